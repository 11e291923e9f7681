"""What several labs' figures need: a launch in words, a replay as spans, a stub.

Left out: figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.record.timeline import Replay
from labkit.view import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {"compute": "forward", "communication": "communication", "wait": "waiting"}


def stub(*_: Any) -> Any:
    """An exercise that is not written yet: pictures then show what is due."""
    return NotImplemented


def wide(width: float = 9.0, height: float = 3.3) -> Axes:
    """Empty Axes of the shape that a slide has room for, in inches."""
    return plot.side_by_side(1, width, height)[0]


def grids(*pictures: tuple[Sequence, Sequence, str]) -> Axes:
    """Several (before, after, title) side by side, all with cells of one size. Returns the last one's Axes."""
    import matplotlib.pyplot as plt

    columns = [sum(max(1, *(len(row or ()) for row in rows)) for rows in picture[:2]) for picture in pictures]
    widths = [count + 4.2 for count in columns]  # the arrow between, and the names of the ranks
    ranks = len(pictures[0][0])
    size = (0.43 * sum(widths), 0.75 + 0.43 * ranks)
    _, row = plt.subplots(1, len(pictures), figsize=size, layout="constrained", width_ratios=widths)
    for ax, picture in zip(row, pictures, strict=True):
        plot.grids(*picture, ax=ax)
    return row[-1]


def told(sentence: str) -> str:
    """A launch's sentence without files and lines, which are those of the notebook when it runs there."""
    return re.sub(r" \([\w.]+, (?:cell \d+, )?line \d+\)", "", sentence)


def recorded(fn: Callable, world_size: int, rank_args: Sequence[tuple] | None = None) -> tuple:
    """What each of `world_size` real ranks did in fn, as RankRecords. Raises RuntimeError when the ranks fail."""
    from labkit.check import evidence

    seen = evidence.observe(fn, world_size, rank_args=rank_args, backend="gloo", deadline_s=60.0)
    if seen.outcome.cause is not None:
        raise RuntimeError(seen.outcome.cause.sentence)
    return seen.records


def spans(played: Replay, labels: dict[str, str], unit_s: float = 1.0) -> list[tuple[int, float, float, str, str]]:
    """A replay's compute streams as `plot.spans` takes them; what follows without a gap and is of a kind is one span.

    labels: per kind of span ("compute", "wait"), what to write on it. unit_s: the unit of time, 1e-3 for ms.
    """
    found: list[tuple[int, float, float, str, str]] = []
    for span in played.spans:
        if not span.stream.startswith("compute") or span.end_s <= span.start_s:
            continue
        start, end, kind = span.start_s / unit_s, span.end_s / unit_s, KINDS[span.kind]
        last = found[-1] if found else None
        if last and last[0] == span.rank and last[3] == kind and start - last[2] < 1e-9:
            found[-1] = (span.rank, last[1], end, kind, last[4])
        else:
            found.append((span.rank, start, end, kind, labels[span.kind]))
    return found
