"""The pipeline explorer: schedule, ranks, microbatches, stages and times against idle time and what is kept in flight.

Left, who computes what when, in virtual time, a rank's further stages paler; right, the most that each rank keeps. A
unit of time is the work of one rank in one step, so that what lies beyond 1 is Megatron's overhead. Left out: messages,
which take no time here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.schedule.actions import most_kept
from labkit.schedule.classic import gpipe, interleaved, one_f_one_b
from labkit.schedule.timing import Timing, play
from labkit.schedule.zero_bubble import zb_h1, zb_v
from labkit.view import curves, explore, lanes
from labkit.view.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V")
RANKS, MICROBATCHES, CHUNKS = (2, 4, 8), (1, 2, 4, 6, 8, 12, 16, 24), (1, 2, 3)
RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0)  # (I + W) / F


def pipeline(**start: Any) -> explore.Explorer:
    """start: values of controls to start with (name, ranks, microbatches, chunks, ratio)."""
    begin = {"name": "1F1B", "ranks": 4, "microbatches": 8, "chunks": 2, "ratio": 2.0} | start
    controls = {
        "name": explore.choice("schedule", NAMES, begin["name"]),
        "ranks": explore.slider("ranks p", RANKS, begin["ranks"]),
        "microbatches": explore.slider("microbatches m", MICROBATCHES, begin["microbatches"]),
        "chunks": explore.slider("stages a rank v", CHUNKS, begin["chunks"]),
        "ratio": explore.slider("time of B / F", RATIOS, begin["ratio"], lambda ratio: f"{ratio:g}"),
    }
    figure, update = _picture()
    return explore.explorer(controls, figure, update)


@functools.lru_cache(maxsize=256)
def played(name: str, ranks: int, microbatches: int, chunks: int, ratio: float) -> Timing:
    """The schedule in units of a rank's work. Interleaved takes microbatches in groups of p: the next multiple then.

    All of a rank's stages together take F = 1 and I = W = ratio / 2 a microbatch, before the unit is changed.
    """
    if name == "interleaved":
        schedule = interleaved(ranks, -(-microbatches // ranks) * ranks, chunks)
    else:
        make = {"GPipe": gpipe, "1F1B": one_f_one_b, "ZB-H1": zb_h1, "ZB-V": zb_v}[name]
        schedule = make(ranks, microbatches)
    forward = 1 / (schedule.microbatches * (1 + ratio) * len(schedule.stages_of(0)))
    return play(schedule, forward, ratio / 2 * forward, ratio / 2 * forward)


def reading(timing: Timing, asked: int) -> str:
    """What is set, in words. asked: microbatches, of which interleaved may have taken more."""
    schedule, idle = timing.schedule, timing.idle_share
    stages = len(schedule.stages_of(0))
    told = f"{schedule.name}: p = {schedule.ranks}, m = {schedule.microbatches}"
    told += f" (not {asked}: multiples of p alone)" if schedule.microbatches != asked else ""
    told += f", {stages} stages a rank" if stages > 1 else ""
    return f"{told}: idle {idle:.1%} of all time, which is {idle / (1 - idle):.1%} on top of the work"


def _picture() -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.8), dpi=explore.DPI, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(6, 1))
    title = figure.suptitle(" ", fontsize=9)
    set_spans = lanes.moving(left)
    left.axvline(1.0, color=COLOURS["ink"], linewidth=1.2, linestyle="--", zorder=4).set_animated(True)
    below = "time, in a rank's own work; dashed: without any idle time; paler: a rank's further stages"
    left.set_xlabel(below, fontsize=8)
    left.set_yticks(range(lanes.MOST_RANKS), [f"rank {rank}" for rank in range(lanes.MOST_RANKS)])  # keeps their room
    kept = right.barh(range(lanes.MOST_RANKS), [0.0] * lanes.MOST_RANKS, height=0.8, color=COLOURS["activations"])
    told = [right.text(0, rank, "", va="center", fontsize=8) for rank in range(lanes.MOST_RANKS)]
    right.set(xticks=[], yticks=[])
    right.set_title("most in flight,\nmicrobatches", fontsize=8)
    right.spines[:].set_visible(False)
    for artist in (*kept, *told, title):
        artist.set_animated(True)

    def update(**values: Any) -> None:
        timing = played(**values)
        set_spans(timing.schedule, timing.spans, float(timing.time_s))
        most = most_kept(timing.schedule)
        for rank, (bar, text) in enumerate(zip(kept, told, strict=True)):
            shown = rank < len(most)
            bar.set(width=most[rank] if shown else 0.0, visible=shown)
            text.set(x=most[rank] if shown else 0.0, text=f" {curves.as_number(most[rank])}" if shown else "")
        right.set(xlim=(0, 1.5 * max(most)), ylim=(len(most) - 0.5, -0.5))
        title.set_text(reading(timing, values["microbatches"]))

    return figure, update
