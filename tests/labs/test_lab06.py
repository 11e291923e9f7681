"""Lab 06's judges without ranks: what is due, and that known mistakes are told apart; and shares by wire."""

import random

import pytest
import torch

import labkit
from labkit.check import find
from labkit.cost import hardware, tensor_parallel
from labkit.cost.groups import on_link
from labkit.cost.shapes import Shape
from labkit.cost.tensor_parallel import layer_time
from labkit.labs.lab06 import (
    attention,
    conjugate,
    embedding,
    entropy,
    linear,
    ring,
    ring_told,
    ring_work,
    sequence,
    shares,
    told,
)

SEEDS = range(2)


def _cases(seed):
    """(name, task, case) of every exercise."""
    rng = random.Random(seed)
    for kind, task in (("column", linear.column_task()), ("row", linear.row_task())):
        yield from ((kind, task, case) for case in linear._cases(rng, kind))
    for task in (conjugate.f_task(), conjugate.g_task()):
        yield from ((task.name, task, case) for case in conjugate._cases(rng))
    for sizes in ((4, 4, 8, 2), (4, 4, 2, 1), (4, 2, 1, 1)):
        yield "attention", attention.task(), attention._case(rng, *sizes)
    for t in (4, 2):
        yield "embedding", embedding.task(), embedding._case(rng, 4, t)
        yield "entropy", entropy.task(), entropy._case(rng, 4, t, 0.0)
        yield "sequence", sequence.task(), sequence._case(rng, 4, t, True)
        yield "ring", ring.task(), ring._case(rng, 4, t, 15)


def _dues(task, case):
    for number in range(len(case.asks)):
        yield task.calls(case, number)
    if hasattr(task, "weights"):
        yield task.weights(case)


