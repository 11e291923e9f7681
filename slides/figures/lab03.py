"""Figures of deck 03, Where the memory goes: steps recorded on a rank, and the cost model.

A recorded step is drawn over its operations, not over time, for a clock gives another picture each time. Left out:
times, and the explorer, which the notebook has.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import labkit.labs.lab03.blocks as blocks
import labkit.labs.lab03.scaler_cases as scaler_cases
import labkit.labs.lab03.scaler_told as scaler_told
from labkit import launch
from labkit.cost import estimate, hardware, states
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.labs import lab03
from labkit.record.held import held as bytes_held
from labkit.view import curves, held, plot
from labkit.view import memory as explorer
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB = "03"
SMALL = lab03.pictures.SMALL
GB = 1e9


def step() -> Drawn:
    """Bytes held over one training step."""
    found = _step("none").held
    ax = _over_ops(found, "one training step of a small Llama, AdamW, fp32", parts.wide(9, 3.2))
    weights = found.begin["parameter"]
    return drawn(ax, weights=f"{weights / 1e6:.1f} MB", peak=f"{found.peak_bytes / 1e6:.0f} MB")


def before() -> Drawn:
    """Bytes per parameter that are there before the first token, by optimizer."""
    names, rows = ("sgd", "momentum", "adamw"), []
    for name in names:
        found = _step("none", name)
        each = {part: found.parts[part] / found.parameters for part in ("parameters", "gradients", "optimizer")}
        rows.append({part: GB * round(size, 2) for part, size in each.items()})  # without step counters
    ax = explorer.stacked(rows, list(names), "recorded, fp32", parts.wide(8))
    ax.set_ylabel("bytes a parameter")
    return drawn(ax, most=f"{rows[-1]['optimizer'] / GB:g}")


def added() -> Drawn:
    """A weight to which one is added again and again, in fp32 and in bf16."""
    import torch

    count, rows = 24, []
    for label, dtype, style in (("fp32", torch.float32, "line"), ("bf16", torch.bfloat16, "points")):
        weight, values = torch.tensor(244.0, dtype=dtype), []
        for _ in range(count):
            values.append(float(weight))
            weight = weight + 1
        rows.append((label, range(count), values, style))
    ax = curves.lines(rows, "updates of one", "weight", "a weight, and many small updates", parts.wide(8))
    ax.set_ylim(240, 272)
    return drawn(ax, stuck=f"{rows[1][2][-1]:g}", due=f"{rows[0][2][-1]:g}")


def billion() -> Drawn:
    """States of a billion parameters by precision and optimizer."""
    settings = cells.value(LAB, "settings")
    sizes = [lab03.pictures.by_convention(10**9, *setting) for setting in settings]
    stacks = [dict(zip(("parameters", "gradients", "optimizer"), each, strict=True)) for each in sizes]
    names = ["\n".join(setting) for setting in settings]
    ax = explorer.stacked(stacks, names, "states of a billion parameters", parts.wide(9, 3.4))
    whole = sum(sizes[settings.index(("bf16", "adamw"))])
    return drawn(ax, total=f"{whole / GB:g} GB", weights=f"{sizes[1][0] / GB:g} GB")


def conventions() -> Drawn:
    """Bytes a parameter in three conventions, without any sharding."""
    found = [states.per_parameter(name, "bf16", 2) for name in states.CONVENTIONS]
    rows = [
        {
            "parameters": GB * e.parameter,
            "gradients": GB * (e.gradient + e.gradient_copy),
            "optimizer": GB * e.optimizer,
        }
        for e in found
    ]
    ax = explorer.stacked(rows, list(states.CONVENTIONS), "bf16, AdamW", parts.wide(8))
    ax.set_ylabel("bytes a parameter")
    return drawn(ax, least=found[0].total, most=found[2].total)


def batch() -> Drawn:
    """States and activations over the batch."""
    sizes, rows = (1, 2, 4, 8), {"states": [], "activations": []}
    for size in sizes:
        found = _step("none", "adamw", size).parts
        rows["states"].append((found["parameters"] + found["gradients"] + found["optimizer"]) / 1e6)
        rows["activations"].append(found["activations"] / 1e6)
    series = [(name, sizes, values, "points") for name, values in rows.items()]
    ax = curves.lines(series, "sequences in the batch", "MB", "the same small Llama, recorded", parts.wide(8))
    return drawn(ax, states=f"{rows['states'][-1]:.0f} MB", activations=f"{rows['activations'][-1]:.0f} MB")


def layer() -> Drawn:
    """Every storage that one layer keeps, in bf16."""
    kept = lab03.of_layer(lab03.llama_keeps(SMALL, 2, 32, element_bytes=2))
    ax = parts.wide(9, 4.2)
    sizes = [each.num_bytes / 1e3 for each in kept]
    names = [each.module.split(".")[2].replace("layernorm", "norm") for each in kept]
    ax.barh(range(len(kept)), sizes, color=plot.COLOURS["activations"], edgecolor=plot.COLOURS["ink"], linewidth=0.5)
    rows = [at for at, name in enumerate(names) if not at or names[at - 1] != name]
    ax.set_yticks(rows, [names[at] for at in rows])
    ax.set(ylim=(len(kept) - 0.4, -0.6), xlabel="kB", title="in the order in which they are saved")
    ax.spines[["top", "right"]].set_visible(False)
    return drawn(ax, count=len(kept))


def counted() -> Drawn:
    """One layer by the papers, by the table, and live."""
    widths = {"bf16": 2, "fp32": 4}
    rows = {
        name: [lab03.pictures.by_the_table(SMALL, 2, 128, e, name) / 1e3 for e in widths.values()]
        for name in ("megatron", "eager")
    }
    rows["autograd, live"] = [lab03.layer_bytes(SMALL, 2, 128, e) / 1e3 for e in widths.values()]
    ax = curves.bars(list(rows.items()), list(widths), "kB a layer", "two sequences", parts.wide(8))
    off = max(abs(a / b - 1) for a, b in zip(rows["eager"], rows["autograd, live"], strict=True))
    return drawn(ax, more=f"{rows['eager'][0] / rows['megatron'][0] - 1:.0%}", off=f"{off:.1%}")


def vocabulary() -> Drawn:
    """What the loss holds at the peak, for two vocabularies."""
    rows, sizes = [], (256, 8192)
    for vocab in sizes:
        found = _step("none", "adamw", 4, vocab)
        loss = [o.num_bytes for o in found.owners if not o.module and o.kind in ("activation", "temporary")]
        rows.append((sum(loss) / 1e6, (found.held.peak_bytes - sum(loss)) / 1e6))
    series = [("the loss", [row[0] for row in rows]), ("all the rest", [row[1] for row in rows])]
    ax = curves.bars(series, [f"{vocab} tokens" for vocab in sizes], "MB at the peak", "by vocabulary", parts.wide(8))
    return drawn(ax, loss=f"{rows[1][0]:.0f}", whole=f"{sum(rows[1]):.0f} MB")


def remembers() -> Drawn:
    """An evaluation that adds up losses with their graphs."""
    record = launch(cells.function(LAB, "evaluate"), 1, False, prints="quiet", backend="gloo")[0]
    found = bytes_held(record)
    ax = _over_ops(found, "total + loss, four batches, no backward", parts.wide(9, 3.2))
    return drawn(ax, peak=f"{found.peak_bytes / 1e6:.0f} MB", weights=f"{found.end['parameter'] / 1e6:.1f} MB")


def input_only() -> Drawn:
    """What a layer keeps, and what it keeps when it is checkpointed."""
    kept = lab03.pictures.by_the_table(SMALL, 4, 128, 4, "eager") / 1e3
    inputs = 4 * 4 * 128 * SMALL.hidden / 1e3
    series = [("", [kept, inputs])]
    ax = curves.bars(series, ["as it is", "checkpointed"], "kB a layer", "fp32", parts.wide(6))
    return drawn(ax, share=f"{inputs / kept:.0%}")


def again() -> Drawn:
    """The step without checkpoints and with every layer checkpointed."""
    plain, again = _step("none"), _step("all")
    left, right = plot.side_by_side(2, width=4.8, height=3.3)
    for ax, found, title in ((left, plain, "no checkpoints"), (right, again, "every layer")):
        _over_ops(found.held, title, ax).set_ylim(0, 1.15 * plain.held.peak_bytes / 1e6)
    left.get_legend().remove()
    share = again.held.peak_bytes / plain.held.peak_bytes
    return drawn(right, flops=f"{again.flops / plain.flops - 1:.0%}", peak=f"{share:.0%}")


def last() -> Drawn:
    """Peaks without checkpoints, with the last layer checkpointed, with all."""
    found = {"none": _step("none"), "the last": _step("last"), "all": _step("all")}
    peaks = [each.held.peak_bytes / 1e6 for each in found.values()]
    ax = curves.bars([("", peaks)], list(found), "MB at the peak", "checkpointed layers", parts.wide(7))
    return drawn(ax, lower=f"{1 - peaks[1] / peaks[0]:.0%}", layers=_step("none").sizes["layers"])


def turns() -> Drawn:
    """What is held at each layer's turn in backward, without checkpoints."""
    made, held_now, rows = lab03.pictures.LAYERS, 0, []
    for block in made:
        held_now += block.kept_bytes
        rows.append(held_now / 1e3)
    ax = curves.bars(
        [("", rows)], [f"layer {at}" for at in range(len(made))], "kB held", "no checkpoints", parts.wide(9)
    )
    ax.axhline(lab03.pictures.LAYERS_BUDGET / 1e3, color=plot.COLOURS["ink"], linestyle="--")
    _on_white(ax)
    return drawn(ax, budget=f"{lab03.pictures.LAYERS_BUDGET / 1e3:.0f} kB")


