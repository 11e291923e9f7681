"""The layer's matrices: every rank has the area that it holds, by columns or by rows, copies counted."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from labkit.cost.named import named
from labkit.cost.shapes import attention_parameters, mlp_parameters
from labkit.view import cut
from labkit.view.plot import rank_colour


@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-8b", 4), ("llama-3.1-8b", 8), ("llama-3.2-1b", 2)])
def test_each_rank_has_the_area_of_its_parameters(name, tp):
    shape = named(name)
    ax = cut.layer(shape, tp)
    areas = {}
    for box in (patch for patch in ax.patches if isinstance(patch, Rectangle)):
        colour = to_hex(box.get_facecolor()).upper()
        areas[colour] = areas.get(colour, 0.0) + box.get_width() * box.get_height()
    due = attention_parameters(shape, tp) + mlp_parameters(shape, tp)
    assert areas == {rank_colour(rank): pytest.approx(due) for rank in range(tp)}
    plt.close(ax.figure)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b"])
@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_every_part_is_seen_and_every_letter_whole(name, tp):
    ax = cut.layer(named(name), tp, "one layer")
    ax.figure.canvas.draw()
    dot = 72 / ax.figure.dpi
    for box in (patch for patch in ax.patches if isinstance(patch, Rectangle)):
        seen = box.get_window_extent()
        assert box.get_linewidth() < min(seen.width, seen.height) * dot / 4, "its edge leaves most of it"
    labels = [text.get_window_extent() for text in ax.texts]
    assert [text.get_text() for text in ax.texts] == ["f", *"qkvo", "g", "f", "gate", "up", "down", "g"]
    for number, box in enumerate(labels):
        assert all(not box.overlaps(other) for other in labels[number + 1 :])
    whole = ax.figure.bbox
    for box in (*labels, ax.title.get_window_extent(), ax.get_legend().get_window_extent()):
        assert box.x0 >= 0 and box.x1 <= whole.x1 and box.y0 >= 0 and box.y1 <= whole.y1
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told == [f"rank {rank}, {rank + 8}" if tp == 16 else f"rank {rank}" for rank in range(min(tp, 8))]
    plt.close(ax.figure)


def test_copies_of_a_kv_head_are_drawn_once_a_rank():
    shape = named("llama-3.1-8b")
    (_, keys, *_), _ = cut.matrices(shape, 16)
    assert keys.columns == 2 * shape.kv_width


def test_what_a_rank_makes_of_its_columns_it_takes_as_rows():
    attention, mlp = cut.matrices(named("llama-3.1-8b"), 4)
    for *before, last in (attention, mlp):
        assert last.by_rows and not any(each.by_rows for each in before)
        assert last.inner == before[0].columns


def test_a_layer_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="cannot be cut over 3 ranks"):
        cut.layer(named("llama-3.1-8b"), 3)
