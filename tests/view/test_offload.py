"""The offload explorer: what is drawn is what the arithmetic gives, for any setting; moved as drawn afresh."""

import pytest

from labkit.labs.lab05 import sweep
from labkit.labs.lab05.configurations import DRAM, NVME
from labkit.labs.lab05.stations import STATES
from labkit.view import offload


@pytest.fixture
def made(monkeypatch):
    """An explorer and the Axes of its picture."""
    kept, original = {}, offload._picture

    def watched():
        kept["figure"], draw = original()
        return kept["figure"], draw

    monkeypatch.setattr(offload, "_picture", watched)
    found = offload.offload()
    return found, kept["figure"].axes[0]


def curves_of(ax):
    return {line.get_label().rpartition(" ")[2]: line for line in ax.get_lines() if "state on" in line.get_label()}


SETTINGS = [
    {"model": "gpt2", "device": "T4", "dram": "2 x DDR5-5600", "nvme": "4 x Samsung 990 PRO", "tokens": 1024,
     "overlap": "one after another"},
    {"model": "llama-2-70b", "device": "H100", "dram": "2 x 8 x DDR5-4800", "nvme": "Samsung 990 PRO", "tokens": 262144,
     "overlap": "overlapped"},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_curves_and_mark_are_the_sweeps(made, setting):
    found, ax = made
    for name, value in setting.items():
        found.controls[name].value = value
    setup = sweep.Setup(*(setting[name] for name in ("model", "device", "dram", "nvme")))
    overlap = setting["overlap"] == "overlapped"
    drawn = curves_of(ax)
    assert set(drawn) == set(STATES)
    for state, line in drawn.items():
        assert list(line.get_ydata()) == pytest.approx(sweep.over_tokens(setup, state, overlap))
        assert (line.get_linestyle() == "-") == offload.fits(setup, state)
    mark = next(line for line in ax.get_lines() if line.get_marker() == "o")
    at = sweep.TOKENS.index(setting["tokens"])
    assert list(mark.get_ydata()) == pytest.approx([drawn[state].get_ydata()[at] for state in STATES])
    assert setting["model"] in ax.get_title()


def test_a_picture_that_was_moved_is_the_same_as_one_drawn_afresh(made):
    found, _ = made
    first = found.image.value
    found.controls["model"].value = "gpt2"
    assert found.image.value != first
    assert found.image.value == offload.offload(model="gpt2").image.value


def test_every_setting_draws(made):
    found, _ = made
    for name in ("model", "device", "dram", "nvme", "overlap"):
        for option in found.controls[name].options:
            value = option[1] if isinstance(option, tuple) else option
            found.controls[name].value = value
    assert found.values["dram"] in DRAM and found.values["nvme"] in NVME


def test_what_fits_is_told_in_words():
    small, large = (sweep.Setup(model, "T4", "2 x DDR5-5600", "Samsung 990 PRO") for model in ("gpt2", "llama-2-70b"))
    assert "too large" not in offload.reading(small, 1024, True)
    assert offload.reading(large, 1024, True).count("too large") == 3


def test_it_shows_itself_without_widgets_too(made):
    bundle = made[0]._repr_mimebundle_()
    assert bundle["image/png"] and "application/vnd.jupyter.widget-view+json" in bundle
