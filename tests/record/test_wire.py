"""Bytes on the sockets: gloo's own algorithms are known to the byte, and sockets agree with the record."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from labkit.ranks.launch import launch, run_ranks
from labkit.ranks.sockets import socket_bytes
from labkit.record.trace import Trace
from labkit.record.wire import expected_wire_bytes
from tests.record import training

pytestmark = pytest.mark.skipif(socket_bytes(os.getpid()) is None, reason="this system shows no socket bytes")


def every_collective(elements):
    """Every kind of communication as a named call without arguments, over tensors of `elements`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    t, full = torch.ones(elements), torch.ones(elements * n)
    parts, world = list(full.chunk(n)), dist.group.WORLD
    ring = [dist.P2POp(dist.isend, t, (rank + 1) % n), dist.P2POp(dist.irecv, t.clone(), (rank - 1) % n)]
    calls = {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(t),
        "all_reduce bf16": lambda: dist.all_reduce(t.bfloat16()),
        "functional all_reduce": lambda: functional.all_reduce(t, "sum", world) + 0,
        "coalesced": lambda: [x + 0 for x in functional.all_reduce_coalesced([t, t.clone()], "sum", world)],
        "messages": lambda: [work.wait() for work in dist.batch_isend_irecv(ring)],
        "all_gather": lambda: dist.all_gather(parts, t),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(full, t),
        "reduce_scatter": lambda: dist.reduce_scatter(t.clone(), parts),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t.clone(), full),
        "all_to_all": lambda: dist.all_to_all([torch.empty(elements) for _ in range(n)], parts),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(full), full),
        "objects": lambda: dist.all_gather_object([None] * n, "text"),
    }
    for root in (0, n - 1):
        mine = parts if rank == root else None
        calls[f"broadcast from {root}"] = lambda root=root: dist.broadcast(t, root)
        calls[f"reduce to {root}"] = lambda root=root: dist.reduce(t.clone(), root)
        calls[f"gather to {root}"] = lambda root=root, mine=mine: dist.gather(t, mine, root)
        calls[f"scatter from {root}"] = lambda root=root, mine=mine: dist.scatter(t, mine, root)
    return calls


def sent_and_expected(elements):
    training.quiet()
    found = {}
    for name, call in every_collective(elements).items():
        before = socket_bytes(os.getpid()).sent
        with Trace() as t:
            dist.barrier()
            call()
        expected = expected_wire_bytes(t.record).sent
        for _ in range(200):  # a rank may go on while the kernel still sends
            sent = socket_bytes(os.getpid()).sent - before
            if sent >= expected:
                break
            time.sleep(0.01)
        found[name] = sent, expected
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_gloo_sends_is_known_to_the_byte(soak, n):
    for elements in (25, 300_001, 3_000_001) if soak else (25, 600_001):
        for rank, found in enumerate(launch(sent_and_expected, n, elements, prints="quiet")):
            wrong = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
            assert not wrong, f"rank {rank}, {elements} elements"


JOBS = [("ddp", 0.1), ("ddp", 25.0), ("fsdp2",), ("deepspeed", 1), ("deepspeed", 3)]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_parents_reading_agrees_with_the_record(trained, soak, job):
    if not soak and job == ("deepspeed", 1):
        pytest.skip("the whole grid runs with --soak")
    outcome = trained(job[0], 2, *job[1:])
    for seen, result in zip(outcome.socket_bytes, outcome.results, strict=True):
        expected = sum((expected_wire_bytes(record) for record, _ in result[1:]), expected_wire_bytes(result[0][0]))
        assert expected.sent > 1_000_000
        assert seen.sent == pytest.approx(expected.sent, rel=0.001)
        assert seen.received == pytest.approx(expected.received, rel=0.001)


def sparse_reduced():
    rows = 10 + 10 * dist.get_rank()
    with Trace() as t:
        dist.all_reduce(torch.sparse_coo_tensor([list(range(rows))], torch.ones(rows, 64), (999, 64)))
    return t.record


def test_a_sparse_all_reduce_is_refused_for_its_bytes_depend_on_what_other_ranks_have():
    for record in launch(sparse_reduced, 3, prints="quiet"):
        with pytest.raises(ValueError, match=f"of rank {record.rank} is a sparse all_reduce.*the other ranks have"):
            expected_wire_bytes(record)


def ring_by_hand(elements):
    with Trace() as t:
        training.ring_all_reduce(torch.ones(elements))
    return t.record


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_ring_by_hand_puts_on_the_wire_what_the_formula_says(n):
    elements = 1_000_000
    outcome = run_ranks(ring_by_hand, n, elements, prints="quiet")
    for seen, record in zip(outcome.socket_bytes, outcome.results, strict=True):
        assert seen.sent == pytest.approx(record.sent_bytes, rel=0.001)
        assert seen.received == pytest.approx(record.received_bytes, rel=0.001)
        assert record.sent_bytes == pytest.approx(2 * (n - 1) / n * 4 * elements, rel=1e-5)
