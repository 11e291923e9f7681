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


def test_sixteen_ranks_over_two_nodes_are_less_than_twice_as_fast_as_eight():
    shape = named("llama-3.1-8b")
    told = float(re.search(r"does ([\d.]+) times", CLAIMS["tp_size is the number of GPUs that you have"].figure)[1])
    assert told == pytest.approx(2 * tensor_claims.speed(shape, 8) / tensor_claims.speed(shape, 16, 2), abs=0.01)
    assert told > 1


def test_the_wait_hardly_shrinks_with_the_batch():
    shares = [tensor_claims.on_node(named("llama-3.1-8b"), 8, tokens=tokens).share for tokens in (512, 65536)]
    assert 0.5 < shares[1] / shares[0] < 1
