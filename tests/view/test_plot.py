"""Plots: they draw what they are given, on the Axes they are given, in colours that can be told apart."""

from itertools import combinations

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from labkit.view import plot

# Viénot, Brettel and Mollon (1999): linear RGB as a protanope and a deuteranope see it.
PROTAN = np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]])
DEUTAN = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt.close("all")


def cells(ax):
    """(text, face colour) of every cell, in the order drawn."""
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    texts = {(text.get_position()): text.get_text() for text in ax.texts}
    found = []
    for box in boxes:
        middle = (box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2)
        text = next((t for at, t in texts.items() if np.allclose(at, middle)), None)
        found.append((text, matplotlib.colors.to_hex(box.get_facecolor()).upper()))
    return found


def linear(colour):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lightness_and_opponents(rgb):
    """CIE L*a*b* of linear sRGB (white point D65)."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.clip(to_xyz @ rgb / np.array([0.9505, 1.0, 1.089]), 1e-6, None)
    f = [np.cbrt(t) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_a_number_keeps_the_colour_of_the_rank_it_came_from():
    ax = plot.grids([[1, 2], [10, 20]], [[10, 1], [11, 22]])
    drawn = dict(cells(ax))
    rank_0, rank_1 = plot.rank_colour(0), plot.rank_colour(1)
    assert cells(ax)[0] == ("01", rank_0.upper())
    assert (drawn["10"], drawn["01"]) == (rank_1.upper(), rank_0.upper())
    assert drawn["11"] == drawn["22"] == plot.COLOURS["mixed"].upper()


def test_a_number_that_two_ranks_held_belongs_to_neither():
    ax = plot.grids([[7], [7], [8]], [[7], [7], [7]])
    assert {colour for text, colour in cells(ax) if text == "07"} == {plot.COLOURS["mixed"].upper()}


def test_a_rank_with_nothing_is_said_to_have_nothing():
    ax = plot.grids([[1], None], [None, [1]])
    assert [text.get_text() for text in ax.texts].count("nothing") == 2


def test_a_tensor_is_drawn_as_its_numbers():
    torch = pytest.importorskip("torch")
    ax = plot.grids([torch.tensor([0.5, 2.0])], [torch.tensor([2.5])])
    assert [text for text, _ in cells(ax)] == ["0.5", "2", "2.5"]


def test_shards_show_every_row_a_rank_owns_and_how_many():
    ax = plot.shards([range(0, 2), range(2, 3), range(0)], 3, "three rows")
    owned = [(text, colour) for text, colour in cells(ax) if text and colour != "#FFFFFF"]
    assert owned == [
        ("0", plot.rank_colour(0).upper()),
        ("1", plot.rank_colour(0).upper()),
        ("2", plot.rank_colour(1).upper()),
    ]
    assert [t.get_text() for t in ax.texts if "row" in t.get_text()] == ["2 rows", "1 row", "0 rows"]
    assert ax.get_xlabel() == "row of the data" and ax.get_title() == "three rows"


def test_shards_can_carry_other_numbers_than_their_rows():
    ax = plot.shards([[2, 0], [1]], 3, labels=[[7, 8], [9]])
    assert [text for text, colour in cells(ax) if text and colour != "#FFFFFF"] == ["7", "8", "9"]


def test_each_message_is_an_arrow_from_its_source_to_its_destination():
    ax = plot.messages([(0.0, 1.0, 2, 0), (1.0, 2.0, 0, 1)], 3)
    arrows = [text for text in ax.texts if text.arrow_patch is not None]
    ends = [(round(a.xyann[1]), round(a.xy[1])) for a in arrows]
    assert ends == [(2, 0), (0, 1)]
    assert all(0 <= a.xyann[0] < a.xy[0] <= 2 for a in arrows)
    assert "rounds" in ax.get_xlabel() and ax.get_xlim()[1] == 2


def test_no_messages_make_an_empty_picture_with_all_ranks():
    ax = plot.messages([], 4)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]


def test_spans_are_as_long_as_their_times():
    ax = plot.spans([(0, 0.0, 0.5, "waiting", "in send"), (1, 0.25, 0.75, "idle", "")])
    bars = [(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in ax.patches]
    assert bars == [(0.0, 0.5, 0), (0.25, 0.5, 1)]
    assert ax.get_xlabel() == "time (s)"


def test_a_label_that_does_not_fit_its_span_is_left_out():
    ax = plot.spans([(0, 0.0, 0.01, "forward", "at work"), (0, 0.01, 1.0, "waiting", "in barrier")])
    assert [text.get_text() for text in ax.texts] == ["in barrier"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: plot.grids([[1]], [[1]], ax=ax),
        lambda ax: plot.shards([range(1)], 1, ax=ax),
        lambda ax: plot.messages([(0, 1, 0, 1)], 2, ax=ax),
        lambda ax: plot.spans([(0, 0, 1, "idle", "")], ax=ax),
    ],
)
def test_a_plot_draws_on_the_axes_it_is_given(draw):
    _, ax = plt.subplots()
    assert draw(ax) is ax
    assert len(plt.get_fignums()) == 1


def test_side_by_side_gives_axes_of_one_figure():
    axes = plot.side_by_side(3)
    assert len(axes) == 3 and len({ax.figure for ax in axes}) == 1


@pytest.mark.parametrize("sight", [np.eye(3), PROTAN, DEUTAN], ids=["common", "protanope", "deuteranope"])
@pytest.mark.parametrize("kind", ["ranks", "activity", "memory"])
def test_colours_that_appear_together_can_be_told_apart(kind, sight):
    together = {
        "ranks": [*plot.RANK_COLOURS[:8], plot.COLOURS["mixed"]],
        "activity": [plot.COLOURS[k] for k in ("forward", "backward", "communication", "waiting", "idle")],
        "memory": [plot.COLOURS[k] for k in ("parameters", "gradients", "optimizer", "activations", "buffers")],
    }[kind]
    seen = [lightness_and_opponents(np.clip(sight @ linear(colour), 0, 1)) for colour in together]
    # 5 is about twice the difference that is just seen side by side (CIE76: 2.3).
    nearest = min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2))
    assert nearest > 5


@pytest.mark.parametrize("colour", [*plot.RANK_COLOURS, plot.COLOURS["mixed"]])
def test_numbers_can_be_read_on_every_colour(colour):
    def luminance(name):
        return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(name))

    light, dark = sorted((luminance(colour), luminance(plot.ink_on(colour))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, level AA


def test_a_timeline_has_a_row_a_lane_and_joins_spans_of_one_kind_that_touch():
    held = [(0.0, 1e-3, "forward"), (1e-3, 2e-3, "forward"), (2e-3, 2e-3, "forward"), (2e-3, 5e-3, "backward")]
    sent = [(3e-3, 4e-3, "communication"), (4e-3, 6e-3, "communication")]
    assert plot.joined(held) == [(0.0, 2e-3, "forward"), (2e-3, 5e-3, "backward")]
    assert plot.joined(sent[::-1]) == sent  # every message counts
    ax = plot.timeline([("computes", held), ("network", sent)], "a step")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["computes", "network"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["forward", "backward", "communication"]
    assert ax.get_xlim()[1] == pytest.approx(6.06) and "ms" in ax.get_xlabel()
    widths = [path.vertices[:, 0].max() - path.vertices[:, 0].min() for c in ax.collections for path in c.get_paths()]
    assert widths == pytest.approx([2.0, 3.0, 1.0, 2.0])


def test_many_short_bars_of_a_timeline_are_not_all_edge():
    sent = [(at * 1e-6, (at + 1) * 1e-6, "communication") for at in range(50)] + [(1e-4, 1e-3, "communication")]
    (bars,) = plot.timeline([("network", sent)]).collections
    *short, long = bars.get_linewidths()
    assert max(short) < 0.2 < long