def all_choices() -> Drawn:
    """Every choice of layers: peak against FLOPs again."""
    made, budget = lab03.pictures.LAYERS, lab03.pictures.LAYERS_BUDGET
    ways = blocks.ways(made)
    flops = [way.flops / 1e6 for way in ways]
    peaks = [way.peak_bytes / 1e3 for way in ways]
    ax = curves.lines([("a choice", flops, peaks, "points")], "MFLOPs again", "kB at most", "", parts.wide(8))
    ax.axhline(budget / 1e3, color=plot.COLOURS["ink"], linestyle="--", label="budget")
    ax.legend(fontsize=8, frameon=False)
    fit = [way for way in ways if way.peak_bytes <= budget]
    least = min(way.flops for way in fit)
    return drawn(ax, count=len(ways), fit=len(fit), least=f"{least / 1e6:.1f}", all=f"{max(flops):.1f}")


def ranges() -> Drawn:
    """Powers of two that three formats hold."""
    import torch

    names, ax = ("fp32", "bf16", "fp16"), parts.wide(9, 2.6)
    ends = []
    for at, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        info = torch.finfo(dtype)
        low, high = (
            float(torch.tensor(value, dtype=torch.float64).log2()) for value in (info.tiny * info.eps, info.max)
        )
        ax.barh(at, high - low, left=low, height=0.6, color=plot.COLOURS["parameters"], edgecolor=plot.COLOURS["ink"])
        ends.append((low, high))
    ax.set_yticks(range(3), names)
    ax.set(ylim=(2.6, -0.6), xlabel="powers of two", title="from the smallest above zero to the largest")
    ax.spines[["top", "right"]].set_visible(False)
    return drawn(ax, low=f"{ends[2][0]:.0f}", high=f"{ends[2][1]:.0f}")


