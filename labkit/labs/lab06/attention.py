"""Judge of exercise 6.3, `ParallelAttention`: heads shared out, KV heads where there are fewer of them than ranks, too.

Query heads are cut in t equal blocks, o_proj's columns with them. With at least t KV heads so are these; with fewer,
t/kv_heads ranks have a copy of the same one, whose gradient is the sum of what their queries ask of it. One all_reduce
forward (g), one backward (f) (Megatron-LM, arXiv:1909.08053, section 3). Left out: the MLP, sizes that do not divide.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.attention_core as attention_core
import labkit.labs.lab06.modules as modules
import labkit.labs.lab06.told as told
import labkit.labs.lab06.wholes as wholes
from labkit.check.exercise import Verdict, right
from labkit.labs.lab02.models import one_thread
from labkit.labs.lab06.functions import in_groups, largest_in_groups
from labkit.labs.lab06.in_rank import Plan
from labkit.labs.lab06.modules import Case, Task
from labkit.labs.lab06.told import Due, Mistake

NAME = "ParallelAttention"
HEADS, HEAD_DIM = 16, 4
_NAMES = ("o_proj", "q_proj", "k_proj", "v_proj")


def judge(cls: Callable, seed: int) -> Verdict:
    """Two KV heads for each rank, then fewer than ranks, then one for each of two groups; then how it came about."""
    rng = random.Random(seed)
    cases = [_case(rng, 4, 4, 8, 2), _case(rng, 4, 4, 2, 1), _case(rng, 4, 2, 1, 1)]
    found, _ = modules.judged(cls, task(), cases)
    return found or right(
        "each rank has its heads, copies of a KV head share their gradient, and one all_reduce goes each way"
    )


def _case(rng: random.Random, world: int, t: int, kv_heads: int, calls: int) -> Case:
    import torch

    from labkit.model.llama import rotary

    hidden = HEADS * HEAD_DIM
    sharing = max(1, t // kv_heads)
    rows, kv_rows = hidden // t, max(1, kv_heads // t) * HEAD_DIM
    kv = kv_rows, hidden
    shapes = {"q_proj": (rows, hidden), "k_proj": kv, "v_proj": kv, "o_proj": (hidden, rows)}
    sizes = (("hidden", hidden), ("heads", HEADS), ("kv_heads", kv_heads))
    named = tuple((f"{name}.weight", shape) for name, shape in shapes.items())
    plan = Plan("attention", sizes, rng.getrandbits(31), world, t, named, sharing)
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    asks = []
    for batch, length in ((2, rng.choice((5, 6))), (1, rng.choice((9, 11))))[:calls]:
        cos, sin = rotary(length, HEAD_DIM, 10000.0)
        each = [torch.randn(2, batch, length, hidden, generator=generator) / 2 for _ in range(world // t)]
        asks.append(tuple(((each[rank // t][0], cos, sin), each[rank // t][1]) for rank in range(world)))
    return Case(f"{HEADS} heads, {kv_heads} KV heads", plan, tuple(asks))


def _whole(case: Case) -> Any:
    return wholes.build(case.plan.kind, case.plan.sizes, case.plan.seed)[0]


def _kv_place(case: Case, rank: int) -> tuple[int, int]:
    """(block, number of blocks) of the KV projections that a rank has."""
    t, kv_heads = case.plan.t, dict(case.plan.sizes)["kv_heads"]
    return (rank % t, t) if kv_heads >= t else (rank % t * kv_heads // t, kv_heads)


def _cut(case: Case, rank: int, whole: Any) -> dict[str, Any]:
    """The rank's block of each projection's weight (or of whatever tensors of their shapes are given)."""
    t, place = case.plan.t, rank % case.plan.t
    kv = _kv_place(case, rank)
    return {
        "q_proj": wholes.block(whole["q_proj"], place, t),
        "k_proj": wholes.block(whole["k_proj"], *kv),
        "v_proj": wholes.block(whole["v_proj"], *kv),
        "o_proj": wholes.block(whole["o_proj"], place, t, 1),
    }


def _of(module: Any, gradient: bool = False) -> dict[str, Any]:
    found = {name: getattr(module, name).weight for name in _NAMES}
    return {name: weight.grad if gradient else weight.detach() for name, weight in found.items()}


def _weights(case: Case) -> Due:
    plan = case.plan
    whole = _of(_whole(case))
    named = {f"{name}.weight": weight for name, weight in whole.items()}
    cut = [_cut(case, rank, whole) for rank in range(plan.world)]
    values = {f"{name}.weight": [each[name] for each in cut] for name in _NAMES}
    first = "every rank has the first block of heads: rank r has the r-th of t."
    known: dict[str, list[Mistake]] = {}
    for name in _NAMES:
        dim, parts = int(name == "o_proj"), plan.t if name[0] in "qo" else _kv_place(case, 0)[1]
        blocks = [wholes.block(whole[name], part, parts, dim) for part in range(parts)]
        known[f"{name}.weight"] = [Mistake("first_shard", first, [blocks[0]] * plan.world)]
        if name[0] in "kv" and plan.sharing > 1:
            ranks = range(plan.world)
            sentence = f"queries of rank r ask KV head r * {parts} // {plan.t}, which neighbours share; this is not it."
            known[f"{name}.weight"] = [
                Mistake("wrong_kv_head", sentence, [blocks[rank % plan.t % parts] for rank in ranks]),
                Mistake("wrong_kv_head", sentence, [blocks[min(rank % plan.t, parts - 1)] for rank in ranks]),
                *known[f"{name}.weight"],
            ]

    def explain(name: str, got: list) -> tuple[str, str]:
        return told.foreign(got, values[name], name, named)

    return Due(values, known, explain=explain)


def _shapes(case: Case, got: dict, due: dict) -> tuple[str, str] | None:
    hidden, plan = HEADS * HEAD_DIM, case.plan
    kv_rows = dict(plan.sizes)["kv_heads"] * HEAD_DIM
    missing = [name for name in due if name not in got]
    if missing:
        return "wrong_names", f"there is no parameter {missing[0]}: the check looks for {', '.join(due)}."
    if got["q_proj.weight"] == (hidden, hidden):
        return "whole_kept", "every rank has all heads: it keeps its own, 1/t of them."
    q, kv, o = got["q_proj.weight"], got["k_proj.weight"], got["o_proj.weight"]
    if kv != due["k_proj.weight"] and kv[1] == hidden:
        if kv[0] == kv_rows:
            return "kv_whole", "every rank keeps all KV heads: its queries ask only some of them, so keep those."
        if kv[0] < HEAD_DIM:
            sentence = f"a KV head is cut in pieces ({kv[0]} rows of {HEAD_DIM}): with fewer of them than ranks, "
            return "kv_head_cut", f"{sentence}ranks share one."
    if q[0] != hidden // plan.t and hidden // plan.world in q:
        return "wrong_group", "rank and size are those of the world: dist.get_rank(group), dist.get_world_size(group)."
    if o == (hidden // plan.t, hidden) or q == (hidden, hidden // plan.t):
        return "wrong_dim", "q, k and v are cut along outputs (rows), o along inputs (columns): heads are both."
    return None


def _local(case: Case, number: int) -> list[dict[str, Any]]:
    """Per rank what it has without any communication: output and gradients of its own heads."""
    whole, found = _of(_whole(case)), []
    for rank in range(case.plan.world):
        module = _whole(case)
        for name, weight in _cut(case, rank, whole).items():
            getattr(module, name).weight.data = weight.clone()
        found.append(_run(module, *case.asks[number][rank]))
    return found


def _dealt_kv(case: Case, number: int) -> list[Any]:
    """Per rank the output of its own heads where the i-th query head asks KV head i % kv_heads, not i // served."""
    whole, found = _of(_whole(case)), []
    for rank in range(case.plan.world):
        module, cut = _whole(case), _cut(case, rank, whole)
        served = len(cut["q_proj"]) // len(cut["k_proj"])
        for name, weight in cut.items():
            getattr(module, name).weight.data = weight.repeat(served, 1) if name[0] in "kv" else weight
        found.append(_run(module, *case.asks[number][rank])["output"])
    return found


