"""A schedule and its text are the same thing; what cannot be read is told with line and token."""

import dataclasses

import pytest

from labkit.schedule.classic import gpipe, one_f_one_b
from labkit.schedule.grid import parse, text
from tests.schedule.made import GRID, made

HEAD = "schedule mine: 2 ranks, 2 microbatches, stages on ranks 0 1\n"


@pytest.mark.parametrize("name, p, m", GRID)
def test_printed_and_read_again_a_schedule_is_the_same_and_so_is_its_text(name, p, m):
    schedule = made(name, p, m)
    written = text(schedule)
    assert parse(written) == schedule
    assert text(parse(written)) == written
    assert len(written.splitlines()) == p + 1 and max(map(len, written.splitlines())) > m


def test_the_text_of_1f1b_on_two_ranks():
    assert text(one_f_one_b(2, 3)) == (
        "schedule 1F1B: 2 ranks, 3 microbatches, stages on ranks 0 1\n"
        "rank 0: 0F0 0F1 .   .   0B0 -   0F2 0B1 -   .   0B2 -\n"
        "rank 1: .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -   .   .\n"
    )


def test_a_schedule_that_is_not_valid_is_printed_without_idle_units_and_read_again():
    broken = one_f_one_b(2, 3).with_actions(1, one_f_one_b(2, 3).actions[1][1:])
    assert "." not in text(broken) and parse(text(broken)) == broken


def test_a_name_may_have_any_letters_and_is_written_so_that_it_can_be_read():
    for name, read in (("#1", "#1"), ("a # b", "a # b"), ("é", "é"), ("a:b", "a b"), (" x\ny ", "x y"), ("", "")):
        named = dataclasses.replace(gpipe(2, 2), name=name)
        assert parse(text(named)) == dataclasses.replace(named, name=read)


def test_idle_units_comments_order_of_lines_and_case_do_not_count():
    loose = HEAD + "\n# mine\nrank 1: 1f0 1F1 1B0 1B1 # the last\n  rank 0 : . 0F0 0F1 - 0B0 . 0B1\n"
    assert parse(loose).actions == gpipe(2, 2).actions


@pytest.mark.parametrize(
    "written, told",
    [
        ("", "there is no schedule here; the first line is such as 'schedule mine"),
        ("gpipe\n", "line 1: 'gpipe' does not name a schedule, as 'schedule mine"),
        ("\n# x\nschedule a: 2 ranks\n", "line 3: 'schedule a: 2 ranks' does not name"),
        (HEAD + "rank 0: 0F0 0X1\nrank 1:", "line 2, token 2 ('0X1'): an action is stage, F, B, I or W, and"),
        (HEAD + "rank 0: 0F0 F1\nrank 1:", "line 2, token 2 ('F1'): an action is stage"),
        (HEAD + "rank 0: . 2F0\nrank 1:", "line 2, token 2 ('2F0'): there is no stage 2; stages are 0 to 1"),
        (HEAD + "rank 0:\nrank 1: . . 1F2", "line 3, token 3 ('1F2'): there is no microbatch 2; microbatches are 0 to"),
        (HEAD + "rank 0:\nrank 2:", "line 3: rank 2 is not there; ranks are 0 to 1"),
        (HEAD + "rank 0:\nrank 0:", "line 3: rank 0 has a line already"),
        (HEAD + "rank 0:\n0F0 0F1", "line 3: '0F0' begins no rank's line, as 'rank 0:' does"),
        (HEAD + "rank 0:", "after line 2: rank 1 has no line"),
        (HEAD, "after line 1: rank 0 has no line"),
        ("schedule a: 1 rank, 1 microbatch, stages on rank 1\nrank 0:", "line 1: a: stage 0 is on rank 1, but ranks"),
        ("schedule a: 1 rank, 3 microbatches, stages on ranks 0 0, 2 copies\nrank 0:", "line 1: a: 3 microbatches can"),
        ("schedule a: 0 ranks, 1 microbatch, stages on rank 0\nrank 0:", "line 1: ranks, microbatches and copies"),
        ("schedule a: 1 rank, 0 microbatches, stages on rank 0\nrank 0: 0F0", "line 1: ranks, microbatches and copies"),
        (f"schedule a: {'9' * 5000} ranks, 1 microbatch, stages on rank 0\nrank 0:", "line 1: more than 10,000"),
        (HEAD + f"rank 0: {'9' * 5000}F0\nrank 1:", "line 2, token 1 ('99999999999999999999'): there is no stage"),
        (HEAD + f"rank {'9' * 5000}: 0F0\nrank 1:", "is not there; ranks are 0 to 1"),
        ("schedule a: 1 rank, 99999 microbatches, stages on rank 0\nrank 0:", "line 1: more than 10,000"),
    ],
)
def test_what_cannot_be_read_is_told_with_line_and_token(written, told):
    with pytest.raises(ValueError) as error:
        parse(written)
    assert told in str(error.value)