def lost() -> Drawn:
    """Share of the logits' gradients that fp16 makes zero, by loss scale."""
    values, powers = lab03.pictures.logit_gradient(128_256, 8192), range(33)
    shares = [100 * lab03.pictures.lost(values, 2.0**power)[0] for power in powers]
    ax = curves.lines(
        [("", powers, shares, "line")], "loss multiplied by two to the", "become zero (%)", "", parts.wide(8)
    )
    first = next(power for power, share in zip(powers, shares, strict=True) if share < 0.01)
    return drawn(ax, zero=f"{int(100 * shares[0]) / 100:g}%", enough=first)


def alone() -> Drawn:
    """Scales of three ranks that each decide by their own gradients."""
    import random

    case = scaler_cases.cases(random.Random(3))[0]
    ranks = scaler_told.play(case, scaler_told.Rule(everyone=False))
    ax = parts.wide(9)
    series = [
        (f"rank {at}", range(case.num_steps), [scale / 1024 for _, scale in rank], "line")
        for at, rank in enumerate(ranks)
    ]
    ax = curves.lines(series, "step", "scale, in 1024", "each rank decides alone", ax)
    apart = max(max(at) / min(at) for at in zip(*([scale for _, scale in rank] for rank in ranks), strict=True))
    return drawn(ax, times=f"{apart:g}")


