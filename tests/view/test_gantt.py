"""The picture of a schedule shows its spans and counts, and nothing else: read back from the artists."""

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from labkit.schedule.classic import gpipe, interleaved, one_f_one_b
from labkit.schedule.dual import dual_pipe
from labkit.schedule.timing import play
from labkit.schedule.zero_bubble import zb_h1, zb_v
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
    assert ax.get_xlim() == (0, timing.time_s)
    assert ax.get_title() == f"{timing.schedule.name}, 8 microbatches"
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


MANY = [one_f_one_b(2, 4), one_f_one_b(8, 16), gpipe(4, 8), interleaved(4, 8, 2), interleaved(2, 4, 3), zb_h1(4, 8),
        zb_v(8, 8), zb_v(4, 8), dual_pipe(4, 16)]  # fmt: skip


@pytest.mark.parametrize("schedule", MANY, ids=lambda each: f"{each.name} {each.ranks} {each.microbatches}")
def test_beside_stands_what_each_rank_keeps_most_in_flight(schedule):
    timing = play(schedule)
    left, right = gantt.with_kept(timing, title="mine")
    # Counted anew, over time: an F of a stage is kept until its W is done.
    spans, most = timing.spans, []
    for rank in range(schedule.ranks):
        forward = [span for span in spans if span.rank == rank and span.action.kind == "F"]
        ends = {(span.action.stage, span.action.microbatch): span.end_s for span in spans if "W" in kinds(span)}
        lives = [(span.start_s, ends[span.action.stage, span.action.microbatch]) for span in forward]
        most.append(max(sum(start <= at < end for start, end in lives) for at, _ in lives))
    due = [count * schedule.ranks / schedule.num_stages for count in most]
    assert [bar.get_width() for bar in right.patches] == pytest.approx(due)
    assert [float(text.get_text()) for text in right.texts] == pytest.approx(due, rel=5e-3)
    assert [round(text.get_position()[1]) for text in right.texts] == list(range(schedule.ranks))
    assert left.get_title() == "mine" and left.get_ylim() == right.get_ylim()


def kinds(span):
    return [kind for kind, *_ in span.action.results]


def test_two_stages_a_rank_are_half_as_much_each():
    assert gantt.most_kept(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert gantt.most_kept(zb_v(4, 8)) == [4, 4, 4, 4]
    assert gantt.most_kept(interleaved(4, 8, 2))[0] == 5.5


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_everything_is_in_the_picture_and_nothing_covers_another(ranks, microbatches):
    left, right = gantt.with_kept(play(zb_h1(ranks, microbatches)))
    left.figure.canvas.draw()
    whole = left.figure.bbox
    title, legend, name = (each.get_window_extent() for each in (left.title, left.get_legend(), left.xaxis.label))
    for box in (title, legend, name, right.title.get_window_extent(), *(t.get_window_extent() for t in right.texts)):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
    assert legend.y1 <= name.y0 and name.y1 <= left.get_window_extent().y0 < left.get_window_extent().y1 <= title.y0
    assert right.get_window_extent().x0 >= left.get_window_extent().x1


def test_the_axis_counts_whole_units():
    ax = gantt.gantt(play(one_f_one_b(4, 4)))
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_a_number_that_does_not_fit_is_left_out():
    sizes = [text.get_fontsize() for text in gantt.gantt(play(one_f_one_b(8, 16))).texts]
    assert len(sizes) == 8 * 16 and min(sizes) >= gantt.READABLE_PT, "of each F and B, the B"
    assert not gantt.gantt(play(one_f_one_b(2, 80))).texts


def test_an_axes_that_is_given_is_drawn_on():
    _, ax = plt.subplots()
    assert gantt.gantt(play(one_f_one_b(2, 2)), unit="ms", ax=ax) is ax and ax.get_xlabel() == "time (ms)"
