"""Judge of exercise 6.5, `SequenceParallelMLP`: between regions a rank has s/t positions, and norms work on those.

f becomes an all_gather forward and a reduce_scatter backward, g the reverse (Korthikanti et al., arXiv:2205.05198,
section 4.2.2): the bytes are those of the all_reduces. What is gathered is kept for backward (keep=True), or only the
rank's own part, which backward gathers again: more bytes, and sbh/t where sbh was. The norm's weight is whole on every
rank, and has a part of its gradient on each. Left out: attention, and overlap of gathering with products.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.modules as modules
import labkit.labs.lab06.seen as seen
import labkit.labs.lab06.sequence_core as sequence_core
import labkit.labs.lab06.told as told
import labkit.labs.lab06.wholes as wholes
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.labs.lab02.models import one_thread
from labkit.labs.lab04.training import held_at
from labkit.labs.lab06.functions import in_groups, largest_in_groups
from labkit.labs.lab06.in_rank import Plan
from labkit.labs.lab06.modules import Case, Task
from labkit.labs.lab06.told import Due, Mistake

NAME = "SequenceParallelMLP"
HIDDEN, FFN = 48, 96
_NORMS = ("rsqrt", "sqrt", "pow", "mean", "var", "rms_norm", "_fused_rms_norm", "linalg_vector_norm")  # a norm's ops
_NAMES = {"norm_weight": 0, "gate": 0, "up": 0, "down": 1}
_SENTENCES = {
    "no_reduce": "a rank's own part of the sum comes out: reduce_scatter adds up the others'.",
    "averaged": "parts of a sum are averaged: they add up.",
    "max_for_sum": "the largest of the ranks' parts is taken: they add up, so op=SUM, which is the default.",
    "no_reduce_backward": "x's gradient is that of the rank's own weights: backward reduce_scatters it.",
    "gradient_summed": "gradients come t times: reduce_scatter sums them once, and nothing else does.",
    "norm_not_summed": "each rank's positions give a part of the norm weight's gradient: sum it over the group (by f).",
    "norm_mean": "the norm weight's gradient is averaged: its parts add up.",
    "wrong_group": "the norm weight's gradient is summed over the world: give all_reduce group=group.",
    "norm_summed_again": "the norm weight's gradient is summed twice over.",
}


def judge(cls: Callable, seed: int) -> Verdict:
    """Both variants on four ranks with the same input, then two groups of two; what each sends and holds."""
    rng = random.Random(seed)
    drawn = rng.getrandbits(48)  # both variants get the same
    kept, again = (_case(random.Random(drawn), 4, 4, keep) for keep in (True, False))
    cases = [kept, again, _case(rng, 4, 2, True)]
    found, observed = modules.judged(cls, task(), cases)
    found = found or _normed_first(cases, observed) or _held(again, observed[0], observed[1])
    if found is not None:
        return found
    sent = [sum(e.sent_bytes for e in _large(case, each)) for case, each in zip(cases, observed, strict=False)]
    held = [_held_bytes(each) for each in observed[:2]]
    return right(
        f"kept, a rank sends {sent[0]:,} bytes and holds {held[0]:,} after forward; gathered again, {sent[1]:,} and "
        f"{held[1]:,}"
    )


def _case(rng: random.Random, world: int, t: int, keep: bool) -> Case:
    import torch

    sizes = (("hidden", HIDDEN), ("heads", 4), ("kv_heads", 4), ("ffn", FFN))
    rows, columns = (FFN // t, HIDDEN), (HIDDEN, FFN // t)
    shapes = (("norm_weight", (HIDDEN,)), ("gate", rows), ("up", rows), ("down", columns))
    plan = Plan("sequence", sizes, rng.getrandbits(31), world, t, shapes, options=(("keep", keep),))
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    batch, length = 2, t * rng.randint(20, 24)  # so that activations outweigh a copy of the weights
    each = [torch.randn(2, batch, length, HIDDEN, generator=generator) / 2 for _ in range(world // t)]
    ask = []
    for rank in range(world):
        x, gradient = (wholes.block(part, rank % t, t, 1).contiguous() for part in each[rank // t])
        ask.append(((x,), gradient))
    return Case(f"hidden {HIDDEN}, {length // t} positions each, keep={keep}", plan, (tuple(ask),))


def _whole(case: Case) -> tuple[dict[str, Any], Any]:
    """(the serial weights by the answer's names, norm's eps)."""
    norm, mlp = wholes.build(case.plan.kind, case.plan.sizes, case.plan.seed)
    found = {"norm_weight": norm, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    return {name: each.weight.detach() for name, each in found.items()}, norm.eps


def _cut(case: Case, whole: dict[str, Any], rank: int) -> dict[str, Any]:
    t = case.plan.t
    return {
        name: whole[name] if name == "norm_weight" else wholes.block(whole[name], rank % t, t, dim)
        for name, dim in _NAMES.items()
    }


def _weights(case: Case) -> Due:
    whole, _ = _whole(case)
    cut = [_cut(case, whole, rank) for rank in range(case.plan.world)]
    first = "every rank has the first block: rank r has the r-th of t."
    cuts = [name for name in _NAMES if name != "norm_weight"]
    known = {name: [Mistake("first_shard", first, [cut[0][name]] * case.plan.world)] for name in cuts}
    values = {name: [each[name] for each in cut] for name in _NAMES}
    return Due(values, known, explain=lambda name, got: told.foreign(got, values[name], name, whole))


def _shapes(case: Case, got: dict, due: dict) -> tuple[str, str] | None:
    if any(name not in got for name in due):
        return "wrong_names", f"the check looks for parameters {', '.join(due)}."
    if got["gate"] == (FFN, HIDDEN):
        return "whole_kept", "the rank has the whole gate: it keeps its own block, 1/t of it."
    if got["gate"] == (FFN, HIDDEN // case.plan.t) or got["down"] == (HIDDEN // case.plan.t, FFN):
        return "wrong_dim", "gate and up are cut along their outputs (rows), down along its inputs (columns)."
    if got["norm_weight"] != (HIDDEN,):
        return "norm_cut", "the norm's weight is whole on every rank: what is cut are positions, not hidden elements."
    if got["gate"][0] in (0, FFN // case.plan.world):
        return "wrong_group", "rank and size are those of the world: dist.get_rank(group), dist.get_world_size(group)."
    return None


def _run(x: Any, gradient: Any, weights: dict[str, Any], eps: float) -> dict[str, Any]:
    """Forward and backward of the MLP with these weights on whole positions: values by name."""
    import torch
    import torch.nn.functional as F

    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    x = x.clone().requires_grad_()
    normed = leaves["norm_weight"] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    normed.retain_grad()
    inner = F.silu(F.linear(normed, leaves["gate"])) * F.linear(normed, leaves["up"])
    out = F.linear(inner, leaves["down"])
    out.backward(gradient)
    grads = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {"output": out.detach(), "input gradient": x.grad, "normed gradient": normed.grad, **grads}


def _calls(case: Case, number: int) -> Due:
    import torch

    whole, eps = _whole(case)
    t, world, ask = case.plan.t, case.plan.world, case.asks[number]
    with one_thread():
        group = []
        for begin in range(0, world, t):
            parts = ask[begin : begin + t]
            x, gradient = torch.cat([i[0] for i, _ in parts], 1), torch.cat([g for _, g in parts], 1)
            own = [_run(x, gradient, _cut(case, whole, begin + place), eps) for place in range(t)]
            group.append((x, gradient, _run(x, gradient, whole, eps), own))
        others = _others(case, group, whole, eps)
    values: dict[str, list[Any]] = {"output": [], "input gradient": []}
    alone: dict[str, list[Any]] = {"output": [], "input gradient": []}
    for rank in range(world):
        _, _, full, own = group[rank // t]
        for name in values:
            values[name].append(wholes.block(full[name], rank % t, t, 1))
            alone[name].append(wholes.block(own[rank % t][name], rank % t, t, 1))
    for name in ("gate", "up", "down", "norm_weight"):
        key = f"gradient of {name}"
        whole_grads = [{n: each[2][f"gradient of {n}"] for n in _NAMES} for each in group]
        values[key] = [_cut(case, whole_grads[rank // t], rank)[name] for rank in range(world)]
    parts = _norm_parts(case, group, eps)
    known = _mistakes(values, alone, parts, t, world)
    return Due(values, {name: [*mistakes, *others.get(name, ())] for name, mistakes in known.items()})


def _others(case: Case, group: list, whole: dict[str, Any], eps: float) -> dict[str, list[Mistake]]:
    """Mistakes inside norm and MLP, and MAX in place of SUM on both ways, of whole positions cut for the ranks."""
    t, sentences = case.plan.t, _SENTENCES | sequence_core.SENTENCES
    outputs, gradients = [], []
    for x, _, _, own in group:
        top = largest_in_groups([each["output"] for each in own], t)[0]
        outputs.append({**sequence_core.outputs(whole, eps, x), "max_for_sum": top})
        largest = largest_in_groups([each["normed gradient"] for each in own], t)[0]
        gradients.append({"max_for_sum": _through_norm(x, largest, whole["norm_weight"], eps)})

    def cut(found: list[dict[str, Any]]) -> list[Mistake]:
        ranks = range(case.plan.world)
        of = {cause: [wholes.block(found[r // t][cause], r % t, t, 1) for r in ranks] for cause in found[0]}
        return told.known(sentences, *of.items())

    return {"output": cut(outputs), "input gradient": cut(gradients)}


def _through_norm(x: Any, gradient: Any, weight: Any, eps: float) -> Any:
    """x's gradient from that of what the norm gives."""
    x = x.clone().requires_grad_()
    (weight * (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt())).backward(gradient)
    return x.grad


