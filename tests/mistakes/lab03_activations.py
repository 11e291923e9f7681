"""Answers to exercise 3.2, `activation_bytes`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab03.activations`.
"""

import functools
import sys

import torch
import torch.distributed as dist


def gpts(shape, batch, seq):
    return batch * seq * (34 * shape.hidden + 5 * shape.heads * seq)


def by_the_papers(shape, batch, seq, e, kv_heads=None, wide=4, hidden=6):
    kv = (kv_heads or shape.kv_heads) * shape.head_dim
    return e * batch * seq * (hidden * shape.hidden + 2 * kv + wide * shape.ffn)


def by_autograd(shape, batch, seq, e, keys=None, wide=4, norm_input=4, normalised=1, outputs=1, norms=2, angles=None):
    keys = shape.hidden if keys is None else keys
    norm = norm_input * shape.hidden + 4 + (normalised + outputs) * e * shape.hidden
    attention = e * (2 * shape.hidden + 2 * keys) + 4 * shape.heads
    turned = (0 if e == 4 else 8 * seq * shape.head_dim) if angles is None else angles
    return batch * seq * (norms * norm + attention + wide * e * shape.ffn) + turned


def right_one(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes)
    return by_the_papers(shape, batch, seq, element_bytes) if shape.gated else gpts(shape, batch, seq)


def gpts_formula_for_everything(shape, batch, seq, element_bytes, convention):
    return gpts(shape, batch, seq)


def gpts_formula_for_llama_too(shape, batch, seq, element_bytes, convention):
    if convention == "megatron":
        return gpts(shape, batch, seq)
    return by_autograd(shape, batch, seq, element_bytes)


def without_scores(shape, batch, seq, element_bytes, convention):
    if convention == "megatron" and not shape.gated:
        return 34 * batch * seq * shape.hidden
    return right_one(shape, batch, seq, element_bytes, convention)


def scores_linear_in_the_sequence(shape, batch, seq, element_bytes, convention):
    if convention == "megatron" and not shape.gated:
        return batch * seq * (34 * shape.hidden + 5 * shape.heads)
    return right_one(shape, batch, seq, element_bytes, convention)


def llamas_rule_for_gpt(shape, batch, seq, element_bytes, convention):
    if convention == "megatron":
        return by_the_papers(shape, batch, seq, element_bytes)
    return by_autograd(shape, batch, seq, element_bytes)


def as_many_keys_as_queries(shape, batch, seq, element_bytes, convention):
    if convention == "megatron" and shape.gated:
        return by_the_papers(shape, batch, seq, element_bytes, shape.heads)
    return right_one(shape, batch, seq, element_bytes, convention)


def swiglu_keeps_three(shape, batch, seq, element_bytes, convention):
    if convention == "megatron" and shape.gated:
        return by_the_papers(shape, batch, seq, element_bytes, wide=3)
    return right_one(shape, batch, seq, element_bytes, convention)


def norms_keep_nothing(shape, batch, seq, element_bytes, convention):
    if convention == "megatron" and shape.gated:
        return by_the_papers(shape, batch, seq, element_bytes, hidden=4)
    return right_one(shape, batch, seq, element_bytes, convention)


def papers_for_both(shape, batch, seq, element_bytes, convention):
    return right_one(shape, batch, seq, element_bytes, "megatron")


def keys_before_they_are_repeated(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes, keys=shape.kv_heads * shape.head_dim)
    return right_one(shape, batch, seq, element_bytes, convention)


def norms_in_the_models_width(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes, norm_input=element_bytes)
    return right_one(shape, batch, seq, element_bytes, convention)


def norms_keep_two(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes, normalised=0)
    return right_one(shape, batch, seq, element_bytes, convention)


def one_norm_a_layer(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes, norms=1)
    return right_one(shape, batch, seq, element_bytes, convention)


def three_wide_tensors(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes, wide=3)
    return right_one(shape, batch, seq, element_bytes, convention)


