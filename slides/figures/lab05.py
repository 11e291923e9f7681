"""Figures of deck 05, Offload: a step on the played device, its replay, the line of stations, six decisions.

Left out: times of this machine, and DeepSpeed's live runs, which the notebook shows.
"""

from __future__ import annotations

import functools
from typing import Any

from labkit.cost import hardware, states
from labkit.cost.named import named
from labkit.cost.shapes import parameters
from labkit.labs import lab05
from labkit.labs.lab05 import pays, stations
from labkit.labs.lab05.configurations import DRAM, NVME
from labkit.view import curves, plot
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB, HOST, DRIVE = "05", "2 x DDR5-5600", "Samsung 990 PRO"
A100 = ("llama-2-7b", "A100-80", "8 x DDR4-3200", DRIVE)


def overlapped() -> Drawn:
    """A step with Adam's state on the host, replayed on a T4."""
    step = _hosted()
    ax = plot.timeline(lab05.lanes(step, _on_t4(step)), "Adam on the host, replayed on a T4", parts.wide(9, 2.6))
    return drawn(ax)


def needed() -> Drawn:
    """Bytes of a parameter by who needs them."""
    each = states.per_parameter()
    kinds = {"weight": each.parameter, "gradient": each.gradient, "Adam's state": each.optimizer}
    ax = curves.bars([("", list(kinds.values()))], list(kinds), "bytes per parameter", "bf16 with Adam", parts.wide(8))
    return drawn(ax, all=each.total, state=each.optimizer)


def wires() -> Drawn:
    """Bandwidth of memory and link of four GPUs."""
    cards = [hardware.device(name) for name in ("T4", "RTX 4090", "A100-80", "H100")]
    series = [("HBM", [card.memory_bandwidth / 1e9 for card in cards])]
    series.append(("PCIe", [card.host.bandwidth / 1e9 for card in cards]))
    ax = curves.bars(series, [card.name for card in cards], "GB/s", "one direction", parts.wide(9))
    ax.set_yscale("log")
    plain, moved = _largest()
    ratio = cards[2].memory_bandwidth / cards[2].host.bandwidth
    return drawn(ax, ratio=f"{ratio:.0f}", times=f"{moved / plain:.0f}")


def _largest() -> tuple[float, float]:
    """The most parameters whose weights, gradients and state, or weights alone, fit into 24 GiB."""
    each = states.per_parameter()
    return states.largest_parameters(24 * 2**30, each, 0, 1), 24 * 2**30 / each.parameter


def held() -> Drawn:
    """Bytes on the device over a step of torch's AdamW."""
    step = _on_device()
    line = [("", range(len(step.held)), [num_bytes / 1e6 for num_bytes in step.held], "line")]
    ax = curves.lines(line, "ops of one step", "MB", "held by the device, torch's AdamW", parts.wide(9, 3.0))
    return drawn(ax, times=f"{step.held[-1] / step.parameter_bytes:.1f}")


def both() -> Drawn:
    """The same, and with the state on the host."""
    series = [("torch's AdamW", _on_device()), ("state on the host", _hosted())]
    lines = [(name, range(len(p.held)), [b / 1e6 for b in p.held], "line") for name, p in series]
    ax = curves.lines(lines, "ops of one step", "MB", "held by the device", parts.wide(9, 3.0))
    hosted = _hosted()
    return drawn(ax, floor=f"{hosted.held[-1] / 1e6:.1f} MB", before=f"{_on_device().held[-1] / 1e6:.1f} MB")


def slower() -> Drawn:
    """Both steps replayed on a T4."""
    steps = _on_device(), _hosted()
    lanes = [lane for step in steps for lane in lab05.lanes(step, _on_t4(step))]
    ax = plot.timeline(lanes, "above torch's AdamW, below Adam on the host", parts.wide(9, 3.3))
    times = [_on_t4(step).time_s for step in steps]
    return drawn(ax, times=f"{times[1] / times[0]:.1f}")


def disk() -> Drawn:
    """Seconds in which one drive, and four, read and write Adam's state."""
    models = ("llama-3.2-1b", "llama-2-7b", "llama-2-13b")
    counts = [parameters(named(name)) for name in models]
    series = [
        (name, [2 * stations.STATE * count / rate for count in counts]) for name, rate in NVME.items()
    ]
    ax = curves.bars(series, models, "seconds a step", "Adam's state, read and written", parts.wide(9))
    return drawn(ax, seven=f"{series[0][1][1]:.0f} s")


