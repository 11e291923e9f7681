"""What a device holds at its fullest moment under two programs for fine-tuning: torchtune and fsdp_qlora.

As in `programs`: each function follows a program's source. Left out: torchtune's 8-bit optimizers and its adapters,
activations on the host, fsdp_qlora's other adapters (DoRA, Llama Pro).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from labkit.cost import activations, comm
from labkit.cost.layout import Layout
from labkit.cost.memory import Memory, layer_saved, total
from labkit.cost.moments import LOGIT_BYTES, Moment, fullest, layer_gradients, layer_kept, made_before, only
from labkit.cost.shapes import Shape, parameters, rank_layer_parameters

CHUNKS = 8  # of the sequence, torchtune's num_output_chunks
LORA_RANK = 64  # fsdp_qlora's default
AXES = {"tp": (1,), "pp": (1,), "cp": (1,), "shard_within": (0,), "zeropp": ("none",), "flash": (True,)}
QUANT_BLOCK = 64  # weights that share one absmax (bitsandbytes' nf4)


def program(name: str) -> Callable[[Shape, Layout, int | None], Memory]:
    """The function of a program's name. ValueError for a name that is not here."""
    known = {
        "torchtune": torchtune,
        "fsdp_lora": partial(fsdp_qlora, quantised=False),
        "fsdp_qlora": partial(fsdp_qlora, quantised=True),
    }
    if name not in known:
        raise ValueError(f"no program is called {name!r} here")
    return known[name]


def torchtune(
    shape: Shape, layout: Layout, stage: int | None = None, chunked: bool = True, in_backward: bool = False
) -> Memory:
    """pytorch/torchtune@bd2a0fc, full finetuning: parameters, gradients and Adam's moments all in bf16.

    One device, or FSDP2 over several (zero 3) with embeddings and head in units of their own; offload "parameters" is
    fsdp_cpu_offload. Gradients are gone during the forward, in_backward also after it (optimizer_in_bwd). chunked: the
    loss in fp32 a chunk at a time (CEWithChunkedOutputLoss): logits and their gradient stay in bf16. Activations of
    convention eager are those without torch.compile.
    """
    zero = (3,) if layout.shards > 1 else (0, 3)
    only(layout, "torchtune", **AXES, recompute=("none", "full"))
    only(layout, "torchtune", zero=zero, offload=("none", "parameters"), precision=("bf16",))
    at, shard = activations.sizes(shape, layout), -(-parameters(shape) // layout.shards)
    away = layout.offload == "parameters"
    layer = 2 * rank_layer_parameters(shape, 1) if layout.shards > 1 or away else 0
    rows = at.tokens * shape.vocab
    kept = shape.layers * layer_kept(shape, layout)
    again = total(layer_saved(shape, layout)) if layout.recompute != "none" else 0
    states = {} if away else {"parameters": 2 * shard, "optimizer": 4 * shard}
    gradients = 0 if away or in_backward else 2 * shard
    made = [gradients * made_before(shape, parameters(shape), at) / parameters(shape) for at in range(shape.layers)]
    logits = (4 + LOGIT_BYTES / CHUNKS if chunked else LOGIT_BYTES) * rows + 2 * at.hidden
    head = 2 * shape.vocab * shape.hidden if layer else 0
    in_layer = {"gathered": 3 * layer, "working": again + layer_gradients(shape, layout)}
    return fullest(
        0,
        Moment(**states, layers=kept, logits=logits, gathered=2 * layer + head),
        Moment(**states, layers=kept, gradients=made[-1], **in_layer),
        Moment(**states, layers=kept / shape.layers, gradients=made[0], **in_layer),
        Moment(**states, gradients=gradients),
        host=8 * shard if away else 0,
    )


def fsdp_qlora(shape: Shape, layout: Layout, stage: int | None = None, quantised: bool = True) -> Memory:
    """AnswerDotAI/fsdp_qlora@05ed9f2: FSDP over all ranks, adapters of rank 64 on every matrix of the layers, bf16.

    Weights of layers in 4 bits (with an absmax of one byte for each 64 of them, on every rank), embeddings and head in
    bf16 and gathered with the root; adapters and their gradients and moments in bf16. The loss is that of transformers,
    on logits that the script still holds: with them 16 bytes a logit. Layers are recomputed by hand-written RMSNorm and
    SwiGLU (convention eager).
    """
    only(layout, "fsdp_qlora", **AXES, zero=(3,), recompute=("full",), offload=("none",), precision=("bf16",))
    at, n = activations.sizes(shape, layout), layout.shards
    matrices, ends = shape.layers * rank_layer_parameters(shape, 1), ends_parameters(shape)
    weights, adapters = layer_weights(shape, quantised), adapter_parameters(shape)
    scales = matrices / QUANT_BLOCK if quantised else 0
    dequantised = 2 * shape.hidden * shape.ffn if quantised else 0
    common = {
        "parameters": (weights + 2 * ends + 2 * adapters) / n + scales,
        "gradients": 2 * adapters / n,
        "optimizer": 4 * adapters / n,
        "gathered": 2 * ends + 2 * weights / shape.layers + dequantised,
        "layers": shape.layers * layer_kept(shape, layout),
    }
    again = total(layer_saved(shape, layout)) + layer_gradients(shape, layout)
    return fullest(0, Moment(**common, logits=16 * at.tokens * shape.vocab), Moment(**common, working=again))


def ends_parameters(shape: Shape) -> int:
    """Embeddings and head: one matrix where they are tied."""
    return (1 if shape.tied else 2) * shape.vocab * shape.hidden


def layer_weights(shape: Shape, quantised: bool) -> float:
    """Bytes of all layers' weights: 4 bits of each, or bf16."""
    return shape.layers * rank_layer_parameters(shape, 1) * (0.5 if quantised else 2)


def adapter_parameters(shape: Shape) -> int:
    """A pair of low-rank matrices for each matrix of a layer: query and output, key and value, the MLP's three."""
    attention = 2 * (shape.hidden + shape.query_width) + 2 * (shape.hidden + shape.kv_width)
    return LORA_RANK * shape.layers * (attention + 3 * (shape.hidden + shape.ffn))


def adapter_traffic(shape: Shape, layout: Layout) -> dict[str, dict[str, int]]:
    """Bytes that a device of fsdp_qlora sends in a step: weights gathered twice, gradients of adapters alone."""
    adapters, m = 2 * adapter_parameters(shape), layout.microbatches
    whole = layer_weights(shape, layout.program == "fsdp_qlora") + 2 * ends_parameters(shape) + adapters
    gathered = 2 * m * comm.sent_bytes("all_gather", whole, layout.shards)
    scattered = m * comm.sent_bytes("reduce_scatter", adapters, layout.shards)
    return {"dp": {"all_gather": round(gathered), "reduce_scatter": round(scattered)}} if gathered else {}
