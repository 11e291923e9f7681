"""Six configurations about which exercise 5.4 decides, worked out by the cost model; and any number of random ones.

Times are FLOPs at half the peak; bytes of activations are Korthikanti's (arXiv:2205.05198) with flash attention, with
nothing recomputed and with everything. A wire's figure is the share of one GPU: those of a node share its DRAM and
drives. Left out: buffers, and communication between GPUs, which is the same in all ways.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

GB = 10**9
REACHED = 0.5  # of the peak, in forward and backward
# Bytes per second, one direction. DRAM: channels x transfers x 8 bytes (JEDEC DDR4, DDR5); drives: their datasheets.
DRAM = {"8 x DDR4-3200": 8 * 3200e6 * 8, "2 x DDR5-5600": 2 * 5600e6 * 8, "2 x 8 x DDR5-4800": 2 * 8 * 4800e6 * 8}
NVME = {"Samsung 990 PRO": 6.9e9, "4 x Samsung 990 PRO": 4 * 6.9e9}  # the slower of its two figures, writing


@dataclass(frozen=True)
class Configuration:
    """A model on the GPUs of one node, ZeRO-2 among them: states and gradients divided, weights whole on each.

    Bytes: hbm_bytes and activations of one GPU (recomputed_bytes: what is left of these when layers are computed
    again in backward, which takes forward_s once more); host_bytes and disk_bytes free in the node, for all its GPUs
    together. bandwidth: bytes per second of one GPU, one direction, by wire ("hbm", "pcie", "dram", "nvme").
    """

    name: str
    num_parameters: int
    gpus: int
    layers: int
    forward_s: float
    backward_s: float
    hbm_bytes: int
    activation_bytes: int
    recomputed_bytes: int
    host_bytes: int
    disk_bytes: int
    bandwidth: dict[str, float]


def six() -> tuple[Configuration, ...]:
    """From a model that fits anywhere to one that fits nowhere."""
    server = ("8 x DDR4-3200", 512, "4 x Samsung 990 PRO", 8000)
    desktop = ("2 x DDR5-5600", 64, "Samsung 990 PRO", 2000)
    large = ("2 x 8 x DDR5-4800", 2048, "4 x Samsung 990 PRO", 8000)
    return (
        _named("gpt2 on one T4", "gpt2", "T4", 1, 8, 1024, *desktop),
        _named("llama-3.2-1b on one RTX 4090", "llama-3.2-1b", "RTX 4090", 1, 2, 4096, *desktop),
        _named("llama-2-7b on one A100-80", "llama-2-7b", "A100-80", 1, 1, 4096, *server),
        _named("llama-2-7b on one A100-80 of a PC", "llama-2-7b", "A100-80", 1, 1, 4096, *desktop),
        _named("llama-2-7b on eight A100-80", "llama-2-7b", "A100-80", 8, 4, 4096, *large),
        _named("llama-2-13b on one RTX 4090", "llama-2-13b", "RTX 4090", 1, 1, 4096, *server),
    )


def _named(
    name: str, model: str, card: str, gpus: int, batch: int, seq: int, dram: str, host: int, drive: str, disk: int
) -> Configuration:
    """host, disk: GB that are free."""
    from labkit.cost import flops, hardware, memory, shapes
    from labkit.cost.layout import Layout
    from labkit.cost.named import named

    shape, device = named(model), hardware.device(card)
    precision = "bf16" if any(dtype == "bf16" for dtype, _ in device.peaks) else "fp16"
    kept, again = (
        round(sum(memory.activation_bytes(shape, Layout(micro_batch=batch, seq=seq, recompute=each), 0)))
        for each in ("none", "full")
    )
    step_s = flops.model_flops(shape, batch * seq, seq, True) / (REACHED * device.peak(precision))
    wires = {"hbm": device.memory_bandwidth, "pcie": device.host.bandwidth}
    wires |= {"dram": DRAM[dram] / gpus, "nvme": NVME[drive] / gpus}
    return Configuration(
        name, shapes.parameters(shape), gpus, shape.layers, step_s / 3, step_s * 2 / 3, device.memory_bytes,
        kept, again, host * GB, disk * GB, wires,
    )  # fmt: skip


def some(rng: random.Random, count: int) -> list[Configuration]:
    """Random ones, around what fits."""
    return [_random(rng, number) for number in range(count)]


def _random(rng: random.Random, number: int) -> Configuration:
    parameters, gpus = round(10 ** rng.uniform(9, 10.3)), rng.choice((1, 1, 2, 4, 8))
    least = 2 * parameters
    states = 14 * parameters / gpus
    kept = round(rng.uniform(0.1, 2.0) * states)
    again = round(kept * rng.uniform(0.05, 0.4))
    edges = (least + states + kept, least + states + again, least + kept, least)
    edge = rng.choices(edges, (3, 4, 6, 1))[0]
    seconds = parameters * 10 ** rng.uniform(-10.5, -8.5)
    layers = rng.randint(4, 12)
    wires = {"hbm": rng.uniform(1e12, 4e12), "pcie": rng.uniform(10e9, 60e9)}
    wires |= {"dram": rng.uniform(20e9, 300e9), "nvme": rng.uniform(1e9, 30e9)}
    if number % 5 == 0:  # slow HBM and a long backward, behind which a fast host's Adam would hide
        edge, layers, seconds = edges[0], 12, parameters * 1e-9
        wires |= {"hbm": rng.uniform(0.3e12, 0.4e12), "pcie": 50e9, "dram": rng.uniform(250e9, 300e9)}
    host = rng.choice((1.5, 6, 11, 13, 15, 40)) * parameters * rng.uniform(0.9, 1.1)
    disk = rng.choice((6, 11, 13, 40)) * parameters * rng.uniform(0.95, 1.05)
    return Configuration(
        f"random {number}", parameters, gpus, layers, seconds / 3, seconds * 2 / 3,
        round(edge * rng.uniform(0.93, 1.12)), kept, again, round(host), round(disk), wires,
    )  # fmt: skip
