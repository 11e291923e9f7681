"""The offload explorer: a model, a GPU, the host's memory and drives against the time of a step over its tokens.

Curves for Adam's state on the device, on the host and on disk; a dashed one does not fit the GPU even without
activations. The mark is at the tokens that are set. Left out: the arithmetic, which is `labkit.labs.lab05.sweep`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.cost import hardware
from labkit.labs.lab05.configurations import DRAM, NVME
from labkit.labs.lab05.stations import STATES
from labkit.labs.lab05.sweep import TOKENS, Setup, device_bytes, over_tokens
from labkit.view import curves, explore
from labkit.view.plot import COLOURS, RANK_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("gpt2", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-2-13b", "qwen2.5-32b", "llama-2-70b")
DEVICES = ("T4", "RTX 4090", "L4", "A100-40", "A100-80", "H100")
OVERLAP = ("overlapped", "one after another")
LEAST_S, MOST_S = 1e-2, 1e4


def offload(**start: Any) -> explore.Explorer:
    """start: values of controls to start with (model, device, dram, nvme, tokens, overlap)."""
    begin = {"model": "llama-2-7b", "device": "A100-80", "dram": "8 x DDR4-3200", "nvme": "Samsung 990 PRO"}
    begin |= {"tokens": 16384, "overlap": OVERLAP[0]} | start
    controls = {
        "model": explore.choice("model", MODELS, begin["model"]),
        "device": explore.choice("GPU", DEVICES, begin["device"]),
        "dram": explore.choice("host", tuple(DRAM), begin["dram"]),
        "nvme": explore.choice("drives", tuple(NVME), begin["nvme"]),
        "tokens": explore.slider("tokens a step", TOKENS, begin["tokens"]),
        "overlap": explore.choice("copies", OVERLAP, begin["overlap"]),
    }
    figure, draw = _picture()

    def update(model: str, device: str, dram: str, nvme: str, tokens: int, overlap: str) -> None:
        draw(Setup(model, device, dram, nvme), tokens, overlap == OVERLAP[0])

    return explore.explorer(controls, figure, update)


@functools.lru_cache(maxsize=256)
def times(setup: Setup, state: str, overlap: bool) -> tuple[float, ...]:
    """Seconds of a step for each of TOKENS."""
    return tuple(over_tokens(setup, state, overlap))


def fits(setup: Setup, state: str) -> bool:
    """Whether weights, and what else lies on the GPU, have room there without any activations."""
    return device_bytes(setup, state) <= hardware.device(setup.device).memory_bytes


def reading(setup: Setup, tokens: int, overlap: bool) -> str:
    """What is set, in words."""
    at = TOKENS.index(tokens)
    parts = []
    for state in STATES:
        room = device_bytes(setup, state) / 1e9
        told = "" if fits(setup, state) else ", too large"
        parts.append(f"{state} {curves.as_time(times(setup, state, overlap)[at])} ({room:.3g} GB{told})")
    card = hardware.device(setup.device)
    return f"{setup.model} on {card.name}, {card.memory_bytes / 1e9:.3g} GB, {tokens:,} tokens: {'; '.join(parts)}"


def _picture() -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 3.4), dpi=explore.DPI, layout="constrained")
    ax = figure.subplots()
    lines = {}
    for number, state in enumerate(STATES):
        colour = RANK_COLOURS[number]
        (lines[state],) = ax.plot(TOKENS, [1.0] * len(TOKENS), color=colour, linewidth=1.8, label=f"state on {state}")
    (mark,) = ax.plot([], [], "o", markersize=8, markerfacecolor="none", color=COLOURS["ink"])
    curves.doubling_axis(ax, TOKENS)
    ax.set_yscale("log")
    ax.set(xlabel="tokens a step", ylabel="step", ylim=(LEAST_S, MOST_S), title=" ")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else curves.as_time(value))
    ax.grid(color=COLOURS["idle"], linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="dashed: does not fit")
    for artist in (*lines.values(), mark, ax.title):
        artist.set_animated(True)

    def draw(setup: Setup, tokens: int, overlap: bool) -> None:
        for state, line in lines.items():
            line.set_ydata(times(setup, state, overlap))
            line.set_linestyle("-" if fits(setup, state) else "--")
        at = TOKENS.index(tokens)
        mark.set_data([tokens] * len(STATES), [times(setup, state, overlap)[at] for state in STATES])
        ax.set_title(reading(setup, tokens, overlap), fontsize=8)

    return figure, draw
