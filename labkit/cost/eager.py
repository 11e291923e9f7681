"""What a forward pass keeps for its backward, in convention `eager`: what torch saves without fused kernels.

Llama's layer is that of `labkit.model.llama`, tensor by tensor as torch 2.13 saves it: RMSNorm written out in fp32
keeps its input (a copy in 16 bits), 1/rms, the normalised and the scaled value; SwiGLU its four wide tensors. GPT's is
one of torch's own LayerNorm, GELU and dropout, whose masks take a byte as on a GPU (a CPU keeps them as wide as the
numbers they mask); its attention has none. For Llama also what comes on top while backward runs, moment by moment, in
which gradients of activations live for a while. Left out: what a caller still holds by name, allocator rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost.activations import Saved, Sizes, kept, sizes
from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape, beyond_plain_llama, layer_parameters
from labkit.cost.states import element_bytes


def layer_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """One layer, one microbatch, nothing recomputed.

    Llama in T tokens, e bytes an element, flash: T (8 h + 4 e h + 4 e a d + 4 e f + 4 (2 + a)), and in 16 bits the
    angles, 8 s d. Keys and values are repeated to as many as there are queries before attention sees them.
    """
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    angles = 0 if shape.dropout or e == 4 else 8 * layout.seq / layout.cp * shape.head_dim
    saved = [
        *_norm("norm 1", shape, layout, "the query, key and value matrices"),
        *([Saved("angles in 16 bits", "rotation of queries and keys", angles)] if angles else []),
        *_attention(shape, layout),
        *_norm("norm 2", shape, layout, "the first matrices"),
        *_mlp(shape, at, e),
    ]
    if shape.dropout:
        saved += [Saved(f"{where} dropout mask", "dropout", at.hidden) for where in ("attention", "MLP")]
    return tuple(saved)


def _attention(shape: Shape, layout: Layout) -> list[Saved]:
    """Without flash, torch's own path computes in fp32 whatever the precision, and keeps what it converted."""
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    inside = e if layout.flash else 4
    saved = [Saved(name, "attention", inside * at.queries) for name in ("queries", "keys", "values")]
    saved.append(Saved("attention output", "attention, the output matrix", e * at.queries))
    if layout.flash:
        return [*saved, Saved("log-sum-exp", "attention", 4 * at.tokens * shape.heads / layout.tp)]
    return [*saved, Saved("softmax output", "softmax, weighting", 4 * at.scores, True)]


def _norm(name: str, shape: Shape, layout: Layout, then: str) -> tuple[Saved, ...]:
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    rows = at.hidden / shape.hidden
    if shape.biases:
        return (
            Saved(f"{name} input", "LayerNorm", e * at.hidden),
            Saved(f"{name} mean and 1/deviation", "LayerNorm", 8 * rows),
            Saved(f"{name} output", then, e * at.hidden),
        )
    return (
        Saved(f"{name} input in fp32", "the product with 1/rms", 4 * at.hidden),
        Saved(f"{name} 1/rms", "the product with the input", 4 * rows),
        Saved(f"{name} normalised", "the product with the weight", e * at.hidden),
        Saved(f"{name} output", then, e * at.hidden),
    )


def _mlp(shape: Shape, at: Sizes, e: int) -> list[Saved]:
    times = shape.active_experts or 1
    wide = e * at.ffn * times
    saved = [Saved("expert inputs", "the first matrices", e * at.hidden * times)] if shape.experts else []
    names = ("gate", "SiLU output", "up", "gated") if shape.gated else ("first matrix output", "GELU output")
    return [*saved, *(Saved(name, "the MLP", wide) for name in names)]


def first_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """Before the layers: tokens, and rotary angles in fp32 or GPT's dropout mask."""
    at = sizes(shape, layout)
    tokens = Saved("tokens", "the embedding", 8 * at.tokens)
    if shape.dropout:
        return tokens, Saved("embedding dropout mask", "dropout", at.hidden)
    # In 16 bits each layer keeps copies of its own; a layer that is run again keeps what it was given.
    wide = element_bytes(layout.precision) == 4 or layout.recompute == "full"
    angles = 8 * layout.seq / layout.cp * shape.head_dim if wide else 0
    return tokens, Saved("angles in fp32", "rotation of queries and keys", angles)