def _norm_parts(case: Case, group: list, eps: float) -> list[Any]:
    """Per rank the part of the norm weight's gradient that comes from its own positions."""
    t, parts = case.plan.t, []
    for rank in range(case.plan.world):
        x, _, full, _ = group[rank // t]
        unit = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        parts.append(wholes.block(full["normed gradient"] * unit, rank % t, t, 1).sum((0, 1)))
    return parts


def _mistakes(values: dict, alone: dict, parts: list, t: int, world: int) -> dict[str, list[Mistake]]:
    sums, of_x = in_groups(parts, t), values["input gradient"]
    known = {
        "output": told.known(
            _SENTENCES, ("no_reduce", alone["output"]), ("averaged", [each / t for each in values["output"]])
        ),
        "input gradient": told.known(
            _SENTENCES,
            ("no_reduce_backward", alone["input gradient"]),
            ("gradient_summed", [t * each for each in of_x]),
            ("averaged", [each / t for each in of_x]),
        ),
        "gradient of norm_weight": told.known(
            _SENTENCES,
            ("norm_not_summed", parts),
            ("norm_mean", [each / t for each in sums]),
            ("max_for_sum", largest_in_groups(parts, t)),
            ("wrong_group", in_groups(parts, world)),
            ("norm_summed_again", [t * each for each in sums]),
        ),
    }
    for name in ("gate", "up", "down"):
        key = f"gradient of {name}"
        known[key] = told.known(_SENTENCES, ("gradient_summed", [t * each for each in values[key]]))
    return known


def _communication(case: Case, number: int, forward: list, backward: list) -> tuple[str, str, str] | None:
    """The large ones: all_gather and reduce_scatter forward, and backward, with one all_gather more where not kept."""
    x, t = case.asks[number][0][0][0], case.plan.t
    size, keep = x.nbytes * t, dict(case.plan.options)["keep"]
    wanted = f"forward all_gather, reduce_scatter; backward {2 - keep} all_gather, reduce_scatter; of {size} bytes each"
    large = [[e for e in events if e.num_bytes > 8 * HIDDEN] for events in (forward, backward)]
    for events, where in zip(large, ("forward", "backward"), strict=True):
        if any(e.op == "all_reduce" for e in events):
            sentence = f"an all_reduce in {where}: a rank needs the sum of its own positions alone, so reduce_scatter."
            return "all_reduce", sentence, wanted
        if any(e.num_bytes > size for e in events):
            return "other_size", f"more than the positions of all ranks is sent at once in {where}.", wanted
    counts = [sum(e.op == "all_gather" for e in events) for events in large]
    sums = [sum(e.op == "reduce_scatter" for e in events) for events in large]
    if counts[1] > 1 + (not keep):
        sentence = f"{counts[1]} all_gathers in backward: gate and up use the same tensor, and one brings it."
        return "gathered_twice" if not keep else "gathered_again", sentence, wanted
    if counts[0] > 1:
        return "gathered_twice", f"{counts[0]} all_gathers in forward: gate and up use the same tensor.", wanted
    if not keep and counts[1] < 2:
        return "not_gathered_again", "keep=False: the gathered tensor goes, and is gathered again in backward.", wanted
    if [*counts, *sums] != [1, 1 + (not keep), 1, 1]:
        return "other_calls", "all_gather where positions come together, reduce_scatter where a sum parts.", wanted
    if sum(len(events) for events in (forward, backward)) > sum(map(len, large)) + 2:
        return "too_many_calls", "more small calls than the norm weight's gradient needs, which is one.", wanted
    return None


def _large(case: Case, observed: Observed) -> list[Any]:
    return [e for e in observed.records[0].collectives if e.num_bytes > 8 * HIDDEN]


def _held_bytes(observed: Observed, rank: int = 0) -> int:
    """What a rank holds after the forward of the first call beyond what it held before it."""
    record = observed.records[rank]
    part = seen.parts(record, 1)[0]
    return held_at(record, part.middle) - held_at(record, part.begin)


def _normed_first(cases: list[Case], observed: list[Observed]) -> Verdict | None:
    """No op of a norm stands between the forward's all_gather and its end. Cause "norm_of_all"."""
    for case, each in zip(cases, observed, strict=True):
        for rank, record in enumerate(each.records):
            part = seen.parts(record, 1)[0]
            events = seen.between(record, part.begin, part.middle)
            begin = next(event.index for event in events if event.op == "all_gather")
            late = [op for op in record.ops if begin < op.index <= part.middle and op.name.split(".")[1] in _NORMS]
            if late:
                sentence = "every rank norms all positions, after the all_gather: norm its own part, then gather."
                got = f"rank {rank}: {late[0].name} after all_gather"
                return wrong("evidence", "norm_of_all", sentence, case.tried, got, "the norm before all_gather")
    return None


def _held(again: Case, kept: Observed, gathered: Observed) -> Verdict | None:
    """With keep=False a rank holds at least half of the others' positions less. Cause "kept_all_the_same"."""
    x = again.asks[0][0][0][0]
    less = x.nbytes * (again.plan.t - 1)
    for rank in range(again.plan.world):
        own, other = _held_bytes(kept, rank), _held_bytes(gathered, rank)
        if own - other < less / 2:  # a copy of gate and up, put together, is allowed
            sentence = f"keep=False holds on rank {rank} what keep=True holds: save the rank's own part alone."
            got = f"{own} bytes kept, {other} gathered again"
            return wrong("evidence", "kept_all_the_same", sentence, again.tried, got, f"{less} bytes less")
    return None


def _flops(case: Case, number: int) -> int:
    x = case.asks[number][0][0][0]
    return 2 * x.numel() // HIDDEN * case.plan.t * 3 * HIDDEN * FFN // case.plan.t


def _kept(case: Case) -> tuple[int, int]:
    return 4 * (HIDDEN + 3 * HIDDEN * FFN // case.plan.t), 4 * (HIDDEN + 3 * HIDDEN * FFN)


def task() -> Task:
    """What the exercise demands."""
    return Task(NAME, _weights, _calls, _shapes, _communication, _flops, _kept)
