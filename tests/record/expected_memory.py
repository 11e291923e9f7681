"""What the cost model says of the steps in `tests.record.live`, engine by engine: states, saved bytes, peak, traffic.

States are `labkit.cost.states`, saved bytes and moments of backward `labkit.cost.eager`. What an engine holds besides
(its bucket, gathered parameters, gradients not yet divided) is written out here, as DDP and FSDP2 of torch 2.13 and
DeepSpeed 0.19.8 do it. Left out: the measuring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.cost import activations, eager, shapes, states
from labkit.cost.layout import Layout
from labkit.cost.memory import total
from tests.record.live import BUCKET, SHAPES, Case


@dataclass(frozen=True)
class Expected:
    """Bytes on one rank. gradient: when backward has ended. peak: in forward and backward, everything counted."""

    parameter: int
    optimizer: int
    gradient: int
    saved: float
    peak: float
    moved: dict[str, int]


def expected(engine: str, case: Case, world_size: int, rank: int) -> Expected:
    shape = cost_shape(case)
    made = {"ddp": _ddp, "fsdp2": _fsdp2, "deepspeed0": _deepspeed0}.get(engine)
    if made:
        return made(case, shape, world_size)
    return _deepspeed(case, shape, world_size, rank, int(engine[-1]))


def cost_shape(case: Case) -> shapes.Shape:
    s = SHAPES[case.shape]
    sizes = (s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.ffn, s.vocab)
    return shapes.Shape(case.shape, *sizes, tied=s.tied)


def layout(case: Case) -> Layout:
    return Layout(
        micro_batch=case.batch,
        seq=case.length,
        precision=case.precision,
        flash=case.flash,
        activations="eager",
        recompute="full" if case.recompute else "none",
    )


def saved_bytes(case: Case) -> float:
    shape, how = cost_shape(case), layout(case)
    layers = shape.layers * activations.kept(eager.layer_saved(shape, how), shape, how)
    return layers + total(eager.first_saved(shape, how)) + total(eager.head_saved(shape, how))


def tensors(shape: shapes.Shape) -> list[tuple[int, ...]]:
    """Shapes of the parameters, in the order in which the model has them."""
    h, f = shape.hidden, shape.ffn
    kv = shape.kv_heads * shape.head_dim
    layer = [(h,), (h, h), (kv, h), (kv, h), (h, h), (h,), (f, h), (f, h), (h, f)]
    head = [] if shape.tied else [(shape.vocab, h)]
    return [(shape.vocab, h), *(shape.layers * layer), (h,), *head]


def _numel(tensor: tuple[int, ...]) -> int:
    return tensor[0] if len(tensor) == 1 else tensor[0] * tensor[1]


def _moments(case: Case, shape: shapes.Shape) -> Iterator[tuple[eager.Moment, int]]:
    """(moment, parameters with gradients by then)."""
    for moment in eager.backward_moments(shape, layout(case)):
        yield moment, eager.gradients_made(shape, moment)


def _ddp(case, shape, n) -> Expected:
    each, count = states.per_parameter("zero", case.precision), shapes.parameters(shape)
    held = states.state_bytes(count, each)
    optimizer = held.optimizer + 4 * len(tensors(shape))  # and a step counter for each tensor
    buckets = count * each.gradient
    most = max(moment.num_bytes + each.gradient * made for moment, made in _moments(case, shape))
    peak = held.parameters + optimizer + buckets + most
    moved = {"all_reduce": count * each.gradient}
    return Expected(held.parameters, optimizer, held.gradients, saved_bytes(case), peak, moved)


def _fsdp2(case, shape, n) -> Expected:
    """Shards in fp32 whatever the precision, their first dimension padded; per layer gathered and reduced in fp32."""
    e = states.element_bytes(case.precision)
    found = tensors(shape)
    own = sum(-(-t[0] // n) * (_numel(t) // t[0]) for t in found)
    held = states.state_bytes(own * n, states.per_parameter("zero", "fp32"), 3, n)
    assert held.total == states.state_bytes(own * n, states.per_parameter("zero", case.precision), 3, n).total
    optimizer = held.optimizer + 4 * len(found)
    layer, root = (
        shapes.layer_parameters(shape),
        shapes.parameters(shape) - shape.layers * shapes.layer_parameters(shape),
    )
    most = 0.0
    for moment, _ in _moments(case, shape):
        extra = e * root + e * moment.made  # the root's are gathered, and not yet reduced
        if moment.place in ("head", "last norm"):
            extra += e * layer  # fetched ahead
        elif moment.unit == "embedding":
            extra += e * (shape.vocab + 1) * shape.hidden + 4 * layer * shape.layers // n
        elif moment.unit != "head":
            done = shape.layers - 1 - moment.unit
            extra += e * (shape.vocab + 1) * shape.hidden + e * layer + 4 * layer * done // n
            extra += (e * layer if moment.unit else 0) + (4 * layer if done else 0)  # fetched ahead; being reduced
        most = max(most, moment.num_bytes + extra)
    # Layers are gathered twice, in forward and in backward, what lies outside them once.
    moved = {"all_gather": e * (own * n + shape.layers * layer), "reduce_scatter": 4 * own * n}
    peak = held.parameters + optimizer + most
    return Expected(held.parameters, optimizer, held.gradients, saved_bytes(case), peak, moved)


def _deepspeed0(case, shape, n) -> Expected:
    """As DDP without buckets; when backward has ended all gradients are copied into one tensor and reduced there."""
    each, count = states.per_parameter("zero", case.precision), shapes.parameters(shape)
    held = states.state_bytes(count, each)
    optimizer = held.optimizer + 4 * (len(tensors(shape)) if case.precision == "fp32" else 1)
    most = max(moment.num_bytes + each.gradient * made for moment, made in _moments(case, shape))
    most = max(most, 2 * held.gradients)
    moved = {"all_reduce": held.gradients}
    peak = held.parameters + optimizer + most
    return Expected(held.parameters, optimizer, held.gradients, saved_bytes(case), peak, moved)


def _deepspeed(case, shape, n, rank, stage) -> Expected:
    e, count = states.element_bytes(case.precision), shapes.parameters(shape)
    each = states.per_parameter("deepspeed", case.precision, stage)
    flat = -(-count // (2 * n)) * 2 * n  # padded to twice the ranks (stage_1_and_2.py)
    if stage == 3:
        flat = sum(-(-_numel(t) // n) * n for t in tensors(shape))
    held = states.state_bytes(flat, each, stage, n)
    part = flat // n
    gradient = e * (part if stage == 3 else straddling(shape, part, rank))
    peak = held.parameters + held.optimizer + _deepspeed_most(case, shape, stage, gradient, count - (rank + 1) * part)
    moved = {"all_reduce": e * flat, "all_gather": e * flat}
    if stage == 3:
        again = shape.layers * (shapes.layer_parameters(shape) - shape.hidden * shape.ffn) if case.recompute else 0
        twice = shape.vocab * shape.hidden if shape.tied else 0  # for embedding and head each time
        moved = {"all_gather": e * (2 * flat + again + 2 * twice), "reduce_scatter": e * flat}
    return Expected(held.parameters, held.optimizer, gradient, saved_bytes(case), peak, moved)


def _deepspeed_most(case, shape, stage, gradient, behind) -> float:
    """Most in backward beside parameters and optimizer. gradient: bytes of a rank's part; behind: elements after it.

    The bucket is there from the first gradient on (stage 3: always). Stage 1 keeps whole gradients until backward has
    ended, stage 2 its part of them once a bucket with some of them has been reduced (they come from the last parameter
    on), stage 3 always. In stage 3 matrices are gathered one by one; where a layer is run again, all but its last are
    gathered for that too, and stay until its backward.
    """
    e, matrix = states.element_bytes(case.precision), shape.hidden * shape.ffn
    gathered = 0
    if stage == 3:
        gathered = e * (shapes.layer_parameters(shape) if case.recompute else matrix)
    arrivals = _arrivals(case, shape)
    waits = e * shape.vocab * shape.hidden if shape.tied and stage > 1 else 0  # the head's, until the embedding's
    most = 0.0
    for moment, made in _moments(case, shape):
        extra = e * BUCKET if stage == 3 or moment.place != "loss" else 0
        reduced = max((each.reduced for each in arrivals if each.made <= made), default=0)
        if stage == 1:
            extra += e * made
        elif stage == 3 or reduced > behind:
            extra += gradient
        extra += waits if moment.place != "loss" else 0
        extra += gathered if moment.unit not in ("head", "embedding") else 0
        most = max(most, moment.num_bytes + extra)
    for each in arrivals if stage > 1 else ():
        there = stage == 3 or each.reduced - each.copied > behind
        extra = e * (BUCKET + each.copied + matrix) + waits + gathered + (gradient if there else 0)
        most = max(most, each.num_bytes + extra)
    return most


@dataclass(frozen=True)
class Arrival:
    """A gradient goes into the bucket. made: elements so far, with it. copied: elements that are copied for a reduction
    because it found the bucket full, 0 where it did not; reduced: elements reduced so far, these included. num_bytes:
    saved and transient then, known for an MLP's gradients, when most is still saved, else 0.
    """

    made: int
    copied: int
    reduced: int
    num_bytes: float


def _arrivals(case, shape) -> list[Arrival]:
    how = layout(case)
    at, e = activations.sizes(shape, how), states.element_bytes(case.precision)
    wide, hidden = e * at.ffn, e * at.hidden
    h, q, kv, matrix = shape.hidden, shape.query_width, shape.kv_width, shape.hidden * shape.ffn
    starts = {m.unit: m.num_bytes - 2 * wide - hidden for m, _ in _moments(case, shape) if m.place == "MLP product"}
    above = (hidden, 2 * hidden - 2 * wide, 3 * hidden - 4 * wide)
    made = shape.vocab * h + h
    content, reduced, found = h if shape.tied else made, 0, []
    for unit in reversed(range(shape.layers)):
        for place, numel in enumerate((matrix, matrix, matrix, h, h * q, h * kv, h * kv, h * q, h)):
            made += numel
            copied = content if content + numel > BUCKET else 0
            reduced += copied
            content += numel - copied
            num_bytes = starts[unit] + above[place] if copied and place < 3 else 0.0
            found.append(Arrival(made, copied, reduced, num_bytes))
    return found


def straddling(shape: shapes.Shape, part: int, rank: int) -> int:
    """Elements of all tensors of which a rank's part of the flat parameters has any: DeepSpeed makes room for them
    whole."""
    at, room = 0, 0
    for tensor in tensors(shape):
        end = at + _numel(tensor)
        if at < (rank + 1) * part and end > rank * part:
            room += end - at
        at = end
    return room
