"""The schedule editor: blocks are put on a grid with a click, or written as text; both are always the same schedule.

The text is what is kept: a click changes it, and everything else shown follows from it (`draft`). Without widgets the
text alone does all: `draft.look(draft.read(text))`. Left out: dragging, which ipywidgets do not know.
"""

from __future__ import annotations

import base64
import html
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.schedule.actions import Schedule
from labkit.view import draft, explore, lanes
from labkit.view.gantt import KINDS, paler
from labkit.view.plot import COLOURS

ERASE = "erase"
OWN = -1  # in place of a stage: the first that the row's rank has
FIRST = (("the row's first", OWN),)
BLANK = "\u00a0"  # ipywidgets leave a button's label as it was when the new one is ""
SPARE = 3  # empty columns at the right, to draw in
# A row of text stays one, so that columns stand below each other; where the keyboard is can be seen.
STYLE = """<style>
.labkit-schedule textarea {white-space: pre; overflow-x: auto}
.labkit-schedule button:focus-visible {outline: 2px solid INK; outline-offset: -2px}
</style>"""
GRID: Mapping[str, str] = MappingProxyType(
    {
        "grid_template_columns": "4.2em",
        "grid_auto_columns": "2.9em",
        "grid_auto_flow": "column",
        "grid_gap": "1px",
        "overflow": "auto",
        "max_width": "100%",
    }
)
Run = Callable[[Schedule], str]


@dataclass(frozen=True)
class Editor:
    """area: the text. kind, stage: what a click puts. grid: names of ranks, then the buttons, column by column.
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

    def cell(self, rank: int, column: int) -> Any:
        """The button of a cell."""
        ranks = sum(not hasattr(each, "click") for each in self.grid.children)  # their names
        return self.grid.children[(1 + column) * ranks + rank]

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
    ranks, tips = len(start.rows), [told for _, told in KINDS.values()]
    wide, high = {"button_width": "4.6em"}, {"width": "98%", "height": f"{1.2 * (ranks + 3):.1f}em"}
    runs = {"disabled": True, "tooltip": "train a small model by this schedule, once it is valid"}
    parts = Editor(
        area=ipywidgets.Textarea(start.text, continuous_update=False, layout=high),
        kind=ipywidgets.ToggleButtons(options=[*KINDS, ERASE], tooltips=[*tips, "nothing"], style=wide),
        stage=ipywidgets.Dropdown(
            options=FIRST, description="stage", style={"description_width": "3em"}, layout={"width": "14em"}
        ),
        grid=ipywidgets.GridBox(layout=dict(GRID)),
        told=ipywidgets.HTML(),
        image=ipywidgets.Image(format="png", layout={"align_self": "flex-start", "max_width": "calc(100% - 4px)"}),
        tidy=ipywidgets.Button(description="to played time", tooltip="move blocks to when they are played"),
        run=ipywidgets.Button(description="run on ranks", layout={"display": None if run else "none"}, **runs),
        box=ipywidgets.VBox(),
    )
    above = [ipywidgets.Label("a click puts"), parts.kind, parts.stage, parts.tidy, parts.run]
    top = ipywidgets.HBox(above, layout={"flex_flow": "row wrap"})
    style = ipywidgets.HTML(STYLE.replace("INK", COLOURS["ink"]), layout={"display": "none"})
    below = ipywidgets.HTML("The same as text. It can be changed, too; leave the field, and the grid follows.")
    parts.box.children = [style, top, parts.grid, parts.told, parts.image, below, parts.area]
    parts.box.add_class("labkit-schedule")
    _wire(parts, run, _picture())
    return parts


def _wire(parts: Editor, run: Run | None, show: Callable[[draft.Draft, draft.Look], bytes]) -> None:
    """Make clicks change the text, and everything follow it."""
    in_turn = _in_turn(parts.told)

    @in_turn
    def follow(_: Any = None) -> None:
        parts.run.disabled = True
        drawn = draft.read(parts.area.value)
        found = draft.look(drawn)
        _offer(parts, drawn.placement)
        _fill(parts, drawn, click)
        parts.image.value = show(drawn, found)
        parts.run.disabled = not found.valid
        _tell(parts.told, found.sentence, found.valid)

    @in_turn
    def click(rank: int, column: int) -> None:
        parts.area.value = _clicked(parts, rank, column).text

    @in_turn
    def tidy(_: Any) -> None:
        parts.area.value = draft.settled(draft.read(parts.area.value)).text

    @in_turn
    def go(_: Any) -> None:
        found = draft.look(draft.read(parts.area.value))
        if found.valid and run is not None:
            _tell(parts.told, "running on ranks ...", True)
            _tell(parts.told, *_tried(run, parts.schedule))

    parts.area.observe(follow, names="value")
    parts.tidy.on_click(tidy)
    parts.run.on_click(go)
    follow()


def _tell(told: Any, sentence: str, good: bool = False) -> None:
    mark = COLOURS["optimizer"] if good else COLOURS["gradients"]
    told.value = f'<b style="color:{mark}">{"&#10003;" if good else "&#9679;"}</b> {html.escape(sentence)}'


def _in_turn(told: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of what changes the editor: one after the other, and a ValueError is told.

    JupyterLab has two buttons' messages handled in two threads at once.
    """
    turn = threading.RLock()

    def decorate(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*given: Any) -> None:
            with turn:
                try:
                    change(*given)
                except ValueError as error:
                    _tell(told, str(error))

        return changed

    return decorate


