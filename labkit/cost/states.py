"""Model states: parameters, gradients and optimizer state in bytes, whole and divided by ZeRO, in named conventions.

`zero` counts 16 bytes per parameter in mixed precision (2 + 2 + 12), `megatron` 18 (gradients in fp32), `deepspeed`
what DeepSpeed's own estimators count: with a copy of the gradients in fp32 for the optimizer, 20 on one device. The
optimizer is Adam. Left out: activations and buffers (`activations`, `memory`), and 8-bit optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass

CONVENTIONS = ("zero", "megatron", "deepspeed")
PRECISIONS = ("bf16", "fp16", "fp32")
OFFLOADS = ("none", "optimizer", "parameters", "nvme")
AWAY = ("parameters", "nvme")  # offloads that leave no parameters on the device


@dataclass(frozen=True)
class PerParameter:
    """Bytes per parameter. master: weights in fp32; moments: Adam's two; gradient_copy: of the optimizer's part."""

    parameter: int
    gradient: int
    master: int
    moments: int
    gradient_copy: int
    source: str

    @property
    def optimizer(self) -> int:
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.gradient_copy + self.optimizer


@dataclass(frozen=True)
class States:
    """Bytes on one device, and what offload put into the host's memory and onto its disk for it."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def element_bytes(precision: str) -> int:
    """Bytes of one number that the forward computes with. ValueError for a precision that is not known."""
    _one_of("precision", precision, PRECISIONS)
    return 4 if precision == "fp32" else 2


def per_parameter(convention: str = "zero", precision: str = "bf16", stage: int = 0) -> PerParameter:
    """Bytes per parameter before any division. ValueError for a convention, precision or stage that is not known.

    zero: ZeRO, arXiv:1910.02054, section 3.1. megatron: Korthikanti et al., arXiv:2205.05198, Figure 1, and
    Megatron-LM's theoretical_memory_usage.py (6 + 12 / dp with the distributed optimizer). deepspeed:
    estimate_zero2_model_states_mem_needs (2P + 18P/N) and estimate_zero3_model_states_mem_needs (18P/N) since
    DeepSpeed pull request 5099. In fp32 nothing needs a master copy (4 + 4 + 8), but DeepSpeed's ZeRO keeps one.
    """
    _one_of("convention", convention, CONVENTIONS)
    _one_of("ZeRO stage", stage, (0, 1, 2, 3))
    wide = element_bytes(precision) == 4
    if convention == "zero":
        source = "arXiv:1910.02054, section 3.1"
        return PerParameter(4, 4, 0, 8, 0, source) if wide else PerParameter(2, 2, 4, 8, 0, source)
    if convention == "megatron":
        source = "arXiv:2205.05198, Figure 1"
        return PerParameter(4, 4, 0, 8, 0, source) if wide else PerParameter(2, 4, 4, 8, 0, source)
    source = "DeepSpeed's estimators, pull request 5099"
    size = 4 if wide else 2
    if wide and stage == 0:
        return PerParameter(4, 4, 0, 8, 0, source)
    # Stage 3's estimator counts gradients once, in fp32.
    return PerParameter(size, 0 if stage == 3 else size, 4, 8, 4, source)


