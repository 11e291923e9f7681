"""Problems with pipelines that people reported: what validator, ranks and replay here say of the whole kind.

The reports with their sources are in tests/data/reported_problems.json. Left out: throughputs of machines that are not
known.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from labkit.ranks.launch import launch, run_ranks
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.record.trace import Trace
from labkit.schedule import theory
from labkit.schedule.actions import in_flight
from labkit.schedule.classic import one_f_one_b
from labkit.schedule.validate import validate
from tests.problems import problem
from tests.record.played import on_link

PRELOAD = ("labkit.record.trace",)


@pytest.mark.parametrize("p, m", [(2, 3), (4, 8), (8, 8), (4, 2)])
def test_neighbours_that_both_send_first_wait_for_each_other_unless_both_are_one_batch(p, m):
    assert "send_forward_recv_backward" in problem("C06")["right_answer"]
    schedule = one_f_one_b(p, m)
    stuck = validate(schedule, sends="blocking")
    if m > 2:
        assert stuck is not None and "nobody goes on" in stuck.sentence and "to send rank" in stuck.sentence
    assert validate(schedule, sends="paired") is None and validate(schedule, sends="isend") is None


def steady(way):
    """The trace reported: rank 0 sends F2 and receives B0, rank 1 sends B0 and receives F2. A record of it."""
    other, mine, theirs = 1 - dist.get_rank(), torch.ones(64), torch.empty(64)
    with Trace() as t:
        if way == "both send first":
            dist.send(mine, other)
            dist.recv(theirs, other)
        elif way == "one batch":
            ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        else:  # the order swapped on the odd rank
            for op, tensor in ((dist.send, mine), (dist.recv, theirs))[:: -1 if dist.get_rank() else 1]:
                op(tensor, other)
    return t.record


def test_a_rank_whose_neighbour_sends_at_the_same_time_is_told_who_waits_and_one_batch_goes_through():
    cause = run_ranks(steady, 2, "both send first", prints="quiet", preload=PRELOAD).cause
    assert cause is not None and cause.code == "deadlock"
    assert "ranks 0 and 1 both send first" in cause.sentence and "let one of them receive first" in cause.sentence
    for way in ("one batch", "swapped"):
        records = launch(steady, 2, way, prints="quiet", preload=PRELOAD)
        assert replay(records, prices(on_link(2))).deadlock == ""


def receive_first():
    theirs = torch.empty(4)
    dist.recv(theirs, 1 - dist.get_rank())
    dist.send(theirs, 1 - dist.get_rank())


def test_both_receiving_first_is_told_at_once():
    cause = run_ranks(receive_first, 2, prints="quiet").cause
    assert cause is not None and cause.code == "deadlock" and "receive first" in cause.sentence


def test_the_bubbles_of_the_report():
    shares = [round(100 * theory.idle_share(case["p"], case["m"])) for case in problem("D21")["input"]["cases"]]
    assert ", ".join(f"{share}%" for share in shares) in problem("D21")["observed"].replace("bubble ", "")


@pytest.mark.parametrize("p", [2, 4, 8])
def test_with_fewer_microbatches_than_stages_a_rank_warms_up_with_what_there_is(p):
    """min(m, p - rank) in flight; nobody waits for a forward that never comes."""
    for m in range(1, 2 * p):
        schedule = one_f_one_b(p, m)
        assert validate(schedule) is None
        assert [max(each) for each in in_flight(schedule)] == [min(m, p - rank) for rank in range(p)]


def test_deepspeed_keeps_as_many_buffers_as_are_in_flight_and_at_least_two():
    """Once it was one more each, 5 on the first of 4 stages, where 4 will do."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    buffers = [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)]
    assert buffers == [max(2, max(each)) for each in in_flight(one_f_one_b(4, 8))]


def test_throughput_that_does_not_move_with_the_bubble_has_another_cause():
    """Twice as many microbatches should have brought 1.3 times the tokens; they brought none."""
    seen = problem("F06")["input"]["tok_s"]
    expected = (1 - theory.idle_share(8, 16)) / (1 - theory.idle_share(8, 8))
    assert expected == pytest.approx(1.31, abs=0.01) and seen["pp8_m16"] / seen["pp8_m8"] < 1
    # Without any bubble, 8 stages would still have had less than a third of what FSDP has.
    assert seen["pp8_m8"] / (1 - theory.idle_share(8, 8)) < seen["fsdp"] / 3
