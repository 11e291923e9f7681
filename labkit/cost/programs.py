"""What a device holds at its fullest moment under programs whose code is known: nanotron and torchtitan here, torchtune
and fsdp_qlora in `tuning`; and the common program, for which `memory` sums parts.

Each function follows a program's own source, moment by moment: at the loss, in a layer's backward, after a backward.
The parts are those of the fullest moment, so that they add up to the peak of what torch's allocator hands out. Left
out: what it keeps in gaps, the CUDA context and NCCL (`overheads`); fp8, which changes no sizes here.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost import activations, memory, tuning
from labkit.cost.layout import Layout
from labkit.cost.memory import Memory
from labkit.cost.moments import LOGIT_BYTES, Moment, fullest, layer_gradients, layer_kept, made_before, only
from labkit.cost.shapes import Shape, beyond_plain_llama, norm_parameters, rank_layer_parameters

SOURCES = {
    "nanotron": "huggingface/nanotron@67c5ebb6",
    "torchtitan": "pytorch/torchtitan@9dec370",
    "torchtune": "pytorch/torchtune@bd2a0fc",
    "fsdp_lora": "AnswerDotAI/fsdp_qlora@05ed9f2",
    "fsdp_qlora": "AnswerDotAI/fsdp_qlora@05ed9f2",
}


@dataclass(frozen=True)
class Part:
    """What one rank of one pipeline stage has: its layers, whether the first and the last stage, its parameters."""

    layers: int
    first: bool
    last: bool
    count: int


def held(shape: Shape, layout: Layout, stage: int | None = None) -> Memory:
    """A device of one pipeline stage, by default of the fullest, under the layout's program. ValueError as `check`,
    and for a layout that the program has not."""
    if layout.program == "common":
        return memory.memory(shape, layout, stage)
    memory.check(shape, layout)
    if odd := beyond_plain_llama(shape):
        what = f"not {shape.name}, which has {', '.join(odd)}"
        raise ValueError(f"{layout.program} is known for plain Llamas alone, {what}; program common would do")
    one = {"nanotron": nanotron, "torchtitan": torchtitan}.get(layout.program) or tuning.program(layout.program)
    return one(shape, layout, stage)


def part(shape: Shape, layout: Layout, split: tuple[int, ...], stage: int) -> Part:
    first, last = stage == 0, stage == layout.pp - 1
    rows = -(-shape.vocab // layout.tp) * shape.hidden
    count = split[stage] * rank_layer_parameters(shape, layout.tp) + first * rows
    count += last * (norm_parameters(shape) + (0 if shape.tied and first else rows))
    return Part(split[stage], first, last, count)


def nanotron(shape: Shape, layout: Layout, stage: int | None = None, gathered: bool = True) -> Memory:
    """huggingface/nanotron@67c5ebb6, as scripts/scaling_benchmarks.py ran it. ZeRO 0 or 1, no recomputation.

    Gradients are added up in fp32 (FP32GradientAccumulator), those of one backward stand beside them in 16 bits until
    it ends, DDP keeps its own buckets of them (gradient_as_bucket_view is off). The loss (_ShardedCrossEntropy) holds
    logits and softmax in fp32. gathered: inputs of column-parallel matrices stay whole. The configuration's default
    (tp_recompute_allgather) says that they are gathered again instead; most measured runs say that they were not.
    """
    only(layout, "nanotron", zero=(0, 1), recompute=("none",), offload=("none",), precision=("bf16", "fp16"))
    only(layout, "nanotron", cp=(1,), interleave=(1,), shard_within=(0,), flash=(True,))
    if stage is None:
        return _fullest_of(nanotron, shape, layout)
    own = part(shape, layout, nanotron_split(shape, layout.pp), stage)
    flight = activations.in_flight(layout, stage)
    one = memory.total(activations.layer_saved(shape, layout))
    at = activations.sizes(shape, layout)
    whole = 2 * at.tokens * shape.hidden
    one += 2 * (whole - 2 * at.hidden) if gathered else 0
    kept = flight * own.layers * one
    optimizer = 12 * -(-own.count // (layout.shards if layout.zero else 1))
    bucket = 2 * own.count if layout.shards > 1 else 0
    # In 16 bits, of the backward that runs.
    made = [2 * made_before(shape, own.count, at, own.first, own.last, layout.tp) for at in range(own.layers)] or [0]
    rest, own_one = kept * (flight - 1) / flight, one if own.layers else 0  # other microbatches; the first layer
    logits = 8 * at.tokens * -(-shape.vocab // layout.tp) if own.last else 0
    in_layer = layer_gradients(shape, layout)
    common = {"parameters": 2 * own.count, "optimizer": optimizer, "bucket": bucket}
    common |= {"gathered": whole if layout.tp > 1 and layout.sequence_parallel else 0}
    return fullest(
        stage,
        Moment(**common, gradients=4 * own.count, layers=kept, logits=logits),
        Moment(**common, gradients=4 * own.count + made[-1], layers=kept, working=in_layer),
        Moment(**common, gradients=4 * own.count + made[0], layers=rest + own_one, working=in_layer),
        Moment(**common, gradients=6 * own.count, layers=rest),
    )


def nanotron_split(shape: Shape, pp: int) -> tuple[int, ...]:
    """Layers per stage, by cost: a block goes to the next stage once those before it have more than that stage's share
    (helpers.py and models/base.py, build_model); the head costs vocab x hidden, whatever the key-value heads."""
    layer = 4 * shape.query_width * shape.hidden + 3 * shape.ffn * shape.hidden
    total = shape.layers * layer + shape.vocab * shape.hidden
    counts, stage = [0] * pp, 0
    for number in range(1, shape.layers + 1):
        counts[stage] += 1
        stage += stage + 1 < pp and number * layer * pp > total * (stage + 1)
    return tuple(counts)


def torchtitan(shape: Shape, layout: Layout, stage: int | None = None) -> Memory:
    """pytorch/torchtitan@9dec370: FSDP2, everything sharded in fp32, gathered in bf16 (parallelize_llama.py).

    The root (embeddings, norm, head) stays gathered, and so does the last layer; with a pipeline all layers do, and
    gradients of all microbatches are added up whole, in fp32. "selective" keeps the output of every second matrix and
    of attention (_save_list). The loss is torch's cross_entropy in fp32, with tp that of loss_parallel, which makes one
    copy more (torch/distributed/tensor/parallel/loss.py). An FSDP of one rank is allowed: cp or dp may be 1.
    """
    only(layout, "torchtitan", interleave=(1,), zeropp=("none",), flash=(True,))
    only(layout, "torchtitan", zero=(3,), offload=("none",), precision=("bf16",))
    if stage is None:
        return _fullest_of(torchtitan, shape, layout)
    own = part(shape, layout, torchtitan_split(shape.layers, layout.pp), stage)
    at, shard = activations.sizes(shape, layout), -(-own.count // layout.divided)
    layer = rank_layer_parameters(shape, layout.tp)
    gathered = 2 * own.count if layout.pp > 1 else 2 * (own.count - own.layers * layer) + 2 * 2 * layer
    pending = 4 * own.count if layout.pp > 1 else 0
    kept = activations.in_flight(layout, stage) * own.layers * layer_kept(shape, layout)
    logits = (LOGIT_BYTES + (4 if layout.tp > 1 else 0)) * at.tokens * -(-shape.vocab // layout.tp)
    logits += 2 * at.tokens * shape.hidden  # the head's input
    again = memory.total(activations.layer_saved(shape, layout)) if layout.recompute != "none" else 0
    common = {"parameters": 4 * shard, "gradients": 4 * shard + pending, "optimizer": 8 * shard}
    common |= {"gathered": gathered, "layers": kept}
    return fullest(
        stage,
        Moment(**common, logits=logits if own.last else 0),
        Moment(**common, working=again + layer_gradients(shape, layout)),
    )


def torchtitan_split(layers: int, pp: int) -> tuple[int, ...]:
    """pipelining_utils.generate_split_points: what is over goes to the stages between first and last, then to the
    last."""
    base, over = divmod(layers, pp)
    counts = [base + (0 < stage < pp - 1 and stage <= over) for stage in range(pp)]
    counts[-1] += layers - sum(counts)
    return tuple(counts)


def _fullest_of(one, shape: Shape, layout: Layout) -> Memory:
    return max((one(shape, layout, stage) for stage in range(layout.pp)), key=lambda each: each.total)
