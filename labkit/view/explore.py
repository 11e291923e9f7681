"""Explorers: sliders beside a picture that follows them.

A picture is a matplotlib Figure whose artists are changed in place and drawn into an `ipywidgets.Image`: several times
as fast as a new figure a move, and the same on ipywidgets 7.7 (Colab) and 8. An explorer shows itself as widgets, and
as its default picture where there are none. Sliders take the keyboard: Tab to reach one, arrow keys to move it.
Left out: ipympl, which sends megabytes a move and breaks on Colab.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.cost import comm, groups, hardware
from labkit.cost.parts import Link
from labkit.view import curves
from labkit.view.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
ALGORITHMS = ("ring", "tree")
SIZES = tuple(2**power for power in range(10, 31))  # 1 KiB to 1 GiB
NODES, PER_NODE = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)
WITHIN = ("NVLink 4", "NVLink 3", "PCIe 5", "PCIe 4", "PCIe 3")
BETWEEN = ("InfiniBand NDR", "InfiniBand HDR", "100 GbE", "25 GbE", "10 GbE")
DPI = 80


@dataclass(frozen=True)
class Explorer:
    """controls: by name, the widgets that set a value. image: what shows the picture. box: all of it together."""

    controls: Mapping[str, Any]
    image: Any
    box: Any

    @property
    def values(self) -> dict[str, Any]:
        """What the controls are set to."""
        return {name: control.value for name, control in self.controls.items()}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        # Both kinds at once: a front end shows the richest it can, so one without widgets shows the picture.
        view = {"model_id": self.box.model_id, "version_major": 2, "version_minor": 0}
        picture = base64.b64encode(self.image.value).decode("ascii")
        kinds = {"application/vnd.jupyter.widget-view+json": view, "image/png": picture}
        return {**kinds, "text/plain": f"Explorer: {', '.join(self.controls)}"}


def explorer(controls: Mapping[str, Any], figure: Figure, update: Callable[..., None]) -> Explorer:
    """An explorer whose picture is `figure`; `update(**values)` changes its artists when a control moves.

    controls: ipywidgets by name, laid out above the picture in up to two columns. Where the artists that change are
    marked `animated`, only those are drawn anew, on a kept picture of all the rest.
    """
    import ipywidgets

    draw = drawing(figure)
    turn = threading.RLock()  # JupyterLab has two sliders' messages handled in two threads at once

    def redraw(_: Any = None) -> None:
        with turn:
            update(**{name: control.value for name, control in controls.items()})
            image.value = draw()

    # At its own size: a picture that is stretched has blurred letters.
    image = ipywidgets.Image(format="png", layout={"align_self": "flex-start", "max_width": "calc(100% - 4px)"})
    redraw()
    for control in controls.values():
        control.observe(redraw, names="value")
    columns = {"grid_template_columns": "repeat(auto-fit, 25em)", "max_width": "50em"}  # one where two do not fit
    pairs = ipywidgets.GridBox(list(controls.values()), layout=columns)
    return Explorer(controls, image, ipywidgets.VBox([pairs, image]))


def drawing(figure: Figure) -> Callable[[], bytes]:
    """A function that draws the figure as it is now, as PNG. Its layout stays what it is at this call."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    moving = sorted(figure.findobj(lambda artist: artist.get_animated()), key=lambda artist: artist.get_zorder())
    canvas.draw()  # works the layout out; once, for it takes as long as all the rest
    figure.set_layout_engine("none")
    canvas.draw()
    still = canvas.copy_from_bbox(figure.bbox)

    def draw() -> bytes:
        if moving:
            canvas.restore_region(still)
            for artist in moving:
                artist.draw(canvas.get_renderer())
        else:
            canvas.draw()
        return _png(canvas)

    return draw


def _png(canvas: Any) -> bytes:
    from matplotlib.image import imsave

    kept = io.BytesIO()
    imsave(kept, canvas.buffer_rgba(), format="png", pil_kwargs={"compress_level": 1})
    return kept.getvalue()


def choice(label: str, options: Sequence[Any], value: Any) -> Any:
    """A drop-down list with its label in full."""
    import ipywidgets

    return ipywidgets.Dropdown(options=list(options), value=value, description=label, **_wide())


def slider(label: str, options: Sequence[Any], value: Any, show: Callable[[Any], str] = str) -> Any:
    """A slider over a list of values, each shown as `show(value)`; it takes the arrow keys."""
    import ipywidgets

    named = [(show(option), option) for option in options]
    return ipywidgets.SelectionSlider(options=named, value=value, description=label, **_wide())


def _wide() -> dict[str, Any]:
    return {"style": {"description_width": "8.5em"}, "layout": {"width": "24em"}}


