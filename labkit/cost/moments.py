"""Moments of a training step, and what a device holds in each: the parts of the fullest are its peak.

Left out: what `memory` has, a sum of parts that need not be there at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost import activations
from labkit.cost.layout import Layout, listed
from labkit.cost.memory import Memory, layer_saved, total
from labkit.cost.shapes import Shape, rank_layer_parameters
from labkit.cost.states import element_bytes

# Log-softmax in fp32, and in backward the gradients of it and of its input (torch's cross_entropy).
LOGIT_BYTES = 12


@dataclass(frozen=True)
class Moment:
    """Bytes held at one moment. layers: activations of layers; working: of the one layer whose backward runs."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    layers: float = 0
    logits: float = 0
    bucket: float = 0
    gathered: float = 0
    working: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, field) for field in self.__dataclass_fields__)


def fullest(stage: int, *moments: Moment, host: float = 0) -> Memory:
    """The parts of the moment at which most is held."""
    most = max(moments, key=lambda each: each.total)
    sizes = [round(getattr(most, field)) for field in most.__dataclass_fields__]
    return Memory(stage, *sizes, round(host))


def loss_bytes(shape: Shape, layout: Layout) -> float:
    """Logits, loss and their gradients at their most: what precedes the logits, and 12 bytes a logit."""
    at = activations.sizes(shape, layout)
    logits = 4 * at.tokens * -(-shape.vocab // layout.tp)
    return total(activations.head_saved(shape, layout)) + (LOGIT_BYTES / 4 - 1) * logits


def layer_gradients(shape: Shape, layout: Layout) -> float:
    """Gradients of activations in one layer's backward, at their most: those of the MLP's wide tensors, and with tp the
    gradient of the whole input, with sequence parallelism that input too, gathered. The papers leave them out."""
    at = activations.sizes(shape, layout)
    e = element_bytes(layout.precision)
    wide = e * (4 if shape.gated else 2) * at.ffn * (shape.active_experts or 1)
    whole = e * at.tokens * shape.hidden if layout.tp > 1 else 0
    return wide + whole * (2 if layout.sequence_parallel else 1)


def made_before(shape: Shape, count: int, number: int, first: bool = True, last: bool = True, tp: int = 1) -> int:
    """Of a stage's `count` parameters those whose gradients are there when its layer of that number (from 0) runs
    backward: of layers that stand after it and the head, which makes those of tied embeddings too.

    first, last: whether it is the first stage and the last.
    """
    rows = -(-shape.vocab // tp) * shape.hidden if first and not (shape.tied and last) else 0
    return max(0, count - (number + 1) * rank_layer_parameters(shape, tp) - rows)


def layer_kept(shape: Shape, layout: Layout) -> float:
    """What one layer keeps; "selective" as torchtitan has it: the layer's input, the outputs of attention and of every
    second matrix (query, value, gate and the last one)."""
    if layout.recompute != "selective":
        return activations.kept(layer_saved(shape, layout), shape, layout)
    at = activations.sizes(shape, layout)
    return 2 * (2 * at.hidden + 2 * at.queries + at.keys + at.ffn)


def only(layout: Layout, program: str, **allowed: tuple) -> None:
    """ValueError, one line, where the program has not what the layout asks for; it names what it has."""
    for field, known in allowed.items():
        if getattr(layout, field) not in known:
            name = field.replace("_", "-")
            raise ValueError(f"{program} has no {name} {getattr(layout, field)}; {name} {listed(known)} would do")
