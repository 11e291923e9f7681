"""Verdicts on tensor parallel rest on figures that the cost model gives and the papers' formulas confirm."""

import re

import pytest

from labkit.cost import tensor_claims
from labkit.cost.named import named
from labkit.cost.tensor_parallel import llama_like

CLAIMS = {claim.said: claim for claim in tensor_claims.claims()}


def test_each_claim_has_a_verdict_and_a_number():
    assert len(CLAIMS) == 5
    for claim in CLAIMS.values():
        assert claim.verdict in ("right", "half right", "wrong") and re.search(r"\d", claim.figure)


def test_activations_of_gpt_are_korthikantis():
    # Equation 2 without 5 a s / h: flash attention. 10 + 24 / t of 34.
    assert tensor_claims.kept_share(named("gpt3-13b"), 8) == pytest.approx((10 + 24 / 8) / 34)
    assert tensor_claims.kept_share(named("gpt3-13b"), 8, sequence_parallel=True) == pytest.approx(1 / 8)


def test_large_layers_get_faster_small_ones_slower():
    assert 1 < tensor_claims.speed(named("llama-3.1-8b"), 8) < 8
    assert tensor_claims.speed(llama_like(512), 8, tokens=2048) < 1
    assert tensor_claims.speed(named("llama-3.1-8b"), 1) == 1


def _layer_s(t, wire, steps_s):
    """A layer of Llama 3.1 8B on t H100s, 8,192 tokens in texts of 4,096: datasheets' figures, put together by hand.

    wire: bytes a second that a ring gets. steps_s: latencies of one all_reduce.
    """
    tokens, hidden, ffn, keys = 8192, 4096, 14336, max(8 / t, 1) * 128  # 8 kv heads of 128, one at least to a rank
    inner_and_columns = [(hidden, hidden / t), (hidden, keys), (hidden, keys), (hidden / t, hidden)]
    inner_and_columns += [(hidden, ffn / t), (hidden, ffn / t), (ffn / t, hidden)]
    compute_s = 3 * 2 * tokens * (4096 + 1) * hidden / t / 989.4e12  # scores and weighting, half of them masked
    for inner, columns in inner_and_columns:
        num_bytes = 2 * (tokens * inner + inner * columns + tokens * columns)
        compute_s += 3 * max(2 * tokens * inner * columns / 989.4e12, num_bytes / 3350e9)
    return compute_s + 4 * (2 * (t - 1) / t * 2 * tokens * hidden / wire + steps_s)


def test_the_figure_for_sixteen_ranks_over_two_nodes_is_that_of_datasheets_put_together_by_hand():
    call_s, nvlink_s, card_s = 6.6e-6, 0.6e-6, 5e-6  # sources: labkit/cost/links.py
    eight_s = _layer_s(8, 18 * 25e9, call_s + 14 * nvlink_s)
    sixteen_s = _layer_s(16, 8 * 50e9, call_s + 28 * nvlink_s + 2 * card_s)  # of 30 steps in a ring two cross over
    told = float(re.search(r"does ([\d.]+) times", CLAIMS["tp_size is the number of GPUs that you have"].figure)[1])
    assert told == pytest.approx(2 * sixteen_s / eight_s, abs=0.005) and told > 1


def test_the_wait_hardly_shrinks_with_the_batch():
    shares = [tensor_claims.on_node(named("llama-3.1-8b"), 8, tokens=tokens).share for tokens in (512, 65536)]
    assert 0.5 < shares[1] / shares[0] < 1