def state_bytes(
    num_parameters: int, each: PerParameter, stage: int = 0, shards: int = 1, offload: str = "none"
) -> States:
    """States of a rank that has num_parameters, of which `shards` ranks hold copies (the data-parallel degree).

    ZeRO (section 5): stage 1 divides the optimizer state, 2 also gradients, 3 also parameters; among one rank it
    divides nothing. offload: ZeRO-Offload (arXiv:2101.06840) puts the optimizer state, and gradients from stage 2
    on, into the host's memory; "parameters" (ZeRO-Infinity, arXiv:2104.07857) those too; "nvme" optimizer state and
    parameters into files, gradients into the host's memory, where the step takes them. Parts are padded to whole
    parameters. ValueError for stages, shards and offload that cannot be.
    """
    check_offload(stage, offload)
    if shards < 1 or num_parameters < 0:
        raise ValueError(f"shards must be 1 or more and num_parameters 0 or more, not {shards} and {num_parameters}")
    part = -(-num_parameters // shards)
    held = [part if stage >= first else num_parameters for first in (1, 2, 3)]
    optimizer, copy = held[0] * each.optimizer, held[0] * each.gradient_copy
    gradients, parameters = held[1] * each.gradient + copy, held[2] * each.parameter
    host = disk = 0
    if offload != "none":
        host, optimizer = optimizer, 0
        gone = gradients if stage >= 2 else copy
        host, gradients = host + gone, gradients - gone
    if offload == "parameters":
        host, parameters = host + parameters, 0
    if offload == "nvme":
        host, disk, parameters = gone, host - gone + parameters, 0
    return States(parameters, gradients, optimizer, host, disk)


def check_offload(stage: int, offload: str) -> None:
    """ValueError for offload that DeepSpeed has not: it needs ZeRO, and that of parameters stage 3."""
    _one_of("ZeRO stage", stage, (0, 1, 2, 3))
    _one_of("offload", offload, OFFLOADS)
    if offload == "optimizer" and stage < 1:
        raise ValueError("offload of the optimizer needs ZeRO stage 1, 2 or 3, not 0")
    if offload in AWAY and stage < 3:
        what = "to nvme" if offload == "nvme" else "of parameters"
        raise ValueError(f"offload {what} needs ZeRO stage 3, not {stage}; offload optimizer would do")


def largest_parameters(memory_bytes: float, each: PerParameter, stage: int, shards: int, mp: int = 1) -> float:
    """The largest model whose states fit: memory / (bytes per parameter) times mp (ZeRO, Table 2, "max theoretical").

    mp: the degree of model parallelism, which divides everything.
    """
    divided = each.optimizer + each.gradient_copy if stage >= 1 else 0
    divided += each.gradient if stage >= 2 else 0
    divided += each.parameter if stage >= 3 else 0
    return mp * memory_bytes / (each.total - divided + divided / shards)


def deepspeed_zero2(
    num_parameters: int, per_node: int, nodes: int = 1, offload: bool = True, factor: float = 1.5
) -> tuple[int, int]:
    """(host bytes per node, device bytes) as DeepSpeed's estimate_zero2_model_states_mem_needs prints them."""
    gpus = per_node * nodes
    if offload:
        return int(num_parameters * max(4 * gpus, 16) * factor), 2 * num_parameters
    return int(num_parameters * 4 * per_node * factor), 2 * num_parameters + int(18 * num_parameters / gpus)


def deepspeed_zero3(
    num_parameters: int,
    largest_layer: int,
    per_node: int,
    nodes: int = 1,
    offload: str = "parameters",
    zero_init: bool = True,
    factor: float = 1.5,
) -> tuple[int, int]:
    """(host bytes per node, device bytes) as DeepSpeed's estimate_zero3_model_states_mem_needs prints them.

    largest_layer: parameters of the largest module, counted at 4 bytes whatever the precision.
    """
    _one_of("offload", offload, OFFLOADS[:3])
    whole = 4 * largest_layer
    if offload == "none":
        host = largest_layer if zero_init else num_parameters
        return int(host * 4 * per_node * factor), whole + int(18 * num_parameters / (per_node * nodes))
    each = (18 if offload == "parameters" else 16) / nodes
    host = num_parameters * (each if zero_init else max(4 * per_node, each)) * factor
    return int(host), whole + (0 if offload == "parameters" else int(2 * num_parameters / (per_node * nodes)))


def deepspeed_zero2_before(num_parameters: int, gpus: int) -> float:
    """4P + 16P/N: stage 2 as DeepSpeed's documentation still prints it, from before pull request 5099."""
    return 4 * num_parameters + 16 * num_parameters / gpus


def _one_of(what: str, value: object, known: tuple) -> None:
    if value not in known or isinstance(value, bool):
        raise ValueError(f"{what} must be one of {', '.join(map(str, known))}, not {value!r}")
