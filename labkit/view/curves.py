"""Curves over message size on log-log axes, with the learner's own points; over anything on plain ones; and bars.

Data in, `Axes` out, in the palette of `plot`; nothing is measured or computed here. Left out: sliders (`explore`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.view.plot import COLOURS, RANK_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Marks of measured points, so that series can be told apart without colour.
MARKS = "osD^vPX*"


@dataclass(frozen=True)
class Curve:
    """A series over sizes in bytes: values in seconds, or in bytes per second.

    style: "line" for what was computed, "dashed" for what it is compared with, "points" for what was measured.
    number: which colour and mark of the palette; curves of one number belong together.
    """

    label: str
    sizes: Sequence[float]
    values: Sequence[float]
    style: str = "line"
    number: int = 0


def times(curves: Sequence[Curve], title: str = "", ax: Axes | None = None) -> Axes:
    """Time over size, both logarithmic. Values in seconds. Returns the Axes."""
    ax = _drawn(curves, ax)
    _time_axis(ax)
    return _finished(ax, curves, title)


def bandwidths(curves: Sequence[Curve], title: str = "", ax: Axes | None = None) -> Axes:
    """Bandwidth over size, both logarithmic. Values in bytes per second, shown in GB/s (1e9). Returns the Axes."""
    ax = _drawn(curves, ax)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g}")
    ax.set_ylabel("bus bandwidth (GB/s)")
    return _finished(ax, curves, title)


def bars(
    series: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    unit: str,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Bars side by side: one group a name ("rank 0", "node 1"), in it one bar a series, with its number on top.

    series: (label, values, one a name). unit: what the numbers are, for the axis. Returns the Axes.
    """
    ax = ax or _new_axes(1.6 + 0.75 * len(names) * max(1.0, 0.7 * len(series)) + 2.0 * (len(series) > 1), 2.6)
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series):
        left = [place - 0.4 + width * (number + 0.5) for place in range(len(names))]
        colour = RANK_COLOURS[number % len(RANK_COLOURS)]
        drawn = ax.bar(left, values, width, label=label, color=colour, edgecolor=COLOURS["ink"])
        ax.bar_label(drawn, [as_number(value) for value in values], fontsize=9, padding=1)
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel=unit, title=title)
    ax.margins(y=0.2)
    ax.title.set_fontsize(10)
    ax.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def limit(ax: Axes, value: float, label: str, at: float) -> None:
    """A dashed line across bars, its label above it at place `at`; numbers that lie on the line stay readable."""
    for number in ax.texts:
        number.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0})
        number.set_zorder(3)
    ax.axhline(value, color=COLOURS["ink"], linewidth=1.2, linestyle="--")
    ax.text(at, value, label, ha="center", va="bottom", fontsize=8, color=COLOURS["ink"])


def lines(
    series: Sequence[tuple[str, Sequence[float], Sequence[float], str]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    ax: Axes | None = None,
    from_zero: bool = True,
) -> Axes:
    """Curves over anything, on plain axes: losses over steps, speed over ranks.

    series: (label, where, values, style), style as in `Curve`; "" is no label. from_zero: the axis of values begins at
    0; not so for losses and logarithms, of which only differences mean something. Returns the Axes.
    """
    ax = ax or _new_axes(6.4, 3.0)
    for number, (label, where, values, style) in enumerate(series):
        ax.plot(where, values, color=RANK_COLOURS[number % len(RANK_COLOURS)], label=label, **_looks(style, number))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    _room(ax, from_zero)
    ax.grid(color=COLOURS["idle"], linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, fontsize=10)
    if any(label for label, *_ in series):
        ax.legend(fontsize=8, frameon=False)
    return ax


def _room(ax: Axes, from_zero: bool) -> None:
    """Limits of the axis of values with a margin, so that no mark at the top is cut."""
    low, high = ax.dataLim.intervaly
    if not low <= high:  # nothing drawn
        low, high = 0.0, 1.0
    bottom = min(0.0, low) if from_zero else low
    margin = 0.08 * (high - bottom) or 0.5
    ax.set_ylim(bottom if from_zero and low >= 0 else bottom - margin, high + margin)


def doubling_axis(ax: Axes, numbers: Sequence[int]) -> None:
    """A logarithmic axis of counts that double (ranks: 1, 2, 4 ... 64), each at a tick of its own."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log", base=2)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(list(numbers), [f"{number:g}" for number in numbers])


def size_axis(ax: Axes, least: float, most: float) -> None:
    """A logarithmic axis of sizes with ticks at powers of two: 1 KiB, 32 KiB, 1 MiB."""
    from matplotlib.ticker import FixedLocator, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_xlim(least / 1.5, most * 1.5)
    ax.xaxis.set_major_locator(FixedLocator([2.0**p for p in range(0, 51, 5) if least / 1.5 <= 2**p <= most * 1.5]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: as_size(value))
    ax.set_xlabel("S, size of the full tensor")


def _time_axis(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(lambda value, _: as_time(value))
    ax.set_ylabel("time")


def as_size(num_bytes: float) -> str:
    """A size in words, in powers of two: 1048576 is "1 MiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.4g} B"


def as_time(time_s: float) -> str:
    """A time in words, to three digits: 0.00125 is "1.25 ms"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "\N{MICRO SIGN}s")):
        if time_s >= unit * 0.9995:
            return f"{time_s / unit:.3g} {name}"
    return f"{time_s / 1e-9:.3g} ns"


def as_number(value: float) -> str:
    """A number to three digits, without an exponent from a ten-millionth to a billion: 0.000022, 282, 5130000."""
    text = f"{value:.3g}"
    if "e" not in text or not 1e-7 <= abs(value) < 1e9:
        return text
    return f"{float(text):.9f}".rstrip("0").rstrip(".")


def _drawn(curves: Sequence[Curve], ax: Axes | None) -> Axes:
    ax = ax or _new_axes(6.4, 3.6)
    for curve in curves:
        colour = RANK_COLOURS[curve.number % len(RANK_COLOURS)]
        ax.plot(curve.sizes, curve.values, color=colour, label=curve.label, **_looks(curve.style, curve.number))
    ax.set_yscale("log")
    sizes = [size for curve in curves for size in curve.sizes]
    size_axis(ax, min(sizes, default=2**10), max(sizes, default=2**26))
    return ax


def _looks(style: str, number: int) -> dict:
    """How a style of `Curve` is drawn."""
    mark = MARKS[number % len(MARKS)]
    return {
        "line": {"linewidth": 1.8},
        "dashed": {"linewidth": 1.4, "linestyle": "--"},
        "points": {"linestyle": "none", "marker": mark, "markersize": 5, "markeredgecolor": COLOURS["ink"]},
    }[style]


def _finished(ax: Axes, curves: Sequence[Curve], title: str) -> Axes:
    from matplotlib.ticker import NullLocator

    ax.yaxis.set_minor_locator(NullLocator())
    ax.grid(color=COLOURS["idle"], linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, fontsize=10)
    if any(curve.label for curve in curves):
        ax.legend(fontsize=8, frameon=False)
    return ax


def _new_axes(width: float, height: float) -> Axes:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax
