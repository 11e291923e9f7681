"""Tensors without a storage of their own in a trace: sparse, nested, wrapped, and in a library's format."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.ranks.launch import launch, run_ranks
from labkit.record.components import components, num_bytes_of
from labkit.record.trace import Trace
from labkit.record.waits import Pending, byte_range

EYE = torch.eye(4)


def kinds():
    """(tensor, its bytes by hand: fp32 values and int64 indices, however many its layout has) by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most of these are in beta, torch says
        return {
            "coo": (EYE.to_sparse(), 4 * 4 + 2 * 4 * 8),
            "uncoalesced": (torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 4)), 2 * 4 + 2 * 2 * 8),
            "hybrid": (torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3)), 2 * 3 * 4 + 2 * 8),
            "csr": (EYE.to_sparse_csr(), 4 * 4 + 5 * 8 + 4 * 8),
            "csc": (EYE.to_sparse_csc(), 4 * 4 + 5 * 8 + 4 * 8),
            "bsr": (EYE.to_sparse_bsr((2, 2)), 8 * 4 + 3 * 8 + 2 * 8),
            "bsc": (EYE.to_sparse_bsc((2, 2)), 8 * 4 + 3 * 8 + 2 * 8),
            "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 5 * 4),
            "mkldnn": (EYE.to_mkldnn(), 64),
            "functional": (torch._to_functional_tensor(EYE), 64),
            "quantized": (torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8), 16),
            "strided": (EYE.clone(), 64),
        }


KINDS = kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_every_kind_are_those_of_its_components(kind):
    tensor, num_bytes = KINDS[kind]
    assert num_bytes_of(tensor) == num_bytes == sum(part.nbytes for part in components(tensor))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mkldnn"])
def test_components_have_storages_and_share_them_with_the_tensor(kind):
    tensor = KINDS[kind][0]
    first, again = ([part.untyped_storage()._cdata for part in components(tensor)] for _ in range(2))
    assert first == again and all(first)


def test_what_is_in_flight_in_a_nested_tensor_is_all_of_it():
    assert byte_range(KINDS["nested"][0]) == (0, 20)


def test_wrappers_of_transforms_are_looked_through():
    found = []

    def look(x):
        found.extend(components(x))
        return x.sum()

    torch.vmap(torch.func.grad(look))(EYE)
    assert [part.untyped_storage()._cdata for part in found] == [EYE.untyped_storage()._cdata]


def record_of(run):
    with Trace() as t:
        run()
    return t.record


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("quantized", "functional")])
def test_a_copy_of_every_kind_is_recorded_with_its_bytes(kind):
    tensor, num_bytes = kinds()[kind]  # made here, for a trace does not see what was there before this file's tests
    kept = []
    record = record_of(lambda: kept.append(tensor.clone()))
    (op,) = [op for op in record.ops if not op.view]
    assert op.name == "aten.clone" and op.read_bytes == op.written_bytes == num_bytes
    held = record.end_bytes - record.begin_bytes
    assert held == (0 if kind == "mkldnn" else num_bytes), "a format of a library does not show what it holds"


def test_a_tensor_on_meta_holds_no_bytes():
    kept, made = [], kinds()
    record = record_of(lambda: kept.append([made[k][0].to("meta") for k in ("coo", "strided")]))
    assert record.end_bytes == record.begin_bytes


def test_what_is_held_on_entry_counts_with_its_components():
    before = record_of(lambda: None).begin_bytes
    kept = torch.sparse_coo_tensor(torch.arange(100).repeat(2, 1), torch.ones(100), (100, 100))
    assert record_of(lambda: None).begin_bytes - before == num_bytes_of(kept) == 100 * (4 + 2 * 8)


def test_components_that_an_op_in_place_has_made_anew_are_held():
    def held():
        return sum(part.untyped_storage().nbytes() for part in components(x))

    x, y = EYE.to_sparse(), torch.ones(4, 4).to_sparse()
    before = held()
    record = record_of(lambda: x.add_(y))
    assert record.end_bytes - record.begin_bytes == held() - before > 0