def _tried(run: Run, schedule: Schedule) -> tuple[str, bool]:
    """What the run says; what went wrong, where it ended otherwise, for nobody sees what a button raises."""
    try:
        return run(schedule), True
    except Exception as error:
        return f"{type(error).__name__}: {error}", False


def _clicked(parts: Editor, rank: int, column: int) -> draft.Draft:
    """The draft after a click on a cell. ValueError for what cannot be put there, and for a text that is none."""
    drawn = draft.read(parts.area.value)
    if parts.kind.value == ERASE:
        return draft.erase(drawn, rank, column)
    own = (*drawn.schedule.stages_of(rank), 0)[0]
    stage = own if parts.stage.value == OWN else parts.stage.value
    return draft.put(drawn, rank, column, parts.kind.value, stage)


def _offer(parts: Editor, placement: tuple[int, ...]) -> None:
    """Let a stage be chosen where a rank has several."""
    stages = [(f"{stage} (rank {rank})", stage) for stage, rank in enumerate(placement)]
    options = (*FIRST, *stages)
    if parts.stage.options != options:
        parts.stage.options = options  # and the first is chosen
    parts.stage.layout.display = None if len(set(placement)) < len(placement) else "none"


def _fill(parts: Editor, drawn: draft.Draft, click: Callable[[int, int], None]) -> None:
    """Show the draft's cells on the grid's buttons. Those of one colour have one style: fewer things for the page."""
    import ipywidgets

    ranks = len(drawn.rows)
    _cut(parts.grid, ranks, max(map(len, drawn.rows)) + SPARE, click)
    buttons = parts.grid.children[ranks:]
    styles = {button.style.button_color: button.style for button in buttons}
    for at, button in enumerate(buttons):
        column, rank = divmod(at, ranks)
        cell = drawn.rows[rank][column] if column < len(drawn.rows[rank]) else draft.EMPTY
        label, colour = BLANK if cell in (draft.EMPTY, draft.SECOND) else cell, _colour(cell)
        if colour not in styles:
            styles[colour] = ipywidgets.ButtonStyle(button_color=colour)
        if (button.description, button.style) != (label, styles[colour]):
            with button.hold_sync():
                button.description, button.style = label, styles[colour]


def _cut(grid: Any, ranks: int, columns: int, click: Callable[[int, int], None]) -> None:
    """Give the grid so many rows and columns.

    Column by column, so that more of them come at the end: all others stay in the page, and with them the focus.
    """
    import ipywidgets

    kept = grid.children[: (1 + columns) * ranks]
    if sum(isinstance(each, ipywidgets.Label) for each in kept) != ranks or not kept:
        kept = [ipywidgets.Label(f"rank {rank}") for rank in range(ranks)]
        grid.layout.grid_template_rows = f"repeat({ranks}, 2.3em)"
    gone = set(grid.children) - set(kept)
    empty = {"layout": ipywidgets.Layout(width="2.8em", height="2em", padding="0")}
    empty["style"] = ipywidgets.ButtonStyle(button_color=_colour(draft.EMPTY))
    made = [*kept]
    for column in range(len(kept) // ranks - 1, columns):
        for rank in range(ranks):
            button = ipywidgets.Button(description=BLANK, tooltip=f"rank {rank}, column {column}", **empty)
            button.on_click(lambda _, rank=rank, column=column: click(rank, column))
            made.append(button)
    if len(made) != len(grid.children) or gone:
        grid.children = made
    for each in gone:
        each.close()


def _colour(cell: str) -> str:
    """Pale, for the letters on a button are black."""
    if cell == draft.EMPTY:
        return COLOURS["idle"]
    kind = next((letter for letter in cell if letter.isalpha()), "B")  # of the second half, too
    return paler(COLOURS[KINDS[kind][0]], 1)


def _picture() -> Callable[[draft.Draft, draft.Look], bytes]:
    """A function that draws a draft as it is played, as PNG; a figure for each number of ranks."""
    made: dict[int, tuple[lanes.SetSpans, Callable[[], bytes]]] = {}

    def show(drawn: draft.Draft, found: draft.Look) -> bytes:
        ranks = len(drawn.rows)
        if ranks not in made:
            made[ranks] = _lanes(ranks)
        set_spans, draw = made[ranks]
        set_spans(drawn.schedule, found.spans, float(found.time))
        return draw()

    return show


def _lanes(ranks: int) -> tuple[lanes.SetSpans, Callable[[], bytes]]:
    """Lanes for so many ranks: what sets their spans, and what draws them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 1.0 + 0.4 * ranks), dpi=explore.DPI, layout="constrained")
    ax = figure.subplots()
    set_spans = lanes.moving(ax)
    ax.set_xlabel("time, in units of F = I = W; paler: a rank's further stages", fontsize=8)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_yticks([0], [f"rank {ranks - 1}"])  # keeps their room
    return set_spans, explore.drawing(figure)
