"""What wrong parameters tell: which known mistake would give them. For the judges of 4.1 to 4.3, in the parent.

Left out: how an answer came about (`evidence`).
"""

from __future__ import annotations

from typing import Any

from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab00.inputs import head
from labkit.labs.lab04.models import Case
from labkit.labs.lab04.serial import MISTAKES, Params, Serial, serial

RTOL = 1e-5  # of the largest element of a tensor, fp32
# bf16: roundings may fall differently in a few elements, by one unit in the last place.
MEAN_OFF = 0.1  # of what training has changed so far, on average over a tensor


def close(got: Params, due: Params, start: Params) -> bool:
    """Whether parameters are what they should be. start: before training, which says how far they have come."""
    return all(_close(got[name], each, start[name]) for name, each in due.items())


def _close(got: Any, due: Any, start: Any) -> bool:
    if got.shape != due.shape or got.dtype != due.dtype or not got.isfinite().all():
        return False
    off = (got.double() - due.double()).abs()
    if due.element_size() >= 4:
        return float(off.max()) <= RTOL * float(due.abs().max())
    moved, unit = (due.double() - start.double()).abs(), 2.0**-7 * due.double().abs()
    loose = bool((off <= 2 * unit + 0.3 * moved.max()).all())
    return loose and float(off.mean()) <= MEAN_OFF * float(moved.mean()) + float(unit.max()) / due.numel()


def values(case: Case, observed: Observed, due: Serial) -> Verdict | None:
    """Parameters of every step against serial AdamW's: stages "shape", "values", "agree", "serial"."""
    for step in range(case.steps):
        got = [result["params"][step] for result in observed.results]
        before = due.params[step - 1] if step else due.start
        found = _losses(case, observed, due, step) or _frozen(case, got, due, step) or _plain(case, got, due, step)
        if found is None and all(close(each, due.params[step], due.start) for each in got):
            left = [result["left"][step] for result in observed.results]
            found = _left(case, left)
        elif found is None:
            found = _explained(case, observed, got, due, before, step)
        if found is not None:
            return found
    return None


def _losses(case: Case, observed: Observed, due: Serial, step: int) -> Verdict | None:
    """Parameters were right so far, so the losses are: unless forward uses others."""
    rtol = 1e-4 if case.plan.dtype == "float32" else 5e-2
    for rank, result in enumerate(observed.results):
        for got, wanted in zip(result["losses"][step], due.losses[step][rank], strict=True):
            if not abs(got - wanted) <= rtol * abs(wanted):
                sentence = f"rank {rank}'s loss of step {step} is not the serial one: what does forward compute with?"
                return wrong("values", "wrong_output", sentence, case.tried, f"{got:.6g}", f"{wanted:.6g}")
    return None


def _frozen(case: Case, got: list[Params], due: Serial, step: int) -> Verdict | None:
    import labkit.labs.lab04.models as models

    for name, p in models.build(case.plan, case.seed).named_parameters():
        for rank, each in enumerate(got):
            if not p.requires_grad and not each[name].equal(due.start[name]):
                sentence = f"{name} is frozen (requires_grad is False) and was changed: leave it as it is."
                where = f"step {step}, rank {rank}: {head(each[name])}"
                return wrong("values", "frozen_parameter", sentence, case.tried, where, head(due.start[name]))
    return None


def _plain(case: Case, got: list[Params], due: Serial, step: int) -> Verdict | None:
    """Shape, dtype and finite values."""
    for rank, each in enumerate(got):
        for name, tensor in each.items():
            wanted = due.start[name]
            if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
                sentence = f"rank {rank}'s {name} changed its shape or dtype: a parameter keeps them."
                now, was = (f"{tuple(t.shape)} of {t.dtype}" for t in (tensor, wanted))
                return wrong("shape", "wrong_shape", sentence, case.tried, now, was)
            if not tensor.isfinite().all():
                sentence = f"rank {rank}'s {name} is not finite after step {step}: t is 1 in the first step, not 0."
                return wrong("values", "not_finite", sentence, case.tried, head(tensor), head(due.params[step][name]))
    return None


def _left(case: Case, left: list[list[str]]) -> Verdict | None:
    for rank, names in enumerate(left):
        if names:
            sentence = f"rank {rank}'s {names[0]} still has a gradient after zero_grad(): the next backward adds to it."
            return wrong("values", "never_cleared", sentence, case.tried, f"{len(names)} gradients", "None, or zeros")
    return None


def _explained(case: Case, observed: Observed, got: list[Params], due: Serial, before: Params, step: int) -> Verdict:
    differ = any(not one.equal(got[0][name]) for each in got for name, one in each.items())
    cause, sentence = _cause(case, observed, got, due, before, step, differ)
    every = [(rank, name) for rank, each in enumerate(got) for name in each]
    rank, name = next((r, n) for r, n in every if not _close(got[r][n], due.params[step][n], due.start[n]))
    where = f"step {step}, rank {rank}, {name}: {head(got[rank][name])}"
    return wrong("agree" if differ else "serial", cause, sentence, case.tried, where, head(due.params[step][name]))


