"""Step time of a named model on a named GPU over tokens per step: what the curves of lab 05 and its explorer draw.

Forward and backward are FLOPs at half the peak; wires are those of `configurations`. Left out: kernels' start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import labkit.labs.lab05.stations as stations
from labkit.labs.lab05.configurations import DRAM, NVME, REACHED

SEQ = 2048
TOKENS = tuple(2**power for power in range(10, 19))  # of one step: 1,024 to 262,144


@dataclass(frozen=True)
class Setup:
    """model: a name of labkit.cost.named. device: of labkit.cost.hardware. dram, nvme: of `configurations`."""

    model: str
    device: str
    dram: str
    nvme: str

    @property
    def wires(self) -> dict[str, float]:
        """Bytes per second by wire."""
        from labkit.cost import hardware

        card = hardware.device(self.device)
        host = card.host.bandwidth
        return {"hbm": card.memory_bandwidth, "pcie": host, "dram": DRAM[self.dram], "nvme": NVME[self.nvme]}


def compute_s(setup: Setup, tokens: int) -> tuple[float, float]:
    """Seconds of (forward, backward) of a step of so many tokens, in sequences of SEQ or one shorter one."""
    from labkit.cost import flops, hardware
    from labkit.cost.named import named

    card = hardware.device(setup.device)
    precision = "bf16" if any(dtype == "bf16" for dtype, _ in card.peaks) else "fp16"
    needed = flops.model_flops(named(setup.model), tokens, min(SEQ, tokens), True)
    seconds = needed / (REACHED * card.peak(precision))
    return seconds / 3, seconds * 2 / 3


def over_tokens(
    setup: Setup,
    state: str,
    overlap: bool = True,
    tokens: Sequence[int] = TOKENS,
    step_time: Callable[..., float] = stations.step_time_s,
) -> list[float]:
    """Seconds of a step for each number of tokens. step_time: called as `stations.step_time_s`."""
    from labkit.cost.named import named
    from labkit.cost.shapes import parameters

    shape = named(setup.model)
    count, wires = parameters(shape), setup.wires
    return [step_time(count, shape.layers, *compute_s(setup, each), wires, state, overlap) for each in tokens]


def device_bytes(setup: Setup, state: str) -> int:
    """Of weights, gradients and state on the GPU, without activations: 16 bytes per parameter, or 2 with offload."""
    from labkit.cost.named import named
    from labkit.cost.shapes import parameters

    each = stations.UP + (stations.DOWN + stations.STATE if state == "device" else 0)
    return each * parameters(named(setup.model))
