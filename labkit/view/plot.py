"""Plots of ranks: before/after grids, shards of rows, messages round by round, spans of time, timelines of a step.

Every function goes from data to `Axes`, takes an optional `ax`, labels its units and runs no experiment. One
palette for the whole course, notebooks and slides alike: Okabe and Ito's colours, which people with any
common form of colour blindness can tell apart (https://jfly.uni-koeln.de/color/). Left out: pictures of
records and replays, which come with the replay; explorers, which are in a room of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a colour stands for in every picture of the course.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#56B4E9",
        "backward": "#0072B2",
        "communication": "#E69F00",
        "waiting": "#F0E442",
        "idle": "#E5E5E5",
        "parameters": "#0072B2",
        "gradients": "#D55E00",
        "optimizer": "#009E73",
        "activations": "#CC79A7",
        "buffers": "#E69F00",
        "mixed": "#4D4D4D",
        "nothing": "#FFFFFF",
        "ink": "#222222",
    }
)

# Colours of ranks 0-7; a ninth rank starts over. Purple stands in for yellow, hardly seen on white.
RANK_COLOURS: tuple[str, ...] = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#5D3A9B",
    "#999999",
)


def rank_colour(rank: int) -> str:
    """The colour of a rank: the same in every picture."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def grids(before: Sequence, after: Sequence, title: str = "", ax: Axes | None = None) -> Axes:
    """What each rank held before and after an operation: one row of cells a rank, two grids side by side.

    before, after: per rank a flat sequence of numbers (a 1-d tensor will do); None or [] is "nothing".
    Numbers that only one rank held before carry that rank's colour wherever they are afterwards; a number
    that nobody held before was made of several ranks' numbers, and is dark. Returns the Axes.
    """
    columns = _columns(before) + _columns(after)
    ax = ax or _new_axes(width=1.4 + 0.52 * columns, height=0.7 + 0.42 * len(before))
    before, after = [_cells(row) for row in before], [_cells(row) for row in after]
    owner = _owners(before)
    width, gap = _columns(before), 1.9
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        _draw_row(ax, 0.0, rank, old, owner)
        _draw_row(ax, width + gap, rank, new, owner)
    right = width + gap + _columns(after)
    middle = (len(before) - 1) / 2
    arrow = {"arrowstyle": "-|>", "color": COLOURS["ink"], "linewidth": 1.5}
    ax.annotate("", (width + gap - 0.45, middle), (width + 0.3, middle), arrowprops=arrow)
    ax.text(width / 2, -0.75, "before", ha="center", va="center", fontsize=9)
    ax.text(width + gap + _columns(after) / 2, -0.75, "after", ha="center", va="center", fontsize=9)
    _rank_axis(ax, len(before))
    ax.set(xlim=(-0.1, right + 0.1), ylim=(len(before) - 0.4, -1.05), xticks=[], title=title, aspect="equal")
    _bare(ax)
    return ax


def shards(
    rows_of_ranks: Sequence[Sequence[int]],
    num_rows: int,
    title: str = "",
    ax: Axes | None = None,
    labels: Sequence[Sequence[int]] | None = None,
) -> Axes:
    """Which rows each rank owns: one lane a rank, one cell a row of the data.

    rows_of_ranks: per rank the row numbers it owns (a range will do). labels: as many numbers to write into the cells,
    by default the rows' own. Returns the Axes.
    """
    ax = ax or _new_axes(width=1.2 + 0.42 * max(num_rows, 1), height=1.0 + 0.42 * len(rows_of_ranks))
    for rank, rows in enumerate(rows_of_ranks):
        for row in range(num_rows):
            _cell(ax, row - 0.5, rank, "", COLOURS["nothing"], edge=COLOURS["idle"])
        for row, label in zip(rows, rows if labels is None else labels[rank], strict=True):
            _cell(ax, row - 0.5, rank, str(label), rank_colour(rank))
        ax.text(num_rows - 0.25, rank, f"{len(rows)} row{'s' * (len(rows) != 1)}", va="center", fontsize=9)
    _rank_axis(ax, len(rows_of_ranks))
    ax.set(
        xlim=(-0.6, num_rows + 0.9),
        ylim=(len(rows_of_ranks) - 0.4, -0.6),
        xlabel="row of the data",
        title=title,
    )
    ax.set(xticks=range(num_rows), aspect="equal")
    _bare(ax)
    return ax


