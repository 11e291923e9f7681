"""Explorers: every number in a picture is the one that the formulas give, and controls change the picture in place.

The formulas are written out here by hand, from the textbook, not taken from `labkit.cost.comm`.
"""

import base64
import io
import math
import re
import threading

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from labkit.cost.parts import Link
from labkit.labs.lab01 import Sweep
from labkit.view import explore

PNG = b"\x89PNG\r\n\x1a\n"
NVLINK_4, CALL_S = (0.6e-6, 450e9), 6.6e-6
ETHERNET_10 = (20e-6, 1.25e9)
SWEEPS = (
    Sweep("all_reduce", 2, (1024, 4096), ((3e-4, 1e-4, 2e-4), (4e-4, 6e-4, 5e-4))),
    Sweep("all_reduce", 4, (1024,), ((9e-4,),)),
    Sweep("all_gather", 4, (2048,), ((7e-4,),)),
)


@pytest.fixture
def made(monkeypatch):
    """An explorer with two sweeps, and the Axes of its picture."""
    kept, original = {}, explore._collectives_picture

    def watched(*args):
        kept["figure"], update = original(*args)
        return kept["figure"], update

    monkeypatch.setattr(explore, "_collectives_picture", watched)
    found = explore.collectives(SWEEPS, per_node=8, nodes=1, within="NVLink 4")
    return found, kept["figure"].axes[0]


def line(ax, name):
    """(sizes, values, width) of the artist that the legend calls `name`."""
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    artist = ax.get_lines()[texts.index(name)]
    return list(artist.get_xdata()), list(artist.get_ydata()), artist.get_linewidth()


def marked(ax):
    """Where the mark stands: (size, time)."""
    mark = next(one for one in ax.get_lines() if one.get_marker() == "o" and one.get_markersize() == 9)
    return mark.get_xdata()[0], mark.get_ydata()[0]


def test_the_ring_in_a_node_is_the_textbooks(made):
    found, ax = made
    sizes, values, _ = line(ax, "ring")
    alpha_s, bandwidth = NVLINK_4
    assert sizes == [2**power for power in range(10, 31)]
    due = [CALL_S + 14 * alpha_s + 14 / 8 * size / bandwidth for size in sizes]
    assert values == pytest.approx(due, rel=1e-12)
    assert marked(ax) == (2**20, pytest.approx(CALL_S + 14 * alpha_s + 14 / 8 * 2**20 / bandwidth))


def test_the_tree_between_nodes_is_the_textbooks(made):
    found, ax = made
    for name, value in {"nodes": 16, "per_node": 1, "between": "10 GbE", "algorithm": "tree"}.items():
        found.controls[name].value = value
    alpha_s, bandwidth = ETHERNET_10
    sizes, values, width = line(ax, "tree")
    # Up and down a binary tree of 16: 2 log2 16 messages one after another, twice the tensor through a port.
    assert values == pytest.approx([CALL_S + 8 * alpha_s + 2 * size / bandwidth for size in sizes], rel=1e-12)
    assert width > line(ax, "ring")[2]
    ring_s = CALL_S + 30 * alpha_s + 30 / 16 * 2**20 / bandwidth
    assert line(ax, "ring")[1][10] == pytest.approx(ring_s, rel=1e-12)


def test_a_ring_over_nodes_pays_for_the_slowest_wire_once(made):
    found, ax = made
    found.controls["nodes"].value, found.controls["between"].value = 2, "10 GbE"
    sizes, values, _ = line(ax, "ring")
    alpha_s = 28 * NVLINK_4[0] + 2 * ETHERNET_10[0]
    assert values == pytest.approx([CALL_S + alpha_s + 30 / 16 * size / 1.25e9 for size in sizes], rel=1e-12)


@pytest.mark.parametrize(
    ("op", "share", "name"),
    [
        ("all_gather", 7 / 8, "ring"),
        ("reduce_scatter", 7 / 8, "ring"),
        ("broadcast", 1.0, "ring"),
        ("reduce", 1.0, "ring"),
    ],
)
def test_every_collective_has_its_own_line(made, op, share, name):
    found, ax = made
    found.controls["op"].value = op
    sizes, values, _ = line(ax, name)
    alpha_s, bandwidth = NVLINK_4
    assert values == pytest.approx([CALL_S + 7 * alpha_s + share * size / bandwidth for size in sizes], rel=1e-12)


def test_all_to_all_is_direct_and_said_to_be(made):
    found, ax = made
    found.controls["op"].value = "all_to_all"
    sizes, values, _ = line(ax, "direct")
    due = [CALL_S + 7 * NVLINK_4[0] + 7 / 8 * size / NVLINK_4[1] for size in sizes]
    assert values == pytest.approx(due, rel=1e-12)
    assert all(math.isnan(value) for value in line(ax, "tree: not for this")[1])


