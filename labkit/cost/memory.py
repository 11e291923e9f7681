"""Bytes of training on one device, pipeline stage by pipeline stage: states, activations, logits and loss, buffers.

The total is a sum of parts that do not all peak at the same moment. Left out, and in `overheads`: the CUDA context,
NCCL's buffers, gaps in the allocator, and gradients of activations in flight, which the papers leave out too.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost import activations, eager, states
from labkit.cost.activations import Saved
from labkit.cost.layout import Layout, check
from labkit.cost.shapes import (
    Shape,
    mlp_parameters,
    norm_parameters,
    rank_layer_parameters,
    stage_experts,
    stage_layers,
    stage_parameters,
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. layers and logits are both activations; logits has the head's and the loss's.

    bucket, gathered, recomputed and secondary (ZeRO++'s second copy of parameters) are buffers. host, disk: what
    offload keeps in the host's memory and in its files for this device.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    layers: int
    logits: int
    bucket: int
    gathered: int
    recomputed: int
    host: int
    secondary: int = 0
    disk: int = 0

    @property
    def activations(self) -> int:
        return self.layers + self.logits

    @property
    def buffers(self) -> int:
        return self.bucket + self.gathered + self.recomputed + self.secondary

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory(shape: Shape, layout: Layout, stage: int | None = None) -> Memory:
    """A device of one pipeline stage; by default of the fullest, the first of equals. ValueError as `layout.check`."""
    check(shape, layout)
    if stage is None:
        # Stages between the second and the last have at most as many layers and fewer microbatches in flight.
        stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
        return max((_memory(shape, layout, each) for each in stages), key=lambda each: each.total)
    return _memory(shape, layout, stage)


def _memory(shape: Shape, layout: Layout, stage: int) -> Memory:
    each = states.per_parameter(layout.convention, layout.precision, layout.zero)
    copies = rank_parameters(shape, layout, stage)
    held = [states.state_bytes(count, each, layout.zero, ranks, layout.offload) for count, ranks in copies]
    count = sum(count for count, _ in copies)
    layers, logits = activation_bytes(shape, layout, stage)
    again = activations.recomputed(layer_saved(shape, layout), shape, layout)
    return Memory(
        stage,
        sum(part.parameters for part in held),
        sum(part.gradients for part in held),
        sum(part.optimizer for part in held),
        round(layers),
        round(logits),
        bucket_bytes(layout, count),
        gathered_bytes(shape, layout, stage),
        round(again),
        sum(part.host for part in held),
        -(-count // layout.node_ranks) * each.parameter if "hpz" in layout.quantised else 0,
        sum(part.disk for part in held),
    )


def rank_parameters(shape: Shape, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """(parameters on a rank of that stage, ranks over which ZeRO divides them): experts apart with expert parallelism.

    A rank has 1/ep of the experts, of which shards / ep ranks have copies (Megatron-Core's expert data parallelism).
    """
    count = stage_parameters(shape, layout.tp, layout.pp, stage)
    if layout.ep == 1:
        return ((count, layout.divided),)
    experts = stage_experts(shape, layout.tp, layout.pp, stage)
    return (count - experts, layout.shards), (experts // layout.ep, layout.shards // layout.ep)


def layer_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """What one layer keeps for its backward, in the layout's convention, before recomputation drops any of it."""
    return (eager if layout.activations == "eager" else activations).layer_saved(shape, layout)


def activation_bytes(shape: Shape, layout: Layout, stage: int) -> tuple[float, float]:
    """(of the layers and what stands before them, of the head and the loss) on a stage, with all that is in flight."""
    room = eager if layout.activations == "eager" else activations
    flight = activations.in_flight(layout, stage)
    one = activations.kept(layer_saved(shape, layout), shape, layout)
    layers = flight * stage_layers(shape.layers, layout.pp)[stage] * one
    logits = 0.0
    if stage == 0:
        layers += min(layout.microbatches, layout.pp) * total(room.first_saved(shape, layout))
    if stage == layout.pp - 1:
        logits = total(room.head_saved(shape, layout))
        logits += eager.loss_transient(shape, layout) if layout.activations == "eager" else 0
    return layers, logits


def total(saved: tuple[Saved, ...]) -> float:
    return sum(each.num_bytes for each in saved)


def bucket_bytes(layout: Layout, num_parameters: int) -> int:
    """The buffer in which gradients are reduced, among more than one rank.

    zero: of constant size, or all gradients where they are smaller (arXiv:1910.02054, section 6.2). megatron: none,
    gradients lie in one buffer anyway. deepspeed: reduce_bucket_size elements at stages 1 to 3, however small the model
    (stage_1_and_2.py, setup_buckets).
    """
    if layout.shards == 1 or layout.convention == "megatron":
        return 0
    whole = layout.convention == "deepspeed" and layout.zero > 0
    elements = layout.bucket if whole else min(layout.bucket, num_parameters)
    return elements * communicated_gradient_bytes(layout)


def communicated_gradient_bytes(layout: Layout) -> int:
    """Bytes of one gradient on the wire: as they are kept; where DeepSpeed keeps them in fp32 only, the model's own."""
    each = states.per_parameter(layout.convention, layout.precision, layout.zero)
    return each.gradient or each.parameter


def units(shape: Shape, layout: Layout, stage: int) -> list[int]:
    """Parameters that ZeRO-3 gathers at once on a stage, in order: the embeddings, each layer, norm and head.

    Of experts only those that are divided: where each lies on one rank alone, ZeRO has nothing of them to gather.
    """
    rows = -(-shape.vocab // layout.tp)
    whole = layout.shards == layout.ep and layout.offload not in states.AWAY
    away = (shape.experts - (0 if whole else shape.experts // layout.ep)) * mlp_parameters(shape, layout.tp)
    found = [rank_layer_parameters(shape, layout.tp) - away] * stage_layers(shape.layers, layout.pp)[stage]
    first = [(rows + shape.positions) * shape.hidden] if stage == 0 else []
    last = [norm_parameters(shape) + rows * shape.hidden] if stage == layout.pp - 1 else []
    return [*first, *found, *last]


def gathered_bytes(shape: Shape, layout: Layout, stage: int) -> int:
    """What ZeRO-3 holds whole for a moment: a unit and the next one, fetched ahead, and the first one's gradients.

    As FSDP does it (arXiv:2304.11277, section 4.3). DeepSpeed keeps up to stage3_max_live_parameters (1e9) for reuse.
    """
    if layout.zero < 3 or (layout.divided == 1 and layout.offload not in states.AWAY):
        return 0
    found = units(shape, layout, stage)
    size = states.element_bytes(layout.precision)
    pairs = max(one + other for one, other in zip(found, [*found[1:], 0], strict=True))
    return pairs * size + max(found) * communicated_gradient_bytes(layout)
