"""Claims about ZeRO's stages: each figure against arithmetic done here by hand, each verdict where it turns."""

import math

import pytest

from labkit.cost import claims
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.cost.shapes import parameters

GIB = 2**30


@pytest.mark.parametrize("n", [1, 2, 8, 64, 1024])
@pytest.mark.parametrize(
    "precision, whole, kept", [("bf16", 16, (16, 4, 2, 0)), ("fp16", 16, (16, 4, 2, 0)), ("fp32", 16, (16, 8, 4, 0))]
)
def test_a_saving_is_all_bytes_over_those_that_stay(n, precision, whole, kept):
    for stage in range(4):
        want = whole / (kept[stage] + (whole - kept[stage]) / n)
        assert claims.saving(stage, n, precision) == pytest.approx(want)
        assert claims.largest_saving(stage, precision) == (whole / kept[stage] if kept[stage] else math.inf)


def test_megatrons_and_deepspeeds_bytes_change_the_factor():
    assert claims.largest_saving(1, convention="megatron") == 18 / 6
    assert claims.largest_saving(2, convention="deepspeed") == 20 / 2


@pytest.mark.parametrize("stage, times", [(1, 2), (1, 3.8), (2, 4), (2, 7.6), (3, 3.5), (3, 100)])
def test_the_ranks_for_a_saving_are_the_fewest(stage, times):
    n = claims.ranks_for(stage, times)
    assert claims.saving(stage, n) >= times * (1 - 1e-12) and claims.saving(stage, n - 1) < times * (1 - 1e-12)


@pytest.mark.parametrize("stage, times, precision", [(1, 4, "bf16"), (2, 8, "bf16"), (1, 3, "fp32"), (0, 2, "bf16")])
def test_a_saving_that_no_number_of_ranks_reaches_is_refused(stage, times, precision):
    with pytest.raises(ValueError, match="never saves .* would do"):
        claims.ranks_for(stage, times, precision)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("n", [2, 4, 1024])
def test_elements_sent_are_2_2_k_plus_1_and_3k(k, n):
    want = (2, 2, k + 1, 3 * k)
    for stage in range(4):
        assert claims.communication(stage, k, n) == pytest.approx(want[stage] * (n - 1) / n)


@pytest.mark.parametrize("stage, bytes_kept", [(1, 4), (2, 2)])
def test_no_number_of_ranks_holds_the_claimed_sizes_and_the_model_parallel_parts_are_the_fewest(stage, bytes_kept):
    size, room = claims.CLAIMED_PARAMETERS[stage], 80 * GIB
    assert size * bytes_kept > room
    parts = claims.model_parallel_for(size, stage, 64, room)
    each = size * (bytes_kept + (16 - bytes_kept) / 64)
    assert each / parts <= room < each / (parts - 1)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_recomputation_is_told_with_the_whole_memory_of_a_device(ranks):
    """By hand: states of the stage, activations of the papers' formula; the more is divided, the larger its share."""
    shape = named("llama-3.1-8b")
    found = claims.recomputation(shape, Layout(dp=ranks))
    assert [stage for stage, _, _ in found] == [0, 1, 2, 3]
    tokens, h, kv, f = 4096, shape.hidden, shape.kv_width, shape.ffn
    one = tokens * 2 * (4 * h + 2 * h + 2 * kv + 4 * f)  # inputs of norms and matrices, attention, the MLP's four
    dropped = 32 * (one - 2 * tokens * h) - (one - 2 * tokens * h)  # of the layer at work all is there
    for stage, plain, again in found:
        states_kept = (16, 4, 2, 0)[stage]
        held = parameters(shape) * (states_kept + (16 - states_kept) / ranks)
        assert plain - again == dropped and plain > held + 32 * one
    times = [plain / again for _, plain, again in found]
    assert times == sorted(times) and times[3] > 1.1 * times[0]
    told = claims.verdicts(ranks)[-1]
    assert told.figure == pytest.approx(times[2]) and told.limit >= told.figure and told.holds == "does not hold"
    assert f"{found[2][2] / GIB:.1f} GiB instead of {found[2][1] / GIB:.1f} " in told.why


WORDS = {
    (8, "bf16", 1): "part part holds | holds holds holds | not not part | not",
    (64, "bf16", 1): "holds part holds | holds holds holds | not not part | not",
    (1024, "bf16", 8): "holds holds holds | holds part part | not not holds | not",
    (8, "fp32", 1): "not not holds | holds holds holds | not not part | not",
}


@pytest.mark.parametrize("given, want", WORDS.items())
def test_verdicts_turn_where_ranks_precision_and_microbatches_do(given, want):
    ranks, precision, k = given
    found = claims.verdicts(ranks, "H100", precision, k)
    short = dict(zip(claims.VERDICTS, ("holds", "part", "not"), strict=True))
    assert [short[each.holds] for each in found] == want.replace("| ", "").split()
    for each in found:
        assert each.figure <= each.limit * (1 + 1e-9) and each.why and each.claim and "\n" not in each.why


def test_a_verdicts_sentence_has_its_figures():
    one, two, three, *rest = claims.verdicts(64)
    assert "3.82 times" in one.why and "57 ranks" in one.why and "133 ranks" in two.why and "64.00" in three.why
    assert rest[2].figure == pytest.approx(1.5) and "2.95 elements per parameter against 1.97" in rest[2].why
    assert "21.5B on any number: 100B needs 5 model-parallel parts" in rest[3].why
    assert "42.9B on any number: 500B needs 13 model-parallel parts" in rest[4].why
    assert "needs 187 of them" in rest[5].why


@pytest.mark.parametrize("given", [{"ranks": 1}, {"microbatches": 0}, {"device": "none"}, {"precision": "int8"}])
def test_what_cannot_be_is_refused(given):
    with pytest.raises(ValueError):
        claims.verdicts(**given)
