"""Recorded bytes equal the formulas exactly, whoever communicates: by hand, DDP, FSDP2, DTensor, DeepSpeed."""

import pytest
import torch
import torch.distributed as dist

from labkit.cost import traffic as collectives
from labkit.ranks.launch import launch
from labkit.record.trace import Trace
from tests.record import training

ELEMENT = 4
WORLD_SIZES = [2, 3, 4]


def ring_bytes(elements, n, rank):
    """What `rank` sends in a ring all-reduce of fp32 elements."""
    return collectives.ring_all_reduce(collectives.parts_of(elements, ELEMENT, n), rank)[0]


def padded(parameter, n):
    """Elements of a parameter whose first dim is padded to a multiple of n."""
    rows = parameter.shape[0]
    return -(-rows // n) * n * (parameter.numel() // rows)


def records(outcome, which=1):
    return [result[which][0] for result in outcome.results]


def by_hand(elements):
    tensor = torch.full((elements,), float(dist.get_rank() + 1))
    with Trace() as t:
        training.ring_all_reduce(tensor)
    return tensor.unique().tolist(), t.record


@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("elements", [1200, 1001])
def test_a_ring_by_hand_sends_what_the_formula_says(n, elements):
    parts = collectives.parts_of(elements, ELEMENT, n)
    for rank, (values, record) in enumerate(launch(by_hand, n, elements)):
        assert values == [n * (n + 1) / 2]
        assert len(record.messages) == 4 * (n - 1) and not record.collectives
        # In the first half a rank starts with the part before its own, in the second with its own.
        sent = [parts[(first - i) % n] for first in (rank - 1, rank) for i in range(n - 1)]
        assert [m.num_bytes for m in record.messages if m.op == "send"] == sent
        assert record.sent_bytes == sum(sent)
        assert elements % n or record.sent_bytes == 2 * (n - 1) * elements * ELEMENT // n
        assert {m.peer for m in record.messages if m.op == "send"} == {(rank + 1) % n}
        assert [m.order for m in record.messages if m.op == "recv"] == list(range(2 * (n - 1)))


@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("bucket_mb", [0.1, 0.5, 25.0])
def test_ddp_reduces_its_buckets_and_nothing_else(trained, n, bucket_mb):
    # After the first step DDP puts parameters into buckets in the order their gradients came: last one first.
    tensors = list(training.llama().parameters())[::-1]
    limit = int(bucket_mb * 1024 * 1024)
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [limit])
    total = sum(t.numel() for t in tensors)
    for rank, record in enumerate(records(trained("ddp", n, bucket_mb))):
        assert {c.op for c in record.communications} == {"all_reduce"}
        assert sum(c.num_bytes for c in record.collectives) == total * ELEMENT
        assert len(record.collectives) == len(groups)
        for c in record.collectives:
            assert c.sent_bytes == ring_bytes(c.num_bytes // ELEMENT, n, rank)
        assert not any(c.blocking or c.in_python for c in record.collectives)
        assert [w.how for w in record.waits] == ["inferred"] * len(groups)


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_fsdp2_gathers_each_layer_twice_and_its_root_once(trained, n):
    model = training.llama()
    layers = [ELEMENT * sum(padded(p, n) for p in layer.parameters()) for layer in model.layers]
    inside = {id(p) for layer in model.layers for p in layer.parameters()}
    root = ELEMENT * sum(padded(p, n) for p in model.parameters() if id(p) not in inside)
    for record in records(trained("fsdp2", n)):
        gathered = [c for c in record.collectives if c.op == "all_gather"]
        scattered = [c for c in record.collectives if c.op == "reduce_scatter"]
        # The root is not resharded after forward, so backward does not gather it again: below 3 times Psi.
        assert sorted(c.num_bytes for c in gathered) == sorted([root, *layers, *layers])
        assert sorted(c.num_bytes for c in scattered) == sorted([root, *layers])
        assert record.sent_bytes * n == (n - 1) * (2 * root + 3 * sum(layers))


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_tensor_parallel_reduces_once_forward_and_once_backward(trained, n):
    for rank, record in enumerate(records(trained("tensor_parallel", n))):
        assert [c.op for c in record.communications] == ["all_reduce", "all_reduce"]
        assert {c.num_bytes for c in record.collectives} == {10 * 96 * ELEMENT}
        assert record.sent_bytes == 2 * ring_bytes(10 * 96, n, rank)
        assert [w.how for w in record.waits] == ["call", "call"]


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_flops_under_tensor_parallel_are_the_local_ones(trained, n):
    serial = 3 * 2 * 2 * 10 * 96 * 384  # forward, both gradients; two matrices; multiply and add
    assert [record.flops for record in records(trained("tensor_parallel", n))] == [serial // n] * n


STAGES = [(stage, n) for n in WORLD_SIZES for stage in (0, 1, 2, 3)]
SAMPLE = {(0, 2), (1, 3), (2, 2), (3, 2)}


@pytest.mark.parametrize(("stage", "n"), STAGES)
def test_deepspeed_moves_what_its_stage_says(trained, soak, stage, n):
    if not soak and (stage, n) not in SAMPLE:
        pytest.skip("the whole grid runs with --soak")
    psi = sum(p.numel() for p in training.llama().parameters())
    for rank, record in enumerate(records(trained("deepspeed", n, stage))):
        large = [c for c in record.collectives if c.num_bytes > 8]
        flags = [c for c in record.collectives if c.num_bytes <= 8]
        reduced = [c for c in large if c.op == "all_reduce"]
        gathered = [c for c in large if c.op == "all_gather"]
        scattered = [c for c in large if c.op == "reduce_scatter"]
        assert [c.op for c in flags] == (["all_reduce"] if stage else [])  # did anything overflow?
        if stage < 3:
            assert [c.num_bytes for c in reduced] == [psi * ELEMENT]
            assert reduced[0].sent_bytes == ring_bytes(psi, n, rank)
            # Flat and padded once to a multiple of 4 elements per rank (DeepSpeed's nccl_start_alignment_factor 2).
            flat = -(-psi // (2 * n)) * 2 * n
            assert [c.num_bytes for c in gathered] == ([flat * ELEMENT] if stage else [])
            assert not scattered
        else:
            _check_stage_3(n, gathered, scattered)
        for c in gathered + scattered:
            assert c.sent_bytes * n == (n - 1) * c.num_bytes


def _check_stage_3(n, gathered, scattered):
    """With no threshold and nothing kept, every parameter is gathered for forward and for backward."""
    parameters = list(training.llama().parameters())
    flat = [ELEMENT * -(-p.numel() // n) * n for p in parameters]
    assert [c.num_bytes for c in scattered] == [sum(flat)]
    assert sorted(c.num_bytes for c in gathered) == sorted(flat + flat)
