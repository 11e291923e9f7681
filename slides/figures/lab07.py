"""Figures of deck 07, Pipeline parallel: schedules played, steps of the notebook's own functions recorded and replayed.

Left out: times of this machine, and what torch and DeepSpeed train, which the notebook shows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from labkit.cost import hardware
from labkit.cost.named import named
from labkit.labs.lab07 import engines, pictures, standins
from labkit.schedule import grid, theory
from labkit.schedule.classic import gpipe as gpipe_schedule
from labkit.schedule.classic import interleaved as interleaved_schedule
from labkit.schedule.classic import one_f_one_b as one_f_one_b_schedule
from labkit.schedule.timing import play
from labkit.schedule.zero_bubble import zb_h1
from labkit.view import curves, draft, gantt, lanes, pipeline
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

if TYPE_CHECKING:
    from labkit.schedule.actions import Schedule

LAB, MODEL, LARGE = "07", "llama-3.1-8b", "llama-3.1-405b"
LINKS = ("NVLink 4", "InfiniBand NDR", "100 GbE", "10 GbE")


def leads() -> Drawn:
    """1F1B, with what each rank keeps."""
    return drawn(_gantt(one_f_one_b_schedule(4, 6), "four ranks, six microbatches", kept=True))


def split() -> Drawn:
    """Time of each of eight stages, layers even and shared out by the notebook's function."""
    shape = named(MODEL)
    head = pictures.head_in_layers(shape)
    ways = {"even": standins.even_stages, "split_stages": cells.function(LAB, "split_stages")}
    series = [(name, pictures.stage_times(way(shape.layers, 8, 0, head), 0, head)) for name, way in ways.items()]
    names = [f"stage {stage}" for stage in range(8)]
    ax = curves.bars(series, names, "layers' time", f"{shape.name} on 8 stages", parts.wide(11))
    return drawn(ax, head=f"{head:.1f}", slowest=f"{max(series[0][1]):.2f}", after=f"{max(series[1][1]):g}")


def alone() -> Drawn:
    """One batch, not cut."""
    return drawn(_gantt(gpipe_schedule(4, 1), "one batch on four ranks"), idle=_share(gpipe_schedule(4, 1)))


def in_two() -> Drawn:
    """Two microbatches."""
    return drawn(_gantt(gpipe_schedule(4, 2), "two microbatches on four ranks"), idle=_share(gpipe_schedule(4, 2)))


def bubble() -> Drawn:
    """GPipe's idle time over microbatches: both formulas, and the notebook's function recorded and replayed."""
    many = (2, 4, 8, 16)
    found = [100 * pictures.on_link(_recorded("gpipe", m)).idle_share for m in many]
    series = [("of all time: (p-1)/(m+p-1)", many, [100 * theory.idle_share(4, m) for m in many], "line")]
    series.append(("on top of the work: (p-1)/m", many, [100 * theory.overhead(4, m) for m in many], "dashed"))
    series.append(("recorded and replayed", many, found, "points"))
    ax = curves.lines(series, "microbatches m", "% idle", "GPipe on four ranks", parts.wide(9))
    return drawn(ax, eight=f"{found[2]:.1f}%", overhead=f"{theory.overhead(4, 8):.1%}")


def keeps_all() -> Drawn:
    """GPipe, with what each rank keeps."""
    return drawn(_gantt(gpipe_schedule(4, 8), "GPipe, eight microbatches", kept=True))


def held() -> Drawn:
    """Bytes of activations that each rank keeps, recorded."""
    kept = {name: pictures.kept_bytes(_recorded(name, 8)) for name in ("gpipe", "one_f_one_b")}
    series = [("GPipe", [each / 1e3 for each in kept["gpipe"]]), ("1F1B", [each / 1e3 for each in kept["one_f_one_b"]])]
    title = "activations, most at a time, eight microbatches"
    ax = curves.bars(series, [f"rank {rank}" for rank in range(4)], "kB", title, parts.wide(9))
    played = pictures.on_link(_recorded("one_f_one_b", 8))
    return drawn(ax, times=f"{kept['gpipe'][0] / kept['one_f_one_b'][0]:.1f}", idle=f"{played.idle_share:.1%}")


