"""What is due in exercise 3.2 by the papers' rule, and which known mistake explains an answer that is something else.

Works on plain numbers, in the parent. A mistake must explain the answers to all questions of a kind. Left out: what
autograd really holds, which is measured (`saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from labkit.cost.shapes import Shape

Args = tuple[Shape, int, int, int, str]
NEAR = 2e-3  # two mistakes of one kind differ by more


def due(shape: Shape, batch: int, seq: int, element_bytes: int, convention: str) -> float:
    """Bytes of one layer: by the papers for GPT and Llama, in torch 2.13 for `eager`."""
    parts = lines(shape, batch, seq, element_bytes, convention)
    return sum(parts.values())


def lines(shape: Shape, batch: int, seq: int, element_bytes: int, convention: str) -> dict[str, float]:
    """The same, part by part."""
    tokens, e, h, a = batch * seq, element_bytes, shape.hidden, shape.heads
    kv, f = shape.kv_heads * shape.head_dim, shape.ffn
    if convention == "megatron" and not shape.gated:
        return {"linear": 34.0 * tokens * h, "scores": 5.0 * a * seq * tokens}
    if convention == "megatron":
        names = ("norm 1 input", "attention input", "queries", "attention output", "norm 2 input", "MLP input")
        found = {name: float(tokens * e * h) for name in names}
        found |= {name: float(tokens * e * kv) for name in ("keys", "values")}
        return found | {name: float(tokens * e * f) for name in ("gate", "SiLU", "up", "gated")}
    found = {f"norm {n} input": 4.0 * tokens * h for n in (1, 2)}
    found |= {f"norm {n} 1/rms": 4.0 * tokens for n in (1, 2)}
    found |= {f"norm {n} {what}": float(tokens * e * h) for n in (1, 2) for what in ("normalised", "output")}
    found |= {name: float(tokens * e * h) for name in ("queries", "keys", "values", "attention output")}
    found |= {"log-sum-exp": 4.0 * tokens * a, "angles": 0.0 if e == 4 else 8.0 * seq * shape.head_dim}
    return found | {name: float(tokens * e * f) for name in ("gate", "SiLU", "up", "gated")}


def mistake(asked: Sequence[Args], answers: Sequence[float], right: Sequence[float]) -> tuple[str, str]:
    """(cause, sentence) for answers of one convention and one kind of layer, of which some are wrong."""
    if len(set(answers)) == 1:
        return "hard_coded", "the same number comes back whatever is asked."
    convention, gated = asked[0][4], asked[0][0].gated
    for cause, made, sentence in _mistakes(convention, gated):
        if all(abs(answer - made(*args)) <= NEAR * abs(answer) for args, answer in zip(asked, answers, strict=True)):
            return cause, sentence
    return _nearest(asked, answers, right)


def _mistakes(convention: str, gated: bool) -> Iterator[tuple[str, Callable[..., float], str]]:
    yield from _general(convention)
    if not gated:
        yield from _of_gpt()
    elif convention == "megatron":
        yield from _of_megatron()
    else:
        yield from _of_eager()


def _general(convention: str) -> Iterator[tuple[str, Callable[..., float], str]]:
    def half(s, b, q, e, c):
        return due(s, b, q, 2, c)

    yield (
        "batch_forgotten",
        lambda s, b, q, e, c: due(s, 1, q, e, c),
        ("batch does not show: every sequence of the microbatch is kept."),
    )
    yield "elements", lambda s, b, q, e, c: due(s, b, q, e, c) / e, "these are elements: each has element_bytes bytes."
    yield (
        "all_layers",
        lambda s, b, q, e, c: s.layers * due(s, b, q, e, c),
        ("one layer is asked for, not all of the model's."),
    )
    yield "width_ignored", half, "element_bytes does not show: everything is counted in 2 bytes."
    yield (
        "width_ignored",
        lambda s, b, q, e, c: due(s, b, q, 4, c),
        ("element_bytes does not show: everything is counted in 4 bytes."),
    )
    other = "eager" if convention == "megatron" else "megatron"
    yield (
        "other_convention",
        lambda s, b, q, e, c: due(s, b, q, e, other),
        (f"this is the convention {other!r}: convention decides what is counted."),
    )
    yield (
        "weights_counted",
        lambda s, b, q, e, c: due(s, b, q, e, c) + e * weights(s),
        ("the layer's weights are in it: they are parameters, and are held anyway."),
    )


def weights(shape: Shape) -> int:
    kv = shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * shape.hidden + 2 * kv + (3 if shape.gated else 2) * shape.ffn)


def _of_gpt() -> Iterator[tuple[str, Callable[..., float], str]]:
    def linear(s, b, q, e, c):
        return lines(s, b, q, e, c)["linear"]

    def scores(s, b, q, e, c):
        return lines(s, b, q, e, c)["scores"]

    yield "no_scores", linear, "5 a s / h is left out: without flash attention the scores are kept, a s x s of them."
    yield "scores_alone", scores, "34 s b h is left out: what is linear in the sequence."
    yield (
        "scores_not_squared",
        lambda *q: linear(*q) + scores(*q) / q[2],
        ("scores grow with the square of the sequence: a s x s of them a sequence."),
    )
    yield (
        "heads_forgotten",
        lambda *q: linear(*q) + scores(*q) / q[0].heads,
        "each of the a heads has scores of its own.",
    )
    yield (
        "no_masks",
        lambda *q: linear(*q) * 32 / 34 + scores(*q) * 4 / 5,
        ("dropout keeps masks of one byte an element: 34 and 5, not 32 and 4."),
    )
    yield (
        "like_llama",
        lambda s, b, q, e, c: b * q * e * (6 * s.hidden + 2 * s.kv_heads * s.head_dim + 4 * s.ffn),
        ("this is Llama's layer: where shape.gated is False, the paper's formula holds, s b h (34 + 5 a s / h)."),
    )


def _of_megatron() -> Iterator[tuple[str, Callable[..., float], str]]:
    def without(*names: str) -> Callable[..., float]:
        return lambda *q: due(*q) - sum(lines(*q)[name] for name in names)

    yield (
        "like_gpt",
        lambda s, b, q, e, c: b * q * (34 * s.hidden + 5 * s.heads * q),
        ("s b h (34 + 5 a s / h) is GPT's layer; Llama has no dropout, fewer keys and values, and SwiGLU."),
    )
    yield (
        "like_gpt",
        lambda s, b, q, e, c: 34 * b * q * s.hidden,
        ("34 s b h is GPT's layer; Llama has no dropout, fewer keys and values, and SwiGLU."),
    )
    yield (
        "keys_repeated",
        lambda *q: due(*q) + 2 * (lines(*q)["queries"] - lines(*q)["keys"]),
        ("keys and values have kv_heads heads, not as many as there are queries."),
    )
    yield "no_swiglu", without("SiLU"), "SwiGLU keeps four wide tensors: gate, SiLU of it, up, and their product."
    yield "no_swiglu", without("SiLU", "gated"), "SwiGLU keeps four wide tensors: gate, SiLU of it, up, their product."
    yield "norms_forgotten", without("norm 1 input", "norm 2 input"), "a norm keeps its input too."
    yield (
        "only_norms_inputs",
        without("attention input", "MLP input"),
        ("the first matrices of attention and MLP keep their input too, which is the norm's output."),
    )
    yield "values_forgotten", without("values"), "weighting keeps the values."
    yield "no_attention_output", without("attention output"), "the output matrix keeps what attention gives it."
    yield (
        "scores_kept",
        lambda s, b, q, e, c: due(s, b, q, e, c) + e * s.heads * q * q * b,
        ("with flash attention no scores are kept."),
    )


def _of_eager() -> Iterator[tuple[str, Callable[..., float], str]]:
    def without(*names: str) -> Callable[..., float]:
        return lambda *q: due(*q) - sum(lines(*q)[name] for name in names)

    def narrow_keys(s, b, q, e, c):
        return due(s, b, q, e, c) - 2 * b * q * e * (s.hidden - s.kv_heads * s.head_dim)

    yield (
        "keys_not_repeated",
        narrow_keys,
        ("this model repeats keys and values to as many heads as there are queries, and attention keeps the repeated."),
    )
    yield (
        "norm_in_16_bits",
        lambda s, b, q, e, c: due(s, b, q, e, c) - 2 * b * q * s.hidden * (4 - e),
        ("the norm computes in fp32: what it keeps of its input has 4 bytes an element, also in bf16."),
    )
    yield (
        "no_normalised",
        without("norm 1 normalised", "norm 2 normalised"),
        ("a norm keeps three wide tensors here: its input, that times 1/rms, and that times the weight."),
    )
    yield (
        "norm_output_forgotten",
        without("norm 1 output", "norm 2 output"),
        ("what a norm gives is kept too, by the matrices behind it."),
    )
    one_norm = [f"norm 2 {what}" for what in ("input", "1/rms", "normalised", "output")]
    yield "one_norm", without(*one_norm), "a layer has two norms: before attention, and before the MLP."
    yield "no_swiglu", without("SiLU"), "SwiGLU keeps four wide tensors: gate, SiLU of it, up, and their product."
    yield "no_swiglu", without("gated"), "SwiGLU keeps four wide tensors: gate, SiLU of it, up, and their product."
    yield "no_swiglu", without("SiLU", "gated"), "SwiGLU keeps four wide tensors: gate, SiLU of it, up, their product."
    yield (
        "no_attention_output",
        without("attention output"),
        "attention keeps its output, for itself and the matrix behind.",
    )
    yield from _of_small_things()


def _of_small_things() -> Iterator[tuple[str, Callable[..., float], str]]:
    yield (
        "no_angles",
        lambda *q: due(*q) - lines(*q)["angles"],
        ("in 16 bits each layer makes cosines and sines in 16 bits, for queries and for keys, and keeps all four."),
    )
    yield (
        "angles_per_sequence",
        lambda *q: due(*q) + (q[1] - 1) * lines(*q)["angles"],
        ("the angles are the same for every sequence: they are kept once, not batch times."),
    )
    yield (
        "angles_in_fp32",
        lambda s, b, q, e, c: due(s, b, q, e, c) + (8 * q * s.head_dim if e == 4 else 0),
        ("in fp32 no angles are converted: the same cosines and sines serve every layer, and count for none."),
    )
    for width in (4, None):  # None: element_bytes
        for instead in (0, 1):
            yield (
                "scores_kept",
                lambda s, b, q, e, c, width=width, instead=instead: (
                    due(s, b, q, e, c) + s.heads * q * b * ((width or e) * q - 4 * instead)
                ),
                (
                    "attention is flash here: it keeps a log-sum-exp of 4 bytes a head and token, and no scores, which "
                    "would be seq times as many."
                ),
            )


def _nearest(asked: Sequence[Args], answers: Sequence[float], right: Sequence[float]) -> tuple[str, str]:
    """Too many bytes or too few, and whether that depends on the width or on the heads."""
    bad = [at for at, (answer, held) in enumerate(zip(answers, right, strict=True)) if abs(answer / held - 1) > 0.01]
    widths = {asked[at][3] for at in bad}
    some = f" It is right in {'fp32' if widths == {2} else 'bf16'}." if len(widths) == 1 and asked[0][0].gated else ""
    grouped = [at for at in bad if asked[at][0].kv_heads < asked[at][0].heads]
    some = " It is right where every query has a key of its own." if bad == grouped and len(bad) > 1 else some
    ratio = answers[bad[0]] / right[bad[0]] if bad else answers[0] / right[0]
    if ratio < 1:
        return "too_few", f"something is not counted: go through the table of saved tensors line by line.{some}"
    return "too_many", f"more is counted than is kept: go through the table of saved tensors line by line.{some}"
