"""What a deck says, read as Markdown: its titles, its order, what it shows, which cells it names. No ranks, no node.

Left out: whether a title is true; figures and their numbers, which have a file of their own.
"""

import re

import pytest

from labkit.classroom import build as editions
from slides import build, cells
from tests.house.source import ROOT

# Finite verbs of the titles: a title is a claim or a question, not a heading. A new one is added when it is used.
VERBS = set(
    """add agree are beats become bend bring can changes come comes copies costs decides depends does doubles falls
    follow freezes give gives grow has have hide holds is keeps leave leaves lets makes match need pay pays send
    sends share take takes tell transposes wait waits waste weigh work""".split()
)


def test_there_is_a_deck_for_each_lab_that_has_a_notebook():
    assert [path.name[:2] for path in build.decks()] == [
        path.stem[3:] for path in sorted((ROOT / "notebooks" / "source").glob("lab[0-9][0-9].py"))
    ]


def test_a_deck_is_named_as_its_notebook(deck):
    source = cells.source_of(deck.lab)
    assert deck.path.stem == editions._name(source, editions._read(source))


def test_a_deck_has_at_most_25_slides(deck):
    assert 10 <= len(deck.slides) <= 25


def test_a_deck_uses_our_theme_and_opens_with_a_question(deck):
    front, _ = build.slides_of(deck.path.read_text())
    assert "theme: deck" in front and "paginate: true" in front
    assert build.title_of(deck.slides[0]).endswith("?")
    assert "_class: lead" in deck.slides[0]


def test_every_title_is_a_sentence_and_stands_alone(deck):
    for slide in deck.slides:
        assert len(re.findall(r"^# ", slide, re.M)) == 1, slide
        title = build.title_of(slide)
        words = set(re.findall(r"[\w']+", title))
        assert words & VERBS, f"{title!r} says nothing: a title is a claim, with a verb (tests/slides/test_decks.py)"
        assert len(title) <= 75 and not title.endswith("."), title
    titles = [build.title_of(slide) for slide in deck.slides]
    assert len(set(titles)) == len(titles)


def test_every_slide_has_one_figure_or_one_table(deck):
    for slide in deck.slides:
        tables = len(re.findall(r"^\|[-|]+\|$", slide, re.M))
        assert len(build.FIGURE.findall(slide)) + tables == 1, build.title_of(slide)
        assert len(re.findall(r"!\[", slide)) == len(build.FIGURE.findall(slide)), "only figures/NAME.svg is shown"


def test_every_figure_says_in_words_what_it_shows(deck):
    for slide in deck.slides:
        for words, _ in build.FIGURE.findall(slide):
            assert len(words.split()) >= 5, build.title_of(slide)


def test_figures_and_functions_are_the_same(deck):
    used = [name for slide in deck.slides for _, name in build.FIGURE.findall(slide)]
    assert set(used) == set(build.figures(deck.lab))
    assert len(set(used)) == len(used)


def test_every_slide_names_a_cell_of_the_notebook_that_is_there(deck):
    for slide in deck.slides:
        footer = deck.footer(slide)
        found = re.match(r"Notebook (\d\d), section (\d+), cell `", footer)
        assert found and found[1] == deck.lab, f"{build.title_of(slide)!r}: {footer!r}"
        for word in re.findall(r"cell `([^`]+)`", footer):
            assert cells.named(deck.lab, int(found[2]), word), f"no code cell of section {found[2]} has {word}"


def test_slides_come_in_the_order_of_the_notebook(deck):
    """But for the last: an open question may look back."""
    sections = [int(re.search(r"section (\d+)", deck.footer(slide))[1]) for slide in deck.slides[:-1]]
    assert sections == sorted(sections)


def test_files_that_a_footer_names_are_there(deck):
    for slide in deck.slides:
        named = re.findall(r"labkit/[\w/]+\.py", deck.footer(slide))
        assert [path for path in named if not (ROOT / path).exists()] == []


def test_exercises_are_those_of_the_notebook_in_its_order(deck):
    assert deck.exercises() == cells.exercises(deck.lab)


def test_an_exercise_is_set_by_its_functions_name_and_its_minutes(deck):
    names = {c.exercise: re.search(r"(?:def|class) (\w+)", c.text)[1] for c in cells.cells(deck.lab) if c.exercise}
    for slide in deck.slides:
        for exercise in re.findall(r"\*\*Exercise (\d+\.\d+[a-z]?)\*\*", deck.shown(slide)):
            assert f"`{names[exercise]}`" in slide
            assert f"{{{{minutes {exercise}}}}} minutes" in slide