def bubbles() -> Drawn:
    """Idle shares of five schedules."""
    found = pictures.bubbles(4, 8)
    ax = curves.bars([("", [100 * each.played for each in found])], [each.name for each in found], "% of all time",
                     "idle, four ranks, eight microbatches, F = I = W", parts.wide(9))  # fmt: skip
    return drawn(ax, one=f"{found[1].played:.1%}", zero=f"{found[3].played:.1%}", least=f"{found[4].played:.1%}")


def zero() -> Drawn:
    """ZB-H1, with what each rank keeps."""
    found = _gantt(zb_h1(4, 8), "ZB-H1, F = I = W", kept=True)
    return drawn(found, idle=_share(zb_h1(4, 8)))


def smaller() -> Drawn:
    """Interleaved 1F1B."""
    found = interleaved_schedule(4, 8, 2)
    return drawn(_gantt(found, "interleaved, two stages a rank"), idle=_share(found))


def ratio() -> Drawn:
    """Idle share over the time of backward."""
    series = []
    for name in ("1F1B", "interleaved", "ZB-H1", "ZB-V"):
        shares = [100 * pipeline.played(name, 4, 8, 2, each).idle_share for each in pipeline.RATIOS]
        series.append((name, pipeline.RATIOS, shares, "line"))
    title = "four ranks, eight microbatches, I = W"
    ax = curves.lines(series, "time of a backward, in forwards", "% idle", title, parts.wide(9))
    ax.set_ylim(0, 42)  # room for the legend
    return drawn(ax, short=f"{series[2][2][0]:.1f}%", long=f"{series[2][2][-1]:.1f}%")


def gaps() -> Drawn:
    """F and I in 1F1B's order, as the editor begins."""
    start = draft.read(grid.text(one_f_one_b_schedule(4, 4)).replace("1F1B", "mine").replace("B", "I"))
    found, ax = draft.look(start), parts.wide(10, 2.6)
    lanes.moving(ax)(start.schedule, found.spans, float(found.time))
    for artist in ax.findobj(lambda artist: artist.get_animated()):
        artist.set_animated(False)
    ax.set_xlabel("time, F = I = W")
    missing = 4 * 4 * 3 - sum(len(own) for own in start.schedule.actions)
    return drawn(ax, missing=missing)


def wire() -> Drawn:
    """Bytes a GPU sends for a microbatch, by pipeline and by tensor parallel."""
    models = (MODEL, "llama-3.1-70b", LARGE)
    sent = [pictures.wire(named(name), 16, 8192) for name in models]
    series = [("pipeline", [each.pipeline / 1e9 for each in sent])]
    series.append(("tensor parallel", [each.tensor / 1e9 for each in sent]))
    ax = curves.bars(series, models, "GB", "sent by a GPU of 16 for 8,192 tokens", parts.wide(10))
    ax.set_yscale("log")
    ax.set_ylim(0.05, 1000)
    return drawn(ax, times=f"{sent[-1].times:.0f}")


def links() -> Drawn:
    """Idle share of the largest model's step over links."""
    made = {"1F1B": one_f_one_b_schedule(16, 32), "interleaved, v = 4": interleaved_schedule(16, 32, 4)}
    card, shape = hardware.device("H100"), named(LARGE)
    series = [
        (name, [100 * pictures.with_messages(each, shape, 8192, card, hardware.link(link)) for link in LINKS])
        for name, each in made.items()
    ]
    title = f"{LARGE}, 16 GPUs in a pipeline, 32 microbatches"
    ax = curves.bars(series, LINKS, "% idle", title, parts.wide(10))
    return drawn(ax, fast=f"{series[0][1][1]:.1f}%", theory=f"{theory.idle_share(16, 32):.1%}")


def _gantt(schedule: Schedule, title: str, kept: bool = False) -> Any:
    timing = play(schedule)
    if kept:
        return gantt.with_kept(timing, title)[0]
    return gantt.gantt(timing, title, ax=parts.wide(9, 2.9))


def _share(schedule: Schedule) -> str:
    return f"{play(schedule).idle_share:.1%}"


@functools.cache
def _recorded(name: str, microbatches: int) -> tuple:
    """The notebook's own function, recorded on four ranks."""
    return engines.recorded(cells.function(LAB, name), 4, microbatches)
