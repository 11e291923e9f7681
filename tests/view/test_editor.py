"""The schedule editor: text and grid are one schedule, the verdict is the validator's, and clicks do what they say."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.schedule import grid, theory
from labkit.schedule.classic import gpipe, interleaved, one_f_one_b
from labkit.schedule.timing import play
from labkit.schedule.validate import validate
from labkit.schedule.zero_bubble import zb_h1, zb_v
from labkit.view import draft, editor, lanes
from labkit.view.gantt import KINDS, most_kept, paler
from labkit.view.plot import COLOURS

MADE = [gpipe(2, 3), one_f_one_b(3, 5), interleaved(2, 4), zb_h1(4, 6), zb_v(2, 4)]
SMALL = "schedule mine: 2 ranks, 2 microbatches, stages on ranks 0 1\nrank 0: 0F0 0F1\nrank 1: . 1F0\n"


@pytest.mark.parametrize("schedule", MADE, ids=lambda each: each.name)
def test_a_schedule_read_as_a_draft_and_written_again_is_the_same(schedule):
    drawn = draft.read(grid.text(schedule))
    assert drawn.schedule == schedule and draft.read(drawn.text) == drawn
    assert draft.settled(drawn).rows == drawn.rows, "grid.text stands in played time already"


@pytest.mark.parametrize("schedule", MADE, ids=lambda each: each.name)
def test_what_is_played_so_far_is_all_of_a_valid_schedule(schedule):
    assert draft.played_so_far(schedule) == play(schedule).spans
    found = draft.look(draft.read(grid.text(schedule)))
    assert found.valid and found.idle_share == pytest.approx(play(schedule).idle_share)
    assert found.time == play(schedule).time_s
    idle, other = play(schedule).idle_share, theory.idle_share(schedule.ranks, schedule.microbatches)
    most = ", ".join(f"{each:.3g}" for each in most_kept(schedule))
    due = f"valid: idle {idle:.1%}, 1F1B {other:.1%}; ranks keep at most {most} microbatches in flight"
    assert found.sentence == due


def test_what_is_wrong_is_told_in_the_validators_words_and_played_as_far_as_it_goes():
    drawn = draft.read(SMALL)
    found = draft.look(drawn)
    assert not found.valid and found.sentence.startswith(validate(drawn.schedule).sentence)
    assert "3 of 12 blocks" in found.sentence
    assert [(span.rank, span.start_s, span.end_s) for span in found.spans] == [(0, 0, 1), (0, 1, 2), (1, 1, 2)]
    assert found.idle_share == pytest.approx(1 / 4)


def test_a_rank_that_waits_for_ever_is_played_up_to_there():
    swapped = one_f_one_b(2, 2)
    swapped = swapped.with_actions(1, swapped.actions[1][2:] + swapped.actions[1][:2])
    stuck = swapped.with_actions(0, (swapped.actions[0][0], swapped.actions[0][2], *swapped.actions[0][1:2],
                                     *swapped.actions[0][3:]))  # fmt: skip
    found = draft.look(draft.read(grid.text(stuck)))
    assert not found.valid and "nobody goes on" in found.sentence
    assert [str(span.action) for span in found.spans] == ["0F0"]


@pytest.mark.parametrize(
    "rank_0, rank_1, words",
    [
        ("0F0 0W0 0I0", "1F0 1I0", "rank 0 stops before 0W0 (action 2): it needs 0I0, which comes later"),
        ("0F0", "1F0 1I1", "rank 1 stops before 1I1 (action 2): it needs 1F1, which is not drawn yet"),
        ("0F0 0I0", "1F0 1F1 1B0 1B1", "rank 1 stops before 1F1 (action 2): it needs 0F1, which is not drawn yet"),
        ("0F0 0I0", "1W0 1F0 1I0", "rank 1 stops before 1W0 (action 1): it needs 1F0, which comes later"),
        ("0F0", "1F0 1B0", "0B0 is missing"),
    ],
)
def test_of_a_part_it_is_told_first_where_a_rank_stops(rank_0, rank_1, words):
    head = SMALL.splitlines()[0]
    found = draft.look(draft.read(f"{head}\nrank 0: {rank_0}\nrank 1: {rank_1}\n"))
    assert not found.valid and found.sentence.startswith(words)


def test_a_click_puts_the_next_microbatch_and_a_b_takes_two_cells():
    drawn = draft.put(draft.read(SMALL), 1, 2, "B", 1)
    assert drawn.rows[1] == (".", "1F0", "1B0", "-")
    drawn = draft.put(drawn, 1, 5, "F", 1)
    assert drawn.rows[1] == (".", "1F0", "1B0", "-", ".", "1F1")
    assert draft.erase(drawn, 1, 3).rows[1] == (".", "1F0", ".", ".", ".", "1F1")
    assert draft.put(drawn, 1, 2, "I", 1).rows[1] == (".", "1F0", "1I0", ".", ".", "1F1")
    assert draft.erase(drawn, 1, 99) == drawn
    crowded = draft.put(draft.read(SMALL), 0, 0, "B", 0)
    assert crowded.rows[0] == ("0B0", "-", "0F1"), "what stands behind moves on"


def test_a_w_is_free_again_when_its_b_is_erased():
    drawn = draft.put(draft.read(SMALL), 0, 2, "B", 0)
    assert draft.put(drawn, 0, 4, "W", 0).rows[0][4] == "0W1"
    assert draft.put(draft.erase(drawn, 0, 2), 0, 4, "W", 0).rows[0][4] == "0W0"


@pytest.mark.parametrize(
    "rank, kind, stage, words", [(0, "F", 1, "stage 1 is on rank 1, not on rank 0"), (0, "F", 0, "every microbatch")]
)
def test_what_cannot_be_put_is_refused(rank, kind, stage, words):
    with pytest.raises(ValueError, match=words):
        draft.put(draft.read(SMALL), rank, 2, kind, stage)


def test_two_copies_are_not_for_the_editor():
    with pytest.raises(ValueError, match="one copy"):
        draft.read("schedule d: 2 ranks, 2 microbatches, stages on ranks 0 1 1 0, 2 copies\nrank 0: 0F0\nrank 1: 1F0\n")


def test_clicks_change_the_text_and_all_else_follows():
    ran = []
    made = editor.editor(SMALL, run=lambda schedule: ran.append(schedule) or "equal to serial")
    before = made.image.value
    made.kind.value = "B"
    made.cell(1, 2).click()
    assert "rank 1: .   1F0 1B0 -" in made.text and "rank 1" in made.text
    assert made.cell(1, 2).description == "1B0" and made.cell(1, 3).description == editor.BLANK
    assert made.image.value != before and "is missing" in made.told.value
    made.run.click()
    assert ran == [] and made.run.disabled, "what is not valid does not run"
    made.area.value = grid.text(one_f_one_b(2, 2))
    assert "valid: idle 33.3%" in made.told.value and made.cell(1, 1).description == "1F0"
    assert not made.run.disabled
    made.run.click()
    assert ran == [made.schedule] and "equal to serial" in made.told.value


def test_text_that_cannot_be_read_is_told_and_nothing_else_changes():
    made = editor.editor(SMALL)
    cells = [each.description for each in made.grid.children]
    made.area.value = SMALL.replace("1F0", "1X0")
    assert "line 3, token 2" in made.told.value
    made.cell(0, 3).click()
    assert "line 3, token 2" in made.told.value and [each.description for each in made.grid.children] == cells


def test_erasing_and_tidying():
    made = editor.editor(SMALL)
    made.kind.value = "erase"
    made.cell(0, 0).click()
    assert made.text.splitlines()[1].split() == ["rank", "0:", ".", "0F1"]
    made.tidy.click()
    assert made.text.splitlines()[1].split() == ["rank", "0:", "0F1"]
    made.kind.value = "F"
    made.stage.value = 1
    made.cell(0, 2).click()
    assert "stage 1 is on rank 1" in made.told.value


def tokens(made):
    """What stands on the buttons, row by row, and its colour."""
    ranks = len(made.schedule.actions)
    columns = len(made.grid.children) // ranks - 1
    return [[(made.cell(rank, at).description, made.cell(rank, at).style.button_color) for at in range(columns)]
            for rank in range(ranks)]  # fmt: skip


@pytest.mark.parametrize("schedule", MADE, ids=lambda each: each.name)
def test_the_grid_shows_the_text_whatever_was_shown_before(schedule):
    for made in (editor.editor(grid.text(schedule)), editor.editor(SMALL), editor.editor(grid.text(gpipe(4, 12)))):
        made.area.value = grid.text(schedule)
        names = [each.value for each in made.grid.children if not hasattr(each, "click")]
        assert names == [f"rank {rank}" for rank in range(schedule.ranks)]
        for row, drawn in zip(tokens(made), draft.read(made.text).rows, strict=True):
            due = [editor.BLANK if cell in ".-" else cell for cell in drawn]
            assert [label for label, _ in row] == due + [editor.BLANK] * editor.SPARE
            colours = [colour for _, colour in row]
            assert [colour == COLOURS["idle"] for colour in colours] == [cell == "." for cell in drawn] + [True] * 3
            kinds = ["".join(filter(str.isalpha, cell)) or "B" for cell in drawn]  # "-" is half a B
            due = [paler(COLOURS[KINDS[kind][0]], 1) for kind, cell in zip(kinds, drawn, strict=True) if cell != "."]
            assert [colour for colour in colours if colour != COLOURS["idle"]] == due


def test_more_columns_come_at_the_end_and_all_other_buttons_stay():
    made = editor.editor(SMALL)
    before = made.grid.children
    made.kind.value = "B"
    made.cell(0, 4).click()
    assert made.cell(0, 4).description == "0B0" and len(made.grid.children) > len(before)
    assert all(old is new for old, new in zip(before, made.grid.children, strict=False))
    made.area.value = SMALL
    assert len(made.grid.children) == len(before)


def test_buttons_say_where_they_are():
    made = editor.editor(grid.text(zb_v(2, 4)))
    assert all(made.cell(rank, at).tooltip == f"rank {rank}, column {at}" for rank in (0, 1) for at in (0, 7, 20))


def test_a_stage_is_to_be_chosen_where_a_rank_has_several_and_follows_the_text():
    made = editor.editor(SMALL)
    assert made.stage.layout.display == "none"
    made.area.value = "schedule v: 2 ranks, 2 microbatches, stages on ranks 0 1 1 0\nrank 0: 0F0\nrank 1: 1F0\n"
    assert made.stage.layout.display is None and made.stage.value == editor.OWN
    assert [label for label, _ in made.stage.options[1:]] == ["0 (rank 0)", "1 (rank 1)", "2 (rank 1)", "3 (rank 0)"]
    made.stage.value = 2
    made.cell(1, 1).click()
    assert made.text.splitlines()[2].split()[2:] == ["1F0", "2F0"]
    made.area.value = SMALL
    assert made.stage.value == editor.OWN and made.stage.layout.display == "none"


def test_what_a_run_raises_is_told_and_the_editor_goes_on():
    def fails(schedule):
        raise RuntimeError("rank 1 <died>")

    made = editor.editor(grid.text(one_f_one_b(2, 2)), run=fails)
    made.run.click()
    assert "RuntimeError: rank 1 &lt;died&gt;" in made.told.value and "&#10003;" not in made.told.value
    made.kind.value = "erase"
    made.cell(0, 0).click()
    assert "rank 0 stops before 0B0" in made.told.value


def test_without_a_run_there_is_no_button_for_it():
    assert editor.editor(SMALL).run.layout.display == "none"
    assert editor.editor(SMALL, run=str).run.layout.display is None


def test_of_clicks_at_the_same_time_none_is_lost(monkeypatch):
    put = draft.put
    monkeypatch.setattr(draft, "put", lambda *given: time.sleep(0.02) or put(*given))
    made = editor.editor(grid.text(one_f_one_b(4, 8)).replace("B", "I").replace("-", "."))
    made.kind.value = "W"
    buttons = [made.cell(rank, 33 + at) for at in range(editor.SPARE) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda button: button.click(), buttons))
    assert made.text.count("W") == len(buttons)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_its_picture_is_the_draft_played_with_all_labels_whole(ranks, microbatches, monkeypatch):
    kept, original = [], lanes.moving
    monkeypatch.setattr(lanes, "moving", lambda ax: kept.append(ax) or original(ax))
    schedule = zb_h1(ranks, microbatches)
    made = editor.editor(grid.text(schedule))
    for _ in range(2):
        (ax,), timing = kept, draft.look(draft.read(made.text))
        boxes = [path.get_extents() for path in ax.collections[1].get_paths()]
        drawn = [(round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in boxes]
        assert drawn == [(span.rank, span.start_s, span.end_s) for span in timing.spans]
        assert ax.get_xlim() == (0, timing.time) and all(float(tick).is_integer() for tick in ax.get_xticks())
        labels = [*ax.get_yticklabels(), ax.xaxis.label, ax.get_legend()]
        assert [each.get_text() for each in labels[:ranks]] == [f"rank {rank}" for rank in range(ranks)]
        for box in (each.get_window_extent() for each in labels):
            assert min(box.x0, box.y0) >= 0 and box.x1 <= ax.figure.bbox.x1 and box.y1 <= ax.figure.bbox.y1
        made.kind.value = "erase"
        made.cell(ranks - 1, ranks - 1).click()


def test_it_shows_itself_without_widgets_too():
    bundle = editor.editor(SMALL)._repr_mimebundle_()
    assert bundle["image/png"] and bundle["text/plain"].startswith("schedule mine")