def test_predictions_are_asked_for_in_the_notebooks_order(deck):
    asked = re.findall(r'predict\("([\w.]+)"', cells.source_of(deck.lab).read_text())
    text = "\n".join(re.sub(r"<!-- _footer.*", "", slide) for slide in deck.slides)
    told = [name for name in dict.fromkeys(re.findall(r"`(\d+\.[a-z]\w*)`", text)) if name in asked]
    assert told == asked


def test_a_slide_asks_for_one_prediction_at_most_and_its_question_holds_no_computed_number(deck):
    for slide in deck.slides:
        asked = re.findall(r"\*\*Predict\*\* `([\w.]+)`", deck.shown(slide))
        assert len(asked) <= 1
        assert "{{" not in "".join(re.findall(r"^> \*\*Predict.*$", slide, re.M)), build.title_of(slide)


def test_every_slide_has_notes_that_say_what_to_say(deck):
    for slide in deck.slides:
        notes = deck.notes(slide)
        assert "Say:" in notes, build.title_of(slide)
        assert len(notes.split()) >= 20, build.title_of(slide)


def test_notes_of_an_exercise_name_mistakes_that_its_judge_knows(deck):
    from labkit.classroom import prove

    wrong = prove.load(prove.mistakes_file(deck.lab, ROOT)).WRONG
    for slide in deck.slides:
        for exercise in re.findall(r"\*\*Exercise (\d+\.\d+[a-z]?)\*\*", deck.shown(slide)):
            told = re.search(r"Common mistakes: (.*?)\n\n|Common mistakes: (.*?)-->", deck.notes(slide), re.S)
            assert told, f"exercise {exercise} has no common mistakes"
            causes = {cause for _, told_of in wrong[exercise] for cause in _several(told_of)}
            named = set(re.findall(r"`(\w+)`", told[0]))
            assert len(named) >= 4 and named <= causes, named - causes


def _several(cause):
    return cause if isinstance(cause, tuple) else (cause,)


def test_no_line_of_a_solution_is_in_a_deck(deck):
    text = re.sub(r"\s+", " ", deck.path.read_text())
    lines = [re.sub(r"\s+", " ", line) for line in deck.solution() if len(line) > 18]
    assert lines
    assert [line for line in lines if line in text] == []


def test_no_deck_holds_a_block_of_code(deck):
    assert "```" not in deck.path.read_text()


def test_no_number_is_typed_into_a_slide(deck, hardware_names):
    """Digits are computed ({{...}}), or part of a name: of a rank, an exercise, a lab, hardware, or code."""
    for slide in deck.slides:
        text = build.FIGURE.sub(lambda found: found[1], deck.shown(slide))
        text = build.PLACE.sub("", re.sub(r"`[^`]*`", "", text))
        for name in hardware_names:
            text = text.replace(name, "")
        text = re.sub(r"\branks? \d( and \d)?|Exercise \d+\.\d|\b[Ll]ab \d\d|ZeRO-\d", "", text, flags=re.I)
        assert re.findall(r"\S*\d\S*", text) == [], build.title_of(slide)


@pytest.mark.parametrize("mark", ["!", "\N{EM DASH}"])
def test_decks_keep_to_plain_prose(deck, mark):
    text = re.sub(r"!\[|<!--|-->", "", deck.path.read_text())
    assert mark not in text


def test_a_slide_whose_number_is_not_given_is_named():
    with pytest.raises(ValueError, match="'It falls'.* no number called 'depth'"):
        build.filled("00", "# It falls\n\n{{depth}}", {})


def test_a_slide_whose_figure_is_not_there_is_named():
    with pytest.raises(ValueError, match="'It falls'.*lab00.py has no function nothing"):
        build.filled("00", "# It falls\n\n![a picture](figures/nothing.svg)", {})


def test_what_no_cell_defines_is_refused():
    with pytest.raises(ValueError, match="no cell of lab00.py defines nothing"):
        cells.function("00", "nothing")
    with pytest.raises(ValueError, match="no cell of lab00.py gives a value to nothing"):
        cells.value("00", "nothing")
    with pytest.raises(ValueError, match="how many minutes exercise 0.9 takes"):
        cells.minutes("00", "0.9")


def test_a_deck_without_front_matter_is_refused():
    with pytest.raises(ValueError, match="front matter"):
        build.slides_of("# A claim is made\n")
