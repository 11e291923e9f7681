"""Figures of deck 04, ZeRO: recorded steps of four real ranks, the cost model, and a checkpoint that is cut anew.

DeepSpeed's figures are the cost model's, which counts as DeepSpeed's estimators do: a deck is drawn without DeepSpeed
as well. Left out: bytes over time, whose axis is a clock.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from typing import Any

from labkit import RankFailed, launch
from labkit.cost import claims, memory, states
from labkit.cost.layout import Layout
from labkit.labs import lab04
from labkit.labs.lab04 import engines, pictures, resumed
from labkit.view import curves, plot, zero
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB, RANKS = "04", 4
RANK_NAMES = [f"rank {rank}" for rank in range(RANKS)]
STAGES = ["no ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
UNIT = "bytes per parameter"


def where_it_leads() -> Drawn:
    """What a rank keeps under DDP and under FSDP2."""
    return drawn(_stacked([_ddp(), _fsdp()], "kept by each of 4 ranks, fp32, recorded"))


def replicas() -> Drawn:
    """What four replicas keep, rank by rank."""
    kept = {kind: [num_bytes / _ddp().parameters] * RANKS for kind, num_bytes in _ddp().states().items()}
    return drawn(zero.stacked(RANK_NAMES, kept, UNIT, "DistributedDataParallel, fp32", parts.wide(9)))


def cut() -> Drawn:
    """A flat tensor of ten elements, padded and cut for four ranks."""
    size = 10
    each = -(-size // RANKS)
    rows = [range(rank * each, (rank + 1) * each) for rank in range(RANKS)]
    ax = _elements(plot.shards(rows, RANKS * each, f"{size} elements and {RANKS * each - size} of padding, 4 ranks"))
    return drawn(ax, padding=RANKS * each - size)


def stage_1() -> Drawn:
    """DDP and ZeRO-1, recorded."""
    sent = _stage(1).sent_elements / _ddp().sent_elements
    moments = _stage(1).states()["optimizer"] / _stage(1).parameters
    ax = _stacked([_ddp(), _stage(1)], "kept by each of 4 ranks, fp32, recorded")
    return drawn(ax, sent=f"{sent:.2f}", moments=f"{moments:.2g}")


def forgotten() -> Drawn:
    """Losses of a serial run, and of ZeRO-1 whose ranks do not tell each other."""
    forgetful = cells.function(LAB, "forgetful")
    forgetful.__globals__["Mine1"] = cells.function(LAB, "ZeroOptimizer")
    found = lab04.record("no all_gather", forgetful, steps=6)
    serial = lab04.serial_losses(RANKS, steps=6)
    series = [("serial", range(6), serial, "line"), ("no all_gather", range(6), found.losses, "dashed")]
    title = "ZeRO-1 on 4 ranks, and the all_gather taken away"
    ax = curves.lines(series, "step", "loss", title, parts.wide(9), from_zero=False)
    return drawn(ax, first=f"{found.losses[0]:.2f}", last=f"{found.losses[-1]:.2f}", due=f"{serial[-1]:.2f}")


def gradients() -> Drawn:
    """Gradients that a rank holds when backward has ended, by stage."""
    held = [step.states()["gradients"] / step.parameters for step in (_ddp(), _stage(1), _stage(2))]
    ax = curves.bars([("", held)], STAGES[:3], UNIT, "gradients held after backward, 4 ranks, fp32", parts.wide(9))
    return drawn(ax, held=f"{held[2]:.2g}", before=f"{held[1]:.2g}")


def many_microbatches() -> Drawn:
    """Elements sent a step over the number of microbatches, by stage."""
    numbers = (1, 2, 4, 8)
    series = [
        (name, [claims.communication(stage, k, RANKS) for k in numbers])
        for stage, name in ((1, "no ZeRO, ZeRO-1"), (2, "ZeRO-2"), (3, "ZeRO-3"))
    ]
    names = [f"{k} micro-\nbatch{'es' * (k > 1)}" for k in numbers]
    ax = curves.bars(series, names, "elements per parameter", "sent by each of 4 ranks in a step", parts.wide(9))
    four = claims.communication(2, 4, RANKS) / claims.communication(1, 4, RANKS)
    return drawn(ax, four=f"{four:.2g}")


def units() -> Drawn:
    """What ZeRO-3 gathers at once, against the part that a rank keeps."""
    shape = zero.shape_of(zero.OURS)
    found = memory.units(shape, Layout(dp=RANKS, zero=3), 0)
    part = sum(found) / RANKS
    names = ["embed-\nding", *(f"layer {at}" for at in range(shape.layers)), "norm,\nhead", "a rank's\npart"]
    sizes = [4 * count / 1e6 for count in (*found, part)]
    ax = curves.bars([("", sizes)], names, "MB", "parameters, fp32, 4 ranks", parts.wide(9))
    return drawn(ax, share=f"{max(found) / sum(found):.0%}")


def sent() -> Drawn:
    """Elements that a rank sends in a step, recorded."""
    steps = [_ddp(), _stage(1), _stage(2), _stage(3), _fsdp()]
    found = [step.sent_elements * RANKS / (RANKS - 1) for step in steps]
    ax = curves.bars([("", found)], ["DDP", *STAGES[1:], "FSDP2"], "in units of (N-1)/N", "recorded", parts.wide(9))
    return drawn(ax, three=f"{found[3] / found[0]:.2g}", fsdp=f"{found[4]:.2f}")


def all_stages() -> Drawn:
    """What a rank keeps at every stage, recorded."""
    steps = [_ddp(), _stage(1), _stage(2), _stage(3)]
    totals = [sum(step.states().values()) / step.parameters for step in steps]
    ax = _stacked(steps, "kept by each of 4 ranks, fp32, recorded", STAGES)
    return drawn(ax, before=f"{totals[0]:.3g}", after=f"{totals[3]:.2g}")


def savings() -> Drawn:
    """How many times ZeRO-1 and ZeRO-2 save over the number of ranks, in mixed precision."""
    many = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    series = [(f"ZeRO-{stage}", many, [claims.saving(stage, n) for n in many], "line") for stage in (1, 2)]
    limits = [claims.largest_saving(stage) for stage in (1, 2)]
    series += [("limits", many, [limit] * len(many), "dashed") for limit in limits[:1]]
    series += [("", many, [limits[1]] * len(many), "dashed")]
    ax = curves.lines(series, "ranks", "times less", "model states, mixed precision", parts.wide(9))
    curves.doubling_axis(ax, many)
    return drawn(ax, first=f"{claims.saving(1, 8):.2f}", second=f"{claims.saving(2, 8):.2f}", ranks=8)


def sizes() -> Drawn:
    """The largest models whose states fit on eight H100s, beside what is claimed of each stage."""
    from labkit.cost import hardware

    card = hardware.device("H100")
    found = [claims.largest(stage, 8, card.memory_bytes) / 1e9 for stage in (1, 2, 3)]
    said = [claims.CLAIMED_PARAMETERS[stage] / 1e9 for stage in (1, 2, 3)]
    series = [("states fit", found), ("claimed", said)]
    ax = curves.bars(series, STAGES[1:], "billions of parameters", "8 H100, mixed precision", parts.wide(9))
    return drawn(ax, one=f"{found[0]:.1f}", two=f"{found[1]:.1f}")


def norms() -> Drawn:
    """Norms of two shards by themselves, their sum, and the norm of both."""
    one, other = [3.0, 4.0], [12.0, 0.0]
    of = [sum(x * x for x in row) ** 0.5 for row in (one, other, one + other)]
    names = ["rank 0\nalone", "rank 1\nalone", "norms\nadded", "squares\nadded"]
    ax = curves.bars([("", [*of[:2], of[0] + of[1], of[2]])], names, "norm", "shards [3, 4] and [12, 0]", parts.wide(9))
    return drawn(ax, whole=f"{of[2]:g}", zero=f"{of[0]:g}", one=f"{of[1]:g}")


def cut_anew() -> Drawn:
    """Parts of one tensor on four ranks, on two and on three."""
    size, rows, names = 11, [], []
    for n in (4, 2, 3):
        each = -(-size // n)
        rows += [range(rank * each, min(size, (rank + 1) * each)) for rank in range(n)]
        names += [f"rank {rank} of {n}" for rank in range(n)]
    ax = _elements(plot.shards(rows, size, f"{size} elements on 4, on 2 and on 3 ranks"))
    ax.set_yticks(range(len(names)), names)
    return drawn(ax)


def goes_on() -> Drawn:
    """Losses of a serial run, and of one that was killed, and resumed on two ranks and on three."""
    train_on = cells.function(LAB, "train_on")
    space = train_on.__globals__
    space["Checkpoint"] = cells.function(LAB, "ShardedCheckpoint")
    space["Mine1"] = cells.function(LAB, "ZeroOptimizer")
    folder = tempfile.mkdtemp()
    try:
        with contextlib.suppress(RankFailed):
            launch(train_on, RANKS, folder, 8, 8, prints="quiet", backend="gloo")
        plan = ((2, 8), (3, 12))
        runs = [launch(train_on, n, folder, until, prints="quiet", backend="gloo") for n, until in plan]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {step: sum(each[step] for each in run) / len(run) for run in runs for step in run[0]}
    serial = resumed.by_one(12)
    series = [("never interrupted", range(1, 13), serial, "line"), ("resumed", [*found], [*found.values()], "points")]
    title = "saved on 4 ranks at step 4, killed at step 8; on 2, then on 3"
    return drawn(curves.lines(series, "step", "loss", title, parts.wide(9), from_zero=False), lost=8 - 4)


def deepspeed() -> Drawn:
    """What a rank keeps under DeepSpeed on two ranks, as its own estimators count it."""
    kept: dict[str, list[float]] = {kind: [] for kind in pictures.PARTS[:3]}
    for stage in range(4):
        held = states.state_bytes(10**6, _no_copy(stage), stage, 2)
        for kind, values in kept.items():
            values.append(getattr(held, kind) / 10**6)
    ax = zero.stacked(STAGES, kept, UNIT, "2 ranks, fp32, counted as DeepSpeed's estimators do", parts.wide(9))
    return drawn(ax, master=4)


def default_bucket() -> Drawn:
    """Bytes of DeepSpeed's default bucket, per parameter, by size of the model."""
    models = (zero.OURS, "gpt2", "gpt3-1.3b", "llama-3.1-8b")
    found = [zero.stages(model, 8, "bf16", "deepspeed", engines.DEFAULT_BUCKET, 1)[2].kept for model in models]
    names = [model.replace("this lab's ", "this lab's\n").replace("-3.1", "\n3.1") for model in models]
    series = [("states", [sum(each.values()) - each["buffers"] for each in found])]
    series += [("bucket", [each["buffers"] for each in found])]
    ax = curves.bars(series, names, UNIT, "ZeRO-2, 8 ranks, bf16, bucket of DeepSpeed's own size", parts.wide(9))
    ax.set_yscale("log")
    ax.set_ylim(0.05, 4000)
    return drawn(ax, ours=f"{found[0]['buffers']:.0f}", large=f"{found[-1]['buffers']:.2f}")


