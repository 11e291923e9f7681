"""Lab 04's exercise 4.4: what its judge asks and knows, without ranks; tests/classroom/test_prove.py has the ranks."""

import math
import random

import pytest
import torch

from labkit.labs.lab04 import clip, clip_told

SHARDS = ((torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0])), (torch.tensor([12.0, 0.0]), torch.tensor([1.0, -5.0])))
TOTAL = math.sqrt(9 + 16 + 4 + 144 + 1 + 25)


@pytest.mark.parametrize("seed", range(8))
def test_norms_are_torchs_of_everything_and_those_of_ranks_differ_by_far(seed):
    for asks in clip._asks(random.Random(seed)):
        for ask in asks:
            everything = torch.cat([tensor.double() for mine in ask.shards for tensor in mine])
            assert ask.norm == pytest.approx(everything.norm().item(), rel=1e-12) or not math.isfinite(ask.norm)
            own = [math.sqrt(clip_told.squares(mine)) for mine in ask.shards]
            if math.isfinite(ask.norm) and ask.norm:
                assert max(own) > 1.02 * min(own)


@pytest.mark.parametrize("seed", range(8))
def test_a_seed_asks_for_clipping_for_none_for_zeros_for_narrow_floats_and_for_infinity(seed):
    asks = [ask for launch in clip._asks(random.Random(seed)) for ask in launch]
    assert {len(ask.shards) for ask in asks} == {2, 3, 4}
    assert sum(ask.norm > ask.max_norm for ask in asks if math.isfinite(ask.norm)) == 3
    assert any(0 < ask.norm < ask.max_norm for ask in asks) and any(ask.norm == 0 for ask in asks)
    assert any(math.isinf(ask.norm) for ask in asks)
    narrow = next(ask for ask in asks if ask.shards[0][0].dtype == torch.float16)
    assert math.isfinite(narrow.norm) and sum(t.pow(2).sum() for mine in narrow.shards for t in mine).isinf()


@pytest.mark.parametrize("seed", range(8))
def test_one_call_a_shard_is_more_than_what_a_norm_may_take(seed):
    first = clip._asks(random.Random(seed))[0]
    assert all(len({len(mine) for mine in ask.shards}) == 1 for ask in first)
    assert all(len(ask.shards[0]) > clip.MOST_CALLS for ask in first)


@pytest.mark.parametrize(
    ("cause", "outs"),
    [
        ("local_norm", [math.sqrt(29), math.sqrt(170)]),
        ("norms_added", [math.sqrt(29) + math.sqrt(170)] * 2),
        ("largest_norm", [math.sqrt(170)] * 2),
        ("mean_norm", [(math.sqrt(29) + math.sqrt(170)) / 2] * 2),
        ("not_rooted", [199.0] * 2),
        ("mean_of_squares", [TOTAL / math.sqrt(2)] * 2),
        ("rooted_twice", [math.sqrt(TOTAL)] * 2),
        ("norms_added", [math.sqrt((5 + 2) ** 2 + (12 + math.sqrt(26)) ** 2)] * 2),
        ("after_clipping", [7.0] * 2),
        ("largest_element", [12.0] * 2),
        ("absolute_values", [27.0] * 2),
        ("ranks_differ", [TOTAL, math.sqrt(170)]),
        ("overflow", [math.inf] * 2),
        ("not_a_number", [math.nan] * 2),
        ("nearly_right", [1.001 * TOTAL] * 2),
        ("wrong_norm", [100.0] * 2),
    ],
)
def test_a_wrong_norm_is_known_by_its_number(cause, outs):
    assert clip_told.wrong_norm(SHARDS, 7.0, outs, 0 if outs[0] != TOTAL else 1)[0] == cause


def scaled(*factors):
    """SHARDS, each rank's times a factor, or each tensor's times one."""
    rows = [factor if isinstance(factor, tuple) else (factor, factor) for factor in factors]
    return [[tensor * f for tensor, f in zip(mine, row, strict=True)] for mine, row in zip(SHARDS, rows, strict=True)]


@pytest.mark.parametrize(
    ("cause", "max_norm", "got"),
    [
        ("not_scaled", 7.0, scaled(1.0, 1.0)),
        ("scaled_up", 100.0, scaled(100 / TOTAL, 100 / TOTAL)),
        ("changed_below", 100.0, scaled(0.5, 1.0)),
        ("local_factor", 4.0, scaled(4 / math.sqrt(29), 4 / math.sqrt(170))),
        ("each_tensor", 4.0, scaled((4 / 5, 1.0), (4 / 12, 4 / math.sqrt(26)))),
        ("scaled_twice", 7.0, scaled((7 / TOTAL) ** 2, (7 / TOTAL) ** 2)),
        ("to_norm_one", 7.0, scaled(1 / TOTAL, 1 / TOTAL)),
        ("squared_factor", 7.0, scaled(7 / 199, 7 / 199)),
        ("some_left", 7.0, scaled((7 / TOTAL, 1.0), (7 / TOTAL, 1.0))),
        ("not_a_number", 7.0, scaled(math.nan, 7 / TOTAL)),
        ("wrong_factor", 7.0, scaled(0.123, 0.123)),
    ],
)
def test_wrong_shards_are_known_by_their_factor(cause, max_norm, got):
    assert clip_told.wrong_factor(SHARDS, got, max_norm, 0, 0)[0] == cause


def test_zeros_that_became_nan_are_told_from_other_nans():
    zeros = ((torch.zeros(2),), (torch.zeros(2),))
    assert clip_told.wrong_factor(zeros, [[torch.zeros(2) / 0], [torch.zeros(2)]], 1.0, 0, 0)[0] == "zero_norm"


def test_a_factor_of_one_allows_no_bit_to_change():
    tensor = torch.tensor([1.0, 2.0])
    assert clip_told.scaled(tensor.clone(), tensor, 1.0)
    assert not clip_told.scaled(tensor * (1 + 1e-7), tensor, 1.0)
    assert clip_told.scaled(tensor * 0.5 * (1 + 1e-6), tensor, 0.5)
