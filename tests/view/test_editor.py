"""The schedule editor: text and grid are one schedule, the verdict is the validator's, and clicks do what they say."""

import pytest

from labkit.schedule import grid, theory
from labkit.schedule.classic import gpipe, interleaved, one_f_one_b
from labkit.schedule.timing import play
from labkit.schedule.validate import validate
from labkit.schedule.zero_bubble import zb_h1, zb_v
from labkit.view import draft, editor

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
    assert f"1F1B {theory.idle_share(schedule.ranks, schedule.microbatches):.1%}" in found.sentence


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


def button(made, rank, column):
    columns = len(made.grid.children) // 2
    return made.grid.children[rank * columns + column]


def test_clicks_change_the_text_and_all_else_follows():
    ran = []
    made = editor.editor(SMALL, run=lambda schedule: ran.append(schedule) or "equal to serial")
    before = made.image.value
    made.kind.value = "B"
    button(made, 1, 2).click()
    assert "rank 1: .   1F0 1B0 -" in made.text and "rank 1" in made.text
    assert button(made, 1, 2).description == "1B0" and button(made, 1, 3).description == ""
    assert made.image.value != before and "is missing" in made.told.value
    made.run.click()
    assert ran == [], "what is not valid does not run"
    made.area.value = grid.text(one_f_one_b(2, 2))
    assert "valid: idle 33.3%" in made.told.value and button(made, 1, 1).description == "1F0"
    made.run.click()
    assert ran == [made.schedule] and "equal to serial" in made.told.value


def test_text_that_cannot_be_read_is_told_and_nothing_else_changes():
    made = editor.editor(SMALL)
    cells = [each.description for each in made.grid.children]
    made.area.value = SMALL.replace("1F0", "1X0")
    assert "line 3, token 2" in made.told.value
    button(made, 0, 3).click()
    assert "line 3, token 2" in made.told.value and [each.description for each in made.grid.children] == cells


def test_erasing_and_tidying():
    made = editor.editor(SMALL)
    made.kind.value = "erase"
    button(made, 0, 0).click()
    assert made.text.splitlines()[1].split() == ["rank", "0:", ".", "0F1"]
    made.tidy.click()
    assert made.text.splitlines()[1].split() == ["rank", "0:", "0F1"]
    made.kind.value = "F"
    made.stage.value = 1
    button(made, 0, 2).click()
    assert "stage 1 is on rank 1" in made.told.value


def test_it_shows_itself_without_widgets_too():
    bundle = editor.editor(SMALL)._repr_mimebundle_()
    assert bundle["image/png"] and bundle["text/plain"].startswith("schedule mine")
