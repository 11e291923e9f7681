"""Lab 02's exercise 2.3: inputs, the serial reference, and how the judge knows a mistake, without ranks.

That the judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on real ranks by
tests/classroom/test_prove.py.
"""

import random
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from labkit.labs.lab02 import accumulate, accumulate_cases, accumulate_seen, accumulate_told
from labkit.labs.lab02.accumulate_told import Part

NAMES = ("a", "b")


def part(counted, positions, loss, *gradient):
    """A microbatch with a gradient of two parameters."""
    tensors = torch.tensor(gradient, dtype=torch.float64)
    return Part(counted, positions, loss, {"a": tensors[:2], "b": tensors[2:]}, 1)


PARTS = [
    [part(2, 8, 5.0, 1.0, 2.0, -1.0, 0.5), part(7, 8, 11.0, 3.0, -1.0, 2.0, 4.0)],
    [part(5, 8, 9.0, -2.0, 6.0, 0.0, 1.0), part(1, 8, 2.5, 0.5, 0.5, 3.0, -6.0)],
    [part(4, 8, 8.0, 2.0, 1.0, 5.0, 1.0)],
]


def add(*pairs):
    return {name: sum(weight * each.gradient[name] for weight, each in pairs).float() for name in NAMES}


EVERYTHING = [each for mine in PARTS for each in mine]
SUM = add(*((1, each) for each in EVERYTHING))


def scaled(factor):
    return {name: each * factor for name, each in SUM.items()}


# Inputs and reference


@pytest.mark.parametrize("seed", range(8))
def test_the_reference_is_torchs_gradient_of_one_batch(seed):
    case = accumulate_cases.cases(random.Random(seed))[0]
    parts = accumulate.serial(case)
    tokens = torch.cat([tokens for mine in case.batches for tokens, _ in mine])
    targets = torch.cat([targets for mine in case.batches for _, targets in mine])
    model = accumulate_cases.model(case.weights)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    assert accumulate_told.near(loss.item(), accumulate_told.mean_loss(parts), accumulate.TOLERANCE / 10)
    due = accumulate_told.mean_gradient(parts)
    for name, parameter in model.named_parameters():
        assert accumulate_told.apart(parameter.grad, due[name], accumulate.TOLERANCE / 10) is None, name


@pytest.mark.parametrize("seed", range(8))
def test_a_mean_of_means_is_far_off_whatever_the_seed(seed):
    for case in accumulate_cases.cases(random.Random(seed)):
        parts = accumulate.serial(case)
        due = accumulate_told.mean_gradient(parts)
        everything = [each for mine in parts for each in mine if each.counted]
        means = {
            name: sum(each.gradient[name] / each.counted for each in everything) / len(everything) for name in due
        }
        assert any(accumulate_told.apart(means[name], due[name], 50 * accumulate.TOLERANCE) for name in due)


@pytest.mark.parametrize("seed", range(10))
def test_token_counts_differ_between_microbatches_and_ranks(seed):
    cases = accumulate_cases.cases(random.Random(seed))
    assert [case.world_size for case in cases] == [2, 4, 3, 1]
    for case in cases[:2]:
        counts = case.counts
        assert len({sum(mine) for mine in counts}) > 1
        assert all(len(set(mine)) > 1 for mine in counts if len(mine) > 2)
    assert sorted(map(len, cases[1].batches)) == [1, 2, 3, 4]
    assert sorted(map(len, cases[2].batches)) == [0, 2, 2]
    assert sum(count == 0 for mine in cases[2].counts for count in mine) == 1
    assert all(any(mine) for mine in cases[2].counts if mine)


def test_making_a_model_leaves_torchs_generator_as_it_was():
    before = torch.get_rng_state()
    accumulate_cases.model({})
    assert torch.equal(before, torch.get_rng_state())


# Values