def line() -> Drawn:
    """Six layers through the stations of a step with the state on the host."""
    wires = {"hbm": 2e12, "pcie": 20e9, "dram": 100e9, "nvme": 6e9}
    played = lab05.play(1e9, 6, 0.1, 0.2, wires, "host", True)
    lanes = {"backward": [], "down": [], "Adam": [], "up": []}
    for span in played.spans:
        if span.kind == "compute" and span.rank == 0:
            kind = "backward" if lanes["backward"] or span.start_s > 0 else "forward"
            lanes["backward"].append((span.start_s, span.end_s, kind))
        elif span.kind == "compute":
            lanes["Adam"].append((span.start_s, span.end_s, "optimizer"))
        elif span.kind == "communication" and span.label == "send":
            lanes["down" if span.rank == 0 else "up"].append((span.start_s, span.end_s, "communication"))
    ax = plot.timeline(list(lanes.items()), "six layers, a billion parameters", parts.wide(9, 2.6))
    return drawn(ax)


def tokens() -> Drawn:
    """Step time over tokens per step, by place of the state."""
    ways = {"on the device": ("device", False), "host": ("host", True), "disk": ("disk", True)}
    found = {name: lab05.over_tokens(lab05.Setup(*A100), *way) for name, way in ways.items()}
    made = [curves.Curve(name, lab05.TOKENS, times, number=i) for i, (name, times) in enumerate(found.items())]
    ax = curves.times(made, "llama-2-7b on an A100-80", parts.wide(9))
    ax.set(xlabel="tokens a step")
    curves.doubling_axis(ax, lab05.TOKENS)
    few = found["host"][0] / found["on the device"][0]
    return drawn(ax, few=f"{few:.0f}")


def fixed() -> Drawn:
    """What grows with tokens, and what does not."""
    setup, many = lab05.Setup(*A100), (2048, 8192, 32768)
    from labkit.labs.lab05.sweep import compute_s

    count, rates = parameters(named(setup.model)), setup.wires
    names = [f"{each:,} tokens" for each in many]
    series = [("backward", [compute_s(setup, each)[1] for each in many])]
    series.append(("link, one way", [stations.DOWN * count / rates["pcie"]] * len(many)))
    series.append(("Adam on the host", [stations.TOUCHED * count / rates["dram"]] * len(many)))
    return drawn(curves.bars(series, names, "seconds", "llama-2-7b on an A100-80", parts.wide(9)))


def six() -> Drawn:
    """Bytes on a GPU by each way, of six configurations, over what the GPU has."""
    found = lab05.six()
    ways = ("device", "recompute", "host")
    series = [(way, [pays.ways(c)[way][0] / c.hbm_bytes for c in found]) for way in ways]
    names = [c.name.replace(" on ", "\n").replace(" of a PC", ",\na PC") + f":\n{pays.decide(c)}" for c in found]
    ax = curves.bars(series, names, "of the GPU's memory", "", parts.wide(13, 4.2))
    for label in list(ax.texts):
        label.remove()
    ax.set_yscale("log")
    ax.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "full", "2", "4", "8"])
    ax.axhline(1.0, color=plot.COLOURS["ink"], linewidth=0.8)
    offloads = sum(pays.decide(c) in ("host", "disk") for c in found)
    return drawn(ax, offloads=offloads, of=len(found))


def weights() -> Drawn:
    """Weights alone of three models, beside a GPU's memory."""
    models = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
    sizes = [stations.UP * parameters(named(name)) / 1e9 for name in models]
    ax = curves.bars([("", sizes)], models, "GB", "weights in bf16", parts.wide(9))
    room = hardware.device("A100-80").memory_bytes / 1e9
    ax.axhline(room, color=plot.COLOURS["ink"], linewidth=0.8)
    return drawn(ax, most=f"{sizes[-1]:.0f} GB", room=f"{room:.0f} GB")


@functools.cache
def _on_device() -> Any:
    import torch

    return lab05.train(lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=False))


@functools.cache
def _hosted() -> Any:
    return lab05.train(lambda weights: lab05.TorchOnHost(weights, lr=1e-3))


def _on_t4(step: Any) -> Any:
    return lab05.replayed(step, hardware.device("T4"), DRAM[HOST])