def test_the_reading_says_time_busbw_and_share_of_latency(made):
    found, ax = made
    found.controls["size"].value = 2**24
    alpha_s, bandwidth = NVLINK_4
    latency_s = CALL_S + 14 * alpha_s
    time_s = latency_s + 14 / 8 * 2**24 / bandwidth
    told = ax.get_title()
    assert told.startswith("all_reduce, ring, 8 ranks, 16 MiB: ")
    assert float(re.search(r": ([\d.]+) \N{MICRO SIGN}s", told)[1]) == pytest.approx(time_s * 1e6, rel=5e-3)
    assert float(re.search(r"busbw ([\d.]+) GB/s", told)[1]) == pytest.approx(14 / 8 * 2**24 / time_s / 1e9, rel=5e-3)
    assert float(re.search(r"(\d+)% of the time", told)[1]) == pytest.approx(100 * latency_s / time_s, abs=0.5)


def test_ones_own_points_are_the_medians_of_the_chosen_collective(made):
    found, ax = made
    assert line(ax, "yours, 2 ranks")[:2] == ([1024, 4096], [2e-4, 5e-4])
    assert line(ax, "yours, 4 ranks")[:2] == ([1024], [9e-4])
    found.controls["op"].value = "all_gather"
    assert line(ax, "yours, 4 ranks")[:2] == ([2048], [7e-4])
    assert line(ax, "yours, 2 ranks: not measured")[:2] == ([], [])


def test_a_link_of_ones_own_comes_first_and_can_be_left():
    found = explore.collectives((), links=[Link("mine", 1e-3, 1e9)])
    assert found.values["within"] == "mine" and "NVLink 4" in found.controls["within"].options
    assert "1 MiB: 7.57 ms" in _title(found)  # 6 ms and 1.5 MiB at 1 GB/s


def _title(found):
    values = found.values
    group = explore.group_of(
        values["per_node"], values["nodes"], Link("mine", 1e-3, 1e9), explore.hardware.link(values["between"])
    )
    return explore.reading(values["op"], values["size"], values["algorithm"], group)


def test_one_rank_has_nothing_to_send(made):
    found, ax = made
    found.controls["per_node"].value = 1
    assert "nothing to send" in ax.get_title()
    assert all(math.isnan(value) for value in line(ax, "ring: not for this")[1])


def test_a_move_changes_the_picture_and_makes_no_new_artist(made):
    found, ax = made
    before, artists, other = bytes(found.image.value), list(ax.get_lines()), ax.figure
    found.controls["size"].value = 2**28
    after = bytes(found.image.value)
    assert before.startswith(PNG) and after.startswith(PNG) and after != before
    assert list(ax.get_lines()) == artists and ax.figure is other


def test_a_moved_picture_is_the_one_that_would_be_drawn_afresh():
    state = {"op": "all_to_all", "size": 2**14, "nodes": 8, "between": "10 GbE"}
    moved, afresh = explore.collectives(SWEEPS), explore.collectives(SWEEPS, **state)
    for name, value in state.items():
        moved.controls[name].value = value
    one, other = (plt.imread(io.BytesIO(bytes(found.image.value))) for found in (moved, afresh))
    assert one.shape == other.shape and (one == other).all()  # nothing of an earlier picture is left


def test_a_picture_without_moving_parts_is_drawn_whole():
    figure = Figure()
    text = figure.text(0.5, 0.5, "")
    slider = explore.slider("number", (1, 2), 1)
    found = explore.explorer({"number": slider}, figure, lambda number: text.set_text(str(number)))
    before = bytes(found.image.value)
    slider.value = 2
    assert bytes(found.image.value) != before


def test_moves_in_two_threads_are_drawn_one_after_the_other():
    """As in JupyterLab, whose second slider can be moved while the first is drawn: letters lay over letters."""
    both, met = threading.Barrier(2), []

    def update(a, b):
        if threading.current_thread() is not threading.main_thread():
            try:
                both.wait(timeout=0.5)
                met.append((a, b))
            except threading.BrokenBarrierError:
                both.reset()

    sliders = {name: explore.slider(name, (1, 2), 1) for name in "ab"}
    found = explore.explorer(sliders, Figure(), update)
    moves = [threading.Thread(target=setattr, args=(sliders[name], "value", 2)) for name in "ab"]
    for move in moves:
        move.start()
    for move in moves:
        move.join()
    assert met == [] and found.values == {"a": 2, "b": 2}


def test_without_widgets_the_default_picture_is_shown(made):
    found, _ = made
    kinds = found._repr_mimebundle_()
    assert base64.b64decode(kinds["image/png"]) == bytes(found.image.value)
    view = kinds["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == found.box.model_id and view["version_major"] == 2


def test_every_control_has_a_label_and_is_reached_by_keyboard(made):
    found, _ = made
    kinds = {type(control).__name__ for control in found.controls.values()}
    assert kinds == {"Dropdown", "SelectionSlider"}  # both take the focus, and the arrow keys
    labels = [control.description for control in found.controls.values()]
    assert all(labels) and len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 16  # 8.5 em hold 16 letters
    assert found.controls["size"].options[10] == ("1 MiB", 2**20)


def test_every_setting_gives_a_picture():
    update = explore._collectives_picture((), {})[1]
    for op in explore.OPS:
        for per_node in (1, 8):
            for nodes in (1, 64):
                for algorithm in explore.ALGORITHMS:
                    update(op, 2**10, per_node, nodes, "PCIe 3", "10 GbE", algorithm)
