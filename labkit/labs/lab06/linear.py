"""Judges of exercises 6.1 and 6.1b: `ColumnParallelLinear` and `RowParallelLinear`, one matrix product cut two ways.

A column-parallel layer keeps out/t rows of nn.Linear's weight (columns of the paper's A) and communicates nothing; a
row-parallel one keeps in/t columns, sums the products by one all_reduce and adds the bias once (Megatron-LM,
arXiv:1909.08053, section 3). Left out: f, which the input's gradient still needs (6.2), and sizes that t does not
divide.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.modules as modules
import labkit.labs.lab06.told as told
import labkit.labs.lab06.wholes as wholes
from labkit.check.exercise import Verdict, right
from labkit.labs.lab02.models import one_thread
from labkit.labs.lab06.functions import in_groups, largest_in_groups
from labkit.labs.lab06.in_rank import Plan
from labkit.labs.lab06.modules import Case, Task
from labkit.labs.lab06.told import Due, Mistake

COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"
_GROUP = "rank and size are taken from the whole world: dist.get_rank(group) and dist.get_world_size(group) are due."
_COLUMN_SENTENCES = {
    "bias_missing": "the bias is not added.",
    "gathered_output": "the output is whole: column-parallel leaves it cut, as the layer after it takes it.",
    "summed_output": "outputs of ranks are summed: each rank has others of them, so nothing is.",
    "f_inside": "x's gradient is summed over ranks in here: that is f's work (6.2), once for all layers that x enters.",
}
_ROW_SENTENCES = {
    "bias_t_times": "the bias is added on every rank before the sum, so t times: add it after.",
    "no_all_reduce": "the rank returns its own part of the sum: all_reduce adds up the others'.",
    "averaged": "parts of a sum are averaged: they add up.",
    "max_for_sum": told.MAX,
    "bias_missing": "the bias is not added.",
    "bias_divided": "the bias is divided by t: after the sum it is added once on each rank, so it stays whole.",
    "wrong_group": "parts of all ranks of the world are summed: give all_reduce group=group.",
    "gradient_summed": "the output's gradient is the same on all ranks and is summed again in backward: pass it on.",
    "bias_on_one_rank": "one rank alone adds the bias: the others have no gradient for it, and their copies stay.",
    "bias_shared_out": "each rank adds bias/t before the sum: right forward, and its gradient is 1/t.",
}


def judge_column(cls: Callable, seed: int) -> Verdict:
    """Four ranks, then two groups of two without a bias; then how it came about."""
    cases = _cases(random.Random(seed), "column")
    found, _ = modules.judged(cls, column_task(), cases)
    return found or right("each rank computes its own outputs from 1/t of the weight, and nothing is sent")


def judge_row(cls: Callable, seed: int) -> Verdict:
    """As `judge_column`."""
    cases = _cases(random.Random(seed), "row")
    found, _ = modules.judged(cls, row_task(), cases)
    return found or right("t partial products, one all_reduce, the bias once; backward sends nothing")


def _cases(rng: random.Random, kind: str) -> list[Case]:
    return [_case(rng, kind, 4, 4, True), _case(rng, kind, 4, 2, False)]


def _case(rng: random.Random, kind: str, world: int, t: int, bias: bool) -> Case:
    import torch

    inputs, outputs = 12 * rng.randint(4, 6), 12 * rng.randint(7, 9)
    cut = (outputs // t, inputs) if kind == "column" else (outputs, inputs // t)
    shapes = (("weight", cut),) + ((("bias", (cut[0],)),) if bias else ())
    sizes = (("inputs", inputs), ("outputs", outputs), ("bias", bias))
    plan = Plan(kind, sizes, rng.getrandbits(31), world, t, shapes)
    generator = torch.Generator().manual_seed(rng.getrandbits(48))

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    asks = []
    for lead in ((2, rng.randint(3, 5)), (rng.randint(5, 7),)):
        groups = [(drawn(*lead, inputs), drawn(*lead, outputs)) for _ in range(world // t)]
        asks.append(tuple(_of_rank(kind, *groups[rank // t], rank % t, t) for rank in range(world)))
    what = f"Linear({inputs}, {outputs}{'' if bias else ', bias=False'})"
    return Case(what, plan, tuple(asks))


def _of_rank(kind: str, x: Any, gradient: Any, place: int, t: int) -> tuple[tuple, Any]:
    if kind == "column":
        return (x,), wholes.block(gradient, place, t, -1).contiguous()
    return (wholes.block(x, place, t, -1).contiguous(),), gradient


def _cut(case: Case) -> tuple[list[Any], list[Any], Any, Any]:
    """(weights by rank, biases by rank, the whole weight, the whole bias); biases are None where there is none."""
    plan = case.plan
    (linear,) = wholes.build(plan.kind, plan.sizes, plan.seed)
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    dim = 0 if plan.kind == "column" else 1
    places = [rank % plan.t for rank in range(plan.world)]
    weights = [wholes.block(weight, place, plan.t, dim) for place in places]
    cut_bias = plan.kind == "column" and bias is not None
    biases = [wholes.block(bias, place, plan.t) if cut_bias else bias for place in places]
    return weights, biases, weight, bias


def _weights(case: Case) -> Due:
    weights, biases, weight, bias = _cut(case)
    plan, dim = case.plan, 0 if case.plan.kind == "column" else 1
    t, world = plan.t, plan.world
    size = weight.shape[dim] // t
    first = "every rank has the first block: rank r has the r-th of t."
    strided = [weight.index_select(dim, _steps(rank % t, size, t)) for rank in range(world)]
    known = {
        "weight": [
            Mistake("first_shard", first, [wholes.block(weight, 0, t, dim)] * world),
            Mistake("interleaved", "they are dealt out one by one: rank r has the r-th block, in one piece.", strided),
            Mistake("wrong_group", _GROUP, [wholes.block(weight, min(r, t - 1), t, dim) for r in range(world)]),
        ]
    }
    values: dict[str, Any] = {"weight": weights}
    if bias is not None:
        values["bias"] = biases
        if plan.kind == "column":
            known["bias"] = [Mistake("first_shard", first, [wholes.block(bias, 0, t)] * world)]
        else:
            sentence = "the parameter is bias/t: keep it whole, and add it once, after the sum."
            known["bias"] = [Mistake("bias_divided", sentence, [each / t for each in biases])]
    whole = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def explain(name: str, got: list) -> tuple[str, str]:
        return told.foreign(got, values[name], name, whole)

    return Due(values, known, explain=explain)


def _steps(begin: int, count: int, step: int) -> Any:
    import torch

    return begin + step * torch.arange(count)


def _shapes(case: Case, got: dict, due: dict) -> tuple[str, str] | None:
    plan, sizes = case.plan, dict(case.plan.sizes)
    inputs, outputs, t = sizes["inputs"], sizes["outputs"], case.plan.t
    weight, bias = got.get("weight"), got.get("bias")
    column = plan.kind == "column"
    if weight == (outputs, inputs):
        return "whole_kept", "the rank has the whole weight: it keeps its own block, 1/t of it."
    if weight in ((outputs, inputs // t), (outputs // t, inputs)) and weight != due["weight"]:
        how = "its input, so columns" if column else "its output, so rows"
        need = "rows of nn.Linear's weight (out, in) are outputs" if column else "columns of (out, in) are inputs"
        return "wrong_dim", f"the weight is cut along {how} are fewer; here it is the other dim that is cut: {need}."
    if t < plan.world and weight in ((outputs // plan.world, inputs), (outputs, inputs // plan.world)):
        return "wrong_group", _GROUP
    if weight is not None and 0 in weight:
        return "wrong_group", _GROUP
    if weight == due["weight"] and "bias" in due and bias is None:
        return "bias_missing", "the linear layer has a bias, and the answer has none."
    if weight == due["weight"] and bias is not None and "bias" in due:
        if column:
            return "bias_not_cut", "each output has its bias: cut the bias as the weight's rows are cut."
        return "bias_cut", "every output needs its bias after the sum: a row-parallel layer keeps the bias whole."
    if bias is not None and "bias" not in due:
        return "bias_invented", "linear.bias is None here: there is no bias to keep."
    return None


def _failed(case: Case, observed: Any, failed: Verdict) -> tuple[str, str] | None:
    if case.plan.t < case.plan.world and any(name in failed.sentence for name in ("IndexError", "shapes cannot")):
        return "wrong_group", f"it works where the group is the whole world. {_GROUP}"
    if not dict(case.plan.sizes)["bias"] and "NoneType" in failed.sentence:
        return "no_bias", "it works with a bias; here linear.bias is None."
    return None


def _calls_column(case: Case, number: int) -> Due:
    import torch

    weights, biases, weight, bias = _cut(case)
    xs, gradients = _asked(case, number)
    plan = case.plan
    with one_thread():
        outs = [x @ w.T + (0 if b is None else b) for x, w, b in zip(xs, weights, biases, strict=True)]
        products = [g @ w for g, w in zip(gradients, weights, strict=True)]
        summed = in_groups(products, plan.t)
        values = {
            "output": outs,
            "gradient of weight": [_outer(g, x) for g, x in zip(gradients, xs, strict=True)],
            "input gradient": products,
        }
        if bias is not None:
            values["gradient of bias"] = [g.flatten(0, -2).sum(0) for g in gradients]
        whole = [torch.nn.functional.linear(x, weight, bias) for x in xs]
    without = [out if b is None else out - b for out, b in zip(outs, biases, strict=True)]
    mistakes = {
        "output": told.known(
            _COLUMN_SENTENCES,
            ("bias_missing", without),
            ("gathered_output", whole),
            ("summed_output", in_groups(outs, plan.t)),
        ),
        "input gradient": told.known(_COLUMN_SENTENCES, ("f_inside", summed)),
    }
    return Due(values, mistakes)


def _calls_row(case: Case, number: int) -> Due:
    import torch

    weights, biases, _, bias = _cut(case)
    xs, gradients = _asked(case, number)
    t, world = case.plan.t, case.plan.world
    b = torch.zeros(()) if bias is None else bias
    with one_thread():
        partial = [x @ w.T for x, w in zip(xs, weights, strict=True)]
        sums, inputs = in_groups(partial, t), [g @ w for g, w in zip(gradients, weights, strict=True)]
        grads = [_outer(g, x) for g, x in zip(gradients, xs, strict=True)]
        values = {"output": [s + b for s in sums], "gradient of weight": grads, "input gradient": inputs}
        if bias is not None:
            values["gradient of bias"] = [g.flatten(0, -2).sum(0) for g in gradients]
    of_output = [
        ("no_all_reduce", [p + b for p in partial]),
        ("averaged", [each / t + b for each in sums]),
        ("max_for_sum", [each + b for each in largest_in_groups(partial, t)]),
        ("bias_missing", sums),
        ("wrong_group", [each + b for each in in_groups(partial, world)]),
    ]
    mistakes = {
        "output": told.known(_ROW_SENTENCES, *of_output),
        "gradient of weight": told.known(_ROW_SENTENCES, ("gradient_summed", [t * g for g in grads])),
        "input gradient": told.known(_ROW_SENTENCES, ("gradient_summed", [t * g for g in inputs])),
    }
    if bias is None:
        return Due(values, mistakes)
    due = values["gradient of bias"]
    of_bias = [("bias_t_times", [each + t * b for each in sums]), ("bias_divided", [each + b / t for each in sums])]
    mistakes["output"] += told.known(_ROW_SENTENCES, *of_bias)
    mistakes["gradient of bias"] = told.known(
        _ROW_SENTENCES,
        ("bias_on_one_rank", [g * (rank % t == 0) for rank, g in enumerate(due)]),
        ("bias_shared_out", [g / t for g in due]),
        ("gradient_summed", [t * g for g in due]),
    )
    return Due(values, mistakes, {"gradient of bias": ("bias_on_one_rank", _ROW_SENTENCES["bias_on_one_rank"])})


def _asked(case: Case, number: int) -> tuple[list[Any], list[Any]]:
    ask = case.asks[number]
    return [inputs[0] for inputs, _ in ask], [gradient for _, gradient in ask]


def _outer(gradient: Any, x: Any) -> Any:
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)


def _silent(case: Case, number: int, forward: list, backward: list) -> tuple[str, str, str] | None:
    return modules.one_all_reduce(forward, backward, (0, 0), 0)


def _once(case: Case, number: int, forward: list, backward: list) -> tuple[str, str, str] | None:
    return modules.one_all_reduce(forward, backward, (1, 0), case.asks[number][0][1].nbytes)


def _flops(case: Case, number: int) -> int:
    sizes, (inputs, _) = dict(case.plan.sizes), case.asks[number][0]
    tokens = inputs[0].numel() // inputs[0].shape[-1]
    return 2 * tokens * sizes["inputs"] * sizes["outputs"] // case.plan.t


def _kept(case: Case) -> tuple[int, int]:
    weights, biases, weight, bias = _cut(case)
    own = weights[0].numel() * 4 + (0 if bias is None else biases[0].numel() * 4)
    return own, weight.numel() * 4


def column_task() -> Task:
    """What 6.1 demands."""
    return Task(COLUMN, _weights, _calls_column, _shapes, _silent, _flops, _kept, failed=_failed)


def row_task() -> Task:
    """What 6.1b demands."""
    return Task(ROW, _weights, _calls_row, _shapes, _once, _flops, _kept, failed=_failed)