def _is(mistake, values):
    return all(
        one.shape == other.shape and told.close(one, other) for one, other in zip(mistake.values, values, strict=True)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_every_known_mistake_shows_in_some_case_and_right_values_pass(seed):
    shows, known = set(), set()
    for exercise, task, case in _cases(seed):
        for due in _dues(task, case):
            got = [dict(zip(due.values, of_rank, strict=True)) for of_rank in zip(*due.values.values(), strict=True)]
            assert told.values(got, due, "") is None
            for name, mistakes in due.mistakes.items():
                for mistake in mistakes:
                    known.add((exercise, name, mistake.cause))
                    if not _is(mistake, due.values[name]):
                        shows.add((exercise, name, mistake.cause))
    assert known - shows == set()


@pytest.mark.parametrize("seed", SEEDS)
def test_where_a_mistake_first_shows_no_other_cause_gives_the_same(seed):
    told_before, shown = set(), set()
    for exercise, task, case in _cases(seed):
        for due in _dues(task, case):
            for name, mistakes in due.mistakes.items():
                for number, one in enumerate(mistakes):
                    if _is(one, due.values[name]) or (exercise, name, one.cause) in told_before:
                        continue
                    shown.add((exercise, name, one.cause))
                    same = {other.cause for other in mistakes[:number] if _is(other, one.values)}
                    assert same <= {one.cause}, (exercise, name, case.tried)
        told_before |= shown


def test_the_second_of_a_pair_is_found_by_its_letter():
    assert find.exercise("6.1b").name == find.exercise("06.1b").name == "RowParallelLinear"
    assert find.exercise("6.1").name == "ColumnParallelLinear"
    with pytest.raises(ValueError, match="there is no exercise '6.3b'"):
        find.exercise("6.3b")
    with pytest.raises(ValueError, match="not the number of an exercise"):
        find.exercise("6.1bc")


def test_a_wrong_value_that_nothing_explains_is_told_all_the_same():
    due = told.Due({"output": [torch.ones(2), torch.ones(2)]})
    found = told.values([{"output": torch.ones(2)}, {"output": torch.zeros(2)}], due, "tried")
    assert (found.cause, found.stage) == ("wrong_output", "values")
    assert told.values([{"output": torch.ones(2)}, {"output": torch.ones(3)}], due, "").cause == "wrong_shape"
    assert told.values([{"output": torch.ones(2)}, {"output": None}], due, "").cause == "no_gradient"
    nan = torch.full((2,), float("nan"))
    assert told.values([{"output": nan}, {"output": nan}], due, "").cause == "not_finite"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_position_is_on_one_rank_and_causal_work_is_the_same_on_all(n):
    length = 2 * n * 5
    of_ranks = [ring_told.positions(rank, n, length) for rank in range(n)]
    assert sorted(torch.cat(of_ranks).tolist()) == list(range(length))
    chunks = [{int(p) // 5 for p in of_rank} for of_rank in of_ranks]
    blocks = [sum(k <= q for q in mine for k in range(2 * n)) for mine in chunks]
    assert set(blocks) == {2 * n + 1}


def _multiplied(trace, heads, dim):
    """FLOPs by the op's name, of ops that are no views."""
    found = {}
    for op in trace.record.ops:
        if not op.view:
            name = op.name.split(".")[1]
            found[name] = found.get(name, 0) + ring_work._flops(op, heads, dim)
    return {name: flops for name, flops in found.items() if flops}


@pytest.mark.parametrize(("queries", "keys"), [(30, 15), (15, 30), (30, 30)])
def test_torchs_kernel_and_what_is_multiplied_by_itself_count_as_the_products_that_they_are(queries, keys):
    batch, heads, dim = 2, 3, 16
    q = torch.randn(batch, heads, queries, dim, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, dim, requires_grad=True) for _ in range(2))
    product = 2 * batch * heads * queries * keys * dim
    with labkit.Trace() as trace:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert _multiplied(trace, batch * heads, dim) == {ring_work.KERNEL: 2 * product}
    with labkit.Trace() as trace:
        out.backward(torch.ones_like(out))
    assert _multiplied(trace, batch * heads, dim) == {f"{ring_work.KERNEL}_backward": 5 * product}
    with torch.no_grad(), labkit.Trace() as trace:
        _ = q @ k.mT, (q[..., None, :] * k[..., None, :, :]).sum(-1)
        for at in range(batch * heads):
            _ = [torch.mv(k.flatten(0, 1)[at], row) for row in q.flatten(0, 1)[at]]
    read = product * (keys + 1) / keys  # mv reads a row of queries with its matrix
    assert _multiplied(trace, batch * heads, dim) == pytest.approx({"bmm": product, "mul": product, "mv": read})


def test_the_serial_parts_of_attention_add_up_to_the_whole():
    case = attention._case(random.Random(3), 4, 4, 2, 1)
    due, own = attention._calls(case, 0), attention._local(case, 0)
    for name in ("output", "input gradient"):
        assert told.close(sum(each[name] for each in own), due.values[name][0])
    assert told.close(own[0]["k_proj"] + own[1]["k_proj"], due.values["gradient of k_proj.weight"][0])


@pytest.fixture(scope="module")
def replayed():
    return {degree: shares.layer_record(degree) for degree in (2, 8)}


def test_a_recorded_layer_has_four_all_reduces_of_its_tokens(replayed):
    size = 2 * shares.TOKENS * shares.LAYER["hidden"]
    assert [(c.op, c.num_bytes) for c in replayed[8].collectives] == [("all_reduce", size)] * 4


def test_the_replay_waits_as_long_as_the_cost_model_says_and_computes_what_it_leaves_out_besides(replayed):
    card, layer = hardware.device("H100"), shares.LAYER
    sizes = [layer[each] for each in ("hidden", "heads", "kv_heads")]
    shape = Shape("a layer", 1, *sizes, layer["hidden"] // layer["heads"], layer["ffn"], 256)
    for degree, record in replayed.items():
        for wire in shares.WIRES:
            formula = layer_time(shape, shares.TOKENS, shares.TOKENS, card, on_link(degree, hardware.link(wire)))
            found = shares.replayed(record, degree, wire)
            assert found.communicate_s == pytest.approx(formula.communication_s, rel=0.01)
            products = sum(2 * m * k * n for m, k, n in tensor_parallel.products(shape, shares.TOKENS, degree))
            assert found.compute_s > 3 * products / card.peak("bf16")


def test_a_slower_wire_and_more_ranks_take_a_larger_share(replayed):
    rows = [[shares.replayed(replayed[degree], degree, wire).share for degree in (2, 8)] for wire in shares.WIRES]
    assert all(row == sorted(row) for row in rows)
    assert all(column == tuple(sorted(column)) for column in zip(*rows, strict=True))


def test_a_degree_that_does_not_divide_the_heads_is_one_clear_error():
    with pytest.raises(ValueError, match="8 would do"):
        shares.layer_record(3)


def test_whatever_of_lab_06_is_loaded_passes_for_what_is_installed():
    import importlib
    import pkgutil

    from labkit.check import pristine
    from labkit.labs import lab06

    for found in pkgutil.iter_modules(lab06.__path__):
        importlib.import_module(f"labkit.labs.lab06.{found.name}")
    assert pristine.first_patched() == ""