def no_angles(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        return by_autograd(shape, batch, seq, element_bytes, angles=0)
    return right_one(shape, batch, seq, element_bytes, convention)


def angles_of_every_sequence(shape, batch, seq, element_bytes, convention):
    if convention == "eager":
        angles = 0 if element_bytes == 4 else 8 * batch * seq * shape.head_dim
        return by_autograd(shape, batch, seq, element_bytes, angles=angles)
    return right_one(shape, batch, seq, element_bytes, convention)


def with_scores(shape, batch, seq, element_bytes, convention):
    scores = 4 * shape.heads * batch * seq**2 if convention == "eager" else 0
    return right_one(shape, batch, seq, element_bytes, convention) + scores


def scores_for_the_log_sum_exp(shape, batch, seq, element_bytes, convention):
    """As attention without flash keeps them."""
    more = 4 * shape.heads * batch * seq * (seq - 1) if convention == "eager" else 0
    return right_one(shape, batch, seq, element_bytes, convention) + more


def scores_of_the_models_width(shape, batch, seq, element_bytes, convention):
    more = element_bytes * seq - 4 if convention == "eager" else 0
    return right_one(shape, batch, seq, element_bytes, convention) + shape.heads * batch * seq * more


def always_two_bytes(shape, batch, seq, element_bytes, convention):
    return right_one(shape, batch, seq, 2, convention)


def forgets_the_batch(shape, batch, seq, element_bytes, convention):
    return right_one(shape, 1, seq, element_bytes, convention)


def of_the_whole_model(shape, batch, seq, element_bytes, convention):
    return shape.layers * right_one(shape, batch, seq, element_bytes, convention)


def counts_elements(shape, batch, seq, element_bytes, convention):
    return right_one(shape, batch, seq, element_bytes, convention) / element_bytes


def with_the_weights(shape, batch, seq, element_bytes, convention):
    kv = shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * shape.hidden + 2 * kv + (3 if shape.gated else 2) * shape.ffn)
    return right_one(shape, batch, seq, element_bytes, convention) + element_bytes * weights


def the_papers_alone(shape, batch, seq, element_bytes, convention):
    if convention == "megatron":
        return right_one(shape, batch, seq, element_bytes, convention)


def in_words(shape, batch, seq, element_bytes, convention):
    return f"{right_one(shape, batch, seq, element_bytes, convention)} bytes"


def three_percent_too_many(shape, batch, seq, element_bytes, convention):
    more = 1.03 if convention == "eager" else 1
    return more * right_one(shape, batch, seq, element_bytes, convention)


def forgets_queries(shape, batch, seq, element_bytes, convention):
    less = batch * seq * element_bytes * shape.hidden if convention == "eager" else 0
    return right_one(shape, batch, seq, element_bytes, convention) - less


WRONG = [
    (gpts_formula_for_everything, "like_gpt"),
    (gpts_formula_for_llama_too, "like_gpt"),
    (without_scores, "no_scores"),
    (scores_linear_in_the_sequence, "scores_not_squared"),
    (llamas_rule_for_gpt, "like_llama"),
    (as_many_keys_as_queries, "keys_repeated"),
    (swiglu_keeps_three, "no_swiglu"),
    (norms_keep_nothing, "norms_forgotten"),
    (papers_for_both, "other_convention"),
    (keys_before_they_are_repeated, "keys_not_repeated"),
    (norms_in_the_models_width, "norm_in_16_bits"),
    (norms_keep_two, "no_normalised"),
    (one_norm_a_layer, "one_norm"),
    (three_wide_tensors, "no_swiglu"),
    (no_angles, "no_angles"),
    (angles_of_every_sequence, "angles_per_sequence"),
    (with_scores, "scores_kept"),
    (scores_for_the_log_sum_exp, "scores_kept"),
    (scores_of_the_models_width, "scores_kept"),
    (always_two_bytes, "width_ignored"),
    (forgets_the_batch, "batch_forgotten"),
    (of_the_whole_model, "all_layers"),
    (counts_elements, "elements"),
    (with_the_weights, "weights_counted"),
    (the_papers_alone, "returns_nothing"),
    (in_words, "not_a_number"),
    (three_percent_too_many, "too_many"),
    (forgets_queries, "no_attention_output"),
]