def test_a_sparse_gradient_is_held_and_freed_and_labelled():
    embedding = nn.Embedding(1000, 8, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    tokens = torch.arange(50)

    def backward():
        embedding(tokens).sum().backward()

    def step():
        optimizer.step()
        optimizer.zero_grad()

    record = record_of(backward)
    assert record.end_bytes - record.begin_bytes >= 50 * 8 * 4, "50 rows, not 1000"
    assert record.peak_bytes - record.begin_bytes < 1000 * 8 * 4
    assert "gradient" in {kind for _, kind in record.kinds}
    after = record_of(step)
    assert after.begin_bytes - after.end_bytes >= 50 * 8 * 4


def reduced_sparse():
    rank = dist.get_rank()
    x = torch.sparse_coo_tensor([[rank, 5]], torch.ones(2, 3), (8, 3))
    with Trace() as t:
        dist.all_reduce(x)
        dist.broadcast(torch.ones(3), src=0)
    assert x.to_dense()[5].tolist() == [dist.get_world_size()] * 3
    return t.record


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sparse_all_reduce_counts_its_components(world_size):
    for record in run_ranks(reduced_sparse, world_size, prints="quiet").results:
        call = record.collectives[0]
        num_bytes = 2 * 3 * 4 + 2 * 8
        assert (call.op, call.num_bytes, call.dtype, call.blocking) == ("all_reduce", num_bytes, "float32", True)
        assert call.sent_bytes == call.received_bytes == (world_size - 1) * num_bytes
        assert call.is_sparse and not record.collectives[1].is_sparse
        assert not record.never_waited and len(call.reads) == 2


def trained_sparse():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True), nn.Linear(4, 4))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Trace() as t:
            wrapped(torch.arange(6) + dist.get_rank()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t.record


def test_ddp_with_sparse_gradients_is_recorded():
    for record in launch(trained_sparse, 2, prints="quiet"):
        sparse, dense = sorted((c for c in record.collectives if c.op == "all_reduce"), key=lambda c: -c.num_bytes)[:2]
        assert (sparse.num_bytes, dense.num_bytes) == (6 * (4 * 4 + 8), (16 + 4) * 4)
        assert not record.never_waited


def trained_sparse_only():
    """A model of which nothing but a sparse gradient is communicated."""
    model = nn.Embedding(1000, 64, sparse=True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Trace() as t:
            wrapped(torch.arange(50) + dist.get_rank()).sum().backward()
            optimizer.step()
    return t.record, num_bytes_of(model.weight.grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddps_wait_for_a_sparse_gradient_comes_before_what_reads_its_new_components(world_size):
    for record, num_bytes in launch(trained_sparse_only, world_size, prints="quiet"):
        (reduced,) = [c for c in record.collectives if c.op == "all_reduce"]
        (wait,) = [w for w in record.waits if w.of == reduced.index]
        after = [op for op in record.ops if op.index > reduced.index and op.reads]
        assert wait.how == "inferred" and wait.index == reduced.index + 1 < after[0].index
        assert "aten.add_.Tensor" in [op.name for op in after]
        read = after[0].reads
        assert not set(read) & set(reduced.writes), "gloo gives other components than those that were sent"
        made = {delta.storage: delta.num_bytes for delta in record.deltas if delta.num_bytes > 0}
        assert sum(made[storage] for storage in read) == num_bytes, "they are new, and were not held before"


def waited_sparse():
    x, other = (torch.sparse_coo_tensor([[0, 5]], torch.ones(2, 3), (8, 3)) for _ in range(2))
    with Trace() as t:
        work = dist.all_reduce(x, async_op=True)
        other.clone()
        work.wait()
        x.clone()
        dist.all_reduce(other, async_op=True)
        time.sleep(0.3)  # gloo gives it the result's components meanwhile
        other.clone()
    return t.record


def test_a_sparse_result_is_waited_for_where_it_is_and_not_at_another_sparse_tensor():
    for record in launch(waited_sparse, 2, prints="quiet"):
        first, second = record.collectives
        ops = [op.index for op in record.ops if op.name == "aten.clone"]
        (called,), (touched,) = ([w for w in record.waits if w.of == c.index] for c in (first, second))
        assert (called.how, touched.how) == ("call", "touched")
        assert first.index < ops[0] < called.index < ops[1] < second.index < touched.index < ops[2]


def test_a_sparse_tensor_in_flight_is_forgotten_when_it_ends():
    pending, x = Pending(), EYE.to_sparse()
    pending.add(7, [], [x, x, EYE])
    assert [indexes for _, indexes in pending.written_whole([EYE, x])] == [[7]]
    assert pending.drop(7) and not pending.by_tensor
    pending.add(8, [], [x])
    del x
    assert not pending.by_tensor
