"""Failures of ranks that people reported elsewhere: each kind is told by its cause here, on real ranks.

The reports with their sources are in tests/data/reported_problems.json. Left out: a notebook that swallows a failed
subprocess and the stop button, tried in tests/ranks/test_notebook.py on a real kernel.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from labkit.ranks.launch import launch, run_ranks
from labkit.ranks.outcome import LaunchError, RankFailed
from tests.problems import problem


def ones() -> torch.Tensor:
    return torch.ones(4)


COLLECTIVES = {
    "barrier": dist.barrier,
    "broadcast": lambda: dist.broadcast(ones(), src=0),
    "all_reduce": lambda: dist.all_reduce(ones()),
    "all_gather": lambda: dist.all_gather([ones() for _ in range(dist.get_world_size())], ones()),
    "reduce_scatter": lambda: dist.reduce_scatter(ones(), [ones() for _ in range(dist.get_world_size())]),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(12), torch.ones(12)),
    "gather_object": lambda: dist.gather_object(1, [None] * dist.get_world_size() if dist.get_rank() == 0 else None),
}


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
@pytest.mark.parametrize(("only", "world_size"), [(0, 2), (2, 3)])
def test_a_collective_that_one_rank_alone_enters_is_told_with_who_waits_and_who_returned(name, only, world_size):
    assert problem("C01")["cause"].startswith("collectives must be called by all")

    def in_a_branch():
        if dist.get_rank() == only:
            COLLECTIVES[name]()

    cause = run_ranks(in_a_branch, world_size).cause
    assert cause is not None and cause.code == "returned_early"
    assert cause.rank != only and f"rank {only} waits" in cause.sentence and "every rank must call it" in cause.sentence


@pytest.mark.parametrize("theirs", sorted(set(COLLECTIVES) - {"all_reduce"}))
def test_another_collective_on_one_rank_is_a_mismatch_and_the_first_difference_is_named(theirs):
    assert "first difference" in problem("C02")["right_answer"]

    def differ():
        dist.all_reduce(ones())
        COLLECTIVES["all_reduce" if dist.get_rank() else theirs]()

    cause = run_ranks(differ, 3).cause
    assert cause is not None and cause.code in ("mismatch", "returned_early") and cause.rank == 0
    assert "#1" in cause.sentence and "(test_reported.py, line" in cause.sentence


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_reductions_in_another_order_are_a_failure_though_everything_returns(world_size):
    values = problem("C03")["input"]

    def swapped():
        a, b = torch.tensor(values["a"]), torch.tensor(values["b"])
        first, second = (a, b) if dist.get_rank() != 1 else (b, a)
        dist.all_reduce(first)
        dist.all_reduce(second)
        return a.item(), b.item()

    outcome = run_ranks(swapped, world_size)
    assert outcome.cause is not None and outcome.cause.code == "mismatch" and outcome.cause.rank == 1
    assert "order" in outcome.cause.sentence


@pytest.mark.parametrize("num_elements", [4, 2_000_000])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_send_first_is_a_deadlock_at_any_size_and_the_batched_form_is_not(num_elements, world_size):
    assert "batch_isend_irecv" in problem("C05")["right_answer"]

    def blocking():
        rank, n = dist.get_rank(), dist.get_world_size()
        dist.send(torch.ones(num_elements), dst=(rank + 1) % n)
        dist.recv(torch.empty(num_elements), src=(rank - 1) % n)

    def batched():
        rank, n = dist.get_rank(), dist.get_world_size()
        got = torch.empty(num_elements)
        ops = [
            dist.P2POp(dist.isend, torch.full((num_elements,), float(rank)), (rank + 1) % n),
            dist.P2POp(dist.irecv, got, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got[-1].item()

    cause = run_ranks(blocking, world_size).cause
    assert cause is not None and cause.code == "deadlock" and "send" in cause.sentence
    assert launch(batched, world_size) == [float((rank - 1) % world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_with_fewer_batches_is_the_one_that_is_named_and_join_is_a_way_out(world_size):
    assert "Join" in problem("C07")["right_answer"]

    def train(joined):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        batches = 3 if dist.get_rank() == 1 else 4
        with Join([model], enable=joined):
            for _ in range(batches):
                model(torch.ones(2, 4)).sum().backward()
        return batches

    cause = run_ranks(train, world_size, False).cause
    assert cause is not None and cause.code == "returned_early" and cause.rank == 1
    assert launch(train, world_size, True) == [4, 3, 4][:world_size]


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 1), (2, 1), (8, 4)])
def test_nccl_with_too_few_gpus_is_refused_before_a_rank_starts(monkeypatch, ranks, gpus):
    assert problem("C09")["input"]["ranks"] == 4
    from labkit.ranks import backend

    monkeypatch.setattr(backend, "gpu_count", lambda: gpus)
    with pytest.raises(LaunchError, match=f"there are {gpus} for {ranks}: use gloo"):
        launch(ones, ranks, backend="nccl")
    assert backend.choose_backend(ranks, None)[0] == "gloo"


def test_ranks_of_one_machine_talk_over_loopback_whatever_the_hosts_name_is():
    assert "lo on one machine" in problem("C13")["right_answer"]

    def name():
        dist.all_reduce(ones())
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert set(launch(name, 2)) <= {"lo", "lo0"}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_elements", [1, 5, 70_000])
def test_reduce_op_avg_on_gloo_is_the_mean_or_an_error_never_a_wrong_number(world_size, dtype, num_elements):
    assert "silently wrong" in problem("C14")["observed"]

    def average():
        tensor = torch.full((num_elements,), float(2 * dist.get_rank() + 1), dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        return tensor.min().item(), tensor.max().item()

    outcome = run_ranks(average, world_size)
    if outcome.cause is not None:  # an older torch refuses it
        assert outcome.cause.code == "raised" and "AVG" in outcome.cause.sentence
    else:
        assert set(outcome.results) == {(float(world_size), float(world_size))}


@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError, StopIteration])
@pytest.mark.parametrize("guilty", [0, 1])
def test_an_exception_before_a_collective_is_the_cause_not_the_broken_connection(error, guilty):
    assert problem("C15")["right_answer"].startswith("Report the earliest non-network")

    def fails():
        if dist.get_rank() == guilty:
            raise error("mine")
        dist.all_reduce(ones())

    cause = run_ranks(fails, 2).cause
    assert cause is not None and cause.code == "raised" and cause.rank == guilty
    assert f"{error.__name__}" in cause.sentence and "mine" in cause.sentence


def test_the_cell_fails_whatever_way_a_rank_ends():
    assert "raises when any rank fails" in problem("E07")["right_answer"]

    def leave(how):
        if dist.get_rank() == 1:
            {"exit": lambda: os._exit(3), "sys": lambda: exit(0), "abort": os.abort}[how]()

    for how in ("exit", "sys", "abort"):
        with pytest.raises(RankFailed, match="rank 1"):
            launch(leave, 2, how)


def test_a_rank_draws_without_a_screen_whatever_the_notebook_draws_with(monkeypatch):
    assert "MPLBACKEND=Agg" in problem("E09")["right_answer"]
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")

    def draws():
        import matplotlib.pyplot as plt

        plt.plot([1, 2])
        return plt.get_backend().lower()

    assert launch(draws, 2) == ["agg", "agg"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_do_not_each_take_all_cores(world_size):
    assert "cores" in problem("F04")["title"]

    def threads():
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert launch(threads, world_size) == [(1, "1")] * world_size
    assert launch(threads, world_size, threads=2) == [(2, "2")] * world_size
