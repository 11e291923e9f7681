"""A pipeline schedule as a picture: who computes what when, and how many microbatches each rank keeps in flight.

Bars are a schedule's spans in virtual time, a number in a bar is its microbatch; a rank's further stages are paler.
Left out: messages, and recorded runs (`plot.timeline`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.schedule.actions import most_kept
from labkit.schedule.timing import Span, Timing
from labkit.view.plot import COLOURS, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Kind of action -> (key of COLOURS, what the legend says).
KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "F": ("forward", "F, forward"),
        "B": ("backward", "B, backward"),
        "I": ("backward", "I, backward for the input"),
        "W": ("gradients", "W, backward for the weights"),
    }
)
WIDTH_PT = 780.0  # of the lanes, over the width of a figure in points of its size
LEGEND_PT = 36.0  # from the lanes down to the legend: past the axis' numbers and its name
READABLE_PT = 6.0  # a number that had to be smaller is left out
PALER = 0.55  # share of white in the colour of a rank's second stage, and of the third's in that of the second


def gantt(timing: Timing, title: str = "", unit: str = "F", ax: Axes | None = None) -> Axes:
    """One lane a rank, one bar an action, grey where a rank is idle. unit: of time, for the axis. Returns the Axes."""
    from matplotlib.patches import Patch

    schedule = timing.schedule
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(8.6, 1.2 + 0.42 * schedule.ranks), layout="constrained")
    kinds: dict[str, None] = {}
    for rank in range(schedule.ranks):
        ax.barh(rank, timing.time_s, left=0, height=0.8, color=COLOURS["idle"], linewidth=0)
    for span in timing.spans:
        kinds[span.action.kind] = None
        _bar(ax, timing, span)
    named = {kind: KINDS[kind] for kind in KINDS if kind in kinds}
    patches = [Patch(facecolor=COLOURS[colour], label=label) for colour, label in named.values()]
    patches.append(Patch(facecolor=COLOURS["idle"], label=f"idle, {timing.idle_share:.1%}"))
    below = {"bbox_to_anchor": (0.5, 0), "bbox_transform": _lower(ax, LEGEND_PT), "borderaxespad": 0}
    ax.legend(handles=patches, fontsize=8, frameon=False, loc="upper center", ncols=len(patches), **below)
    ax.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    ax.set(xlim=(0, timing.time_s or 1), ylim=(schedule.ranks - 0.5, -0.5), xlabel=f"time ({unit})")
    if isinstance(timing.time_s, int):
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_title(title or f"{schedule.name}, {schedule.microbatches} microbatches", fontsize=10)
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def kept(timing: Timing, ax: Axes | None = None) -> Axes:
    """The most that each rank keeps in flight (`most_kept`), as bars in lanes like those of `gantt`."""
    ranks, most = timing.schedule.ranks, most_kept(timing.schedule)
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(2.2, 1.2 + 0.42 * ranks), layout="constrained")
    ax.barh(range(ranks), most, height=0.8, color=COLOURS["activations"])
    for rank, count in enumerate(most):
        ax.text(count, rank, f" {count:.3g}", va="center", fontsize=9)
    ax.set(ylim=(ranks - 0.5, -0.5), xlim=(0, 1.4 * max([1, *most])), xticks=[], yticks=[])
    ax.set_title("most in flight,\nmicrobatches", fontsize=9)
    ax.spines[:].set_visible(False)
    return ax


def with_kept(timing: Timing, title: str = "", unit: str = "F") -> tuple[Axes, Axes]:
    """`gantt` and `kept` side by side in one new figure; gives both Axes."""
    import matplotlib.pyplot as plt

    size = (9.6, 1.2 + 0.42 * timing.schedule.ranks)
    _, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained", width_ratios=(6, 1))
    return gantt(timing, title, unit, left), kept(timing, right)


def _lower(ax: Axes, points: float) -> Any:
    """The place of the axes, so many points further down."""
    from matplotlib.transforms import ScaledTranslation

    return ax.transAxes + ScaledTranslation(0, -points / 72, ax.figure.dpi_scale_trans)


def _bar(ax: Axes, timing: Timing, span: Span) -> None:
    action, length = span.action, span.end_s - span.start_s
    if length <= 0:
        return
    chunk = timing.schedule.stages_of(span.rank).index(action.stage)
    colour = paler(COLOURS[KINDS[action.kind][0]], chunk)
    ax.barh(span.rank, length, left=span.start_s, height=0.8, color=colour, edgecolor=COLOURS["ink"], linewidth=0.4)
    size = min(8.0, WIDTH_PT * length / timing.time_s / len(str(timing.schedule.microbatches - 1)))
    if size >= READABLE_PT:
        at, look = span.start_s + length / 2, {"ha": "center", "va": "center", "color": ink_on(colour)}
        ax.text(at, span.rank, str(action.microbatch), fontsize=size, **look)


def paler(colour: str, times: int) -> str:
    """A colour mixed with white, as many times."""
    share = (1 - PALER) ** times
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * share):02X}" for channel in channels)