def leaving() -> Drawn:
    """Bytes that leave a node in a step, by way of sharding over nodes."""
    ways = pictures.spreads(nodes=2, per_node=8)
    ax = curves.bars(
        [("", [way.leaving for way in ways])], [w.name for w in ways], UNIT, "leave a node, bf16, 2 nodes of 8 GPUs",
        parts.wide(9),
    )  # fmt: skip
    of = {way.name: way.leaving for way in ways}
    return drawn(ax, three=f"{of['ZeRO-3']:.2f}", hybrid=f"{of['HSDP']:.2f}", plus=f"{of['ZeRO++']:.2f}")


def kept_across() -> Drawn:
    """What a GPU keeps, by way of sharding over nodes."""
    ways = pictures.spreads(nodes=2, per_node=8)
    kept = {kind: [way.kept[kind] for way in ways] for kind in pictures.PARTS}
    ax = zero.stacked([way.name for way in ways], kept, UNIT, "kept by a GPU, bf16, 2 nodes of 8", parts.wide(9))
    of = {way.name: sum(way.kept.values()) for way in ways}
    return drawn(ax, three=f"{of['ZeRO-3']:.2g}", hybrid=f"{of['HSDP']:.2g}")


def what_waits() -> Drawn:
    """States of a model of 7.5 billion parameters on eight GPUs with ZeRO-3."""
    held = states.state_bytes(7_500_000_000, states.per_parameter("zero", "bf16"), 3, 8)
    kept = {kind: [getattr(held, kind) / 1e9] for kind in pictures.PARTS[:3]}
    ax = zero.stacked(["7.5 billion parameters"], kept, "GB on each GPU", "ZeRO-3, 8 GPUs", parts.wide(9))
    ax.set_xlim(-1.5, 1.5)
    return drawn(ax, share=f"{held.optimizer / held.total:.0%}")


