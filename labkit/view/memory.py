"""The memory explorer, and stacked bars: what one device holds in training, for any model and layout.

A bar of the parts that the cost model counts; below it, where the step was recorded, the same parts from the record.
The bars' scale is the larger of need and device, so sizes are read from the legend. Left out: the arithmetic, which is
`labkit.cost.estimate`; context parallelism, experts and interleaving, which `labkit estimate` has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.cost import estimate, hardware, shapes
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.cost.shapes import Shape
from labkit.view import curves, explore
from labkit.view.plot import COLOURS, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from labkit.labs.lab03.recorded import Step

OWN, RECORDED = "own sizes", "the recorded one"
MODELS = (
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt2", "gpt3-175b", "qwen3-8b",
    "qwen3-32b", "mixtral-8x7b",
)  # fmt: skip
DEVICES = ("T4", "L4", "RTX 4090", "A100-40", "A100-80", "H100", "H200", "B200")
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "overheads")
COLOUR = {**{part: COLOURS[part] for part in PARTS[:-1]}, "overheads": COLOURS["idle"]}
POWERS = tuple(2**power for power in range(11))
RIGHT = 1.16  # of the scale: the axis' end


def memory(recorded: Step | None = None, **start: Any) -> explore.Explorer:
    """An explorer of a device's memory.

    recorded: a step to choose as a model too, with its record beside the formula. start: values of controls to start
    with (model, device, heads, hidden, layers, seq, vocab, kv_heads, micro_batch, dp, tp, pp, zero, recompute,
    precision, offload, activations). With "own sizes" the model is a Llama of those.
    """
    models = (*MODELS, *([RECORDED] if recorded is not None else []), OWN)
    begin = {"model": "llama-3.1-8b", "device": "H100", "heads": 32, "hidden": 4096, "layers": 32, "vocab": 128256}
    begin |= {"kv_heads": 8, "seq": 4096, "micro_batch": 1, "dp": 1, "tp": 1, "pp": 1, "zero": 0, "recompute": "none"}
    begin |= {"precision": "bf16", "offload": "none", "activations": "megatron"} | start
    controls = _controls(models, begin)
    figure, draw = _picture()

    def update(**values: Any) -> None:
        draw(*reading(recorded, **values), _how_recorded(recorded))

    return explore.explorer(controls, figure, update)


def _controls(models: tuple[str, ...], begin: Mapping[str, Any]) -> dict[str, Any]:
    choice, slider = explore.choice, explore.slider
    return {
        "model": choice("model", models, begin["model"]),
        "device": choice("device", DEVICES, begin["device"]),
        "micro_batch": slider("microbatch b", POWERS[:8], begin["micro_batch"]),
        "seq": slider("sequence s", tuple(2**power for power in range(6, 18)), begin["seq"]),
        "dp": slider("dp", POWERS, begin["dp"]),
        "zero": slider("ZeRO stage", (0, 1, 2, 3), begin["zero"]),
        "tp": slider("tp", POWERS[:5], begin["tp"]),
        "pp": slider("pp", POWERS[:6], begin["pp"]),
        "precision": choice("precision", ("bf16", "fp16", "fp32"), begin["precision"]),
        "recompute": choice("recompute", ("none", "full"), begin["recompute"]),
        "offload": choice("offload", ("none", "optimizer", "parameters"), begin["offload"]),
        "activations": choice("activations", ("megatron", "eager"), begin["activations"]),
        "hidden": slider("own: hidden h", tuple(2**p for p in range(7, 15)), begin["hidden"]),
        "layers": slider("own: layers L", (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 126), begin["layers"]),
        "heads": slider("own: heads a", POWERS[:8], begin["heads"]),
        "kv_heads": slider("own: kv heads", POWERS[:8], begin["kv_heads"]),
        "vocab": slider("own: vocabulary v", (256, 32000, 50257, 128256, 151936), begin["vocab"]),
    }


def stacked(
    parts: Sequence[Mapping[str, float]], names: Sequence[str], title: str = "", ax: Axes | None = None
) -> Axes:
    """Bytes by part as stacked bars in GB (1e9 bytes), one bar a name; the sum on top, sizes in the larger parts.

    parts: per bar, bytes by part (keys of PARTS). Returns the Axes.
    """
    ax = ax or _new_axes(1.6 + 1.0 * len(names) + 1.4, 3.0)
    highest = max(sum(each.values()) for each in parts) / 1e9
    for at, each in enumerate(parts):
        bottom = 0.0
        for part in PARTS:
            height = each.get(part, 0) / 1e9
            ax.bar(at, height, 0.7, bottom, color=COLOUR[part], edgecolor=COLOURS["ink"], linewidth=0.5)
            if height > 0.06 * highest:
                size, ink = curves.as_number(height), ink_on(COLOUR[part])
                ax.text(at, bottom + height / 2, size, ha="center", va="center", fontsize=9, color=ink)
            bottom += height
        ax.text(at, bottom, curves.as_number(bottom), ha="center", va="bottom", fontsize=9)
    there = [part for part in PARTS if any(each.get(part) for each in parts)]
    patches = [_patch(part) for part in reversed(there)]
    ax.legend(handles=patches, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel="GB", ylim=(0, 1.12 * highest))
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


@functools.lru_cache(maxsize=256)
def needed(shape: Shape, layout: Layout, device: str) -> estimate.Estimate:
    """The estimate; ValueError, one line, for what cannot be."""
    return estimate.estimate(shape, layout, device)


def shape_of(model: str, recorded: Step | None, heads: int, hidden: int, layers: int, vocab: int, kv: int) -> Shape:
    """The model that is set. ValueError for own sizes that do not divide."""
    if model == RECORDED:
        s = recorded.sizes
        sizes = (s["layers"], s["hidden"], s["heads"], s["kv_heads"], s["hidden"] // s["heads"], s["ffn"], 256)
        return Shape("recorded", *sizes)
    if model != OWN:
        return named(model)
    if hidden % heads:
        raise ValueError(f"own sizes: {heads} heads do not divide hidden {hidden}")
    ffn = -(-8 * hidden // 3 // 128) * 128  # as Llama's, up to a multiple
    return Shape(OWN, layers, hidden, heads, kv, hidden // heads, ffn, vocab)


def reading(
    recorded: Step | None,
    model: str,
    device: str,
    heads: int,
    hidden: int,
    layers: int,
    vocab: int,
    kv_heads: int,
    **how: Any,
) -> tuple[str, dict[str, int], dict[str, int], int, str]:
    """(what is set and whether it fits, in words; bytes by part; the same from the record; the device's bytes; its
    name). No bytes, and the reason as the words, for what cannot be."""  # fmt: skip
    card = hardware.device(device)
    try:
        shape = shape_of(model, recorded, heads, hidden, layers, vocab, kv_heads)
        layout = Layout(microbatches=how["pp"], **how)
        found = needed(shape, layout, device)
    except ValueError as error:
        return str(error), {}, {}, card.memory_bytes, card.name
    held = {part: getattr(found.memory, part) for part in PARTS[:-1]} | {"overheads": found.overheads.total}
    seen = recorded.parts if model == RECORDED and _is_recorded(recorded, layout) else {}
    count = shapes.parameters(shape)
    told = f"{count / 1e9:.3g} billion parameters" if count >= 1e8 else f"{count:,} parameters"
    short = curves.as_size(abs(found.free_bytes))
    fits = f"fits, {short} free" if found.fits else f"{short} too much"
    gpus = f"{layout.gpus} x {device}" if layout.gpus > 1 else device
    words = f"{shape.name}, {told}, on {gpus}: {curves.as_size(found.needed_bytes)} a device, {fits}"
    host = found.memory.host
    return words + (f"; {curves.as_size(host)} on the host" if host else ""), held, seen, card.memory_bytes, card.name


def _how_recorded(recorded: Step | None) -> str:
    """What to choose so that the record can stand below the formula."""
    if recorded is None:
        return "recorded: nothing; memory(recorded=step) takes a step"
    how = "full" if recorded.checkpoint == "all" else "none"
    choose = f"recorded: choose model {RECORDED!r}, microbatch {recorded.batch}, sequence {recorded.length},"
    return f"{choose}\nfp32, eager, recompute {how}; dp, tp, pp 1 and ZeRO 0"


def _is_recorded(recorded: Step, layout: Layout) -> bool:
    """Whether the layout is what the step was recorded with."""
    how = "full" if recorded.checkpoint == "all" else "none"
    wanted = (layout.micro_batch, layout.seq, layout.precision, layout.gpus, layout.zero, layout.recompute)
    return wanted == (recorded.batch, recorded.length, "fp32", 1, 0, how)


def _picture() -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    figure, ax = _axes()
    rows = {row: {part: _bar(ax, at, part) for part in PARTS} for at, row in enumerate(("formula", "recorded"))}
    device = ax.axvline(1.0, color=COLOURS["ink"], linewidth=1.6, linestyle="--")
    name = ax.text(1.0, -0.62, "", ha="right", va="bottom", fontsize=9)
    note = ax.text(0.01, 1.0, "", va="center", fontsize=9, color=COLOURS["ink"], zorder=3)
    note.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # over the device's line
    legend = ax.legend(
        handles=list(rows["formula"].values()), fontsize=9, frameon=False, loc="upper left", ncols=2,
        bbox_to_anchor=(0.0, -0.08),
    )  # fmt: skip
    for artist in (*rows["formula"].values(), *rows["recorded"].values(), device, name, note, legend, ax.title):
        artist.set_animated(True)

    def draw(words: str, held: Mapping[str, int], seen: Mapping[str, int], room: int, card: str, how: str) -> None:
        total = sum(held.values())
        small = bool(seen)  # beside a whole device a recorded step would be no bar at all
        scale = max(total - held["overheads"], sum(seen.values())) if small else max(total, room)
        for row, parts in (("formula", held), ("recorded", seen)):
            left = 0.0
            for part, bar in rows[row].items():
                width = parts.get(part, 0) / scale if not (small and part == "overheads") else 0.0
                bar.set(x=left, width=width)
                left += width
        device.set_xdata([2.0 if small else room / scale] * 2)
        name.set(x=2.0 if small else room / scale, text=f"{card}, {room / 2**30:.0f} GiB ")
        note.set(text="" if seen else how, visible=not seen)
        for part, text in zip(PARTS, legend.get_texts(), strict=True):
            also = f"; recorded {_size(seen.get(part, 0))}" if seen and part != "overheads" else ""
            text.set_text(f"{part} {_size(held.get(part, 0))}{also}")
        ax.set_title(words, fontsize=9)

    return figure, draw


def _size(num_bytes: float) -> str:
    return curves.as_size(num_bytes) if num_bytes else "0"


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.3), dpi=explore.DPI, layout="constrained")
    ax = figure.add_subplot()
    ax.set(xlim=(0, RIGHT), ylim=(1.6, -1.0), xticks=[], title=" ")
    ax.set_yticks((0, 1), ("formula", "recorded"))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    return figure, ax


def _patch(part: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOUR[part], edgecolor=COLOURS["ink"], linewidth=0.5, label=part)


def _new_axes(width: float, height: float) -> Axes:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax


def _bar(ax: Any, row: int, part: str) -> Any:
    from matplotlib.patches import Rectangle

    bar = Rectangle((0, row - 0.36), 0.1, 0.72, facecolor=COLOUR[part], edgecolor=COLOURS["ink"], linewidth=0.5)
    bar.set_label(part)
    return ax.add_patch(bar)