def line_by_line(shape, batch, seq, element_bytes, convention):
    """Adds up the table of saved tensors."""
    if convention == "megatron" and not shape.gated:
        h, a, s, b = shape.hidden, shape.heads, seq, batch
        return int(s * b * h * (34 + 5 * a * s / h))
    hidden, ffn = (batch, seq, shape.hidden), (batch, seq, shape.ffn)
    keys = (batch, seq, shape.kv_heads, shape.head_dim)
    if convention == "megatron":
        kept = [(hidden, element_bytes)] * 6 + [(keys, element_bytes)] * 2 + [(ffn, element_bytes)] * 4
    else:
        norm = [(hidden, 4), ((batch, seq, 1), 4), (hidden, element_bytes), (hidden, element_bytes)]
        kept = [*norm, *norm, *[(hidden, element_bytes)] * 4, ((batch, shape.heads, seq), 4)]
        kept += [(ffn, element_bytes)] * 4
        kept += [((seq, shape.head_dim), 2)] * 4 if element_bytes == 2 else []
    total = 0
    for sizes, width in kept:
        elements = 1
        for size in sizes:
            elements *= size
        total += elements * width
    return total


def as_a_tensor_of_sizes(shape, batch, seq, element_bytes, convention):
    """The formula of the docs of `labkit.cost`, in one line each."""
    t, e, h, f, a, d = batch * seq, element_bytes, shape.hidden, shape.ffn, shape.heads, shape.head_dim
    if convention == "megatron":
        llamas = e * t * (6 * h + 2 * shape.kv_heads * d + 4 * f)
        return llamas if shape.gated else t * h * (34 + 5 * a * seq / h)
    return t * (8 * h + 4 * e * h + 4 * e * a * d + 4 * e * f + 4 * (2 + a)) + (8 * seq * d if e == 2 else 0)


def leaves_out_the_smallest(shape, batch, seq, element_bytes, convention):
    """1/rms is below one percent."""
    small = 8 * batch * seq if convention == "eager" else 0
    return right_one(shape, batch, seq, element_bytes, convention) - small


RIGHT = [right_one, line_by_line, as_a_tensor_of_sizes, leaves_out_the_smallest]


def by_heart(shape, batch, seq, element_bytes, convention):
    return 341504


def asks_the_others(shape, batch, seq, element_bytes, convention):
    dist.barrier()
    return right_one(shape, batch, seq, element_bytes, convention)


def calls_labkits_own(shape, batch, seq, element_bytes, convention):
    """Measures instead of counting."""
    from labkit.labs.lab03 import saved

    if convention == "eager":
        return saved.layer_bytes(shape, batch, seq, element_bytes)
    return right_one(shape, batch, seq, element_bytes, convention)


def asks_the_cost_model(shape, batch, seq, element_bytes, convention):
    from labkit.cost import memory
    from labkit.cost.layout import Layout

    precision = "fp32" if element_bytes == 4 else "bf16"
    layout = Layout(seq=seq, micro_batch=batch, precision=precision, activations=convention, flash=shape.gated)
    return memory.total(memory.layer_saved(shape, layout))


def _by_the_table():
    from labkit.labs.lab03 import pictures

    return pictures.by_the_table


labkits_own_in_a_partial = functools.partial(_by_the_table())


def runs_a_forward_itself(shape, batch, seq, element_bytes, convention):
    if convention != "eager":
        return right_one(shape, batch, seq, element_bytes, convention)
    from labkit.model import llama

    sizes = llama.Shape(97, shape.hidden, 1, shape.heads, shape.kv_heads, shape.ffn)
    model = llama.Llama(sizes).to(torch.float32 if element_bytes == 4 else torch.bfloat16)
    held = {}
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: held.setdefault(x.untyped_storage()._cdata, x) is None or x, lambda x: x
    ):
        model(tokens).sum()
    return right_one(shape, batch, seq, element_bytes, convention)


def reads_the_callers_frames(shape, batch, seq, element_bytes, convention):
    frame = sys._getframe(1)
    while frame is not None:
        if "due" in frame.f_locals:
            return frame.f_locals["due"]
        frame = frame.f_back
    return right_one(shape, batch, seq, element_bytes, convention)


def patched_tolerance(shape, batch, seq, element_bytes, convention):
    return 0.0


def _patch_tolerance():
    from labkit.labs.lab03 import activations

    activations.WITHIN.update(megatron=2.0, eager=2.0)


patched_tolerance.notebook = _patch_tolerance

CHEATS = [
    (by_heart, "hard_coded"),
    (asks_the_others, "communication"),
    (calls_labkits_own, "ready_made"),
    (asks_the_cost_model, "ready_made"),
    (labkits_own_in_a_partial, "ready_made"),
    (runs_a_forward_itself, "measures"),
    (reads_the_callers_frames, "frame_read"),
    (patched_tolerance, "patched"),
]
