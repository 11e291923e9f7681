"""The ZeRO explorer: bars are the textbook's bytes and elements, for any setting; moved as drawn afresh."""

import io

import matplotlib.pyplot as plt
import pytest

from labkit.cost.shapes import parameters
from labkit.view import zero


@pytest.fixture
def made(monkeypatch):
    """An explorer and the two Axes of its picture."""
    kept, original = {}, zero._picture

    def watched():
        kept["figure"], update = original()
        return kept["figure"], update

    monkeypatch.setattr(zero, "_picture", watched)
    found = zero.zero()
    return found, *kept["figure"].axes


def heights(ax):
    """{label: heights of its four bars}."""
    return {container.get_label(): [bar.get_height() for bar in container] for container in ax.containers}


def by_textbook(ranks, size, microbatches):
    """(bytes kept, elements sent) per parameter by stage, as in ZeRO's sections 5 and 7."""
    optimizer = 8 if size == 4 else 12
    kept = [
        (size, size, optimizer),
        (size, size, optimizer / ranks),
        (size, size / ranks, optimizer / ranks),
        (size / ranks, size / ranks, optimizer / ranks),
    ]
    share = (ranks - 1) / ranks
    sent = [2 * share, 2 * share, (microbatches + 1) * share, 3 * microbatches * share]
    return kept, sent


@pytest.mark.parametrize(
    ("ranks", "precision", "k"), [(2, "fp32", 1), (8, "bf16", 4), (64, "bf16", 8), (256, "fp32", 2)]
)
def test_bars_are_the_textbooks(made, ranks, precision, k):
    found, left, right = made
    for name, value in {"ranks": ranks, "precision": precision, "microbatches": k, "bucket": 10**5}.items():
        found.controls[name].value = value
    kept, sent = by_textbook(ranks, 4 if precision == "fp32" else 2, k)
    drawn = heights(left)
    for stage in range(4):
        got = [drawn[kind][stage] for kind in ("parameters", "gradients", "optimizer")]
        assert got == pytest.approx(kept[stage], rel=1e-3)
        assert sum(bars[stage] for bars in heights(right).values()) == pytest.approx(sent[stage], rel=1e-6)


def test_a_bucket_has_its_elements_whatever_the_model_under_deepspeed(made):
    found, left, _ = made
    for name, value in {"convention": "deepspeed", "bucket": 10**7, "ranks": 8}.items():
        found.controls[name].value = value
    count = parameters(zero.shape_of(zero.OURS))
    stages = zero.stages(zero.OURS, 8, "fp32", "deepspeed", 10**7, 1)
    for stage in (1, 2, 3):
        assert stages[stage].kept["buffers"] == pytest.approx(4 * 10**7 / count)
    assert heights(left)["buffers"][2] == pytest.approx(4 * 10**7 / count)


def test_what_is_beyond_the_axis_is_cut_and_said(made):
    found, left, _ = made
    for name, value in {"convention": "deepspeed", "bucket": 5 * 10**8}.items():
        found.controls[name].value = value
    tops = [sum(heights(left)[kind][stage] for kind in zero.KINDS) for stage in range(4)]
    assert max(tops) == pytest.approx(zero.MOST_BYTES)
    total = sum(zero.stages(zero.OURS, 4, "fp32", "deepspeed", 5 * 10**8, 1)[2].kept.values())
    told = [text.get_text() for text in left.texts]
    assert told[2].endswith("\N{UPWARDS ARROW}") and float(told[2].split()[0]) == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("microbatches", zero.MICROBATCHES)
def test_what_is_sent_fits_its_own_axis_and_fills_most_of_it(made, microbatches):
    found, _, right = made
    found.controls["microbatches"].value = microbatches
    found.controls["ranks"].value = zero.RANKS[-1]
    tops = [sum(bars[stage] for bars in heights(right).values()) for stage in range(4)]
    low, high = right.get_ylim()
    assert low == 0 and 0.9 * high < max(tops) == pytest.approx(sum(by_textbook(1024, 4, microbatches)[1][3:]))
    assert not any("\N{UPWARDS ARROW}" in text.get_text() for text in right.texts)


def test_bars_of_a_stage_stand_on_one_another(made):
    _, left, _ = made
    for stage in range(4):
        bars = [container[stage] for container in left.containers]
        tops = [bar.get_y() + bar.get_height() for bar in bars]
        assert [bar.get_y() for bar in bars[1:]] == pytest.approx(tops[:-1])


def test_our_model_is_the_one_that_the_lab_records():
    from labkit.labs.lab04 import recorded

    assert parameters(zero.shape_of(zero.OURS)) == sum(p.numel() for p in recorded.model().parameters())


def test_a_move_is_the_picture_drawn_afresh():
    state = {"model": "gpt2", "ranks": 64, "precision": "bf16", "bucket": 10**7, "microbatches": 4}
    moved, afresh = zero.zero(), zero.zero(**state)
    for name, value in state.items():
        moved.controls[name].value = value
    one, other = (plt.imread(io.BytesIO(bytes(found.image.value))) for found in (moved, afresh))
    assert one.shape == other.shape and (one == other).all()


def test_every_setting_can_be_drawn():
    for model in zero.MODELS:
        for convention in ("zero", "deepspeed"):
            found = zero.stages(model, 2, "bf16", convention, zero.BUCKETS[0], zero.MICROBATCHES[-1])
            assert max(sum(stage.sent.values()) for stage in found) <= zero.MOST_SENT * zero.MICROBATCHES[-1]
            assert all(value >= 0 for stage in found for value in stage.kept.values())


def test_every_control_has_a_label_and_takes_the_keyboard(made):
    controls = made[0].controls
    assert {type(control).__name__ for control in controls.values()} == {"Dropdown", "SelectionSlider"}
    assert all(control.description for control in controls.values())
    assert "image/png" in made[0]._repr_mimebundle_()


def test_stacked_bars_say_their_sums():
    ax = zero.stacked(["one", "two"], {"parameters": [1.0, 2.0], "optimizer": [3.0, 0.5]}, "GB", "title")
    assert [text.get_text() for text in ax.texts] == ["4", "2.5"]
    assert [bar.get_y() for bar in ax.containers[1]] == [1.0, 2.0]
    plt.close(ax.figure)
