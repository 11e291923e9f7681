"""The matrices of one decoder layer, drawn to scale, with the part of each rank in that rank's colour.

Each matrix is drawn as in y = x A: inputs down, outputs across; by columns a rank gets part of y, by rows a summand of
it. What several ranks keep copies of is drawn once a copy, so the area is what all ranks hold together. Left out:
norms and biases, which are too thin to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.cost.shapes import Shape, rank_kv_heads
from labkit.cost.tensor_parallel import products
from labkit.view.plot import COLOURS, RANK_COLOURS, rank_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAP = 0.03  # between matrices, of the largest one's width
# Points: about how wide all matrices together are, and the white line between two ranks' parts, at most.
WIDTH_PT, EDGE_PT, EDGE_SHARE = 540.0, 0.6, 0.15  # the last: of a part's narrow side, where that is less


@dataclass(frozen=True)
class Matrix:
    """A matrix as the ranks hold it: `inner` inputs and `columns` outputs in all. by_rows: cut along the inputs."""

    name: str
    inner: int
    columns: int
    by_rows: bool = False


def matrices(shape: Shape, tp: int) -> tuple[tuple[Matrix, ...], ...]:
    """Those of attention, and those of the MLP, in the order of forward (Megatron-LM, arXiv:1909.08053, section 3).

    ValueError where tp does not divide the layer.
    """
    products(shape, 1, tp)  # refuses what cannot be cut
    keys = tp * rank_kv_heads(shape, tp) * shape.head_dim
    attention = [Matrix("q", shape.hidden, shape.query_width), Matrix("k", shape.hidden, keys)]
    attention += [Matrix("v", shape.hidden, keys), Matrix("o", shape.query_width, shape.hidden, True)]
    first = ("gate", "up") if shape.gated else ("up",)
    mlp = [Matrix(name, shape.hidden, shape.ffn) for name in first]
    return tuple(attention), (*mlp, Matrix("down", shape.ffn, shape.hidden, True))


def layer(shape: Shape, tp: int, title: str = "", ax: Axes | None = None) -> Axes:
    """The layer's matrices on tp ranks, attention's and then the MLP's, with f before and g after. Returns the Axes."""
    from matplotlib.patches import Patch

    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(9.0, 3.0), layout="constrained")
    regions = matrices(shape, tp)
    deepest = max(each.inner for region in regions for each in region)
    gap = GAP * max(each.columns for region in regions for each in region)
    left = 0.0
    for region in regions:
        left = _letter(ax, "f", left + gap, deepest, gap)
        for each in region:
            _matrix(ax, each, tp, left, deepest)
            ax.text(left + each.columns / 2, deepest / 2 + each.inner / 2 + gap, each.name, ha="center", va="top")
            left += each.columns + gap
        left = _letter(ax, "g", left, deepest, gap) + gap
    ax.set(xlim=(0, left), ylim=(deepest + 5 * gap, -gap), aspect="equal", xticks=[], yticks=[])
    ax.set_title(title, fontsize=10)
    ax.spines[:].set_visible(False)
    for box in ax.patches:
        box.set_linewidth(min(EDGE_PT, EDGE_SHARE * min(box.get_width(), box.get_height()) * WIDTH_PT / left))
    first = range(min(tp, len(RANK_COLOURS)))  # those without a colour before them
    patches = [Patch(facecolor=rank_colour(rank), label=_ranks_like(rank, tp)) for rank in first]
    ax.legend(handles=patches, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _ranks_like(rank: int, tp: int) -> str:
    """The ranks that have the colour of this one: "rank 0, 8"."""
    alike = [str(each) for each in range(rank, tp, len(RANK_COLOURS))]
    return f"rank {', '.join(alike[:2])}{', ...' * (len(alike) > 2)}"


def _letter(ax: Axes, letter: str, left: float, deepest: float, gap: float) -> float:
    """f or g at half height; the place where it ends."""
    ax.text(left + gap, deepest / 2, letter, ha="center", va="center", fontsize=12, style="italic")
    return left + 2.5 * gap


def _matrix(ax: Axes, each: Matrix, tp: int, left: float, deepest: float) -> None:
    """One rectangle a rank."""
    from matplotlib.patches import Rectangle

    top = (deepest - each.inner) / 2
    width, height = each.columns / (1 if each.by_rows else tp), each.inner / (tp if each.by_rows else 1)
    for rank in range(tp):
        corner = (left, top + rank * height) if each.by_rows else (left + rank * width, top)
        ax.add_patch(Rectangle(corner, width, height, facecolor=rank_colour(rank), edgecolor=COLOURS["nothing"]))
