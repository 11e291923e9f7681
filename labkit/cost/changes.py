"""The cheapest changes that make a layout fit: neighbours of the layout, and neighbours of those, until three fit.

The tokens of a step stay what they were, so that a smaller microbatch means more of them. A change that needs no more
devices stands before one that does; among equals the one that takes less device time per token (`estimate.gpu_time_s`:
recomputed FLOPs, bytes communicated, bubbles; an optimizer's step on the host is not in it). Left out: another
precision, model or sequence length; those are the reader's to decide.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from labkit.cost.estimate import Estimate, estimate, needed_bytes, node_of
from labkit.cost.layout import Layout, divisors, tensor_parallel
from labkit.cost.shapes import Shape
from labkit.cost.states import AWAY

MOST = 256  # ranks along pp or cp
DEEPEST = 4  # changes at once
CHANGING = (
    *("tp", "pp", "cp", "ep", "zero", "shard_within", "zeropp", "per_node"),
    *("micro_batch", "microbatches", "recompute", "offload"),
)
WIDEST = 40  # layouts looked at per number of changes: those nearest to fitting go on


@dataclass(frozen=True)
class Change:
    """options: as the command line takes them. slowdown: device time per token over that of the layout as it is."""

    options: str
    result: Estimate
    slowdown: float


def cheapest(result: Estimate, count: int = 3) -> tuple[Change, ...]:
    """Up to `count` changes after which it fits; none where it fits already, or nothing tried does."""
    if result.fits:
        return ()
    seen, border, found, enough = {result.layout}, [result.layout], [], False
    for _ in range(DEEPEST):
        tried = {}
        for layout in border:
            for other in neighbours(result.shape, layout, result):
                if other not in seen:
                    seen.add(other)
                    tried[other] = _total(result.shape, other)
        room = result.device.memory_bytes
        found += [estimate(result.shape, layout, result.device) for layout, size in tried.items() if size <= room]
        border = sorted((layout for layout, size in tried.items() if room < size < math.inf), key=tried.get)[:WIDEST]
        if enough:
            break
        # One change more than needed may be cheaper than one fewer: full recomputation than a hundred devices.
        enough = len({changed(result.layout, each.layout) for each in found}) >= count
    found.sort(key=lambda each: (max(0, each.layout.gpus - result.layout.gpus), each.gpu_time_s))
    kinds: dict[frozenset, Estimate] = {}
    for each in found:
        kind = changed(result.layout, each.layout)
        # What fits with --micro-batch 2 need not be told of --micro-batch 1, nor of --micro-batch 2 and something more.
        if not any(known <= kind for known in kinds):
            kinds[kind] = each
    return tuple(
        Change(options(result.layout, each.layout), each, each.gpu_time_s / result.gpu_time_s - 1)
        for each in list(kinds.values())[:count]
    )


def changed(before: Layout, after: Layout) -> frozenset[str]:
    """Names of what differs, but for the microbatches that keep a step's tokens."""
    names = (field.name for field in fields(Layout) if getattr(before, field.name) != getattr(after, field.name))
    return frozenset(names) - {"microbatches"}


def neighbours(shape: Shape, layout: Layout, result: Estimate) -> Iterator[Layout]:
    """Layouts one step away."""
    box = node_of(result.device)
    count = layout.tp * layout.per_node or (box.count if box else layout.node_gpus)
    for change in (*_same_devices(shape, layout, count), *_more_devices(layout, count)):
        if layout.per_node and "tp" in change:  # the node stays what it was
            change["per_node"] = max(1, layout.per_node * layout.tp // change["tp"])
        with contextlib.suppress(ValueError):  # interleaving, for one, does not go with every pp
            yield replace(layout, **change)


def _total(shape: Shape, layout: Layout) -> float:
    """Bytes; inf where this model cannot have the layout."""
    try:
        return needed_bytes(shape, layout)
    except ValueError:
        return math.inf


def _same_devices(shape: Shape, layout: Layout, per_node: int) -> Iterator[dict]:
    for stage in range(layout.zero + 1, 4):
        yield {"zero": stage}
    if layout.offload == "none":
        yield {"offload": "optimizer", "zero": max(2, layout.zero)}
    if layout.offload not in AWAY:
        yield {"offload": "parameters", "zero": 3}
    if layout.recompute == "none" and not layout.flash:
        yield {"recompute": "selective"}
    if layout.recompute != "full":
        yield {"recompute": "full"}
    if not layout.flash:
        yield {"flash": True}
    if not layout.sequence_parallel and layout.tp > 1:
        yield {"sequence_parallel": True}
    yield from _sharded_further(shape, layout)
    for size in range(1, layout.micro_batch):
        if layout.micro_batch % size == 0:
            times = layout.micro_batch // size
            yield {"micro_batch": size, "microbatches": layout.microbatches * times}
    stages = range(1, min(shape.layers, MOST) + 1)
    for axis, sizes in (("tp", tensor_parallel(shape)), ("pp", stages), ("cp", range(1, MOST + 1))):
        size = getattr(layout, axis)
        for other in sizes:
            if other <= size or other % size or layout.dp % (times := other // size):
                continue
            if axis != "tp" or other <= per_node:
                yield {axis: other, "dp": layout.dp // times, "microbatches": layout.microbatches * times}


def _sharded_further(shape: Shape, layout: Layout) -> Iterator[dict]:
    """Experts on more ranks, states over larger groups, no second copy."""
    for ep in divisors(shape.experts) if shape.experts else ():
        if ep > layout.ep and layout.shards % ep == 0:
            yield {"ep": ep}
    for size in divisors(layout.shards) if layout.shard_within else ():
        if size > layout.shard_within:
            yield {"shard_within": size if size < layout.shards else 0}
    if "hpz" in layout.quantised:
        yield {"zeropp": "+".join(sorted(layout.quantised - {"hpz"})) or "none"}


def _more_devices(layout: Layout, per_node: int) -> Iterator[dict]:
    """More devices, along dp or along tp, pp and cp; the tokens of a step stay where they can."""
    for times in (2, 4, 8, 16, 32, 64):
        kept = layout.microbatches // times if layout.microbatches % times == 0 else 1
        for stage in range(max(1, layout.zero), 4):
            yield {"dp": layout.dp * times, "microbatches": kept, "zero": stage}
        for axis in ("tp", "pp", "cp"):
            if axis != "tp" or layout.tp * times <= per_node:
                yield {axis: getattr(layout, axis) * times}


def options(before: Layout, after: Layout) -> str:
    """What to give `labkit estimate` besides, to get from one layout to the other."""
    words = []
    if after.gpus != before.gpus:
        words.append(f"--gpus {after.gpus}")
    for field in CHANGING:
        # Where pp changes the command would take another default.
        if getattr(after, field) != getattr(before, field) or (field == "microbatches" and after.pp != before.pp):
            words.append(f"--{field.replace('_', '-')} {getattr(after, field)}")
    for field, word in (("flash", "--flash"), ("sequence_parallel", "--sequence-parallel")):
        if getattr(after, field) != getattr(before, field):
            words.append(word)
    return " ".join(words)
