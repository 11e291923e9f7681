"""The picture of a schedule shows its spans and counts, and nothing else: read back from the artists."""

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from labkit.schedule.actions import in_flight
from labkit.schedule.classic import one_f_one_b
from labkit.schedule.timing import play
from labkit.schedule.zero_bubble import zb_v
from labkit.view import gantt
from labkit.view.plot import COLOURS


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def bars(ax):
    """(lane, left, right, colour) of every bar with an edge: the actions."""
    found = [(round(b.get_y() + b.get_height() / 2), b.get_x(), b.get_x() + b.get_width(), to_hex(b.get_facecolor()))
             for b in ax.patches if b.get_linewidth() > 0]  # fmt: skip
    return sorted(found)


@pytest.mark.parametrize("make", [one_f_one_b, zb_v])
def test_bars_are_the_spans_and_numbers_the_microbatches(make):
    timing = play(make(4, 8))
    ax = gantt.gantt(timing)
    drawn = bars(ax)
    assert [bar[:3] for bar in drawn] == sorted((s.rank, s.start_s, s.end_s) for s in timing.spans)
    at = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in ax.texts}
    expected = {(s.rank, (s.start_s + s.end_s) / 2): str(s.action.microbatch) for s in timing.spans}
    assert at == expected
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told[-1] == f"idle, {timing.idle_share:.1%}" and len(told) == 1 + len({s.action.kind for s in timing.spans})


def test_kinds_have_the_colours_of_the_palette_and_a_ranks_second_stage_paler_ones():
    timing = play(zb_v(2, 4))
    colours = {}
    for span, (*_, colour) in zip(sorted(timing.spans, key=lambda s: (s.rank, s.start_s)), bars(gantt.gantt(timing)),
                                  strict=True):  # fmt: skip
        colours.setdefault((span.action.kind, span.action.stage >= 2), set()).add(colour.upper())
    assert colours["F", False] == {COLOURS["forward"]} and colours["W", False] == {COLOURS["gradients"]}
    assert all(len(found) == 1 for found in colours.values()) and len(set(map(tuple, colours.values()))) == 6
    assert gantt.paler("#000000", 0) == "#000000" and gantt.paler("#FFFFFF", 3) == "#FFFFFF"


def test_beside_stands_what_each_rank_keeps_most_in_flight():
    timing = play(one_f_one_b(4, 8))
    left, right = gantt.with_kept(timing, title="1F1B")
    most = [max(counts) for counts in in_flight(timing.schedule)]
    assert [bar.get_width() for bar in right.patches] == most == [4, 3, 2, 1]
    assert [text.get_text().strip() for text in right.texts] == list(map(str, most))
    assert left.get_title() == "1F1B" and left.get_ylim() == right.get_ylim()
    assert "of 2 stages a rank" in gantt.kept(play(zb_v(2, 4))).get_title()


def test_a_number_that_does_not_fit_is_left_out():
    assert not gantt.gantt(play(one_f_one_b(2, 200))).texts


def test_an_axes_that_is_given_is_drawn_on():
    _, ax = plt.subplots()
    assert gantt.gantt(play(one_f_one_b(2, 2)), unit="ms", ax=ax) is ax and ax.get_xlabel() == "time (ms)"
