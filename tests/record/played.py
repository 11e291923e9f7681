"""What the tests of the replay play: records written by hand, and functions that ranks record.

In a record by hand, an op's FLOPs are its seconds, and a communication takes 1 s of latency and a second per byte.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from labkit.cost.links import FREE
from labkit.cost.parts import Cluster, Device, Link, Node
from labkit.record.events import Collective, Op, PointToPoint, RankRecord, Wait
from labkit.record.prices import Prices
from labkit.record.trace import Trace

# Records by hand


def compute(seconds, reads=(), writes=(), stream=0, view=False):
    return Op(0, "aten.mm", seconds, 0, 0, tuple(reads), tuple(writes), view, stream, 0.0, 0.0, "")


def collective(ranks, num_bytes=0, op="all_reduce", group="0", stream=0, reads=(), writes=(), place=""):
    common = (0, 0, 4, 1, "float32", tuple(reads), tuple(writes), None, "sum", False, True, stream, 0.0, 0.0, place)
    return Collective(0, op, op, group, tuple(ranks), 0, num_bytes, *common)


def message(op, peer, num_bytes=0, tag=0, place=""):
    return PointToPoint(
        0, op, op, "0", (0, 1), peer, tag, 0, num_bytes, "float32", (), (), False, True, 0, 0.0, 0.0, place
    )


def send(peer, num_bytes=0, **more):
    return message("send", peer, num_bytes, **more)


def recv(peer, num_bytes=0, **more):
    return message("recv", peer, num_bytes, **more)


def wait(of, blocking=False):
    return Wait(0, of, "call", blocking, 0.0, 0.0, "")


def at_once(communication):
    """A blocking call: the communication and the wait for it."""
    return [communication, wait(None, True)]


def record(rank, world_size, *events):
    """A RankRecord; lists among the events are taken apart, indexes, sequence numbers and orders are given."""
    flat = [event for each in events for event in (each if isinstance(each, list) else [each])]
    counts, numbered = defaultdict(int), []
    for index, event in enumerate(flat):
        new = {"index": index}
        if isinstance(event, Wait) and event.of is None:
            new["of"] = index - 1
        elif isinstance(event, Collective):
            new["sequence"] = counts[event.group]
            counts[event.group] += 1
        elif isinstance(event, PointToPoint):
            new["order"] = counts[event.op, event.peer]
            counts[event.op, event.peer] += 1
        numbered.append(dataclasses.replace(event, **new))
    return RankRecord(rank, world_size, tuple(numbered), (), (), 0, 0, 0, (), 0.0, 0.0)


def records(*programs):
    return [record(rank, len(programs), *program) for rank, program in enumerate(programs)]


def by_hand(**more):
    """Prices for records by hand."""
    return Prices(
        lambda rank, op: op.flops, lambda c: (1.0, float(c.num_bytes)), lambda s, d, num_bytes: (1.0, num_bytes), **more
    )


def spans(played, rank, kind):
    """(start, end) of a rank's spans of one kind."""
    return [(span.start_s, span.end_s) for span in played.spans if span.rank == rank and span.kind == kind]


# Clusters to play on: a slow device, whose arithmetic takes milliseconds and whose memory hardly any time

SLOW = Device("slow", (("fp32", 5e9),), 2**34, 1e12)
WIRE = Link("wire", 20e-6, 1e9)


def on_link(num_ranks, link=FREE, device=SLOW):
    return Cluster(Node("test", device, num_ranks, link))


# Functions that ranks record

WIDTH, BATCH, LAYERS = 256, 64, 2


def gpipe(microbatches):
    """GPipe by hand: all forwards, then all backwards, blocking sends and receives."""
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stage = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    firsts = [torch.randn(BATCH, WIDTH, requires_grad=True) for _ in range(microbatches)]
    with Trace() as t:
        inputs, outputs = [], []
        for first in firsts:
            x = first if rank == 0 else torch.empty(BATCH, WIDTH)
            if rank > 0:
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank < p - 1:
                dist.send(y.detach(), rank + 1)
            inputs.append(x)
            outputs.append(y)
        for x, y in zip(inputs, outputs, strict=True):
            gradient = torch.ones(BATCH, WIDTH)
            if rank < p - 1:
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank > 0:
                dist.send(x.grad, rank - 1)
    return t.record


WEIGHTS, SIDE, ROWS = 16, 512, 32


def data_parallel(ways):
    """One record per way of averaging gradients, of a step after one to warm up."""
    return [_step_record(way) for way in ways]


def _step_record(way):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(WEIGHTS)])
    x = torch.randn(ROWS, SIDE, requires_grad=True)
    wrapped, finish = model, list
    if way in ("one bucket", "bucketed"):
        cap = 1000 if way == "one bucket" else 4 * SIDE * SIDE * 4 / 2**20
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    elif way == "naive":
        finish = lambda: [dist.all_reduce(p.grad) for p in model.parameters()]  # noqa: E731
    else:
        finish = _hooked(model, way)

    def step():
        wrapped(x).sum().backward()
        finish()

    step()
    model.zero_grad(set_to_none=False)
    with Trace() as t:
        step()
    return t.record


def _hooked(model, way):
    """Hooks on every weight: "hooks" waits at the end, "fake" issues and waits at once, "blocking" just calls."""
    works = []

    def hook(parameter):
        if way == "blocking":
            dist.all_reduce(parameter.grad)
            return
        work = dist.all_reduce(parameter.grad, async_op=True)
        work.wait() if way == "fake" else works.append(work)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def finish():
        for work in works:
            work.wait()
        works.clear()

    return finish


def broadcasts():
    """Records of a star, a chain and a binomial tree from rank 0."""
    found = []
    for way in (_star, _chain, _binomial):
        tensor = torch.zeros(8)
        with Trace() as t:
            way(tensor, dist.get_rank(), dist.get_world_size())
        found.append(t.record)
    return found


def _star(tensor, rank, n):
    if rank:
        dist.recv(tensor, 0)
    else:
        for work in [dist.isend(tensor, peer) for peer in range(1, n)]:
            work.wait()


def _chain(tensor, rank, n):
    if rank:
        dist.recv(tensor, rank - 1)
    if rank < n - 1:
        dist.send(tensor, rank + 1)


def _binomial(tensor, rank, n):
    reach = 1
    while reach < n:
        if rank < reach and rank + reach < n:
            dist.send(tensor, rank + reach)
        elif reach <= rank < 2 * reach:
            dist.recv(tensor, rank - reach)
        reach *= 2


def left_in_flight():
    """A record with an all_reduce that nobody waits for before its end."""
    tensor = torch.ones(1000)
    with Trace() as t:
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return t.record
