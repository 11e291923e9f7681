"""What a wrong value tells: which known mistake would give it, on every rank. For lab 06's judges, in the parent.

Values are compared by name: weights first, then what came out, then gradients. Left out: how they came about (`seen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import apart

RTOL = 1e-5  # of the largest element of a tensor, fp32
MAX = "the largest of the ranks' parts comes out: they add up, so all_reduce with op=SUM, its default."


@dataclass(frozen=True)
class Mistake:
    """A known mistake and, per rank, the value that it gives."""

    cause: str
    sentence: str
    values: Sequence[Any]


@dataclass(frozen=True)
class Due:
    """Per name the value of every rank, in the order in which they are compared; and mistakes by the same names.

    none: what is told of a name without a value (a gradient that is None), as (cause, sentence).
    explain: (name, every rank's value) -> (cause, sentence) where no known mistake fits, or None.
    words: what a name is called in sentences, where that is not the name.
    """

    values: dict[str, Sequence[Any]]
    mistakes: dict[str, Sequence[Mistake]] = field(default_factory=dict)
    none: dict[str, tuple[str, str]] = field(default_factory=dict)
    explain: Callable[[str, list], tuple[str, str] | None] = lambda name, values: None
    words: dict[str, str] = field(default_factory=dict)


def known(sentences: dict[str, str], *pairs: tuple[str, Sequence[Any]]) -> list[Mistake]:
    """Mistakes of (cause, values by rank), with what each cause is told."""
    return [Mistake(cause, sentences[cause], values) for cause, values in pairs]


def close(got: Any, due: Any, rtol: float = RTOL) -> bool:
    """Whether a tensor is another to rounding."""
    if got is None or got.shape != due.shape or got.dtype != due.dtype or not got.isfinite().all():
        return False
    return not got.numel() or float((got - due).abs().max()) <= rtol * max(float(due.abs().max()), 1e-30)


def groups(world: int, t: int) -> str:
    """So many ranks, and groups of t of them, in words."""
    return f"{world} ranks" if t == world else f"{world} ranks in groups of {t}"


def ran(task: Any, case: Any, observed: Observed) -> Verdict | None:
    """A run that failed, with the cause that the task knows of it, if it knows one. For tasks of functions and classes.

    task: has a name, and failed(case, observed, verdict) -> (cause, sentence) or None. case: says what was tried.
    """
    failed = attempts.ran(observed, task.name, case.tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    known = task.failed(case, observed, failed)
    if known is None:
        return failed
    return wrong("attempted", known[0], f"{known[1]} {failed.sentence}", case.tried, failed.got, failed.expected)


def values(
    got: Sequence[dict[str, Any]], due: Due, tried: str, shape: tuple[str, str] | None = None
) -> Verdict | None:
    """The first name whose value is wrong on some rank, with its cause. shape: told of an output's wrong shape."""
    for name, every in due.values.items():
        mine = [each.get(name) for each in got]
        found = _kinds(name, mine, every, due, tried, shape) or _one(name, mine, every, due, tried)
        if found is not None:
            return found
    return None


def _kinds(
    name: str, mine: list, every: Sequence[Any], due: Due, tried: str, shape: tuple[str, str] | None
) -> Verdict | None:
    called = due.words.get(name, name)
    for rank, (got, wanted) in enumerate(zip(mine, every, strict=True)):
        if got is None:
            vague = "no_gradient", f"rank {rank} has no {called}: backward did not reach it, or gave None for it."
            cause, sentence = due.none.get(name, vague)
            return wrong("values", cause, sentence.format(rank=rank), tried, f"rank {rank}: None", kind(wanted))
        if kind(got) != kind(wanted):
            for each in due.mistakes.get(name, ()):  # some mistakes are known by their shape
                if all(kind(a) == kind(b) and close(a, b) for a, b in zip(mine, each.values, strict=True)):
                    return wrong("shape", each.cause, each.sentence, tried, f"rank {rank}: {kind(got)}", kind(wanted))
            cause, sentence = shape or ("wrong_shape", f"rank {rank}'s {called} has another shape or type than is due.")
            return wrong("shape", cause, sentence, tried, f"rank {rank}: {kind(got)}", kind(wanted))
    return None


def _one(name: str, mine: list, every: Sequence[Any], due: Due, tried: str) -> Verdict | None:
    off = [rank for rank, (got, wanted) in enumerate(zip(mine, every, strict=True)) if not close(got, wanted)]
    if not off:
        return None
    rank = off[0]
    word = name.replace("input ", "").split()[0].replace(".", "_")
    called = due.words.get(name, name)
    cause, sentence = f"wrong_{word}", f"rank {rank}'s {called} is wrong."
    for each in due.mistakes.get(name, ()):
        if all(close(got, value) for got, value in zip(mine, each.values, strict=True)):
            cause, sentence = each.cause, each.sentence
            break
    else:
        finite = all(each.isfinite().all() for each in mine)
        infinite = "not_finite", f"rank {rank}'s {called} has values that are not finite."
        vague = (cause, sentence) if finite else infinite
        cause, sentence = due.explain(name, mine) or vague
    got, wanted = apart(mine[rank], every[rank])
    return wrong("values", cause, sentence, tried, f"rank {rank}, {called}: {got}", wanted)


def changed(observed: Observed, tried: str) -> Verdict | None:
    """Whether a call wrote into what it was given."""
    for rank, result in enumerate(observed.results):
        for values_of_call in result["asks"]:
            if values_of_call["changed"]:
                what = values_of_call["changed"]
                sentence = f"{what} was written into on rank {rank}: others still need it, so work on a clone."
                return wrong("values", "changed_in_place", sentence, tried, what, "left as it was")
    return None


def hooked(observed: Observed, tried: str) -> Verdict | None:
    """Whether a call left a hook on what it was given: gradients of its other uses would pass through, too."""
    for rank, result in enumerate(observed.results):
        if any(values_of_call["hooked"] for values_of_call in result["asks"]):
            sentence = (
                "a hook is left on the given tensor itself: it also changes gradients that come to it from elsewhere, "
                "a residual or the next step (of a weight). Hook a new tensor: y = x.view_as(x)."
            )
            return wrong("values", "hooked_input", sentence, tried, f"rank {rank}: the input has a hook", "none")
    return None


def foreign(got: list, due: Sequence[Any], name: str, whole: dict[str, Any]) -> tuple[str, str]:
    """(cause, sentence) of weights that are no known cut: numbers of the serial module in other places, or own ones.

    due: those that the ranks should have. name: of whole, the module's tensors by name.
    """
    import torch

    def in_order(tensor: Any) -> Any:
        return tensor.flatten().sort().values

    def of(tensor: Any) -> bool:
        return all(bool(torch.isin(each, tensor).all()) for each in got)

    if of(whole[name]):
        if all(in_order(each).equal(in_order(one)) for each, one in zip(got, due, strict=True)):
            return "other_block", f"the rank's numbers of the serial {name} are there, in another order."
        return "other_block", f"these are numbers of the serial {name}, but not those that the rank is to have."
    for other, tensor in whole.items():
        if of(tensor):
            return "other_weight", f"{name} has numbers of the serial module's {other}: each is cut out of its own."
    factor = _factor(got, due)
    if factor is not None:
        return "scaled", f"these are the rank's numbers times {factor:.3g}: copy them as they are."
    if all(bool((each == each.flatten()[0]).all()) for each in got):
        return "constant", "all its numbers are the same: copy the rank's block of the serial one."
    if len(got) > 1 and all(close(each, got[0]) for each in got):
        return "same_seed", "every rank drew the same numbers of its own: copy the rank's block of the serial weight."
    return "own_init", "the weights are newly drawn: copy the rank's block of the serial weight."


def _factor(got: list, due: Sequence[Any]) -> float | None:
    """By which one number all of what ranks have is what is due, or None."""
    largest = due[0].abs().argmax()
    factor = float(got[0].flatten()[largest] / due[0].flatten()[largest])
    same = factor != 0.0 and all(close(mine, factor * theirs) for mine, theirs in zip(got, due, strict=True))
    return factor if same else None
