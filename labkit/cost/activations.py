"""What a forward pass keeps for its backward, in convention `megatron`: the papers' formulas, tensor by tensor.

Every operation keeps its input, in 2 bytes an element, and dropout a mask of 1 byte. For GPT this adds up to
s b h (34 + 5 a s / h) bytes a layer (Korthikanti et al., arXiv:2205.05198, equation 1). The same rule gives Llama's
layer, which no paper has: no dropout, fewer keys and values, SwiGLU. Small things are left out, as there: the norms'
means and variances, flash attention's log-sum-exp, rotary angles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape, rank_kv_heads
from labkit.cost.states import element_bytes


@dataclass(frozen=True)
class Saved:
    """A tensor that is kept: its bytes on this rank, and which backward needs it. core: of the attention core, which
    selective recomputation does not keep."""

    name: str
    cause: str
    num_bytes: float
    core: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes of one microbatch's tensors on a rank, of 1 byte an element.

    hidden: s b h, whole without sequence parallelism, a part with it. queries, keys, ffn: on this tp rank. scores:
    a s^2 b. tokens: s b.
    """

    tokens: float
    hidden: float
    queries: float
    keys: float
    ffn: float
    scores: float


def sizes(shape: Shape, layout: Layout) -> Sizes:
    """Context parallelism leaves a rank seq / cp queries, which see all keys."""
    tokens = layout.seq * layout.micro_batch / layout.cp
    own = layout.tp if layout.sequence_parallel else 1
    return Sizes(
        tokens,
        tokens * shape.hidden / own,
        tokens * shape.query_width / layout.tp,
        tokens * rank_kv_heads(shape, layout.tp) * shape.head_dim,
        tokens * shape.ffn / layout.tp,
        tokens * layout.seq * shape.heads / layout.tp,
    )


def layer_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """One layer, one microbatch, nothing recomputed: arXiv:2205.05198, section 4.1.

    GPT adds up to s b h (10 + 24/t + 5 a s / (h t)) (equation 2), with sequence parallelism to all of it over t
    (equation 4), with flash attention to the same without 5 a s / h.
    """
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    saved = [
        Saved("norm 1 input", "the norm", e * at.hidden),
        Saved("attention input", "the query, key and value matrices", e * at.hidden),
        Saved("queries", "scores", e * at.queries),
        Saved("keys", "scores", e * at.keys),
        Saved("values", "weighting", e * at.keys),
        *(() if layout.flash else _core(shape, at, e)),
        Saved("attention output", "the output matrix", e * at.queries),
        Saved("norm 2 input", "the norm", e * at.hidden),
        Saved("MLP input", "the first matrix", e * at.hidden),
        *_mlp(shape, at, e),
    ]
    if shape.dropout:
        saved.insert(-3, Saved("attention dropout mask", "dropout", at.hidden))
        saved.append(Saved("MLP dropout mask", "dropout", at.hidden))
    return tuple(saved)


def _core(shape: Shape, at: Sizes, e: int) -> tuple[Saved, ...]:
    softmax = Saved("softmax output", "softmax, weighting", e * at.scores, True)
    if not shape.dropout:
        return (softmax,)
    return (
        softmax,
        Saved("softmax dropout mask", "dropout", at.scores, True),
        Saved("softmax dropout output", "weighting", e * at.scores, True),
    )


def _mlp(shape: Shape, at: Sizes, e: int) -> list[Saved]:
    """Each token passes through its active experts; their inputs are copies, sorted by expert."""
    times = shape.active_experts or 1
    wide = e * at.ffn * times
    saved = [Saved("expert inputs", "the first matrix", e * at.hidden * times)] if shape.experts else []
    if not shape.gated:
        return [*saved, Saved("first matrix output", "GELU", wide), Saved("GELU output", "the second matrix", wide)]
    return [
        *saved,
        Saved("gate", "SiLU", wide),
        Saved("SiLU output", "gating", wide),
        Saved("up", "gating", wide),
        Saved("gated", "the last matrix", wide),
    ]


def first_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """Before the layers: the tokens (8 bytes each), and GPT's dropout (arXiv:2205.05198, section 4.3)."""
    at = sizes(shape, layout)
    mask = (Saved("embedding dropout mask", "dropout", at.hidden),) if shape.dropout else ()
    return (Saved("tokens", "the embedding", 8 * at.tokens), *mask)


def head_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """After the layers: 4 s b h (1 + v / h) / t, logits in fp32 (arXiv:2205.05198, section 4.3)."""
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    return (
        Saved("last norm input", "the norm", e * at.hidden),
        Saved("head input", "the head", e * at.hidden),
        Saved("logits in fp32", "the loss", 4 * at.tokens * -(-shape.vocab // layout.tp)),
    )


def kept(saved: Iterable[Saved], shape: Shape, layout: Layout) -> float:
    """Bytes of one layer that stay until its backward, given what recomputation drops.

    full: only the layer's input (2 s b h; arXiv:2205.05198, Table 2). selective: all but the attention core.
    """
    if layout.recompute == "full":
        return element_bytes(layout.precision) * sizes(shape, layout).hidden
    return sum(each.num_bytes for each in saved if not (each.core and layout.recompute == "selective"))


def recomputed(saved: Iterable[Saved], shape: Shape, layout: Layout) -> float:
    """Bytes of one layer that recomputation brings back for the time of its backward."""
    saved = tuple(saved)
    return max(0.0, sum(each.num_bytes for each in saved) - kept(saved, shape, layout))


def in_flight(layout: Layout, stage: int = 0) -> float:
    """Microbatches whose activations a stage holds at once, in layers of that stage.

    1F1B: min(m, p - stage) (Narayanan et al., arXiv:2104.04473, section 2.2.1). Interleaved in v chunks: p (1 +
    (p-1) / (p v)) on the first stage (arXiv:2205.05198, section 4.2.3); each later one has 2 chunks fewer
    (Megatron-LM's schedules.py: (p - stage - 1) 2 + (v - 1) p warm-up chunks, and the one at work). Never more than m.
    """
    p, v, m = layout.pp, layout.interleave, layout.microbatches
    if not 0 <= stage < p:
        raise ValueError(f"stage must be 0 to {p - 1}, not {stage}")
    if v == 1:
        return min(m, p - stage)
    chunks = 2 * (p - stage - 1) + (v - 1) * p + 1
    return min(m, chunks / v)
