"""Judge of exercise 6.4, `VocabParallelEmbedding`: rows of the table shared out, one all_reduce puts rows together.

A token's row is on one rank; the others add zeros (Megatron-LM, arXiv:1909.08053, section 3). Tokens at both ends of
every rank's range are among those asked for. Left out: vocabularies that t does not divide, which real models pad.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.modules as modules
import labkit.labs.lab06.told as told
import labkit.labs.lab06.wholes as wholes
from labkit.check.exercise import Verdict, right
from labkit.labs.lab06.functions import in_groups, largest_in_groups
from labkit.labs.lab06.in_rank import Plan
from labkit.labs.lab06.modules import Case, Task
from labkit.labs.lab06.told import Due, Mistake

NAME = "VocabParallelEmbedding"
HIDDEN = 48
_OFFSET = "rank r of t has the rows from r * vocab/t on, and counts them from there."
_SENTENCES = {
    "no_all_reduce": "only tokens of the rank's own range have their row: all_reduce the rest.",
    "not_masked": "a token outside the rank's range brings a row all the same: it must bring zeros.",
    "first_row_lost": "the first row of each range is taken for outside: it is begin <= token < end.",
    "last_row_lost": "the last row of each range is taken for outside: it is begin <= token < end.",
    "mask_unseen": "others' tokens bring zeros, and autograd does not know: the row put in their place gets their "
    "gradient. Mask by an op that autograd sees.",
    "mask_inverted": "the rank's own tokens bring zeros and all others a row: the mask is the wrong way round.",
    "offset_missing": f"every rank takes tokens 0 to vocab/t - 1 for its own: {_OFFSET}",
    "wrong_offset": f"rank r takes tokens from r * t on for its own: {_OFFSET}",
    "wrong_place": "the rank's first row is found by its place in the world: dist.get_rank(group) is due.",
    "max_for_sum": "the largest of the ranks' numbers comes out, and a 0 is larger than a row's negative ones: add up.",
    "averaged": "one rank has the row and the others zeros: add, do not average.",
    "wrong_group": "rows are summed over the world: give all_reduce group=group.",
    "gradient_summed": "the output's gradient is the same on all ranks and is summed again in backward: pass it on.",
}


def judge(cls: Callable, seed: int) -> Verdict:
    """Four ranks, then two groups of two; then how it came about."""
    rng = random.Random(seed)
    found, _ = modules.judged(cls, task(), [_case(rng, 4, 4), _case(rng, 4, 2)])
    return found or right("every rank keeps 1/t of the table, and one all_reduce of b * s * h brings all their rows")


def _case(rng: random.Random, world: int, t: int) -> Case:
    import torch

    rows = 2 * rng.randint(11, 14)  # the world divides the vocabulary, too
    vocab = rows * t
    sizes, shapes = (("vocab", vocab), ("hidden", HIDDEN)), (("weight", (rows, HIDDEN)),)
    plan = Plan("embedding", sizes, rng.getrandbits(31), world, t, shapes)
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    each = []
    for _ in range(world // t):
        ends = [edge for part in range(t) for edge in (part * rows, (part + 1) * rows - 1)]
        inner = torch.randint(0, vocab, (24 - len(ends),), generator=generator)
        tokens = torch.cat([torch.tensor(ends), inner])[torch.randperm(24, generator=generator)].view(2, 12)
        each.append((tokens, torch.randn(2, 12, HIDDEN, generator=generator)))
    ask = tuple(((each[rank // t][0],), each[rank // t][1]) for rank in range(world))
    return Case(f"Embedding({vocab}, {HIDDEN})", plan, (ask,))


def _table(case: Case) -> Any:
    return wholes.build(case.plan.kind, case.plan.sizes, case.plan.seed)[0].weight.detach()


def _weights(case: Case) -> Due:
    table, t, world = _table(case), case.plan.t, case.plan.world
    first = "every rank has the first block of rows: rank r has the r-th of t."
    values = [wholes.block(table, rank % t, t) for rank in range(world)]
    strided = [table[rank % t :: t] for rank in range(world)]
    known = [
        Mistake("first_shard", first, [values[0]] * world),
        Mistake("interleaved", "rows are dealt out one by one: rank r has the r-th block, in one piece.", strided),
    ]
    whole = {"weight": table}
    return Due({"weight": values}, {"weight": known}, explain=lambda name, got: told.foreign(got, values, name, whole))


def _shapes(case: Case, got: dict, due: dict) -> tuple[str, str] | None:
    vocab, weight, plan = dict(case.plan.sizes)["vocab"], got.get("weight"), case.plan
    if weight == (vocab, HIDDEN):
        return "whole_kept", "the rank has the whole table: it keeps its own rows, 1/t of them."
    if weight == (vocab, HIDDEN // plan.t):
        return "wrong_dim", "the table is cut along the hidden size: it is its rows, the vocabulary, that are shared."
    if weight in ((vocab // plan.world, HIDDEN), (0, HIDDEN)):
        return "wrong_group", "rank and size are those of the world: dist.get_rank(group), dist.get_world_size(group)."
    return None


def _calls(case: Case, number: int) -> Due:
    import torch

    table, t, world = _table(case), case.plan.t, case.plan.world
    rows = len(table) // t
    tokens = [inputs[0] for inputs, _ in case.asks[number]]
    local = [each - rank % t * rows for rank, each in enumerate(tokens)]
    whole = [torch.nn.functional.embedding(each, table) for each in tokens]
    puts = [y * ((y >= 0) & (y < rows)) for y in local], [y.clamp(0, rows - 1) for y in local]
    grads = []
    for rank, (_, gradient) in enumerate(case.asks[number]):
        full = torch.zeros_like(table).index_add_(0, tokens[rank].flatten(), gradient.flatten(0, 1))
        grads.append(wholes.block(full, rank % t, t))
    mistakes = {
        "output": _of_output([wholes.block(table, rank % t, t) for rank in range(world)], tokens, local, t),
        "gradient of weight": told.known(
            _SENTENCES,
            ("gradient_summed", [t * each for each in grads]),
            *(("mask_unseen", _unmasked(case, number, put)) for put in puts),
        ),
    }

    def explain(name: str, got: list) -> tuple[str, str] | None:
        return _other_rows(got, tokens, table, t) if name == "output" else None

    return Due({"output": whole, "gradient of weight": grads}, mistakes, explain=explain)


def _of_output(blocks: list[Any], tokens: list[Any], local: list[Any], t: int) -> list[Mistake]:
    """By rank: its block of the table, tokens, and tokens counted from its first one."""
    world, rows = len(blocks), len(blocks[0])
    inside = [((each >= 0) & (each < rows))[..., None] for each in local]
    clamped = [block[each.clamp(0, rows - 1)] for block, each in zip(blocks, local, strict=True)]
    parts = [each * mask for each, mask in zip(clamped, inside, strict=True)]
    wrapped = [block[each % rows] for block, each in zip(blocks, local, strict=True)]
    at_zero = [block[each * mask[..., 0]] for block, each, mask in zip(blocks, local, inside, strict=True)]
    without_first = [part * (each > 0)[..., None] for part, each in zip(parts, local, strict=True)]
    without_last = [part * (each < rows - 1)[..., None] for part, each in zip(parts, local, strict=True)]
    return told.known(
        _SENTENCES,
        ("no_all_reduce", parts),
        *(("not_masked", in_groups(each, t)) for each in (clamped, wrapped, at_zero)),
        *(("not_masked", each) for each in (clamped, wrapped, at_zero)),
        ("first_row_lost", in_groups(without_first, t)),
        ("last_row_lost", in_groups(without_last, t)),
        *(
            ("mask_inverted", in_groups([y * ~mask for y, mask in zip(each, inside, strict=True)], t))
            for each in (clamped, wrapped, at_zero)
        ),
        ("offset_missing", in_groups(_looked_up(blocks, tokens, [0] * world), t)),
        ("wrong_offset", in_groups(_looked_up(blocks, tokens, [rank % t * t for rank in range(world)]), t)),
        ("wrong_place", in_groups(_looked_up(blocks, tokens, [rank * rows for rank in range(world)]), t)),
        ("max_for_sum", largest_in_groups(parts, t)),
        ("averaged", [each / t for each in in_groups(parts, t)]),
        ("wrong_group", in_groups(parts, world)),
    )


def _looked_up(blocks: list[Any], tokens: list[Any], begins: list[int]) -> list[Any]:
    """Per rank the rows that it brings where it takes its block to begin at that token."""
    found = []
    for block, each, begin in zip(blocks, tokens, begins, strict=True):
        row = each - begin
        inside = (row >= 0) & (row < len(block))
        found.append(block[row.clamp(0, len(block) - 1)] * inside[..., None])
    return found


def _other_rows(got: list[Any], tokens: list[Any], table: Any, t: int) -> tuple[str, str] | None:
    """What is to be told where a group's ranks differ, or all that comes out are rows of the table or zeros."""
    import torch

    if not all(bool(each.isfinite().all()) for each in got):
        return None
    if any(not told.close(out, got[rank // t * t]) for rank, out in enumerate(got)):
        return "ranks_differ", (
            "ranks of a group have different rows for the same tokens: all_reduce gives all the same sum, and nothing "
            "may change it afterwards."
        )
    rows = torch.cat([table, torch.zeros_like(table[:1])])
    wrong = []
    for out, due in zip(got, tokens, strict=True):
        if out.shape != (*due.shape, table.shape[1]):
            return None
        off = torch.cdist(out.flatten(0, 1), rows, compute_mode="donot_use_mm_for_euclid_dist")
        least, row = off.min(-1)
        if float(least.max()) > told.RTOL * float(table.abs().max()):
            return None
        wrong += [(token, at) for token, at in zip(due.flatten().tolist(), row.tolist(), strict=True) if at != token]
    if not any(bool(out.any()) for out in got) or not wrong:
        return None
    others = [(token, at) for token, at in wrong if at < len(table)]
    if others:
        token, at = others[0]
        return "other_row", f"token {token} gets the row of token {at}: {_OFFSET}"
    return "no_row", f"token {wrong[0][0]} gets zeros, as if no rank took it for its own: {_OFFSET}"


def _unmasked(case: Case, number: int, put: list[Any]) -> list[Any]:
    """Per rank the weight's gradient where every token takes part. put: the rank's row that each was looked up in."""
    import torch

    found = []
    for at, (_, gradient) in zip(put, case.asks[number], strict=True):
        zeros = torch.zeros(dict(case.plan.shapes)["weight"])
        found.append(zeros.index_add_(0, at.flatten(), gradient.flatten(0, 1)))
    return found


def _communication(case: Case, number: int, forward: list, backward: list) -> tuple[str, str, str] | None:
    return modules.one_all_reduce(forward, backward, (1, 0), case.asks[number][0][1].nbytes)


def _flops(case: Case, number: int) -> int:
    """Of a one-hot product, which is one way to look rows up."""
    return 2 * case.asks[number][0][0][0].numel() * dict(case.plan.shapes)["weight"][0] * HIDDEN


def _kept(case: Case) -> tuple[int, int]:
    vocab = dict(case.plan.sizes)["vocab"]
    return 4 * vocab * HIDDEN // case.plan.t, 4 * vocab * HIDDEN


def _failed(case: Case, observed: Any, failed: Verdict) -> tuple[str, str] | None:
    if "IndexError" in failed.sentence or "out of range" in failed.sentence:
        return "out_of_range", "a token of another rank's range is looked up as it is: the rank has no such row."
    return None


def task() -> Task:
    """What the exercise demands."""
    return Task(NAME, _weights, _calls, _shapes, _communication, _flops, _kept, failed=_failed)
