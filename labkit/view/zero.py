"""The ZeRO explorer: stages 0 to 3 side by side, for any ranks, precision, bucket size and number of microbatches.

Left, what a rank keeps, in bytes per parameter, stacked by kind, with the bucket in which gradients are reduced as a
bar part of its own; right, what it sends in a step, in elements per parameter. Both are per parameter, so that the left
axis stays as it is (what goes beyond is cut and said above); the right one grows with microbatches alone. `stacked`
draws such bars of recorded steps.
Left out: activations and what ZeRO-3 gathers for a moment (lab 03's explorer has both).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.cost import memory, states
from labkit.cost.layout import Layout
from labkit.cost.moved import data_parallel
from labkit.cost.named import named
from labkit.cost.shapes import Shape, parameters
from labkit.view import curves, explore
from labkit.view.plot import COLOURS, RANK_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = (0, 1, 2, 3)
KINDS = ("parameters", "gradients", "optimizer", "buffers")
# Colours of the palette that the left side does not use for something else.
OPS = {"all_reduce": RANK_COLOURS[6], "reduce_scatter": COLOURS["forward"], "all_gather": RANK_COLOURS[7]}
OURS = "this lab's Llama"
MODELS = (OURS, "gpt2", "gpt3-1.3b", "llama-3.1-8b", "llama-3.1-70b")
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BUCKETS = (10**5, 10**6, 10**7, 10**8, 5 * 10**8)  # elements; the last is DeepSpeed's own
MICROBATCHES = (1, 2, 4, 8)
MOST_BYTES, MOST_SENT = 22.0, 3.0  # per parameter, of the axes; the right one's a microbatch
HEAD = 1.08  # of the most, above which an axis ends: room for a sum
FLAT = 0.82  # width of a bar


@dataclass(frozen=True)
class Stage:
    """One stage on one rank, per parameter of the model: bytes kept by kind, elements sent in a step by collective."""

    kept: Mapping[str, float]
    sent: Mapping[str, float]


def zero(**start: Any) -> explore.Explorer:
    """An explorer of ZeRO's stages. start: values of controls to start with (model, ranks, precision, convention,
    bucket, microbatches).
    """
    begin = {"model": OURS, "ranks": 4, "precision": "fp32", "convention": "zero", "bucket": 10**6, "microbatches": 1}
    begin |= start
    controls = {
        "model": explore.choice("model", MODELS, begin["model"]),
        "ranks": explore.slider("ranks", RANKS, begin["ranks"]),
        "precision": explore.choice("precision", ("fp32", "bf16"), begin["precision"]),
        "convention": explore.choice("counted as", ("zero", "deepspeed"), begin["convention"]),
        "bucket": explore.slider("bucket", BUCKETS, begin["bucket"], lambda count: f"{count:,}"),
        "microbatches": explore.slider("microbatches", MICROBATCHES, begin["microbatches"]),
    }
    figure, update = _picture()
    return explore.explorer(controls, figure, update)


def shape_of(model: str) -> Shape:
    """The shape of one of MODELS."""
    if model == OURS:  # labkit.labs.lab04.recorded.model
        return Shape(OURS, layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=688, vocab=256)
    return named(model)


@functools.lru_cache(maxsize=256)
def stages(
    model: str, ranks: int, precision: str, convention: str, bucket: int, microbatches: int
) -> tuple[Stage, ...]:
    """All stages of one setting (ZeRO, arXiv:1910.02054, sections 5 and 7; buckets as `memory.bucket_bytes`)."""
    shape = shape_of(model)
    count, size = parameters(shape), states.element_bytes(precision)
    found = []
    for stage in STAGES:
        layout = Layout(
            dp=ranks,
            zero=stage,
            precision=precision,
            convention=convention,
            bucket=bucket,
            microbatches=microbatches,
        )
        held = states.state_bytes(count, states.per_parameter(convention, precision, stage), stage, ranks)
        kept = {kind: getattr(held, kind) / count for kind in KINDS[:3]}
        kept["buffers"] = memory.bucket_bytes(layout, count) / count
        wide = {"all_gather": size}
        sent = {
            op: num_bytes / wide.get(op, memory.communicated_gradient_bytes(layout)) / count
            for op, num_bytes in data_parallel(shape, layout, 0).items()
        }
        found.append(Stage(kept, sent))
    return tuple(found)


def reading(found: Sequence[Stage], model: str, ranks: int) -> str:
    """What is set, in words."""
    count = parameters(shape_of(model))
    kept = ", ".join(curves.as_size(sum(stage.kept.values()) * count) for stage in found)
    return f"{model}, {count / 1e6:,.4g} million parameters on {ranks} ranks: a rank keeps {kept}"


def stacked(
    names: Sequence[str], kept: Mapping[str, Sequence[float]], unit: str, title: str = "", ax: Axes | None = None
) -> Axes:
    """Stacked bars by kind of bytes, one a name, the sum on top. kept: kind of COLOURS -> values. Returns the Axes."""
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(2.4 + 0.9 * len(names), 3.0), layout="constrained")
    low = [0.0] * len(names)
    for kind, values in kept.items():
        look = {"color": COLOURS[kind], "edgecolor": COLOURS["ink"], "linewidth": 0.4}
        ax.bar(range(len(names)), values, FLAT, bottom=low, label=kind, **look)
        low = [one + other for one, other in zip(low, values, strict=True)]
    for place, total in enumerate(low):
        ax.text(place, total, curves.as_number(total), ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel=unit, ylim=(0, 1.12 * max(low, default=0.0) or 1.0))
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _picture() -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    figure, left, right = _axes()
    kept = {kind: _bars(left, kind, COLOURS[kind]) for kind in KINDS}
    sent = {op: _bars(right, op, colour) for op, colour in OPS.items()}
    sums = [[ax.text(stage, 0, "", ha="center", va="bottom", fontsize=9) for stage in STAGES] for ax in (left, right)]
    for ax in (left, right):
        ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    title = figure.suptitle(" ", fontsize=9)
    moving = [bar for container in (*kept.values(), *sent.values()) for bar in container]
    for artist in (*moving, *sums[0], *sums[1], title, right.yaxis):
        artist.set_animated(True)

    def update(**setting: Any) -> None:
        found = stages(**setting)
        _set(kept, [stage.kept for stage in found], sums[0], MOST_BYTES)
        most = MOST_SENT * setting["microbatches"]
        right.set_ylim(0, HEAD * most)
        _set(sent, [stage.sent for stage in found], sums[1], most)
        title.set_text(reading(found, setting["model"], setting["ranks"]))

    return figure, update


def _axes() -> tuple[Any, Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.2), dpi=explore.DPI, layout="constrained")
    figure.get_layout_engine().set(wspace=0.08)  # the right label is not the left picture's
    left, right = figure.subplots(1, 2)
    left.set_ylabel("bytes per parameter, kept")
    right.set_ylabel("elements sent a step, per parameter")
    for ax, most in ((left, MOST_BYTES), (right, MOST_SENT)):
        ax.set(xlim=(-0.6, 3.6), ylim=(0, HEAD * most))
        ax.set_xticks(STAGES, ["no ZeRO", "stage 1", "stage 2", "stage 3"])
        ax.spines[["top", "right"]].set_visible(False)
    return figure, left, right


def _bars(ax: Any, label: str, colour: str) -> Any:
    return ax.bar(STAGES, [0.0] * 4, FLAT, label=label, color=colour, edgecolor=COLOURS["ink"], linewidth=0.4)


def _set(drawn: Mapping[str, Any], values: Sequence[Mapping[str, float]], sums: Sequence[Any], most: float) -> None:
    """Heights and sums of stacked bars; what is beyond the axis is cut, and its sum says all of it."""
    for place, of_stage in enumerate(values):
        low = 0.0
        for kind, container in drawn.items():
            top = min(low + of_stage.get(kind, 0.0), most)
            container[place].set(y=low, height=top - low)
            low = top
        total = sum(of_stage.values())
        arrow = " \N{UPWARDS ARROW}" if total > most * (1 + 1e-9) else ""
        sums[place].set(y=low, text=curves.as_number(total) + arrow)
