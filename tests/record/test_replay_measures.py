"""Graded figures, on records by hand."""

import pytest

from labkit.record import measures
from labkit.record.replay import replay
from labkit.record.timeline import length_s, union
from tests.record.played import at_once, by_hand, collective, compute, record, records, recv, send, wait


def share(*events):
    return measures.overlapped_share(record(0, 1, *events))


def test_only_arithmetic_between_issue_and_wait_counts_as_overlap():
    reduce = collective((0,), 4)
    assert share(reduce, compute(1), wait(0)) == 1
    assert share(reduce, wait(0), compute(1)) == 0
    assert share(compute(1), at_once(reduce), compute(1)) == 0
    assert share(reduce, compute(0), wait(0)) == 0, "an op without FLOPs hides nothing"
    assert share(reduce, compute(1), collective((0,), 4), wait(0), wait(2)) == 0.5
    assert share(reduce, compute(1)) == 0, "never waited for"


def test_a_barrier_is_no_communication_to_hide():
    assert share(compute(1), at_once(collective((0,), op="barrier"))) is None
    assert share(collective((0,), 4), compute(1), wait(0), at_once(collective((0,), op="barrier"))) == 1
    assert measures.early_waits(record(0, 1, collective((0,)), wait(0), at_once(collective((0,), op="barrier")))) == ()


def test_waits_before_the_last_issue():
    reduce = collective((0,), 4)
    assert measures.early_waits(record(0, 1, reduce, reduce, wait(0), wait(1))) == ()
    early = measures.early_waits(record(0, 1, reduce, wait(0), reduce, wait(2)))
    assert [w.of for w in early] == [0]
    assert measures.early_waits(record(0, 1, compute(1))) == ()


def test_the_chain_formula_by_hand():
    assert measures.chain_time_s([2, 4, 6], [1, 1, 1], 6) == 7
    assert measures.chain_time_s([2, 4, 6], [5, 5, 5], 6) == 17
    assert measures.chain_time_s([2, 4, 6], [4, 1, 1], 9) == 9
    assert measures.chain_time_s([], [], 9) == 9
    with pytest.raises(ValueError):
        measures.chain_time_s([1], [1, 2], 3)


def test_the_chain_formula_is_what_a_replay_of_buckets_gives():
    for sizes in ([1, 1, 1], [5, 0, 3], [0, 9, 0]):
        program = [event for size in sizes for event in (compute(2), collective((0,), size))]
        waits = [wait(1), wait(3), wait(5)]
        found = replay(records([*program, compute(1), *waits]), by_hand())
        assert found.time_s == measures.chain_time_s([2, 4, 6], [1 + size for size in sizes], 7)


def test_rounds_are_counted_and_a_pattern_that_hangs_is_told():
    assert measures.rounds(records([at_once(send(1, 99))], [compute(50), at_once(recv(0))])) == 1
    with pytest.raises(ValueError, match="rank 0 waits for rank 1 in send #0 to rank 1; rank 1 waits for rank 0"):
        measures.rounds(records([at_once(send(1))], [at_once(send(0))]))


def test_moments_that_overlap_count_once():
    assert union([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == [(0, 4), (5, 6)]
    assert length_s(union([(0, 2), (0, 2)])) == 2
