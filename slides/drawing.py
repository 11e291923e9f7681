"""A figure for a slide, with the numbers that the slide may say; and how it becomes SVG.

The same figure gives the same bytes, as often as it is asked: no date, no random ids, letters as outlines. Text
smaller than a projector shows is made larger. Left out: what is drawn (`figures`), and by which function
(`labkit.view`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The room that theme.css leaves a figure, in pixels of a slide of 1280 x 720, and its smallest letters.
ROOM_PX = (1160, 400)
SMALLEST_PX = 19


@dataclass(frozen=True)
class Drawn:
    """figure: what the slide shows. numbers: by name, what the slide may say of it, as text."""

    figure: Figure
    numbers: Mapping[str, str] = field(default_factory=dict)


def drawn(ax: Axes, **numbers: object) -> Drawn:
    """The figure that `ax` is part of; numbers as text, as `str` gives it."""
    return Drawn(ax.figure, {name: str(number) for name, number in numbers.items()})


def pixels_a_point(figure: Figure) -> float:
    """Pixels on the slide for a point (1/72 inch) in the figure, which is scaled to the room that it has."""
    width, height = figure.get_size_inches()
    return min(ROOM_PX[0] / width, ROOM_PX[1] / height) / 72


def enlarge(figure: Figure) -> None:
    """Make all text at least SMALLEST_PX high on the slide."""
    from matplotlib.text import Text

    least = SMALLEST_PX / pixels_a_point(figure)
    for text in figure.findobj(Text):
        text.set_fontsize(max(least, text.get_fontsize()))


def svg(drawing: Drawn, name: str) -> bytes:
    """The figure as SVG; `name` salts the ids, so that figures of one page do not share any."""
    import matplotlib

    enlarge(drawing.figure)
    kept = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        drawing.figure.savefig(kept, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawing.figure.set_layout_engine("none")  # laid out anew, what is laid out already would move a little
    return kept.getvalue()
