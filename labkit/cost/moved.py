"""Bytes that one device sends in one optimizer step, by axis and collective.

Sent bytes are those of `comm.sent_bytes`, a ring's. What recomputation repeats is counted. Left out: scalars (clipping,
loss scaling), the scales of quantised numbers. What ZeRO sends is in `sharding`.
"""

from __future__ import annotations

from labkit.cost import activations, comm, memory, sharding, states
from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape, rank_kv_heads, stage_layers

Moved = dict[str, dict[str, int]]


def communication_bytes(shape: Shape, layout: Layout, stage: int) -> Moved:
    """{axis: {collective: bytes sent}} of a device of that stage; only axes on which something moves.

    shard: within a group of hybrid sharding, or within a node under ZeRO++; dp is then what crosses them. disk: files.
    """
    found = {
        **sharding.data_parallel(shape, layout, stage),
        "ep": expert_parallel(shape, layout, stage),
        "tp": tensor_parallel(shape, layout, stage),
        "cp": context_parallel(shape, layout, stage),
        "pp": pipeline(shape, layout, stage),
        **host(shape, layout, stage),
    }
    kept = {axis: {op: round(size) for op, size in ops.items() if size} for axis, ops in found.items()}
    return {axis: ops for axis, ops in kept.items() if ops}


def data_parallel(shape: Shape, layout: Layout, stage: int) -> dict[str, float]:
    """Of axis dp alone, as `sharding` has it; in 2 P, or 3 P at stage 3 (arXiv:1910.02054, section 7)."""
    return sharding.data_parallel(shape, layout, stage)["dp"]


def tensor_parallel(shape: Shape, layout: Layout, stage: int) -> dict[str, float]:
    """Megatron-LM, arXiv:1909.08053, section 3: per layer and microbatch 2 all_reduces of s b h forward, 2 backward.

    With sequence parallelism each is a reduce_scatter and an all_gather, and the backward gathers the two inputs again
    (arXiv:2205.05198, section 4.2.2): 10 (t-1)/t of s b h instead of 8. Full recomputation repeats the forward's. The
    embedding, the head and the loss (three numbers per token in fp32) come on top where they are.
    """
    t = layout.tp
    if t == 1:
        return {}
    tokens = layout.seq * layout.micro_batch / layout.cp
    size = tokens * shape.hidden * states.element_bytes(layout.precision)
    forwards = 2 if layout.recompute == "full" else 1
    regions = 2 * stage_layers(shape.layers, layout.pp)[stage] * layout.microbatches
    ends = ((stage == 0) + (stage == layout.pp - 1)) * layout.microbatches
    loss = (stage == layout.pp - 1) * layout.microbatches * 3 * 4 * tokens
    reduced = comm.sent_bytes("all_reduce", loss, t)
    if not layout.sequence_parallel:
        return {"all_reduce": reduced + comm.sent_bytes("all_reduce", size, t) * (regions * (forwards + 1) + ends)}
    one = comm.sent_bytes("all_gather", size, t)
    return {
        "all_gather": one * (regions * (forwards + 2) + ends),
        "reduce_scatter": one * (regions * (forwards + 1) + ends),
        "all_reduce": reduced,
    }


def context_parallel(shape: Shape, layout: Layout, stage: int) -> dict[str, float]:
    """Keys and values of all ranks, gathered forward and again backward; their gradients reduced and scattered.

    The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2. A ring of sends moves as many bytes.
    """
    width = 2 * rank_kv_heads(shape, layout.tp) * shape.head_dim
    size = layout.seq * layout.micro_batch * width * states.element_bytes(layout.precision)
    times = stage_layers(shape.layers, layout.pp)[stage] * layout.microbatches
    forwards = 2 if layout.recompute == "full" else 1
    return {
        "all_gather": times * (forwards + 1) * comm.sent_bytes("all_gather", size, layout.cp),
        "reduce_scatter": times * comm.sent_bytes("reduce_scatter", size, layout.cp),
    }


def pipeline(shape: Shape, layout: Layout, stage: int) -> dict[str, float]:
    """b s h per microbatch to the next stage, and its gradient to the previous one (arXiv:2104.04473, section 3.2).

    With sequence parallelism each tp rank sends its own part. Interleaving sends between all chunks. A tied embedding's
    gradient is reduced among the first and the last stage.
    """
    p, v = layout.pp, layout.interleave
    if p == 1:
        return {}
    own = layout.tp if layout.sequence_parallel else 1
    tokens = layout.seq * layout.micro_batch / layout.cp
    size = tokens * shape.hidden * states.element_bytes(layout.precision) / own
    # Of p v chunks in a row all but the last send on, all but the first send back.
    sends = (v - (stage == p - 1)) + (v - (stage == 0))
    found = {"send": size * sends * layout.microbatches}
    if shape.tied and stage in (0, p - 1):
        rows = -(-shape.vocab // layout.tp)
        found["all_reduce"] = comm.sent_bytes(
            "all_reduce", rows * shape.hidden * memory.communicated_gradient_bytes(layout), 2
        )
    return found


def expert_parallel(shape: Shape, layout: Layout, stage: int) -> dict[str, float]:
    """Tokens to their experts and back, forward and backward: four all_to_alls of a token's hidden state for each of
    its experts, in every layer (GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596). Tokens spread evenly."""
    if layout.ep == 1:
        return {}
    at = activations.sizes(shape, layout)
    size = at.hidden * shape.active_experts * states.element_bytes(layout.precision)
    times = stage_layers(shape.layers, layout.pp)[stage] * layout.microbatches
    trips = 6 if layout.recompute == "full" else 4
    return {"all_to_all": trips * times * comm.sent_bytes("all_to_all", size, layout.ep)}


def host(shape: Shape, layout: Layout, stage: int) -> dict[str, dict[str, float]]:
    """ZeRO-Offload, arXiv:2101.06840, section 4.1: gradients down and parameters up, of a rank's own part.

    Offloaded parameters come up for every forward and backward instead. From files (ZeRO-Infinity, arXiv:2104.07857)
    the optimizer state is read and written once a step, parameters are read as often as they come up and written once.
    """
    if layout.offload == "none":
        return {}
    copies = memory.rank_parameters(shape, layout, stage)
    part = sum(-(-count // ranks) for count, ranks in copies)
    size = states.element_bytes(layout.precision)
    times = 2 * layout.microbatches if layout.offload in states.AWAY else 1
    down = layout.microbatches if layout.zero >= 2 else 1
    found = {
        "host": {
            "to_host": part * memory.communicated_gradient_bytes(layout) * down,
            "to_device": part * size * times,
        }
    }
    if layout.offload == "nvme":
        optimizer = part * states.per_parameter(layout.convention, layout.precision, layout.zero).optimizer
        found["disk"] = {"read": optimizer + part * size * times, "write": optimizer + part * size}
    return found
