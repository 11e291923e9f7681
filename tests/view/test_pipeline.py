"""The pipeline explorer: what is drawn is the schedule played, and theory; moved as drawn afresh."""

import pytest
from matplotlib.colors import to_hex

from labkit.schedule import theory
from labkit.schedule.classic import gpipe, one_f_one_b
from labkit.schedule.zero_bubble import zb_v
from labkit.view import lanes, pipeline
from labkit.view.plot import COLOURS, ink_on


@pytest.fixture
def made(monkeypatch):
    """An explorer and the two Axes of its picture."""
    kept, original = {}, pipeline._picture

    def watched():
        kept["figure"], update = original()
        return kept["figure"], update

    monkeypatch.setattr(pipeline, "_picture", watched)
    found = pipeline.pipeline()
    return found, *kept["figure"].axes


def bars(ax):
    """(lane, left, right) of the actions' bars, in order."""
    boxes = [path.get_extents() for path in ax.collections[1].get_paths()]
    return [(round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in boxes]


@pytest.mark.parametrize(
    "name, setting",
    [("ZB-V", (2, 6, 2, 3.0)), ("interleaved", (4, 8, 3, 2.0)), ("GPipe", (8, 24, 1, 1.0))],
)
def test_bars_are_the_spans_of_the_schedule(made, name, setting):
    found, left, right = made
    values = dict(zip(("name", "ranks", "microbatches", "chunks", "ratio"), (name, *setting), strict=True))
    for key, value in values.items():
        found.controls[key].value = value
    timing = pipeline.played(**values)
    assert [lane for lane, *_ in bars(left)] == [span.rank for span in timing.spans]
    for (_, start, end), span in zip(bars(left), timing.spans, strict=True):
        assert (start, end) == pytest.approx((span.start_s, span.end_s))
    assert left.get_xlim() == pytest.approx((0, timing.time_s))
    assert [line.get_xdata()[0] for line in left.get_lines() if line.get_linestyle() == "--"] == [1.0]
    widths = [bar.get_width() for bar in right.patches if bar.get_visible()]
    assert widths == pytest.approx(pipeline.most_kept(timing.schedule))
    told = [(text.get_position()[1], float(text.get_text())) for text in right.texts if text.get_text()]
    assert told == [(rank, pytest.approx(width, rel=5e-3)) for rank, width in enumerate(widths)]
    title = left.figure._suptitle.get_text()
    assert title.startswith(f"{timing.schedule.name}: p = {values['ranks']}, m = {timing.schedule.microbatches}")
    assert f"idle {timing.idle_share:.1%} of all time, which is {timing.time_s - 1:.1%} on top of the work" in title


@pytest.mark.parametrize("ratio", pipeline.RATIOS)
def test_idle_shares_are_those_of_theory_at_any_ratio(ratio):
    for name in ("GPipe", "1F1B"):
        timing = pipeline.played(name, 4, 8, 1, ratio)
        assert timing.idle_share == pytest.approx(theory.idle_share(4, 8))
        assert timing.time_s == pytest.approx(1 + theory.overhead(4, 8)), "a rank's own work is the unit"
    assert pipeline.played("interleaved", 4, 8, 2, ratio).idle_share == pytest.approx(theory.idle_share(4, 8, 2))
    if ratio <= 2:  # W no longer than F
        idle = theory.zb_h1_idle_s(4, 1, ratio / 2, ratio / 2) / (8 * (1 + ratio))
        assert pipeline.played("ZB-H1", 4, 8, 1, ratio).time_s == pytest.approx(1 + idle)


def test_gpipe_keeps_all_microbatches_and_1f1b_as_many_as_ranks_follow():
    assert pipeline.most_kept(gpipe(4, 8)) == [8, 8, 8, 8]
    assert pipeline.most_kept(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert max(pipeline.most_kept(zb_v(4, 8))) == 4


def test_a_schedule_is_chosen_by_the_name_that_it_shows(made):
    found, left, _ = made
    assert list(found.controls["name"].options) == list(pipeline.NAMES)
    for name in pipeline.NAMES:
        found.controls["name"].value = name
        assert left.figure._suptitle.get_text().startswith(f"{name}: p = 4")


def test_interleaved_takes_the_next_multiple_of_the_ranks(made):
    found, left, _ = made
    found.controls["name"].value = "interleaved"
    found.controls["microbatches"].value = 6
    assert "m = 8 (not 6: multiples of p alone), 2 stages a rank" in left.figure._suptitle.get_text()
    found.controls["microbatches"].value = 8
    assert "m = 8, 2 stages a rank" in left.figure._suptitle.get_text()


def test_a_ranks_further_stages_are_paler():
    timing = pipeline.played("interleaved", 2, 2, 2, 2.0)
    colours = lanes.colours_of(timing.schedule, timing.spans)
    first = {colour for colour, span in zip(colours, timing.spans, strict=True) if span.action.stage < 2}
    assert first == {COLOURS["forward"], COLOURS["backward"]} and len(set(colours)) == 4


def test_a_picture_that_was_moved_is_the_same_as_one_drawn_afresh(made):
    found = made[0]
    first = found.image.value
    found.controls["name"].value = "ZB-H1"
    assert found.image.value != first
    assert found.image.value == pipeline.pipeline(name="ZB-H1").image.value
    found.controls["name"].value = "1F1B"
    assert found.image.value == first


def numbers(ax):
    """(lane, middle, microbatch, colour) of what is written into the bars, read back from the outlines."""
    (written,) = [each for each in ax.collections if each.get_gid() == "numbers"]
    known = {lanes._outline(str(number)).vertices.tobytes(): number for number in range(100)}
    found = [known[path.vertices.tobytes()] for path in written.get_paths()]
    inks = map(to_hex, written.get_facecolors())
    return [(y, x, number, ink) for (x, y), number, ink in zip(written.get_offsets(), found, inks, strict=False)]


def test_bars_carry_the_number_of_their_microbatch_in_the_ink_that_is_read_best(made):
    found, left, _ = made
    for name, microbatches in (("1F1B", 8), ("ZB-V", 8), ("GPipe", 24)):
        found.controls["name"].value, found.controls["microbatches"].value = name, microbatches
        timing = pipeline.played(**found.values)
        inks = [ink_on(colour).lower() for colour in lanes.colours_of(timing.schedule, timing.spans)]
        middles = [pytest.approx((s.start_s + s.end_s) / 2) for s in timing.spans]
        due = [(s.rank, at, s.action.microbatch, ink) for s, at, ink in zip(timing.spans, middles, inks, strict=True)]
        wide = left.bbox.width / timing.time_s / left.figure.dpi
        needs = {s: len(str(s.action.microbatch)) * lanes.DIGIT_IN + 2 * lanes.BESIDE_IN for s in timing.spans}
        fits = [wide * (s.end_s - s.start_s) > needs[s] for s in timing.spans]
        assert len(due) - sum(fits) == {"GPipe": 4 * 14}.get(name, 0), "of the narrow F, those with two digits"
        assert numbers(left) == [each for each, fit in zip(due, fits, strict=True) if fit]


def test_a_number_is_no_wider_than_is_reckoned():
    for number in range(100):
        box = lanes._outline(str(number)).get_extents()
        assert box.width <= len(str(number)) * lanes.DIGIT_IN and box.height <= lanes.NUMBER_IN
        assert (box.x0 + box.x1, box.y0 + box.y1) == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.parametrize("ranks", pipeline.RANKS)
def test_title_legend_and_labels_are_whole_and_apart(made, ranks):
    found, left, right = made
    for name, microbatches, ratio in (("interleaved", 24, 3.0), ("ZB-V", 1, 1.0)):
        found.controls["ranks"].value, found.controls["chunks"].value, found.controls["ratio"].value = ranks, 3, ratio
        found.controls["name"].value, found.controls["microbatches"].value = name, microbatches
        whole = left.figure.bbox
        title, legend = left.figure._suptitle.get_window_extent(), left.get_legend().get_window_extent()
        ticks = [label.get_window_extent() for label in left.get_yticklabels()]
        counts = [text.get_window_extent() for text in right.texts if text.get_text()]
        for box in (title, legend, *ticks, *counts, right.title.get_window_extent()):
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
        assert title.y0 >= legend.y1 and legend.y0 >= left.get_window_extent().y1
        assert title.y0 >= right.title.get_window_extent().y1
        assert len(ticks) == len(counts) == ranks


def test_it_shows_itself_without_widgets_too(made):
    bundle = made[0]._repr_mimebundle_()
    assert bundle["image/png"] and "application/vnd.jupyter.widget-view+json" in bundle
