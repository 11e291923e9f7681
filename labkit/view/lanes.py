"""A schedule's bars that change in place: what the pipeline explorer and the schedule editor have in common.

One collection of polygons holds all bars, so that a thousand of them cost about as much as ten. Left out: a picture
that stays as it is (`gantt`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.schedule.actions import Schedule
from labkit.schedule.timing import Span
from labkit.view.gantt import KINDS, paler
from labkit.view.plot import COLOURS, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 8
NUMBERED = 108  # bars; more of them are too narrow for a number, and take long to write
HALF = 0.4  # of a lane's height
# What the legend says: (key of COLOURS, label).
NAMED = (("forward", "F"), ("backward", "B, or I"), ("gradients", "W"), ("idle", "idle"))

SetSpans = Callable[[Schedule, Sequence[Span], float], None]


def moving(ax: Axes, legend: bool = True) -> SetSpans:
    """Prepare empty lanes; gives set_spans(schedule, spans, time), which shows spans on an axis that ends at time."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    ground = PolyCollection([], facecolors=COLOURS["idle"], zorder=1)
    bars = PolyCollection([], edgecolors=COLOURS["ink"], linewidths=0.3, zorder=2)
    for collection in (ground, bars):
        ax.add_collection(collection, autolim=False)
    look = {"ha": "center", "va": "center", "fontsize": 7, "zorder": 3, "animated": True, "clip_on": True}
    numbers = [ax.text(0, 0, "", **look) for _ in range(NUMBERED)]
    for artist in (ground, bars, ax.xaxis, ax.yaxis):
        artist.set_animated(True)
    if legend:
        patches = [Patch(facecolor=COLOURS[colour], label=label) for colour, label in NAMED]
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(NAMED)}
        ax.legend(handles=patches, fontsize=7, frameon=False, **place)
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="y", length=0)

    def set_spans(schedule: Schedule, spans: Sequence[Span], time: float) -> None:
        ranks = schedule.ranks
        ground.set_verts(_boxes([(rank, 0.0, time) for rank in range(ranks)]))
        bars.set_verts(_boxes([(span.rank, span.start_s, span.end_s) for span in spans]))
        colours = colours_of(schedule, spans)
        bars.set_facecolors(colours)
        shown = list(zip(spans, colours, strict=True)) if len(spans) <= NUMBERED else []
        for number, (span, colour) in zip(numbers, shown, strict=False):
            number.set_position(((span.start_s + span.end_s) / 2, span.rank))
            number.set(text=str(span.action.microbatch), color=ink_on(colour), visible=True)
        for number in numbers[len(shown) :]:
            number.set_visible(False)
        ax.set(xlim=(0, time or 1), ylim=(ranks - 0.5, -0.5))
        ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])

    return set_spans


def colours_of(schedule: Schedule, spans: Sequence[Span]) -> list[str]:
    """A colour a span: that of its kind, paler for a rank's further stages."""
    chunks = {stage: at for rank in range(schedule.ranks) for at, stage in enumerate(schedule.stages_of(rank))}
    found = {(kind, at): paler(COLOURS[KINDS[kind][0]], at) for kind in KINDS for at in set(chunks.values())}
    return [found[span.action.kind, chunks[span.action.stage]] for span in spans]


def _boxes(held: Sequence[tuple[int, float, float]]) -> Any:
    """Corners (bar, corner, x and y) of bars (rank, start, end), as one array: matplotlib takes that quickly."""
    import numpy

    corners = [[(a, rank - HALF), (b, rank - HALF), (b, rank + HALF), (a, rank + HALF)] for rank, a, b in held]
    return numpy.array(corners, dtype=float).reshape(-1, 4, 2)
