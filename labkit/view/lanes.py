"""A schedule's bars that change in place: what the pipeline explorer and the schedule editor have in common.

One collection of polygons holds all bars, and one of outlines all numbers, so that a thousand of them cost about as
much as ten. A number that does not fit its bar is left out. Left out, too: a picture that stays as it is (`gantt`).
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
# Inches: size of a number's letters, width of a digit, and what is free on both sides of a number.
NUMBER_IN, DIGIT_IN, BESIDE_IN = 7.5 / 72, 4.8 / 72, 0.5 / 72
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
    set_numbers = _numbers(ax)
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
        ax.set(xlim=(0, time or 1), ylim=(ranks - 0.5, -0.5))
        ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        set_numbers(spans, colours)

    return set_spans


def _numbers(ax: Axes) -> Callable[[Sequence[Span], Sequence[str]], None]:
    """A function that writes the microbatch into every bar which is wide enough, with the axes as large as now."""
    from matplotlib.collections import PathCollection

    written = PathCollection([], offsets=[], offset_transform=ax.transData, linewidths=0, zorder=5)
    written.set(transform=ax.figure.dpi_scale_trans, animated=True, gid="numbers")
    ax.add_collection(written, autolim=False)
    outlines: dict[int, Any] = {}

    def set_numbers(spans: Sequence[Span], colours: Sequence[str]) -> None:
        for number in {span.action.microbatch for span in spans} - set(outlines):
            outlines[number] = _outline(str(number))
        (left, right), width = ax.get_xlim(), ax.bbox.width / ax.figure.dpi
        room = [(span.end_s - span.start_s) / (right - left) * width - 2 * BESIDE_IN for span in spans]
        fit = [n for n, span in enumerate(spans) if len(str(span.action.microbatch)) * DIGIT_IN <= room[n]]
        written.set_paths([outlines[spans[n].action.microbatch] for n in fit])
        written.set_offsets([((spans[n].start_s + spans[n].end_s) / 2, spans[n].rank) for n in fit] or [(-1, -1)])
        written.set_facecolors([ink_on(colours[n]) for n in fit])

    return set_numbers


def _outline(text: str) -> Any:
    """A text's path in inches, its middle at the origin."""
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, size=NUMBER_IN)
    box = path.get_extents()
    return Path(path.vertices - (box.x0 + box.width / 2, box.y0 + box.height / 2), path.codes)


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