@pytest.mark.parametrize(
    ("cause", "grads"),
    [
        ("divided_by_world_size", [scaled(1 / 19 / 3)] * 3),
        ("summed", [SUM] * 3),
        ("times_world_size", [scaled(3 / 19)] * 3),
        ("local_tokens", [scaled(1 / 9), scaled(1 / 6), scaled(1 / 4)]),
        ("ignored_counted", [scaled(1 / 40)] * 3),
        ("twice", [scaled(2 / 19)] * 3),
        ("wrong_factor", [scaled(1.7 / 19)] * 3),
        ("mean_of_means", [add(*((1 / each.counted / 5, each) for each in EVERYTHING))] * 3),
        ("mean_of_means", [add(*((1 / p.counted / len(m) / 3, p) for m in PARTS for p in m))] * 3),
        ("mean_over_ranks", [add(*((1 / sum(q.counted for q in m) / 3, p) for m in PARTS for p in m))] * 3),
        ("not_reduced", [add(*((1 / sum(q.counted for q in m), p) for p in m)) for m in PARTS]),
        ("last_microbatch", [add(*((1 / 19, m[-1]) for m in PARTS))] * 3),
        ("first_microbatch", [add(*((1 / 19, m[0]) for m in PARTS))] * 3),
        ("no_gradient_left", [scaled(0.0)] * 3),
        ("not_finite", [scaled(float("nan"))] * 3),
        ("nearly_right", [{name: (each / 19).bfloat16().float() for name, each in SUM.items()}] * 3),
        ("wrong_gradient", [add((1.0, PARTS[0][0]), (-3.0, PARTS[1][1]))] * 3),
    ],
)
def test_a_wrong_gradient_is_known_by_its_numbers(cause, grads):
    assert accumulate_told.wrong_gradient(PARTS, grads, 0)[0] == cause


@pytest.mark.parametrize(
    ("cause", "loss"),
    [
        ("summed_loss", 35.5),
        ("loss_divided_again", 35.5 / 19 / 3),
        ("loss_times_world_size", 35.5 / 19 * 3),
        ("ignored_counted", 35.5 / 40),
        ("local_loss", 16.0 / 9),
        ("last_loss", 11.0 / 7),
        ("loss_of_means", (16 / 9 + 11.5 / 6 + 8 / 4) / 3),
        ("wrong_loss", 123.0),
        ("not_finite", float("nan")),
    ],
)
def test_a_wrong_loss_is_known_by_its_number(cause, loss):
    assert accumulate_told.wrong_loss(PARTS, loss, 0)[0] == cause


def test_nan_is_put_down_to_a_microbatch_without_tokens_or_a_rank_without_microbatches():
    empty = [[part(0, 8, 0.0, 0.0, 0.0, 0.0, 0.0)], *PARTS]
    assert accumulate_told.wrong_loss(empty, float("nan"), 1)[0] == "empty_microbatch"
    assert accumulate_told.wrong_loss([[], *PARTS], float("nan"), 1)[0] == "no_microbatch"


def test_a_gradient_within_rounding_is_right_and_nan_is_not():
    due = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert accumulate_told.apart(torch.tensor([1.00001, 1e-5]), due, 2e-4) is None
    assert accumulate_told.apart(torch.tensor([1.001, 0.0]), due, 2e-4) is not None
    assert accumulate_told.apart(torch.tensor([1.0, float("nan")]), due, 2e-4) is not None


# Evidence


def record(peak_bytes=0, tokens=48, communications=(), waits=(), never_waited=()):
    """One forward, at event 10."""
    ops = [SimpleNamespace(name="aten.embedding", index=10, written_bytes=4 * 16 * tokens)]
    told = {"communications": communications, "waits": waits, "never_waited": never_waited}
    sent = sum(each.sent_bytes for each in communications)
    return SimpleNamespace(ops=ops, begin_bytes=500, peak_bytes=500 + peak_bytes, sent_bytes=sent, **told)


@pytest.mark.parametrize(("graphs", "held"), [(1, False), (2, False), (6, True), (12, True)])
def test_graphs_that_pile_up_are_seen_and_those_that_go_are_not(graphs, held):
    logits, gradient = 48 * 256 * 4, 41_000
    peak = 2 * gradient + int(2.3 * logits * graphs) + 3 * logits
    assert (accumulate_seen.graphs_kept(record(peak), gradient, 48) is not None) == held


def test_a_forward_of_more_tokens_than_a_microbatch_has_is_seen():
    assert accumulate_seen.all_at_once(record(), 48, 16) is None
    assert accumulate_seen.all_at_once(record(), 47, 16)[0] == "one_large_batch"


def event(op, num_bytes, dtype="float32", index=20, root=None):
    given = {"num_bytes": num_bytes, "sent_bytes": num_bytes, "dtype": dtype, "index": index, "root": root}
    return SimpleNamespace(op=op, **given)