def _elements(ax: Any) -> Any:
    """A picture of shards whose cells are elements of a tensor, not rows of data."""
    ax.set_xlabel("element")
    for text in ax.texts:
        text.set_text(text.get_text().replace("row", "element"))
    return ax


def _no_copy(stage: int) -> Any:
    """DeepSpeed's count without the second copy of gradients, which it makes only within its step."""
    import dataclasses

    each = states.per_parameter("deepspeed", "fp32", stage)
    kept = each.gradient or each.gradient_copy
    return dataclasses.replace(each, gradient=kept, gradient_copy=0)


def _stacked(steps: list, title: str, names: list[str] | None = None) -> Any:
    labels, kept = pictures.bars(steps)
    kept = {kind: values for kind, values in kept.items() if kind != "buffers"}
    return zero.stacked(names or labels, kept, UNIT, title, parts.wide(9))


@functools.cache
def _ddp() -> Any:
    return lab04.record("DDP", lab04.ddp_way)


@functools.cache
def _fsdp() -> Any:
    return lab04.record("FSDP2", lab04.fsdp_way)


@functools.cache
def _stage(number: int) -> Any:
    name = {1: "ZeroOptimizer", 2: "ZeroGradients", 3: "ZeroParameters"}[number]
    return lab04.record(f"ZeRO-{number}", cells.function(LAB, name))
