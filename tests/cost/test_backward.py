"""Moments of backward in convention `eager`: each place's formula, written out, where it is the largest."""

import dataclasses

import pytest

from labkit.cost import activations, eager, named, shapes
from labkit.cost.layout import Layout
from labkit.cost.memory import total

SMALL = shapes.Shape("small", 3, 64, 4, 2, 16, 172, 100)
HOW = Layout(micro_batch=2, seq=128, precision="fp32", activations="eager")
T = 2 * 128


def saved(shape, how):
    layers = shape.layers * activations.kept(eager.layer_saved(shape, how), shape, how)
    return layers + total(eager.first_saved(shape, how)) + total(eager.head_saved(shape, how))


def of(shape, how, place, unit):
    return next(m for m in eager.backward_moments(shape, how) if (m.place, m.unit) == (place, unit))


def test_with_a_large_vocabulary_the_loss_is_the_peak():
    shape = dataclasses.replace(SMALL, vocab=50_000)
    assert eager.backward_peak(shape, HOW) == saved(shape, HOW) + 2 * 4 * T * 50_000


@pytest.mark.parametrize(("precision", "e"), [("fp32", 4), ("bf16", 2)])
def test_with_a_wide_mlp_its_product_in_the_last_layer_is_the_peak(precision, e):
    how = dataclasses.replace(HOW, precision=precision)
    shape = dataclasses.replace(SMALL, ffn=2000)
    h, f, v = shape.hidden, shape.ffn, shape.vocab
    # Gone by then: log-softmax with its targets' neighbours, the last norm. There: gradients of its two inputs and of
    # its result (whose own tensor is gone), of the layer's output, of the head, the norm and the last matrix.
    head = total(eager.head_saved(shape, how))
    above = T * e * (h + 2 * f) + e * (v * h + h + h * f)
    assert eager.backward_peak(shape, how) == saved(shape, how) - head + above


def test_moments_go_from_the_head_through_the_layers_to_the_embedding():
    units = [m.unit for m in eager.backward_moments(SMALL, HOW)]
    assert list(dict.fromkeys(units)) == ["head", 2, 1, 0, "embedding"]


def test_gradients_made_add_up_to_all_parameters():
    last = eager.backward_moments(SMALL, HOW)[-1]
    assert eager.gradients_made(SMALL, last) == shapes.parameters(SMALL)
    made = [eager.gradients_made(SMALL, m) for m in eager.backward_moments(SMALL, HOW)]
    assert made == sorted(made)


def test_recomputation_keeps_inputs_and_brings_one_layer_back():
    again = dataclasses.replace(HOW, recompute="full")
    one = total(eager.layer_saved(SMALL, HOW))
    whole, part = (of(SMALL, how, "MLP product", 2).num_bytes for how in (HOW, again))
    kept = 4 * T * SMALL.hidden
    assert whole - part == 2 * (one - kept)  # of the two layers below; the one at work is whole in both
    assert eager.backward_peak(SMALL, again) < eager.backward_peak(SMALL, HOW)


def test_math_attention_adds_its_scores_and_their_gradient():
    long = dataclasses.replace(HOW, seq=2048, flash=False)
    scores = 4 * 2 * 4 * 2048 * 2048
    flash, math = (of(SMALL, how, place, 2).num_bytes for how, place in (
        (dataclasses.replace(long, flash=True), "attention"), (long, "softmax")))  # fmt: skip
    assert math > flash + 2 * scores
    assert max(eager.backward_moments(SMALL, long), key=lambda m: m.num_bytes).place in ("softmax", "attention values")


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [("gpt2", HOW, "plain Llama; gpt2 has biases"), ("qwen3-8b", HOW, "plain Llama; qwen3-8b has norms"),
     ("llama-3.1-8b", dataclasses.replace(HOW, tp=2), "without tp"),
     ("llama-3.1-8b", dataclasses.replace(HOW, recompute="selective"), "none or full")],
)  # fmt: skip
def test_what_is_not_known_is_refused(name, how, why):
    with pytest.raises(ValueError, match=why):
        eager.backward_moments(named.named(name), how)
