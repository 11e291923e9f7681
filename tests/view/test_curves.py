"""Curves and bars: what is drawn is what was given, in words that are right."""

import matplotlib.pyplot as plt
import pytest

from labkit.view import curves
from labkit.view.plot import RANK_COLOURS


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(1, "1 B"), (1000, "1000 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (2**35, "32 GiB")],
)
def test_sizes_are_in_powers_of_two(num_bytes, words):
    assert curves.as_size(num_bytes) == words


@pytest.mark.parametrize(
    ("time_s", "words"),
    [
        (2.5, "2.5 s"),
        (0.00125, "1.25 ms"),
        (19.08e-6, "19.1 \N{MICRO SIGN}s"),
        (1e-3, "1 ms"),
        (0.99999e-3, "1 ms"),
        (5e-9, "5 ns"),
    ],
)
def test_times_have_three_digits_and_the_unit_that_fits(time_s, words):
    assert curves.as_time(time_s) == words


@pytest.mark.parametrize("draw", [curves.times, curves.bandwidths])
def test_curves_are_drawn_as_given_on_two_logarithmic_axes(draw):
    given = [
        curves.Curve("computed", (1024, 2**20), (1e-5, 1e-3)),
        curves.Curve("measured", (2048,), (2e-5,), "points", 3),
        curves.Curve("compared", (1024,), (3e-5,), "dashed", 3),
    ]
    ax = draw(given, "a title")
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()]
    assert drawn == [(list(curve.sizes), list(curve.values)) for curve in given]
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_title()) == ("log", "log", "a title")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["computed", "measured", "compared"]
    assert ax.get_lines()[1].get_color() == ax.get_lines()[2].get_color() == RANK_COLOURS[3]
    assert "S" in ax.get_xlabel() and ax.get_ylabel()


def test_bandwidth_is_shown_in_gigabytes():
    ax = curves.bandwidths([curves.Curve("", (1024,), (2.5e9,))])
    assert ax.yaxis.get_major_formatter()(2.5e9, 0) == "2.5" and "GB/s" in ax.get_ylabel()


def test_bars_carry_their_numbers_and_the_axis_its_unit():
    ax = curves.bars([("star", [3, 1]), ("ring", [1.5, 1.5])], ["rank 0", "rank 1"], "tensors")
    assert [bar.get_height() for bar in ax.patches] == [3, 1, 1.5, 1.5]
    assert sorted(text.get_text() for text in ax.texts) == ["1", "1.5", "1.5", "3"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["rank 0", "rank 1"]
    assert ax.get_ylabel() == "tensors"
    lefts = [bar.get_x() for bar in ax.patches]
    assert len(set(lefts)) == 4  # none covers another


def test_a_limit_has_its_label_and_strikes_no_number_through():
    ax = curves.bars([("", [3, 1])], ["a", "b"], "kB")
    curves.limit(ax, 2.5, "budget 2.5 kB", at=1)
    (line,) = ax.get_lines()
    *numbers, label = ax.texts
    assert set(line.get_ydata()) == {2.5} and label.get_position() == (1, 2.5) and label.get_text() == "budget 2.5 kB"
    assert all(number.get_zorder() > line.get_zorder() and number.get_bbox_patch() for number in numbers)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (2.2e-5, "0.000022"), (1.234e-7, "0.000000123"), (0.5, "0.5"), (282.3, "282"), (5_131_000, "5130000"),
     (-1500, "-1500"), (1e-12, "1e-12")],
)  # fmt: skip
def test_numbers_are_told_without_an_exponent(value, words):
    assert curves.as_number(value) == words
    assert curves.bars([("", [value])], ["x"], "").texts[0].get_text() == words


def test_counts_that_double_have_a_tick_each_at_equal_distances():
    ax = curves.lines([("", (1, 2, 4, 64), (1, 2, 3, 4), "line")], "ranks", "speed")
    curves.doubling_axis(ax, (1, 2, 4, 64))
    assert ax.get_xscale() == "log" and list(ax.get_xticks()) == [1, 2, 4, 64] and not len(ax.get_xticks(minor=True))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2", "4", "64"]


def test_more_series_than_colours_are_drawn():
    ax = curves.bars([(f"series {i}", [1]) for i in range(10)], ["all"], "tensors")
    assert len(ax.patches) == 10


def test_a_plot_draws_on_the_axes_it_is_given():
    _, ax = plt.subplots()
    one = [curves.Curve("", (1024,), (1.0,))]
    assert curves.times(one, ax=ax) is curves.bandwidths(one, ax=ax) is curves.bars([("", [1])], ["x"], "", ax=ax) is ax
    assert len(plt.get_fignums()) == 1


def test_marks_at_the_top_are_not_cut_and_zero_is_there_only_where_wanted():
    steep = [("", range(3), [22.0, 23.0, 24.0], "points")]
    ax = curves.lines(steep, "step", "log2")
    assert ax.get_ylim() == (0, pytest.approx(24 * 1.08))
    ax = curves.lines(steep, "step", "log2", from_zero=False)
    assert ax.get_ylim() == (pytest.approx(22 - 0.16), pytest.approx(24 + 0.16))
    ax = curves.lines([("", range(2), [-1.0, 1.0], "line")], "step", "change")
    assert ax.get_ylim() == (pytest.approx(-1.16), pytest.approx(1.16))


@pytest.mark.parametrize(("values", "limits"), [([5.0, 5.0], (4.5, 5.5)), ([], (-0.08, 1.08))])
def test_lines_without_a_range_have_an_axis_all_the_same(values, limits):
    ax = curves.lines([("", range(len(values)), values, "line")], "step", "loss", from_zero=False)
    assert ax.get_ylim() == pytest.approx(limits)


def test_lines_over_anything_begin_at_zero_and_name_their_axes():
    ax = curves.lines([("a", [0, 1], [3.0, 2.0], "line"), ("", [0, 1], [1.0, 4.0], "dashed")], "step", "loss", "t")
    first, second = ax.get_lines()
    assert list(first.get_ydata()) == [3.0, 2.0] and second.get_linestyle() == "--"
    assert ax.get_ylim()[0] == 0 and (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("step", "loss", "t")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a"]