def collectives(sweeps: Sequence[Any] = (), links: Sequence[Link] = (), **start: Any) -> Explorer:
    """Time of a collective over size, by ring and by tree, on any links; measured sweeps on top.

    sweeps: measured points, each with op, world_size, sizes and medians (in seconds). links: more links to choose
    from, e.g. one fitted to the sweeps; the first is where the explorer starts. start: values of controls to start
    with (op, size, per_node, nodes, within, between, algorithm).
    """
    more = {link.name: link for link in links}
    begin = {"op": "all_reduce", "size": 2**20, "per_node": 4, "nodes": 1, "algorithm": "ring"}
    begin |= {"within": next(iter(more), WITHIN[0]), "between": BETWEEN[0]} | start
    controls = {
        "op": choice("collective", OPS, begin["op"]),
        "algorithm": choice("algorithm", ALGORITHMS, begin["algorithm"]),
        "size": slider("size S", SIZES, begin["size"], curves.as_size),
        "per_node": slider("ranks per node", PER_NODE, begin["per_node"]),
        "nodes": slider("nodes", NODES, begin["nodes"]),
        "within": choice("link in a node", (*more, *WITHIN), begin["within"]),
        "between": choice("between nodes", BETWEEN, begin["between"]),
    }
    figure, update = _collectives_picture(tuple(sweeps), more)
    return explorer(controls, figure, update)


def group_of(per_node: int, nodes: int, within: Link, between: Link) -> groups.Group:
    """A group of equal nodes, each with one network card."""
    return groups.Group((per_node,) * nodes, within, between)


def algorithm_for(op: str, wanted: str, group: groups.Group) -> str:
    """The wanted algorithm, or the one that this collective has instead."""
    offered = comm.choices(op, group)
    return wanted if wanted in offered else offered[0]


def reading(op: str, size: int, algorithm: str, group: groups.Group) -> str:
    """What the mark in the picture stands at, in words."""
    if group.size == 1:
        return f"{op}, 1 rank: nothing to send"
    used = algorithm_for(op, algorithm, group)
    time_s = comm.group_time_s(op, size, group, used)
    fast = comm.busbw(op, size, group.size, time_s)
    share = comm.group_time_s(op, 0, group, used) / time_s
    return (
        f"{op}, {used}, {group.size} ranks, {curves.as_size(size)}: {curves.as_time(time_s)}, "
        f"busbw {fast / 1e9:.3g} GB/s, {share:.0%} of the time is latency"
    )


def _axes_of_collectives(sweeps: tuple) -> tuple:
    """Figure, axes, and the artists that move: a line per algorithm, measured points, the mark, the line down."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), dpi=DPI, layout="constrained")
    ax = figure.add_subplot()
    blank = [curves.Curve(name, SIZES, [1.0] * len(SIZES), "line", at) for at, name in enumerate(ALGORITHMS)]
    curves.times([*blank, *_points(sweeps, OPS[0])], " ", ax)
    ax.set_ylim(1e-6, 10)
    ax.get_legend().set_loc("upper left")  # the "best" place would jump about
    lines = dict(zip(ALGORITHMS, ax.get_lines(), strict=False))
    measured = ax.get_lines()[len(ALGORITHMS) :]
    (mark,) = ax.plot([], [], marker="o", markersize=9, markerfacecolor="none", color=COLOURS["ink"])
    down = ax.axvline(SIZES[0], color=COLOURS["ink"], linewidth=0.8, linestyle=":")
    for artist in (*lines.values(), *measured, mark, down, ax.title, ax.get_legend()):
        artist.set_animated(True)
    return figure, ax, lines, measured, mark, down


def _collectives_picture(sweeps: tuple, more: Mapping[str, Link]) -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    figure, ax, lines, measured, mark, down = _axes_of_collectives(sweeps)
    legend = dict(zip((*ALGORITHMS, *measured), ax.get_legend().get_texts(), strict=False))

    def update(op: str, size: int, per_node: int, nodes: int, within: str, between: str, algorithm: str) -> None:
        group = group_of(per_node, nodes, more.get(within) or hardware.link(within), hardware.link(between))
        used = algorithm_for(op, algorithm, group)
        offered = comm.choices(op, group)
        for name, line in lines.items():
            shown = name in offered and group.size > 1
            line.set_ydata([comm.group_time_s(op, s, group, name) if shown else float("nan") for s in SIZES])
            line.set(linewidth=2.6 if name == used else 1.2, linestyle="-" if name == used else "--")
            legend[name].set_text(name if shown else f"{name}: not for this")
        if used not in lines and group.size > 1:
            # all_to_all goes directly: it takes the place of the ring.
            lines["ring"].set_ydata([comm.group_time_s(op, s, group, used) for s in SIZES])
            lines["ring"].set(linewidth=2.6, linestyle="-")
            legend["ring"].set_text(used)
        for line, points in zip(measured, _points(sweeps, op), strict=True):
            line.set_data(points.sizes, points.values)
            legend[line].set_text(points.label)
        at = comm.group_time_s(op, size, group, used) if group.size > 1 else float("nan")
        mark.set_data([size], [at])
        down.set_xdata([size, size])
        ax.set_title(reading(op, size, algorithm, group), fontsize=9)

    return figure, update


def _points(sweeps: tuple, op: str) -> list[curves.Curve]:
    """The measured points of one collective, a series a group size; a size that was not measured has none."""
    found = []
    for at, n in enumerate(sorted({sweep.world_size for sweep in sweeps})):
        mine = [sweep for sweep in sweeps if (sweep.op, sweep.world_size) == (op, n)]
        sizes = [size for sweep in mine for size in sweep.sizes]
        values = [time for sweep in mine for time in sweep.medians]
        label = f"yours, {n} ranks" if mine else f"yours, {n} ranks: not measured"
        found.append(curves.Curve(label, sizes, values, "points", len(ALGORITHMS) + at))
    return found