def from_above() -> Drawn:
    """The scale of a training that starts far too high."""
    scales, skipped = lab03.pictures.too_high(lab03.pictures.TorchScaler, 32)
    powers = [len(bin(int(scale))) - 3 for scale in scales]
    ax = parts.wide(8)
    curves.lines([("", range(len(powers)), powers, "points")], "step", "log2 of the scale", "", ax, from_zero=False)
    return drawn(ax, skipped=skipped, begin=32)


def allocator() -> Drawn:
    """What a caching allocator reserves for tensors whose sizes change."""
    events = lab03.gaps.batches_of_changing_length()
    usual, growing = (lab03.gaps.filled(events, expandable) for expandable in (False, True))
    rows = (("allocated", usual.allocated), ("reserved", usual.reserved), ("one segment that grows", growing.reserved))
    series = [(name, range(len(events)), [size / 2**20 for size in sizes], "line") for name, sizes in rows]
    ax = curves.lines(series, "tensors made and freed", "MiB", "", parts.wide(9))
    ax.set_ylim(0, 140)
    ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=3)
    held_most, reserved = max(usual.allocated) / 2**20, usual.reserved[-1] / 2**20
    return drawn(
        ax, reserved=f"{reserved:.0f} MiB", most=f"{held_most:.0f}", grown=f"{growing.reserved[-1] / 2**20:.0f}"
    )


def layouts() -> Drawn:
    """Llama 3.1 8B on H100s in four layouts."""
    shape, ways = named("llama-3.1-8b"), {"one GPU": {}, "recompute": {"recompute": "full"}}
    ways |= {"ZeRO-1\non eight": {"dp": 8, "zero": 1}, "ZeRO-3\non eight": {"dp": 8, "zero": 3}}
    ways["tp 8"] = {"tp": 8}
    stacks = []
    for how in ways.values():
        found = estimate.estimate(shape, Layout(seq=4096, **how), "H100")
        sizes = {part: getattr(found.memory, part) for part in explorer.PARTS[:-1]}
        stacks.append(sizes | {"overheads": found.overheads.total})
    ax = explorer.stacked(stacks, list(ways), "Llama 3.1 8B, one sequence of 4096 a GPU", parts.wide(9, 3.4))
    room = hardware.device("H100").memory_bytes
    ax.axhline(room / GB, color=plot.COLOURS["ink"], linestyle="--", zorder=0.5)
    return drawn(ax, one=f"{sum(stacks[0].values()) / GB:.0f} GB", room=f"{room / GB:.0f}")


def copies() -> Drawn:
    """What each of four ranks holds of a billion parameters."""
    sizes = lab03.pictures.by_convention(10**9, "bf16", "adamw")
    each = dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))
    names = [f"rank {rank}" for rank in range(4)]
    ax = explorer.stacked([each] * 4, names, "a billion parameters, bf16, AdamW", parts.wide(8, 3.3))
    return drawn(ax, own=f"{each['optimizer'] / GB:g}", all=f"{sum(sizes) / GB:g}")


def _on_white(ax: Any) -> None:
    """Numbers that a line may run through."""
    for text in ax.texts:
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0})


@functools.cache
def _step(checkpoint: str, optimizer: str = "adamw", batch: int = 4, vocab: int = 256) -> Any:
    return lab03.record_step(batch, 128, optimizer, checkpoint, vocab=vocab)


def _over_ops(found: Any, title: str, ax: Any) -> Any:
    """As `held.over_time`, over the changes of what is held, one after the other: the same in every run."""
    count = len(found.times_s)
    even = replace(found, times_s=tuple(at / 1e3 for at in range(count)))
    even = replace(even, peak_time_s=found.total.index(found.peak_bytes) / 1e3)
    ax = held.over_time(even, title, ax)
    ax.set(xlabel="what is held changes, in order", xticks=[])
    return ax
