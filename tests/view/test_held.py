"""Pictures of bytes held: every area, bar and figure is what the record's list says."""

import matplotlib.pyplot as plt
import pytest

from labkit.record.held import KINDS, Held, Owner
from labkit.view.held import KIND_LOOKS, over_time, owners, unit_of

MB = 1_000_000


def by_hand():
    """Parameters 4 MB all the time; activations up to 6 MB, which is the peak at 2 ms; a gradient at the end."""
    by_kind = {kind: (0, 0, 0, 0) for kind in KINDS}
    by_kind |= {"parameter": (4 * MB,) * 4, "activation": (0, 3 * MB, 6 * MB, 0), "gradient": (0, 0, 0, 4 * MB),
                "temporary": (0, 1000, 0, 0)}  # fmt: skip
    at = [{kind: line[i] for kind, line in by_kind.items()} for i in range(4)]
    return Held((0.0, 0.001, 0.002, 0.004), by_kind, at[0], at[3], at[2], 10 * MB, 0.002)


def at_the_peak(ax):
    """Per area, (bottom, top) in MB from 2 ms on."""
    found = {}
    for area in ax.collections:
        ys = [y for x, y in area.get_paths()[0].vertices if x > 2.0]
        found[area.get_label()] = min(ys), max(ys)
    return found


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_every_kind_has_a_look_and_no_two_the_same():
    assert set(KIND_LOOKS) == set(KINDS)
    assert len({colour for _, colour in KIND_LOOKS.values()}) == len({word for word, _ in KIND_LOOKS.values()}) == 7


def test_areas_are_the_bytes_and_the_dashed_line_is_the_peak():
    ax = over_time(by_hand(), "a step")
    areas = at_the_peak(ax)
    assert areas["parameters"] == (0, 4) and areas["activations"][1] == 10
    (line,) = ax.lines
    assert list(line.get_xdata()) == [2.0, 2.0] and line.get_linestyle() == "--"
    assert [text.get_text() for text in ax.texts] == ["peak 10 MB"]
    assert ax.get_ylabel() == "bytes held (MB)" and ax.get_xlabel() == "time (ms)" and ax.get_title() == "a step"
    assert ax.get_ylim()[1] > 10


def test_areas_are_steps_not_slopes():
    ax = over_time(by_hand())
    area = next(each for each in ax.collections if each.get_label() == "activations")
    corners = [tuple(corner) for corner in area.get_paths()[0].vertices]
    assert (1.0, 4.0) in corners and (1.0, 7.0) in corners and (2.0, 7.0) in corners and (2.0, 10.0) in corners


def test_the_legend_names_what_can_be_seen_from_the_top_down():
    ax = over_time(by_hand())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["activations", "gradients", "parameters"]


def test_an_empty_record_is_drawn_too():
    none = dict.fromkeys(KINDS, 0)
    ax = over_time(Held((0.0,), {kind: (0,) for kind in KINDS}, none, none, none, 0, 0.0))
    assert ax.get_ylabel() == "bytes held (B)" and not ax.collections
    assert not owners(()).patches


def test_a_given_axes_is_used():
    _, (left, right) = plt.subplots(1, 2)
    assert over_time(by_hand(), ax=left) is left and owners(ROWS, ax=right) is right


ROWS = (
    Owner("optimizer", "layers.0.mlp", "", "", 4 * MB, 3),
    Owner("activation", "layers.1", "aten.mul.Tensor", "/home/me/train.py:7", 2 * MB, 1),
    Owner("temporary", "", "aten.mm", "", MB // 2, 1),
)


def test_bars_are_the_owners_the_largest_on_top():
    ax = owners(ROWS)
    assert [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in ax.patches] == [(0, 4), (1, 2), (2, 0.5)]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["layers.0.mlp", "layers.1", "(no module)"]
    said = [text.get_text().strip() for text in ax.texts]
    assert said == ["4 MB, 3 tensors", "2 MB  mul at train.py, line 7", "0.5 MB  mm"]
    assert ax.get_xlabel() == "bytes at the peak (MB)"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["optimizer", "activations", "temporary"]


def test_no_more_bars_than_asked_for():
    assert len(owners(ROWS, most=2).patches) == 2


@pytest.mark.parametrize(
    ("num_bytes", "unit"), [(0, "B"), (999, "B"), (1000, "kB"), (2_500_000, "MB"), (1e9, "GB"), (3e12, "TB")]
)
def test_units_are_powers_of_a_thousand(num_bytes, unit):
    assert unit_of(num_bytes)[0] == unit