def messages(
    sent: Sequence[tuple[float, float, int, int]], world_size: int, title: str = "", ax: Axes | None = None
) -> Axes:
    """Messages between ranks over rounds: one lane a rank, one arrow a message.

    sent: (start, end, source, destination), start and end in rounds (a round: one message out and one in per
    rank at a time, one unit of time a message). The arrow has the colour of its source. Returns the Axes.
    """
    rounds = max((end for _, end, *_ in sent), default=0.0)
    ax = ax or _new_axes(width=1.6 + 0.75 * max(rounds, 2), height=1.0 + 0.34 * world_size)
    for rank in range(world_size):
        ax.axhline(rank, color=COLOURS["idle"], linewidth=1, zorder=0)
    for start, end, source, destination in sent:
        arrow = {
            "arrowstyle": "-|>",
            "color": rank_colour(source),
            "linewidth": 1.8,
            "shrinkA": 0,
            "shrinkB": 2,
        }
        ax.annotate("", (end - 0.08, destination), (start + 0.08, source), arrowprops=arrow)
        ax.plot([start + 0.08], [source], marker="o", markersize=4, color=rank_colour(source))
    for edge in range(1, ceil(rounds)):
        ax.axvline(edge, color=COLOURS["idle"], linewidth=1, linestyle=":", zorder=0)
    _rank_axis(ax, world_size)
    ax.set(xlim=(0, max(rounds, 1)), ylim=(world_size - 0.5, -0.5), xlabel="time (rounds)", title=title)
    ax.set_xticks(range(ceil(rounds) + 1))
    _bare(ax)
    return ax


def spans(held: Sequence[tuple[int, float, float, str, str]], title: str = "", ax: Axes | None = None) -> Axes:
    """What each rank was busy with over wall-clock time: one lane a rank, one bar a span.

    held: (rank, start_s, end_s, kind, label); kind is a key of COLOURS ("waiting", "communication", ...). A
    label is left out where its bar is too short for it. Returns the Axes.
    """
    world_size = 1 + max((rank for rank, *_ in held), default=0)
    whole_s = max((end_s for _, _, end_s, *_ in held), default=0.0) - min((s for _, s, *_ in held), default=0.0)
    ax = ax or _new_axes(width=6.4, height=1.0 + 0.45 * world_size)
    for rank, start_s, end_s, kind, label in held:
        colour, length_s = COLOURS[kind], end_s - start_s
        ax.barh(rank, length_s, left=start_s, height=0.6, color=colour, edgecolor=COLOURS["ink"])
        # A letter takes about a 60th of the width; a label that does not fit its bar would cover others.
        if length_s * 60 > len(label) * whole_s:
            ax.text(
                start_s + length_s / 2,
                rank,
                label,
                ha="center",
                va="center",
                fontsize=9,
                color=ink_on(colour),
            )
    _rank_axis(ax, world_size)
    ax.set(ylim=(world_size - 0.5, -0.5), xlabel="time (s)", title=title)
    _bare(ax)
    return ax


