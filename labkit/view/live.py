"""A curve that grows while ranks train: `with live.losses() as watch: launch(train, 4, on_report=watch)`.

What ranks `report` becomes a picture that is changed in place a few times a second, through IPython's display handle:
the same in every notebook front end, with or without widgets, and in nbval. Outside a notebook the last values are
printed. A report it cannot use is passed over, so that a plot never ends a training. Left out: more than one quantity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.check.card import in_notebook
from labkit.view.explore import DPI, drawing
from labkit.view.plot import COLOURS, rank_colour

_LARGEST = 1e30


class Live:
    """An `on_report` callback that draws one quantity over steps, a thin line a rank and a thick one for their mean.

    points: per rank, step -> value, as reported so far.
    """

    def __init__(
        self, name: str, reference: Sequence[float], label: str, every_s: float, show: Callable[[bytes], None]
    ):
        self.name, self.every_s = name, every_s
        self.points: dict[int, dict[float, float]] = {}
        self._show, self._drawn_s, self._new = show, 0.0, True
        self._ax, self._draw = _picture(name, reference, label)

    def __call__(self, rank: int, values: dict[str, Any]) -> None:
        """Take a report; draw it unless the last picture is younger than every_s. Never raises for what is in it."""
        step, value = (values.get(key) if isinstance(values, dict) else None for key in ("step", self.name))
        if not (_finite(step) and _finite(value) and isinstance(rank, int)):
            return
        self.points.setdefault(rank, {})[step] = value
        self._new = True
        if time.monotonic() - self._drawn_s >= self.every_s:
            self.draw()

    def draw(self) -> None:
        """Bring the picture up to date, if something came since."""
        if self._new:
            self._new = False
            _update(self._ax, self.points, self.mean, self.name)
            self._show(self._draw())
            self._drawn_s = time.monotonic()

    @property
    def mean(self) -> dict[float, float]:
        """Step -> mean over ranks, of the steps that every rank has reported that has reported anything."""
        rows = list(self.points.values())
        steps = sorted(set.intersection(*map(set, rows))) if rows else []
        return {step: sum(row[step] for row in rows) / len(rows) for step in steps}

    def __enter__(self) -> Live:
        self.draw()
        return self

    def __exit__(self, *error: Any) -> None:
        self.draw()
        if not in_notebook() and self.mean:
            step, value = list(self.mean.items())[-1]
            print(f"{self.name} at step {step:g}: {value:.4g}, mean of {len(self.points)} ranks")


def losses(reference: Sequence[float] = (), label: str = "serial", name: str = "loss", every_s: float = 0.3) -> Live:
    """A live curve of what ranks report as `report(step=..., loss=...)`.

    reference: one value a step to compare with, drawn as rings on top and called `label`; it also sets the axes' first
    limits, which begin a little below it and not at 0.
    every_s: seconds between two pictures at least.
    """
    return Live(name, tuple(reference), label, every_s, _shower() if in_notebook() else _not_shown)


def _picture(name: str, reference: Sequence[float], label: str) -> tuple[Any, Callable[[], bytes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.0), dpi=DPI, layout="constrained")
    ax = figure.add_subplot()
    ax.plot([], [], color=COLOURS["ink"], linewidth=2.2, label="mean of ranks", zorder=3)
    if reference:
        # Rings, which no rank's line looks like; where they are met, the mean is seen inside them.
        look = {"markerfacecolor": "none", "markeredgecolor": "#5D3A9B", "markeredgewidth": 1.4, "markersize": 7}
        look["markevery"] = max(1, len(reference) // 40)  # rings apart, however many steps
        ax.plot(range(len(reference)), reference, linestyle="none", marker="o", label=label, zorder=4, **look)
    ax.set(xlabel="step", ylabel=name, title=" ")
    ax.title.set_fontsize(10)
    ax.set_xlim(0, max(len(reference) - 1, 10))
    drawn = [value for value in reference if 0 < value < _LARGEST]
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    margin = 0.08 * (high - low) or 0.1 * high
    ax.set_ylim(low - margin if drawn else 0.0, high + margin)
    ax.grid(color=COLOURS["idle"], linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="upper right")
    return ax, drawing(figure)


def _update(ax: Any, points: dict[int, dict[float, float]], mean: dict[float, float], name: str) -> None:
    """Set the artists; a rank that is new gets its line."""
    lines = {line.get_gid(): line for line in ax.get_lines()}
    for rank, row in points.items():
        gid = f"rank {rank}"
        if gid not in lines:
            (lines[gid],) = ax.plot([], [], color=rank_colour(rank), linewidth=1.2, label=gid, gid=gid)
            handles = sorted(ax.get_lines(), key=lambda line: (line.get_gid() or "", -line.get_zorder()))
            ax.legend(handles=handles, fontsize=8, frameon=False, loc="upper right", ncols=2)
        lines[gid].set_data(list(row), list(row.values()))
        ax.set_xlim(right=max(ax.get_xlim()[1], *row))
        ax.set_ylim(bottom=min(ax.get_ylim()[0], *row.values()), top=max(ax.get_ylim()[1], *row.values()))
    ax.get_lines()[0].set_data(list(mean), list(mean.values()))
    said = [f"{name} {value:.3f} at step {step:g}" for step, value in mean.items()]
    ax.set_title(said[-1] if said else f"waiting for the first {name}")


def _finite(value: Any) -> bool:
    """Whether this is a number that can be drawn; axes have no room for 1e300."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _shower() -> Callable[[bytes], None]:
    """A function that shows a PNG: the first time as new output, then in its place."""
    from IPython.display import Image, display

    handles: list[Any] = []

    def show(png: bytes) -> None:
        if handles:
            handles[0].update(Image(png))
        else:
            handles.append(display(Image(png), display_id=True))

    return show


def _not_shown(png: bytes) -> None:
    """Outside a notebook there is nobody to see a picture."""
