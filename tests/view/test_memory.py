"""The memory explorer: bars are the estimate's bytes and the record's, for any setting; moved as drawn afresh."""

import io
import itertools

import matplotlib.pyplot as plt
import pytest

from labkit.cost import estimate, hardware
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.labs.lab03.recorded import Step
from labkit.view import memory

SIZES = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 344}
SEEN = {"parameters": 3_000, "gradients": 3_000, "optimizer": 6_000, "activations": 9_000, "buffers": 0}


class Recorded(Step):
    """A step whose record says SEEN."""

    parts = SEEN


@pytest.fixture
def made(monkeypatch):
    """An explorer with a recorded step, and the Axes of its picture."""
    kept, original = {}, memory._picture

    def watched():
        kept["figure"], draw = original()
        return kept["figure"], draw

    monkeypatch.setattr(memory, "_picture", watched)
    step = Recorded(None, {}, 791_680, 4, 128, "none", SIZES)
    return memory.memory(step), kept["figure"].axes[0]


def widths(ax, row):
    """Part -> (left, width) of the bars of a row."""
    bars = [bar for bar in ax.patches if abs(bar.get_y() + 0.36 - row) < 1e-9]
    return {bar.get_label(): (bar.get_x(), bar.get_width()) for bar in bars}


def device_at(ax):
    return next(line for line in ax.get_lines() if line.get_linestyle() == "--").get_xdata()[0]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dp": 8, "zero": 3, "micro_batch": 4, "recompute": "full"},
        {"tp": 8, "pp": 4, "precision": "fp16", "seq": 8192},
        {"dp": 64, "zero": 2, "offload": "optimizer", "activations": "eager"},
    ],
)
def test_bars_are_the_estimates_bytes_to_one_scale_with_the_device(made, how):
    found, ax = made
    for name, value in how.items():
        found.controls[name].value = value
    layout = Layout(**({"seq": 4096, "microbatches": how.get("pp", 1)} | how))
    due = estimate.estimate(named("llama-3.1-8b"), layout, "H100")
    sizes = {part: getattr(due.memory, part) for part in memory.PARTS[:-1]} | {"overheads": due.overheads.total}
    room = hardware.device("H100").memory_bytes
    scale = max(due.needed_bytes, room)
    left = 0.0
    for part, (begin, width) in widths(ax, 0).items():
        assert (begin, width) == (pytest.approx(left), pytest.approx(sizes[part] / scale))
        left += width
    assert left == pytest.approx(due.needed_bytes / scale)
    assert device_at(ax) == pytest.approx(room / scale)
    words = ax.get_title()
    assert ("fits, " in words) == due.fits and ("too much" in words) != due.fits
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts[2] == f"optimizer {memory._size(sizes['optimizer'])}"


def test_the_recorded_model_has_its_record_below(made):
    found, ax = made
    setting = {"model": memory.RECORDED, "micro_batch": 4, "seq": 128, "precision": "fp32", "activations": "eager"}
    for name, value in setting.items():
        found.controls[name].value = value
    formula, seen = widths(ax, 0), widths(ax, 1)
    assert formula["overheads"][1] == 0.0
    share = seen["activations"][1] / SEEN["activations"]
    for part, size in SEEN.items():
        assert seen[part][1] == pytest.approx(share * size)
    assert ax.get_legend().get_texts()[0].get_text().endswith("; recorded 2.93 KiB")
    found.controls["micro_batch"].value = 8
    assert all(width == 0 for _, width in widths(ax, 1).values())
    told = next(text.get_text() for text in ax.texts if text.get_text().startswith("recorded: choose"))
    for words in (f"model {memory.RECORDED!r}", "microbatch 4", "sequence 128", "fp32", "recompute none"):
        assert words in told


def test_own_sizes_are_a_llama_of_these(made):
    found, ax = made
    found.controls["model"].value = memory.OWN
    for name, value in {"hidden": 2048, "heads": 16, "kv_heads": 16, "layers": 16, "vocab": 32000}.items():
        found.controls[name].value = value
    shape = memory.shape_of(memory.OWN, None, 16, 2048, 16, 32000, 16)
    assert (shape.head_dim, shape.ffn % 128, shape.kv_heads) == (128, 0, 16)
    due = estimate.estimate(shape, Layout(seq=4096), "H100")
    scale = max(due.needed_bytes, hardware.device("H100").memory_bytes)
    assert widths(ax, 0)["parameters"][1] == pytest.approx(due.memory.parameters / scale)


def test_what_cannot_be_is_said_in_the_title(made):
    found, ax = made
    found.controls["offload"].value = "parameters"
    assert "offload of parameters needs ZeRO stage 3" in ax.get_title()
    assert all(width == 0 for _, width in widths(ax, 0).values())
    found.controls["offload"].value = "none"
    found.controls["model"].value = memory.OWN
    found.controls["kv_heads"].value = 64
    assert "kv heads do not divide" in ax.get_title()


def test_every_model_and_device_draws_within_the_axes(made):
    found, ax = made
    for model, device in itertools.product(memory.MODELS, ("T4", "H200")):
        found.controls["model"].value, found.controls["device"].value = model, device
        left, width = widths(ax, 0)["overheads"]
        assert left + width <= 1.0 + 1e-9 or not width


def test_a_move_is_the_picture_drawn_afresh():
    state = {"model": "qwen3-32b", "device": "A100-80", "dp": 16, "zero": 1, "micro_batch": 2}
    moved, afresh = memory.memory(), memory.memory(**state)
    for name, value in state.items():
        moved.controls[name].value = value
    one, other = (plt.imread(io.BytesIO(bytes(found.image.value))) for found in (moved, afresh))
    assert one.shape == other.shape and (one == other).all()


def test_every_control_has_a_label_and_takes_the_keyboard(made):
    controls = made[0].controls
    assert {type(control).__name__ for control in controls.values()} == {"Dropdown", "SelectionSlider"}
    assert all(control.description for control in controls.values())
    assert "image/png" in made[0]._repr_mimebundle_()


def test_stacked_bars_are_the_bytes_and_say_them():
    parts = [{"parameters": 2e9, "gradients": 2e9, "optimizer": 12e9}, {"parameters": 4e9, "optimizer": 0.1e9}]
    ax = memory.stacked(parts, ["one", "other"], "states")
    heights = [(round(bar.get_x() + 0.35), bar.get_y(), bar.get_height()) for bar in ax.patches if bar.get_height()]
    assert heights == [(0, 0.0, 2.0), (0, 2.0, 2.0), (0, 4.0, 12.0), (1, 0.0, 4.0), (1, 4.0, pytest.approx(0.1))]
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["2", "2", "12", "16", "4", "4.1"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["optimizer", "gradients", "parameters"]
    plt.close(ax.figure)