def timeline(
    lanes: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], title: str = "", ax: Axes | None = None
) -> Axes:
    """What happens when within a step: one lane a row, from top to bottom, with a legend of the kinds that occur.

    lanes: (name, spans), a span being (start_s, end_s, kind) and kind a key of COLOURS. Spans of one kind that touch
    are drawn as one, but for communication, where every message counts. Returns the Axes.
    """
    from matplotlib.patches import Patch

    ax = ax or _new_axes(width=7.2, height=0.9 + 0.36 * len(lanes))
    kinds: dict[str, None] = {}
    last_s = max((end_s for _, held in lanes for _, end_s, _ in held), default=0.0)
    for row, (_, held) in enumerate(lanes):
        bars: dict[str, list[tuple[float, float]]] = {}
        for start_s, end_s, kind in joined(held):
            bars.setdefault(kind, []).append((start_s * 1e3, (end_s - start_s) * 1e3))
        for kind, of_kind in bars.items():
            edges = edge_widths([length / (last_s * 1e3) for _, length in of_kind])
            look = {"facecolors": COLOURS[kind], "edgecolors": COLOURS["ink"], "linewidths": edges}
            ax.broken_barh(of_kind, (row - 0.36, 0.72), **look)
            kinds[kind] = None
    ax.set(xlim=(0, 1.01e3 * last_s or 1), ylim=(len(lanes) - 0.45, -0.55), xlabel="time (ms)", title=title)
    ax.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    patches = [Patch(facecolor=COLOURS[kind], edgecolor=COLOURS["ink"], linewidth=0.4, label=kind) for kind in kinds]
    ax.legend(handles=patches, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _bare(ax)
    ax.tick_params(axis="x", length=3)
    return ax


def edge_widths(shares: Sequence[float]) -> list[float]:
    """Line widths of the edges of bars that are so long, in parts of the axis: many short ones would be all edge."""
    return [0.4 if share >= 0.01 else 0.1 for share in shares]


def joined(spans: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Spans of a lane in order, those of one kind that touch made one, but for communication; without empty ones."""
    found: list[tuple[float, float, str]] = []
    for start_s, end_s, kind in sorted(spans):
        if end_s <= start_s:
            continue
        if kind != "communication" and found and found[-1][2] == kind and start_s <= found[-1][1] + 1e-12:
            found[-1] = (found[-1][0], max(end_s, found[-1][1]), kind)
        else:
            found.append((start_s, end_s, kind))
    return found


def side_by_side(count: int, width: float = 3.6, height: float = 2.4) -> Sequence[Axes]:
    """`count` empty Axes in one row of one new figure; `width` and `height` of each in inches."""
    import matplotlib.pyplot as plt

    _, row = plt.subplots(1, count, figsize=(width * count, height), layout="constrained", squeeze=False)
    return list(row[0])


def _new_axes(width: float, height: float) -> Axes:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax


def _cells(row: Any) -> list:
    if row is None:
        return []
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _columns(rows: Sequence) -> int:
    return max([1, *(len(_cells(row)) for row in rows)])


def _owners(before: Sequence[Sequence]) -> dict:
    """Number -> the one rank that held it before; a number on several ranks has no owner."""
    holders: dict = {}
    for rank, row in enumerate(before):
        for value in row:
            holders.setdefault(value, set()).add(rank)
    return {value: next(iter(ranks)) for value, ranks in holders.items() if len(ranks) == 1}


def _draw_row(ax: Axes, left: float, rank: int, row: Sequence, owner: Mapping) -> None:
    if not row:
        ax.text(left + 0.1, rank, "nothing", va="center", fontsize=8, style="italic", color=COLOURS["mixed"])
    for column, value in enumerate(row):
        colour = rank_colour(owner[value]) if value in owner else COLOURS["mixed"]
        _cell(ax, left + column, rank, _number(value), colour)


def _number(value: float) -> str:
    return f"{value:02d}" if isinstance(value, int) else f"{value:g}"


def _cell(ax: Axes, left: float, rank: int, text: str, colour: str, edge: str = "#FFFFFF") -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((left, rank - 0.42), 1.0, 0.84, facecolor=colour, edgecolor=edge, linewidth=1.5))
    ax.text(left + 0.5, rank, text, ha="center", va="center", fontsize=9, color=ink_on(colour))


def ink_on(colour: str) -> str:
    """Black or white, whichever contrasts more (WCAG 2 relative luminance, threshold 0.179)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#FFFFFF"


def _rank_axis(ax: Axes, world_size: int) -> None:
    ax.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])


def _bare(ax: Axes) -> None:
    """No frame and no tick marks: the lanes carry the picture."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.title.set_fontsize(10)