def head_saved(shape: Shape, layout: Layout) -> tuple[Saved, ...]:
    """After the layers, at the end of forward: the last norm, and log-softmax in fp32 with its targets."""
    at = sizes(shape, layout)
    return (
        *_norm("last norm", shape, layout, "the head"),
        Saved("log-softmax in fp32", "the loss", 4 * at.tokens * -(-shape.vocab // layout.tp)),
        Saved("targets", "the loss", 8 * at.tokens),
        Saved("number of targets", "the loss", 4),
    )


def loss_transient(shape: Shape, layout: Layout) -> float:
    """Bytes that the loss's backward adds for a moment: the gradients of log-softmax and of its input, in fp32."""
    return 8 * sizes(shape, layout).tokens * -(-shape.vocab // layout.tp)


@dataclass(frozen=True)
class Moment:
    """A moment of backward at which much is held. num_bytes: of what is still saved and of transients, without states.

    place: what runs its backward. unit: "head", a layer's number, or "embedding". made: parameters of this unit whose
    gradients are there by then.
    """

    place: str
    unit: str | int
    num_bytes: float
    made: int


def backward_moments(shape: Shape, layout: Layout) -> tuple[Moment, ...]:
    """The moments among which the peak of backward is, in order: head, then layers from the last to the first.

    One microbatch on one rank without tensor, sequence, context and pipeline parallelism; recomputation "none" or
    "full", layer by layer. Tensors are those of `labkit.model.llama`, in the order in which torch 2.13's autograd makes
    and frees them. Raises ValueError for any other model or layout.
    """
    if odd := beyond_plain_llama(shape):
        raise ValueError(f"moments of backward are known for a plain Llama; {shape.name} has {', '.join(odd)}")
    if max(layout.tp, layout.cp, layout.pp) > 1 or layout.recompute == "selective":
        raise ValueError("moments of backward are known without tp, cp and pp, and for recomputation none or full")
    saved = layer_saved(shape, layout)
    each, one = kept(saved, shape, layout), sum(part.num_bytes for part in saved)
    first = sum(part.num_bytes for part in first_saved(shape, layout))
    moments = _head_moments(shape, layout, first + shape.layers * each)
    again = 0.0
    if layout.recompute == "full":
        # The kept input is, in fp32, the very tensor that the first norm saves.
        shared = each if element_bytes(layout.precision) == 4 else 0
        again = one - shared
    for layer in reversed(range(shape.layers)):
        moments += _layer_moments(shape, layout, layer, first + (layer + 1) * each + again)
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    copies = 2 if shape.tied else 1  # tied: beside the head's
    moments.append(Moment("embedding", "embedding", first + e * at.hidden, copies * shape.vocab * shape.hidden))
    return tuple(moments)


def backward_peak(shape: Shape, layout: Layout) -> float:
    """The most that is held in backward, in bytes, without parameters and optimizer state, with all gradients so far.

    Gradients are of the parameters' precision and stay, as without ZeRO. ValueError as `backward_moments`.
    """
    e = element_bytes(layout.precision)
    return max(each.num_bytes + e * gradients_made(shape, each) for each in backward_moments(shape, layout))


def gradients_made(shape: Shape, moment: Moment) -> int:
    """Parameters whose gradients are there at a moment, in all units."""
    if moment.unit == "head":
        return moment.made
    head = shape.vocab * shape.hidden + shape.hidden
    done = shape.layers if moment.unit == "embedding" else shape.layers - 1 - moment.unit
    return head + done * layer_parameters(shape) + moment.made


def _head_moments(shape: Shape, layout: Layout, below: float) -> list[Moment]:
    """Loss, head matrix, last norm. below: bytes saved by all that stands before them."""
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    saved = below + sum(part.num_bytes for part in head_saved(shape, layout))
    scores = at.tokens * shape.vocab
    head = shape.vocab * shape.hidden
    return [
        Moment("loss", "head", saved + loss_transient(shape, layout), 0),
        Moment("head", "head", saved - 4 * scores + e * scores + e * at.hidden, head),
        Moment("last norm", "head", saved - 4 * scores - 2 * e * at.hidden + 20 * at.hidden, head + shape.hidden),
    ]


def _layer_moments(shape: Shape, layout: Layout, layer: int, saved: float) -> list[Moment]:
    """A layer backwards. saved: all that is saved when its backward begins. The gradient of its output is held besides,
    until the first norm is done; the norms compute in fp32, with five tensors at once.
    """
    at, e = sizes(shape, layout), element_bytes(layout.precision)
    wide, hidden, queries = e * at.ffn, e * at.hidden, e * at.queries
    matrix = shape.hidden * shape.ffn
    norm = 20 * at.hidden + (hidden if e < 4 else 0)  # in fp32 one of the five has the layer's gradient in it
    after_mlp = saved - 4 * wide - 2 * hidden  # the four wide tensors, and what the second norm gave
    moments = [
        Moment("MLP product", layer, saved - wide + hidden + 3 * wide, matrix),
        Moment("MLP up", layer, saved - wide + 2 * hidden, 2 * matrix),
        Moment("MLP gate", layer, saved - 3 * wide + 3 * hidden, 3 * matrix),
        Moment("norm 2", layer, after_mlp + norm, 3 * matrix + shape.hidden),
    ]
    before = after_mlp - 4 * at.hidden - 4 * at.tokens
    made = 3 * matrix + shape.hidden + shape.hidden * shape.query_width
    scores = 4 * at.scores
    if layout.flash:
        moments.append(Moment("attention", layer, before + hidden + 4 * queries, made))
        before -= 4 * queries + 4 * at.tokens * shape.heads
    else:
        inside = 4 * at.queries
        rest = before - queries + hidden
        moments.append(Moment("attention values", layer, rest + 2 * inside + scores, made))
        moments.append(Moment("softmax", layer, rest + 2 * scores, made))
        before = before - queries - 3 * inside - scores
    made = layer_parameters(shape)
    moments.append(Moment("query matrix", layer, before + 3 * hidden + queries, made - shape.hidden))
    moments.append(Moment("norm 1", layer, before - 2 * hidden + norm, made))
    return moments
