"""The card: what it says, that it cannot be written into, and that a machine can read it."""

import re
from html.parser import HTMLParser

import pytest

from labkit.check import card, progress
from labkit.check.exercise import Exercise, Verdict, not_attempted, right, wrong

EXERCISE = Exercise("0.2", "broadcast", "Broadcast <b>", 10, 3, judge=None)
FAILED = wrong("values", "star", "The root sends & sends.", "world_size=5", [1, 2], [1, 3])


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(progress.tempfile, "gettempdir", lambda: str(tmp_path))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parsed(markup):
    tags = Tags()
    tags.feed(markup)
    assert tags.open == []
    return tags


def test_the_card_says_what_was_tried_got_expected_and_why():
    for text in (card.text(EXERCISE, FAILED), parsed(card.markup(EXERCISE, FAILED)).text):
        for part in ("0.2 Broadcast <b>: not yet, 0 of 3 points", "world_size=5", "[1, 2]", "[1, 3]", "sends & sends"):
            assert part in text


def test_what_a_learner_wrote_cannot_become_markup():
    evil = "<script>alert(1)</script><img src=x onerror='x'>\"'&"
    verdict = wrong("values", "x", evil, evil, evil, evil)
    tags = parsed(card.markup(EXERCISE, verdict, (evil,)))
    assert set(tags.seen) <= {"div", "span", "table", "tr", "th", "td"}
    assert tags.text.count("<script>alert(1)</script>") == 5


def test_state_is_said_in_words_and_not_by_colour_alone():
    assert "passed, 3 of 3 points" in parsed(card.markup(EXERCISE, right("five ranks"))).text
    assert "not yet" in parsed(card.markup(EXERCISE, FAILED)).text
    assert 'aria-label="0.2 Broadcast &lt;b&gt;: passed' in card.markup(EXERCISE, right())


def test_the_card_takes_the_colours_of_its_page():
    markup = card.markup(EXERCISE, FAILED)
    assert "color:inherit" in markup and "background:transparent" in markup
    assert "black" not in markup and "white;" not in markup and "#fff" not in markup


def test_a_stub_gets_a_short_card():
    text = card.text(EXERCISE, not_attempted("broadcast"))
    assert len(text.splitlines()) == 2 and "not attempted" in text


def test_the_bundle_holds_exercise_score_possible_and_cause():
    bundle = card.bundle(EXERCISE, FAILED)
    assert bundle[card.MIME] == {"exercise": "0.2", "score": 0.0, "possible": 3, "cause": "star"}
    half = Verdict(True, "evidence", score=0.5)
    assert card.bundle(EXERCISE, half)[card.MIME] == {"exercise": "0.2", "score": 1.5, "possible": 3, "cause": ""}
    assert set(bundle) == {"text/html", "text/plain", card.MIME}


def test_outside_a_notebook_the_card_is_printed(capsys):
    card.show(EXERCISE, FAILED, ("a note",))
    out = capsys.readouterr().out
    assert out.startswith("0.2 Broadcast <b>: not yet") and "note: a note" in out and "<div" not in out


def test_a_verdict_survives_json():
    assert card.from_json(card.to_json(FAILED)) == FAILED


def test_long_values_are_cut_and_unknown_stages_refused():
    assert len(wrong("values", "x", "y", got="z" * 5000).got) == 300
    assert wrong("values", "x", "y", got=list(range(3))).got == "[0, 1, 2]"
    with pytest.raises(ValueError, match="stage"):
        wrong("luck", "x", "y")


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#111111", "#1e1e1e"])
@pytest.mark.parametrize("verdict", [FAILED, right(), not_attempted("broadcast")])
def test_the_marks_stand_out_in_light_and_dark_themes(page, verdict):
    (colour,) = set(re.findall(r"color:(#\w{6})", card.markup(EXERCISE, verdict)))
    lighter, darker = sorted((luminance(colour), luminance(page)), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 3


def test_a_later_failure_says_that_the_points_stay(capsys):
    progress.judged("0.2", "x", True, 3.0, 3, "")
    for verdict, state in ((FAILED, "not yet"), (not_attempted("broadcast"), "not attempted yet")):
        card.show(EXERCISE, verdict)
        out = capsys.readouterr().out
        assert f"{state} (passed before; your 3 points stay)" in out and "0 of 3" not in out
    card.show(EXERCISE, right())
    assert "passed, 3 of 3 points" in capsys.readouterr().out


def test_without_a_pass_no_points_are_said_to_stay(capsys):
    progress.judged("0.2", "x", False, 0.0, 3, "star")
    card.show(EXERCISE, FAILED)
    assert "not yet, 0 of 3 points" in capsys.readouterr().out


def test_what_each_rank_did_stands_on_a_line_of_its_own():
    got = "rank 0: waiting in send (cell 12, line 3); rank 1: waiting in send (cell 12, line 3)"
    verdict = wrong("attempted", "deadlock", "They wait.", "two ranks", got, "every rank returns")
    lines = [line.strip() for line in card.text(EXERCISE, verdict).splitlines()]
    assert "rank 1: waiting in send (cell 12, line 3)" in lines
    assert "3)\nrank 1: waiting" in parsed(card.markup(EXERCISE, verdict)).text


def test_the_line_in_place_of_a_traceback_does_not_say_the_card_twice():
    assert card.failed_line(EXERCISE, FAILED, shown=True) == "CheckFailed 0.2: see the card above"
    told = card.failed_line(EXERCISE, FAILED, shown=False)
    assert told == "CheckFailed: 0.2 Broadcast <b>: not yet, 0 of 3 points: The root sends & sends."
