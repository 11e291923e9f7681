"""The schedule editor: blocks are put on a grid with a click, or written as text; both are always the same schedule.

The text is what is kept: a click changes it, and everything else shown follows from it (`draft`). Without widgets the
text alone does all: `draft.look(draft.read(text))`. Left out: dragging, which ipywidgets do not know.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.schedule.actions import Schedule
from labkit.view import draft, explore, lanes
from labkit.view.gantt import KINDS, paler
from labkit.view.plot import COLOURS

ERASE = "erase"
SPARE = 3  # empty columns at the right, to draw in
Run = Callable[[Schedule], str]


@dataclass(frozen=True)
class Editor:
    """area: the text. kind, stage: what a click puts. cells: the grid's buttons, row by row, and `columns` a row.
    told: the verdict. image: the schedule, played. tidy, run: buttons. box: all of it together."""

    area: Any
    kind: Any
    stage: Any
    grid: Any
    told: Any
    image: Any
    tidy: Any
    run: Any
    box: Any

    @property
    def text(self) -> str:
        """The schedule as it is drawn now."""
        return self.area.value

    @property
    def schedule(self) -> Schedule:
        """The same, read. ValueError when it cannot be."""
        return draft.read(self.text).schedule

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        view = {"model_id": self.box.model_id, "version_major": 2, "version_minor": 0}
        picture = base64.b64encode(self.image.value).decode("ascii")
        kinds = {"application/vnd.jupyter.widget-view+json": view, "image/png": picture}
        return {**kinds, "text/plain": self.text}


def editor(text: str, run: Run | None = None) -> Editor:
    """An editor that starts with `text`. run: what the button "run on ranks" does with a valid schedule; it gives a
    sentence. ValueError when the text cannot be read."""
    import ipywidgets

    start = draft.read(text)
    stages = [(f"stage {stage} (rank {rank})", stage) for stage, rank in enumerate(start.placement)]
    parts = Editor(
        area=ipywidgets.Textarea(start.text, continuous_update=False, layout={"width": "98%", "height": "9em"}),
        kind=ipywidgets.ToggleButtons(options=[*KINDS, ERASE], style={"button_width": "4em"}),
        stage=ipywidgets.Dropdown(options=[("the row's own", None), *stages], layout={"width": "11em"}),
        grid=ipywidgets.GridBox([], layout={"overflow": "auto", "max_width": "100%", "grid_gap": "1px"}),
        told=ipywidgets.HTML(),
        image=ipywidgets.Image(format="png", layout={"align_self": "flex-start", "max_width": "100%"}),
        tidy=ipywidgets.Button(description="to played time"),
        run=ipywidgets.Button(description="run on ranks", disabled=run is None),
        box=ipywidgets.VBox(),
    )
    top = ipywidgets.HBox([parts.kind, parts.stage, parts.tidy, parts.run], layout={"flex_flow": "row wrap"})
    parts.box.children = [top, parts.grid, parts.told, parts.image, parts.area]
    _wire(parts, run, _picture())
    return parts


def _wire(parts: Editor, run: Run | None, show: Callable[[draft.Draft, draft.Look], bytes]) -> None:
    """Make clicks change the text, and everything follow it."""

    def tell(sentence: str, good: bool = False) -> None:
        parts.told.value = _verdict(sentence, good)

    def follow(_: Any = None) -> None:
        try:
            drawn = draft.read(parts.area.value)
        except ValueError as error:
            tell(str(error))
            return
        found = draft.look(drawn)
        _fill(parts, drawn, click)
        parts.image.value = show(drawn, found)
        tell(found.sentence, found.valid)

    def click(rank: int, column: int) -> None:
        try:
            drawn = draft.read(parts.area.value)
            drawn = _clicked(drawn, rank, column, parts.kind.value, parts.stage.value)
        except ValueError as error:
            tell(str(error))
            return
        parts.area.value = drawn.text

    def tidy(_: Any) -> None:
        parts.area.value = draft.settled(draft.read(parts.area.value)).text

    def go(_: Any) -> None:
        found = draft.look(draft.read(parts.area.value))
        if found.valid and run is not None:
            tell("running on ranks ...", True)
            tell(run(parts.schedule), True)

    parts.area.observe(follow, names="value")
    parts.tidy.on_click(tidy)
    parts.run.on_click(go)
    follow()


def _clicked(drawn: draft.Draft, rank: int, column: int, kind: str, stage: int | None) -> draft.Draft:
    """The draft after a click on a cell. stage: None is the first that the rank has. ValueError as in `draft`."""
    if kind == ERASE:
        return draft.erase(drawn, rank, column)
    own = drawn.schedule.stages_of(rank)
    stage = own[0] if stage is None and own else stage
    return draft.put(drawn, rank, column, kind, stage if stage is not None else 0)


def _verdict(sentence: str, good: bool) -> str:
    """The sentence as HTML, with a tick or a dot before it."""
    mark = COLOURS["optimizer"] if good else COLOURS["gradients"]
    return f'<b style="color:{mark}">{"&#10003;" if good else "&#9679;"}</b> {html.escape(sentence)}'


def _fill(parts: Editor, drawn: draft.Draft, click: Callable[[int, int], None]) -> None:
    """Show the draft's cells on the grid's buttons; new ones only where the grid has another size."""
    import ipywidgets

    columns = max(map(len, drawn.rows)) + SPARE
    wanted = f"repeat({columns}, 2.9em)"
    if parts.grid.layout.grid_template_columns != wanted or len(parts.grid.children) != columns * len(drawn.rows):
        made = []
        for rank in range(len(drawn.rows)):
            for column in range(columns):
                button = ipywidgets.Button(layout={"width": "2.8em", "height": "2em", "padding": "0"})
                button.on_click(lambda _, rank=rank, column=column: click(rank, column))
                made.append(button)
        parts.grid.layout.grid_template_columns = wanted
        parts.grid.children = made
    for at, button in enumerate(parts.grid.children):
        rank, column = divmod(at, columns)
        cell = drawn.rows[rank][column] if column < len(drawn.rows[rank]) else draft.EMPTY
        label = "" if cell in (draft.EMPTY, draft.SECOND) else cell
        colour = _colour(cell)
        if (button.description, button.style.button_color) != (label, colour):
            button.description, button.style.button_color = label, colour
            button.tooltip = f"rank {rank}, column {column}"


def _colour(cell: str) -> str:
    """Pale, for the letters on a button are black."""
    if cell == draft.EMPTY:
        return COLOURS["idle"]
    kind = next((letter for letter in cell if letter.isalpha()), "B")  # of the second half, too
    return paler(COLOURS[KINDS[kind][0]], 1)


def _picture() -> Callable[[draft.Draft, draft.Look], bytes]:
    """A function that draws a draft as it is played, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.6), dpi=explore.DPI, layout="constrained")
    ax = figure.subplots()
    set_spans = lanes.moving(ax)
    ax.set_xlabel("time, in units of F = I = W", fontsize=8)
    ax.set_yticks([0], ["rank 0"])
    draw = explore.drawing(figure)

    def show(drawn: draft.Draft, found: draft.Look) -> bytes:
        set_spans(drawn.schedule, found.spans, float(found.time))
        return draw()

    return show
