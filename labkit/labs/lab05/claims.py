"""What published guides say of offload, each with a verdict and the figure that it rests on.

Left out: claims on communication and on profiling, which belong to labs 04 and 09.
"""

from __future__ import annotations

from labkit.cost import hardware, states
from labkit.cost.claims import Claim
from labkit.cost.named import named
from labkit.cost.shapes import parameters
from labkit.labs.lab05.configurations import NVME
from labkit.labs.lab05.stations import DOWN, STATE, UP

FASTER, SLOWER = 0.258, 0.239  # steps per second that the guide with the LoRA run measured, without DeepSpeed and with


def claims() -> tuple[Claim, ...]:
    """Of three guides on DeepSpeed that are widely read."""
    return _larger_models(), _parameters_at_stage_2(), _nvme_is_slow(), _copies_slow_lora()


def lora_parameters(model: str = "llama-3.2-3b", r: int = 16) -> int:
    """Trainable parameters of LoRA on the q and v projections: r (in + out) each (arXiv:2106.09685, section 4.1)."""
    shape = named(model)
    return shape.layers * r * (2 * shape.hidden + shape.query_width + shape.kv_width)


def _larger_models() -> Claim:
    card = hardware.device("RTX 4090").memory_bytes
    each = states.per_parameter()
    plain = states.largest_parameters(card, each, 0, 1)
    offloaded = card / each.parameter
    figure = f"states alone on 24 GiB: {plain / 1e9:.2g} billion parameters, offloaded {offloaded / 1e9:.3g} billion"
    return Claim("offload makes much larger models trainable", "right", f"{figure}: {offloaded / plain:.0f} times")


def _parameters_at_stage_2() -> Claim:
    try:
        states.check_offload(2, "parameters")
    except ValueError as error:
        kept = 2 * parameters(named("llama-2-7b"))
        figure = f"{error}; DeepSpeed takes the key and does nothing: a 7B model's {kept / 1e9:.1f} GB of weights stay"
        return Claim("stage 2 with offload_param moves parameters to the host", "wrong", figure)
    raise AssertionError("the cost model takes offload of parameters at stage 2")


def _nvme_is_slow() -> Claim:
    count, rate = parameters(named("llama-2-7b")), NVME["Samsung 990 PRO"]
    seconds = 2 * STATE * count / rate
    figure = f"Adam's state of a 7B model, read and written: {seconds:.0f} s a step on one drive of {rate / 1e9:g} GB/s"
    return Claim("NVMe offload is slow, I/O may be the bottleneck", "right", figure)


def _copies_slow_lora() -> Claim:
    count, link = lora_parameters(), hardware.device("T4").host
    seconds = (DOWN + UP) * count / link.bandwidth
    lost = 1 / SLOWER - 1 / FASTER
    figure = f"{count / 1e6:.2f} million trained parameters: {seconds * 1e3:.1f} ms of copies a step; {lost * 1e3:.0f} "
    figure += "ms were lost"
    return Claim("CPU offload's copies slowed the LoRA run down", "wrong", figure)