@pytest.mark.parametrize(
    ("events", "surplus", "cause"),
    [
        ([event("broadcast", 100, index=5, root=0), event("all_reduce", 100)], 100, "parameters_sent"),
        ([event("broadcast", 100, root=0), event("all_reduce", 100)], 100, "parameters_sent"),
        ([event("broadcast", 100, root=0), event("broadcast", 100, root=1)], 100, "too_many_bytes"),
        ([event("all_gather", 400)], 300, "gathered"),
        ([event("all_reduce", 100)] * 6, 500, "every_microbatch"),
        ([event("all_reduce", 200, "float64")], 100, "sent_as_float64"),
        ([event("all_reduce", 100), event("all_gather", 30)], 30, "more_than_scalars"),
        ([event("all_reduce", 100)] * 2, 100, "too_many_bytes"),
    ],
)
def test_what_was_sent_beside_one_gradient_is_named(events, surplus, cause):
    assert accumulate_seen.too_much(record(communications=events), 100, 6, surplus)[0] == cause


def test_a_sum_that_was_touched_before_its_wait_is_seen_and_one_waited_for_is_not():
    first, second = event("all_reduce", 100, index=20), event("all_reduce", 100, index=21)
    waits = [SimpleNamespace(of=20, how="touched"), SimpleNamespace(of=21, how="call")]
    assert accumulate_seen.not_waited(record(communications=[first, second], waits=waits)) == "all_reduce"
    waits.append(SimpleNamespace(of=20, how="call"))
    assert accumulate_seen.not_waited(record(communications=[first, second], waits=waits)) is None
    assert accumulate_seen.not_waited(record(communications=[first], never_waited=[first])) == "all_reduce"


def test_work_is_of_others_only_where_more_than_gradients_and_scalars_was_sent():
    reduced, told = event("all_reduce", 100_000), event("all_gather", 5_000)
    assert not accumulate_seen.more_than_sums(record(communications=[reduced]), 100_000, 2, 1024)
    assert accumulate_seen.more_than_sums(record(communications=[reduced, told]), 100_000, 2, 1024)
    assert accumulate_seen.more_than_sums(record(communications=[told]), 100_000, 2, 1024)


def test_a_reduce_and_a_broadcast_are_one_gradient_each_and_an_all_reduce_is_a_rings():
    up, down, both = event("reduce", 1000), event("broadcast", 1000), event("all_reduce", 1000)
    assert accumulate_seen.due_bytes(record(communications=[up, down]), 1000, 4) == 2000
    assert accumulate_seen.due_bytes(record(communications=[both, down]), 1000, 4) == 1500
    assert accumulate_seen.due_bytes(None, 1000, 2) == 1000


def test_a_function_that_takes_futures_is_known_also_by_its_helper():
    def waits(work):
        return [each.get_future() for each in [work]]

    helper = FunctionType((lambda work: work).__code__, {"waits": waits})
    assert accumulate_seen.uses(waits, "get_future") and accumulate_seen.uses(helper, "get_future")
    assert not accumulate_seen.uses(len, "get_future") and not accumulate_seen.uses(event, "get_future_of")


def test_a_wrong_gradient_is_put_down_to_what_was_sent_only_where_it_was():
    narrow, wide = event("all_reduce", 100, "bfloat16"), event("all_reduce", 100)
    for events, cause in (([narrow], "precision_lost"), ([wide], "nearly_right")):
        assert accumulate_seen.explained("nearly_right", "", record(communications=events), 200)[0] == cause
    said = accumulate_seen.explained("not_reduced", "none.", record(communications=[wide]), 100)
    assert said[0] == "not_reduced" and "copied back" in said[1]
    assert accumulate_seen.explained("not_reduced", "none.", record(), 100) == ("not_reduced", "none.")


def test_what_is_no_float_comes_back_as_its_kind_and_a_hidden_parameter_is_asked_all_the_same():
    def hides(model, microbatches):
        model.named_parameters = lambda: iter(())
        return [0.0] * 1000

    case = accumulate_cases.cases(random.Random(0))[3]
    out, grads, changed, _ = accumulate.call(hides, case.weights, list(case.batches[0]))
    assert out == "a list of 1000" and changed == []
    assert grads.keys() == case.weights.keys() and set(grads.values()) == {None}