def _cause(
    case: Case, observed: Observed, got: list[Params], due: Serial, before: Params, step: int, differ: bool
) -> tuple[str, str]:
    right = due.params[step]
    trained = [name for name in right if not right[name].equal(before[name])]
    if all(each[name].equal(before[name]) for each in got for name in trained):
        if step == 0:
            sentence = "step() changes no parameter. Was `parameters`, a generator, used up? Make a list of it first."
            return "nothing_updated", sentence
        return "later_steps", "the first step is right and later ones change nothing."
    if step == 0 or differ:
        found = _partly(got, right, before, trained, differ)
        if found is not None:
            return found
    if differ:
        own = [serial(case, "own", rank).params[step] for rank in range(case.world_size)]
        if all(close(each, mine, due.start) for each, mine in zip(got, own, strict=True)):
            return "not_averaged", "every rank trains with its own gradients: average them over the ranks first."
        return "ranks_differ", "ranks hold different parameters after step(): every rank must get every rank's part."
    found = _known(case, observed, due, step) or _own_parts(case, got[0], due, step)
    return found or _places(got[0], right) or _vague(step)


def _known(case: Case, observed: Observed, due: Serial, step: int) -> tuple[str, str] | None:
    """The first known mistake that gives rank 0's parameters in all steps; else one that gives them up to this one."""
    params = observed.results[0]["params"]
    up_to_here, known = None, MISTAKES
    if case.plan.dtype != "float32":  # what is wrong in fp32 as well was told before
        known = {"no_master": MISTAKES["no_master"]}
        sentence = f"right in fp32, and not in {case.plan.dtype}: m, v and a copy of the part belong into fp32."
        up_to_here = "narrow_state", sentence
    for cause, sentence in known.items():
        made = serial(case, cause).params
        same = [close(got, wrong_one, due.start) for got, wrong_one in zip(params, made, strict=True)]
        told_apart = not close(made[step], due.params[step], due.start)
        if all(same) and told_apart:
            return cause, sentence
        if up_to_here is None and all(same[: step + 1]) and told_apart:
            up_to_here = cause, sentence
    return up_to_here


def _partly(
    got: list[Params], right: Params, before: Params, trained: list[str], differ: bool
) -> tuple[str, str] | None:
    """Whether every element is either right or as it was before the step."""
    new, old = 0, 0
    names = []
    for each in got:
        for name in trained:
            tolerance = RTOL * float(right[name].abs().max()) + (
                0.0 if right[name].element_size() >= 4 else 2.0**-7 * float(right[name].abs().max())
            )
            is_new = (each[name].double() - right[name].double()).abs() <= tolerance
            is_old = each[name] == before[name]
            if not (is_new | is_old).all():
                return None
            stale = int((is_old & ~is_new).sum())
            new, old = new + int(is_new.sum()), old + stale
            names += [name] if stale else []
    if not old:
        return None
    if differ and old >= new / 4:
        sentence = "every rank has its own part updated and the others' parts as before: gather the parts after step()."
        return "not_gathered", sentence
    told = ", ".join(dict.fromkeys(names[:3]))
    sentence = f"{old} elements keep their old values ({told}): pad, so that the ranks divide it, and cut none off."
    return "remainder", sentence


def _own_parts(case: Case, got: Params, due: Serial, step: int) -> tuple[str, str] | None:
    """Whether every element is as one rank's own gradients would make it."""
    own = [serial(case, "own", rank).params[step] for rank in range(case.world_size)]
    for name, each in got.items():
        off = [(each.double() - mine[name].double()).abs() for mine in own]
        if not (sum(one <= RTOL * float(each.abs().max()) for one in off) > 0).all():
            return None
    return "own_parts", "each part is updated with its owner's gradients alone: average over the ranks first."


def _places(got: Params, right: Params) -> tuple[str, str] | None:
    """Whether nearly all numbers are those of other places."""
    import torch

    one, other = (torch.cat([t.double().flatten() for t in each.values()]) for each in (got, right))
    ordered = other.sort().values
    after = torch.searchsorted(ordered, one).clamp(max=len(ordered) - 1)
    before = (after - 1).clamp(min=0)
    off = torch.minimum((ordered[after] - one).abs(), (ordered[before] - one).abs())
    if float((off <= RTOL * float(other.abs().max())).double().mean()) < 0.9:
        return None
    sentence = "these are the right numbers in the wrong places: parts go back in the order in which they were cut."
    return "wrong_places", sentence


def _vague(step: int) -> tuple[str, str]:
    if step:
        return "later_steps", "the first step is right and a later one is not: what is kept, and what is cleared?"
    return "wrong_values", "parameters after step() are not those of serial AdamW on the mean gradient."
