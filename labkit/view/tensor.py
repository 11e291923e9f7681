"""The tensor-parallel explorer: ranks, hidden size, tokens and wires against the share of a step spent communicating.

Left, of one layer's forward and backward, the share in which a rank waits for its all_reduces; right, how many times as
fast as one GPU the layer is. Both over the hidden size, a curve per number of ranks; the marks are at what is set.
Left out: the arithmetic, which is `labkit.cost.tensor_parallel`, and what that leaves out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.cost import hardware
from labkit.cost.groups import Group
from labkit.cost.tensor_parallel import LayerTime, layer_time, llama_like
from labkit.view import curves, explore
from labkit.view.plot import COLOURS, RANK_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS = (2, 4, 8, 16)
HIDDEN = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DEVICES = ("T4", "RTX 4090", "A100-80", "H100", "B200")
PER_NODE = (1, 2, 4, 8, 16)
SEQ = 4096  # the longest sequence
SLOWEST, FASTEST = 1 / 64, 16  # of the right axis, in times one GPU's speed; a curve may leave it, a mark does not


@dataclass(frozen=True)
class Setting:
    """tokens: of one step on every rank. per_node: ranks in a node. within, between: names of links."""

    tokens: int
    device: str
    per_node: int
    within: str
    between: str


def tensor(**start: Any) -> explore.Explorer:
    """start: values of controls to start with (ranks, hidden, tokens, device, per_node, within, between)."""
    begin = {"ranks": 8, "hidden": 4096, "tokens": 4096, "device": "H100", "per_node": 8}
    begin |= {"within": "NVLink 4", "between": "InfiniBand NDR"} | start
    controls = {
        "ranks": explore.slider("ranks t", RANKS, begin["ranks"]),
        "hidden": explore.slider("hidden h", HIDDEN, begin["hidden"]),
        "tokens": explore.slider("tokens b s", TOKENS, begin["tokens"], lambda count: f"{count:,}"),
        "device": explore.choice("GPU", DEVICES, begin["device"]),
        "per_node": explore.slider("ranks in a node", PER_NODE, begin["per_node"]),
        "within": explore.choice("link in a node", explore.WITHIN, begin["within"]),
        "between": explore.choice("between nodes", explore.BETWEEN, begin["between"]),
    }
    figure, draw = _picture()

    def update(ranks: int, hidden: int, **others: Any) -> None:
        draw(ranks, hidden, Setting(**others))

    return explore.explorer(controls, figure, update)


def group_of(setting: Setting, ranks: int) -> Group:
    """So many ranks, node by node, each rank with a network card of its own."""
    per_node = min(ranks, setting.per_node)
    within, between = hardware.link(setting.within), hardware.link(setting.between)
    return Group((per_node,) * (ranks // per_node), within, between, float(per_node))


@functools.lru_cache(maxsize=512)
def times(setting: Setting, ranks: int) -> tuple[LayerTime, ...]:
    """A layer's time on `ranks` ranks for each of HIDDEN, in bf16, or fp16 where the GPU has no bf16."""
    card = hardware.device(setting.device)
    dtype = "bf16" if "bf16" in dict(card.peaks) else "fp16"
    seq, group = min(SEQ, setting.tokens), group_of(setting, ranks)
    return tuple(layer_time(llama_like(hidden), setting.tokens, seq, card, group, dtype) for hidden in HIDDEN)


def faster(setting: Setting, ranks: int) -> tuple[float, ...]:
    """How many times as fast as one GPU, for each of HIDDEN."""
    alone = times(setting, 1)
    return tuple(one.time_s / cut.time_s for one, cut in zip(alone, times(setting, ranks), strict=True))


def reading(ranks: int, hidden: int, setting: Setting) -> str:
    """What is set, in words."""
    at, nodes = HIDDEN.index(hidden), group_of(setting, ranks).num_nodes
    cut, speed = times(setting, ranks)[at], faster(setting, ranks)[at]
    where = "in one node" if nodes == 1 else f"on {nodes} nodes"
    told = f"{ranks} x {setting.device} {where}, hidden {hidden:,}, {setting.tokens:,} tokens: a layer takes "
    told += f"{curves.as_time(cut.time_s)}, {cut.share:.0%} of it communication; "
    return told + f"{curves.as_number(speed)} times one GPU's speed"


def _picture() -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    figure, left, right = _axes()
    shares, speeds = {}, {}
    for number, ranks in enumerate(RANKS):
        look = {"color": RANK_COLOURS[number], "label": f"{ranks} ranks"}
        (shares[ranks],) = left.plot(HIDDEN, [0.0] * len(HIDDEN), **look)
        (speeds[ranks],) = right.plot(HIDDEN, [1.0] * len(HIDDEN), **look)
    look = {"marker": "o", "markersize": 8, "markerfacecolor": "none", "color": COLOURS["ink"]}
    marks = [ax.plot([], [], **look)[0] for ax in (left, right)]
    right.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    title = figure.suptitle(" ", fontsize=9)
    for artist in (*shares.values(), *speeds.values(), *marks, title):
        artist.set_animated(True)

    def draw(ranks: int, hidden: int, setting: Setting) -> None:
        for each in RANKS:
            shares[each].set_ydata([100 * cut.share for cut in times(setting, each)])
            speeds[each].set_ydata(faster(setting, each))
            for line in (shares[each], speeds[each]):
                line.set(linewidth=2.8 if each == ranks else 1.2, zorder=3 if each == ranks else 2)
        at = HIDDEN.index(hidden)
        marks[0].set_data([hidden], [100 * times(setting, ranks)[at].share])
        marks[1].set_data([hidden], [max(faster(setting, ranks)[at], SLOWEST)])
        title.set_text(reading(ranks, hidden, setting))

    return figure, draw


def _axes() -> tuple[Figure, Axes, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=explore.DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    for ax in (left, right):
        curves.doubling_axis(ax, HIDDEN)
        ax.tick_params(axis="x", labelsize=8)
        ax.grid(color=COLOURS["idle"], linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlabel("hidden size h")
    left.set(ylabel="% of a layer's time communicating", ylim=(0, 100))
    right.set_yscale("log", base=2)
    right.set(ylabel="times one GPU's speed", ylim=(SLOWEST, FASTEST))
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    right.axhline(1.0, color=COLOURS["ink"], linewidth=0.8)
    return figure, left, right
