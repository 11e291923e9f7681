"""Virtual time, against schedules small enough to be worked out by hand."""

from fractions import Fraction

import pytest

from labkit.schedule.actions import Action, Schedule
from labkit.schedule.classic import gpipe, one_f_one_b
from labkit.schedule.timing import play
from labkit.schedule.zero_bubble import zb_h1


def spans(timing, rank):
    return [(str(span.action), span.start_s, span.end_s) for span in timing.spans if span.rank == rank]


def test_two_ranks_and_two_microbatches_by_hand():
    found = play(gpipe(2, 2), forward=1, input=2, weight=1)
    assert spans(found, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 6, 9), ("0B1", 9, 12)]
    assert spans(found, 1) == [("1F0", 1, 2), ("1F1", 2, 3), ("1B0", 3, 6), ("1B1", 6, 9)]
    assert (found.time_s, found.idle_s(0), found.idle_s(1), found.idle_share) == (12, 4, 4, 1 / 3)


def test_a_hand_over_comes_between_ranks_and_not_within_one():
    schedule = Schedule("v", 1, 1, (0, 0), (tuple(Action(*each) for each in
                        (("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0))),))  # fmt: skip
    assert play(schedule, hand_over=5).time_s == 6
    # Two forwards and two backwards pass the link: 2 hand-overs in a row each way are on the longest path.
    assert play(one_f_one_b(2, 1), hand_over=5).time_s == 6 + 2 * 5
    assert play(gpipe(3, 1), hand_over=Fraction(1, 2)).time_s == 9 + 4 * Fraction(1, 2)


def test_a_slow_stage_holds_up_all_others():
    found = play(one_f_one_b(2, 4), forward=(1, 2), input=(1, 2), weight=(1, 2))
    assert found.busy_s(0) == 12 and found.busy_s(1) == 24
    assert found.time_s == 1 + 24 + 2  # its first forward waits for stage 0, and the last backward follows


def test_a_split_backward_hands_on_before_its_w():
    found = {str(span.action): (span.start_s, span.end_s) for span in play(zb_h1(2, 1)).spans}
    assert found["1I0"] == (2, 3) and found["0I0"] == (3, 4) and found["0W0"] == (4, 5)


def test_in_flight_over_time_has_one_count_an_instant():
    assert play(one_f_one_b(2, 2)).in_flight(0) == ((0, 1), (1, 2), (6, 1), (9, 0))
    assert play(one_f_one_b(2, 2)).in_flight(1) == ((1, 1), (4, 1), (7, 0))


def test_nothing_that_takes_time_is_never_idle():
    assert play(gpipe(2, 2), 0, 0, 0).idle_share == 0


@pytest.mark.parametrize(
    "more, words",
    [
        ({"forward": (1, 1, 1)}, "3 times of F for 2 stages"),
        ({"weight": -1}, "times of W are -1"),
        ({"hand_over": -1}, "hand_over is -1"),
    ],
)
def test_times_that_cannot_be_are_refused(more, words):
    with pytest.raises(ValueError, match=words):
        play(gpipe(2, 2), **more)


def test_a_schedule_that_is_not_valid_is_refused_with_what_is_wrong():
    broken = gpipe(2, 2).with_actions(1, ())
    with pytest.raises(ValueError, match="schedule GPipe: 1F0 is missing: rank 1 never does it"):
        play(broken)
