"""The pipeline explorer: what is drawn is the schedule played, and theory; moved as drawn afresh."""

import pytest

from labkit.schedule import theory
from labkit.schedule.classic import one_f_one_b
from labkit.view import lanes, pipeline
from labkit.view.plot import COLOURS


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
    widths = [bar.get_width() for bar in right.patches if bar.get_visible()]
    assert widths == pytest.approx(pipeline.most_kept(timing))
    assert f"idle {timing.idle_share:.1%}" in left.figure._suptitle.get_text()
    numbers = [text.get_text() for text in left.texts if text.get_visible() and text.get_text()]
    due = [str(span.action.microbatch) for span in timing.spans]
    assert numbers == (due if len(due) <= lanes.NUMBERED else [])


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
    assert pipeline.most_kept(pipeline.played("GPipe", 4, 8, 1, 2.0)) == [8, 8, 8, 8]
    assert pipeline.most_kept(pipeline.played("1F1B", 4, 8, 1, 2.0)) == [4, 3, 2, 1]
    assert max(pipeline.most_kept(pipeline.played("ZB-V", 4, 8, 1, 2.0))) == 4


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


def test_1f1bs_bars_carry_the_number_of_their_microbatch(made):
    _, left, _ = made
    shown = [text.get_text() for text in left.texts if text.get_visible() and text.get_text()]
    assert shown == [str(action.microbatch) for own in one_f_one_b(4, 8).actions for action in own]


def test_it_shows_itself_without_widgets_too(made):
    bundle = made[0]._repr_mimebundle_()
    assert bundle["image/png"] and "application/vnd.jupyter.widget-view+json" in bundle