def _times_kv(case: Case, number: int, rank: int) -> Any:
    """The output where k's and v's weights come once per rank that shares them."""
    module = _whole(case)
    for layer in (module.k_proj, module.v_proj):
        layer.weight.data = layer.weight.data * case.plan.sharing
    return _run(module, *case.asks[number][rank])["output"]


def _by_kv(case: Case, number: int) -> list[Any]:
    """Per rank what its own keys and values alone give x's gradient."""
    whole, found = _of(_whole(case)), []
    for rank in range(case.plan.world):
        module = _whole(case)
        for name, weight in _cut(case, rank, whole).items():
            getattr(module, name).weight.data = weight.clone()
        module.q_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
        found.append(_run(module, *case.asks[number][rank])["input gradient"])
    return found


def _run(module: Any, inputs: tuple, gradient: Any) -> dict[str, Any]:
    x = inputs[0].clone().requires_grad_()
    module.zero_grad()
    out = module(x, *inputs[1:])
    out.backward(gradient)
    return {"output": out.detach(), "input gradient": x.grad, **_of(module, gradient=True)}


def _calls(case: Case, number: int) -> Due:
    plan = case.plan
    t, world, sharing = plan.t, plan.world, plan.sharing
    with one_thread():
        own, by_kv, dealt = _local(case, number), _by_kv(case, number), _dealt_kv(case, number)
        of_core = _of_core(case, number)
        serial = [_run(_whole(case), *case.asks[number][rank]) for rank in range(0, world, t)]
        doubled = [
            _run(_whole(case), (t * inputs[0], *inputs[1:]), gradient) for inputs, gradient in case.asks[number][::t]
        ]
    of = [serial[rank // t] for rank in range(world)]
    cut = [_cut(case, rank, each) for rank, each in enumerate(of)]
    values: dict[str, list[Any]] = {"output": [each["output"] for each in of]}
    values |= {f"gradient of {name}.weight": [each[name] for each in cut] for name in _NAMES}
    values["input gradient"] = [each["input gradient"] for each in of]
    summed = [doubled[rank // t]["output"] for rank in range(world)]
    f_forward = Mistake("f_forward", "f sums x in forward: it leaves x as it is.", summed)
    of_x = [each["input gradient"] for each in own]
    order = "query head i of a rank asks its KV head i // (query heads per KV head): repeat_interleave, not repeat."
    forward = "shared weights are summed in forward: f leaves them as they are, and sums their gradients."
    mistakes = {
        "output": [
            *_of_output([each["output"] for each in own], t, world),
            f_forward,
            Mistake("kv_dealt_out", order, in_groups(dealt, t)),
            Mistake("kv_summed_forward", forward, [_times_kv(case, number, rank) for rank in range(world)]),
            *of_core,
        ],
        "input gradient": [*_of_input(of_x, t, world), *_of_kv_paths(of_x, by_kv, sharing, t)],
    }
    again = "gradients come t times: g passes the gradient on as it is in backward, and nothing sums it."
    for name in _NAMES:
        key = f"gradient of {name}.weight"
        mistakes[key] = [Mistake("g_backward", again, [t * each for each in values[key]])]
        if name[0] in "kv":
            mistakes[key] += _of_shared([each[name] for each in own], sharing, t, world)
        if name[0] == "q" and sharing > 1:
            alone = "query heads are the rank's own: kv_group sums the gradients of k and v alone."
            mistakes[key].append(Mistake("q_shared", alone, in_groups([each[name] for each in own], sharing)))
    return Due(values, mistakes)


def _of_core(case: Case, number: int) -> list[Mistake]:
    """Mistakes inside a head, the same on every rank."""
    whole, parts = _of(_whole(case)), []
    for rank, (inputs, _) in enumerate(case.asks[number]):
        parts.append(attention_core.outputs(_cut(case, rank, whole), HEAD_DIM, *inputs))
    return [
        Mistake(cause, sentence, in_groups([each[cause] for each in parts], case.plan.t))
        for cause, sentence in attention_core.SENTENCES.items()
    ]


def _of_output(parts: list[Any], t: int, world: int) -> list[Mistake]:
    sums = in_groups(parts, t)
    return [
        Mistake("no_g", "the output is that of the rank's own heads: g sums it over ranks.", parts),
        Mistake("averaged", "the ranks' outputs are averaged: heads add up.", [each / t for each in sums]),
        Mistake("max_for_sum", told.MAX, largest_in_groups(parts, t)),
        Mistake("wrong_group", "g sums over the world: give it the group.", in_groups(parts, world)),
    ]


def _of_input(parts: list[Any], t: int, world: int) -> list[Mistake]:
    sums = in_groups(parts, t)
    missing = "forward is right, and x's gradient is that of the rank's own heads: x enters through f, which sums it."
    mean = "x's gradient is averaged over ranks: what heads ask adds up."
    return [
        Mistake("no_f", missing, parts),
        Mistake("averaged", mean, [each / t for each in sums]),
        Mistake("max_for_sum", told.MAX, largest_in_groups(parts, t)),
        Mistake("f_twice", "x's gradient is summed over ranks twice.", [each * t for each in sums]),
        Mistake("wrong_group", "f sums over the world: give it the group.", in_groups(parts, world)),
    ]


def _of_kv_paths(parts: list[Any], by_kv: list[Any], sharing: int, t: int) -> list[Mistake]:
    """x's gradient, where k and v take another way than q. by_kv: what of each part came by k and v."""
    sums, by_q = in_groups(parts, t), in_groups([a - b for a, b in zip(parts, by_kv, strict=True)], t)
    outputs = "k and v themselves are summed over kv_group, so x's gradient has their part once per rank of it: "
    beside = "x's gradient by k and v is the rank's own: q, k and v all take the x that went through f."
    again = [a + (sharing - 1) * b for a, b in zip(sums, in_groups(by_kv, t), strict=True)]
    return [
        Mistake("f_beside_kv", beside, [a + b for a, b in zip(by_q, by_kv, strict=True)]),
        Mistake("f_on_kv", f"{outputs}f(weight, kv_group) sums the weight's alone.", again),
    ]


def _of_shared(parts: list[Any], sharing: int, t: int, world: int) -> list[Mistake]:
    sums = in_groups(parts, sharing)
    alone = "ranks that share a KV head each have a part of its gradient: sum it over kv_group, or copies part company."
    others = "gradients of other KV heads are in the sum: kv_group is of those that share one, None where none do."
    mean = "a shared KV head's gradient is averaged: its parts add up."
    over = [Mistake("kv_all_summed", others, in_groups(parts, size)) for size in (t, world)]
    if sharing == 1:
        return over
    return [
        Mistake("kv_not_shared", alone, parts),
        Mistake("kv_mean", mean, [each / sharing for each in sums]),
        Mistake("max_for_sum", told.MAX, largest_in_groups(parts, sharing)),
        *over,
    ]


def _communication(case: Case, number: int, forward: list, backward: list) -> tuple[str, str, str] | None:
    x = case.asks[number][0][0][0]
    weights = 2 * dict(case.plan.sizes)["kv_heads"] * HEAD_DIM * HEADS * HEAD_DIM * 4
    shared = [event for event in backward if event.op == "all_reduce" and event.num_bytes != x.nbytes]
    wanted = f"forward 1 all_reduce of {x.nbytes} bytes, backward 1"
    if case.plan.sharing > 1:
        wanted += ", and in backward those of the shared weights"
        if len(shared) <= 2 and sum(event.num_bytes for event in shared) <= weights:
            backward = [event for event in backward if event not in shared]
    large = [event for event in backward if event.num_bytes == x.nbytes]
    if len(large) in (2, 3) and len(large) == len(backward):
        sentence = f"x's gradient is summed {len(large)} times in backward: x goes through f once, then to q, k, v."
        return "f_thrice", sentence, wanted
    found = modules.one_all_reduce(forward, backward, (1, 1), x.nbytes)
    return found and (found[0], found[1], wanted)


def _flops(case: Case, number: int) -> int:
    x = case.asks[number][0][0][0]
    batch, length, hidden = x.shape
    projections = sum(2 * batch * length * shape[0] * shape[1] for _, shape in case.plan.shapes)
    return projections + 4 * batch * length * length * hidden // case.plan.t


def _kept(case: Case) -> tuple[int, int]:
    whole = sum(weight.numel() for weight in _of(_whole(case)).values())
    return sum(4 * shape[0] * shape[1] for _, shape in case.plan.shapes), 4 * whole


def task() -> Task:
    """What the exercise demands."""
    return Task(NAME, _weights, _calls, _shapes, _communication, _flops, _kept)
