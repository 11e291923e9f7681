"""What a Trace writes down: ops, FLOPs, collectives, waits, places; and that it leaves nothing behind."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from labkit.ranks.launch import launch, run_ranks
from labkit.record.events import Collective, Op, PointToPoint, Wait
from labkit.record.trace import Trace
from tests.record import training


def ops_of(run, *arguments):
    with Trace() as t:
        run(*arguments)
    return t.record.ops


def test_a_product_has_its_flops_and_bytes():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    (op,) = ops_of(torch.mm, a, b)
    assert (op.name, op.flops, op.read_bytes, op.written_bytes) == ("aten.mm", 2 * 3 * 4 * 5, 4 * (12 + 20), 4 * 15)
    assert len(op.reads) == 2 and len(op.writes) == 1 and not set(op.reads) & set(op.writes)
    assert 0 < op.start_s <= op.end_s


def test_flops_of_forward_and_backward_are_torchs():
    from torch.utils.flop_counter import FlopCounterMode

    step = training.serial()
    step()
    with FlopCounterMode(display=False) as counter:
        step()
    with Trace() as t:
        step()
    assert t.record.flops == counter.get_total_flops() > 0


def test_flops_are_counted_below_autograd_too():
    a, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    with torch.inference_mode(), Trace() as t:
        torch.nn.functional.linear(a, w)
        torch.matmul(a, w.t())
    assert t.record.flops == 2 * (2 * 6 * 4 * 5)


def test_a_convolution_and_its_backward_have_flops():
    x, w = torch.randn(1, 2, 8, 8, requires_grad=True), torch.randn(3, 2, 3, 3, requires_grad=True)
    with Trace() as t:
        torch.nn.functional.conv2d(x, w).sum().backward()
    forward = 2 * 3 * 2 * 9 * 36
    assert t.record.flops == 3 * forward


def test_views_move_no_bytes():
    x = torch.randn(4, 6)
    for op in ops_of(lambda: (x.view(6, 4).t()[1:], torch.ops.aten._unsafe_view(x, [24]))):
        assert op.view and op.read_bytes == op.written_bytes == 0 and not op.writes


def test_an_op_in_place_writes_what_it_reads():
    x = torch.ones(10)
    (op,) = ops_of(x.add_, 1)
    assert op.reads == op.writes and op.written_bytes == 40 and not op.view


def test_a_place_is_the_callers_line():
    line = inspect.currentframe().f_lineno + 2
    with Trace() as t:
        torch.nn.functional.layer_norm(torch.ones(4, requires_grad=True), (4,)).sum().backward()
    assert {op.place for op in t.record.ops if not op.view} == {f"{__file__}:{line}"}


def test_fused_and_foreach_optimizers_custom_functions_and_vmap_are_seen():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    p = torch.nn.Parameter(torch.ones(4))
    fused, foreach = torch.optim.AdamW([p], fused=True), torch.optim.AdamW([p], foreach=True)
    with Trace() as t:
        Twice.apply(p).sum().backward()
        fused.step()
        foreach.step()
        torch.vmap(torch.dot)(torch.ones(3, 4), torch.ones(3, 4))
    names = {op.name for op in t.record.ops}
    assert {"aten.mul.Tensor", "aten._fused_adamw_"} <= names
    assert any(name.startswith("aten._foreach_") for name in names)
    assert any(name.startswith(("aten.bmm", "aten.mm", "aten.mul")) for name in names)


def test_a_record_is_read_after_the_block_is_frozen_and_holds_no_tensor():
    t = Trace()
    with pytest.raises(RuntimeError, match="when the `with Trace"), t:
        _ = t.record
    with Trace() as t:
        torch.ones(3) + 1
    record = pickle.loads(pickle.dumps(t.record))
    assert record == t.record and record.rank == 0 and record.world_size == 1
    with pytest.raises(AttributeError):
        record.events[0].flops = 1


def test_an_error_passes_through_and_everything_is_put_back():
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work)), torch._C._len_torch_dispatch_stack()
    with pytest.raises(ZeroDivisionError), Trace() as t:
        torch.ones(2) / (1 // 0)
    assert [op.name for op in t.record.ops] == ["aten.ones"]
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work)), torch._C._len_torch_dispatch_stack()) == before


def waits():
    training.quiet()
    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x, y, buckets = torch.ones(100), torch.ones(100), torch.ones(200)
    with Trace() as t:
        dist.all_reduce(x)  # 0: waited for at once
        work = dist.all_reduce(y, async_op=True)  # 1: later, with an op in between
        x + 1
        work.wait()
        functional.all_reduce(x, "sum", world) + 1  # 2: by the op wait_tensor
        dist.all_reduce(x, async_op=True)  # 3: touched without a wait
        x + 1
        half = dist.all_reduce(buckets[:100], async_op=True)  # 4: another half is no touch
        buckets[100:] + 1
        half.wait()
        lost = dist.all_reduce(y, async_op=True)  # 5: never
        sent = dist.isend(x, (rank + 1) % n) if rank == 0 else None
        if rank == 1:
            dist.recv(x.clone())  # from any source: who it was is known after the wait
        if sent is not None:
            sent.wait()
    lost.wait()
    return t.record


def test_waits_are_told_apart():
    records = launch(waits, 2, prints="quiet")
    for record in records:
        issued = record.collectives
        hows = [[(w.how, w.blocking) for w in record.waits if w.of == c.index] for c in issued]
        assert hows == [[("call", True)], [("call", False)], [("call", False)], [("touched", False)],
                        [("call", False)], []]  # fmt: skip
        assert record.never_waited == (issued[5],)
        assert [c.blocking for c in issued] == [True] + [False] * 5
        assert [c.sequence for c in issued] == list(range(6))
    sent, received = records[0].messages[0], records[1].messages[0]
    assert (sent.op, sent.peer, sent.num_bytes, sent.order) == ("send", 1, 400, 0)
    assert (received.op, received.peer, received.blocking) == ("recv", 0, True)
    lies_between = [type(e) for e in records[0].events[issued[1].index + 1 : issued[2].index]]
    assert Op in lies_between and Wait in lies_between


def groups():
    pair = dist.new_group([1, 2])
    rank = dist.get_rank()
    with Trace() as t:
        if rank in (1, 2):
            dist.broadcast(torch.ones(5, dtype=torch.bfloat16), src=2, group=pair)
            dist.all_reduce(torch.ones(6), op=dist.ReduceOp.MAX, group=pair)
            splits = [[rank, 3 - rank]] * 2
            dist.all_to_all_single(torch.empty(3), torch.ones(3), *splits, group=pair)
    return t.record


def test_groups_roots_and_reductions_are_named_by_global_ranks():
    first, second = launch(groups, 3, prints="quiet")[1:]
    for record in (first, second):
        cast, reduced = record.collectives[:2]
        assert cast.ranks == (1, 2) and cast.root == 2 and cast.group == reduced.group != "0"
        assert (cast.num_bytes, cast.dtype, cast.element_bytes, cast.reduce_op) == (10, "bfloat16", 2, "")
        assert record.collectives[2].sent_bytes == record.collectives[2].received_bytes == 8
        assert reduced.reduce_op == "max" and reduced.root is None


def test_a_trace_lies_over_the_ledger_and_both_see_the_same():
    outcome = run_ranks(waits, 2, prints="quiet")
    for record, ledger in zip(outcome.results, outcome.ledgers, strict=True):
        assert [e.op for e in ledger] == [c.op for c in record.communications]
        assert [e.group for e in ledger] == [c.group for c in record.communications]


def put_back():
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    with Trace():
        dist.all_reduce(torch.ones(1))
        within = vars(dist.ProcessGroup)["allreduce"]
    after = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    return before == after and within is not before[0]["allreduce"]


def test_the_ledgers_wrappers_are_put_back_exactly():
    assert launch(put_back, 2, prints="quiet") == [True, True]


def test_events_have_their_own_index():
    record = launch(waits, 2, prints="quiet")[0]
    assert [event.index for event in record.events] == list(range(len(record.events)))
    kinds = {type(event) for event in record.events}
    assert kinds == {Op, Collective, PointToPoint, Wait}
