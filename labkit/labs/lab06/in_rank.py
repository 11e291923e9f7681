"""What runs in a rank for lab 06's checks: groups, the answer's calls, and marks in the record between its parts.

A mark is a `torch.profiler.record_function` in this file, known by its place. Left out: what is right (each exercise's
module), and what a record says (`seen`).
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.average_waits as waits
import labkit.labs.lab06.ready_made as ready_made
import labkit.labs.lab06.wholes as wholes
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.attempts import Unusable
from labkit.record.events import RankRecord


@dataclass(frozen=True)
class Plan:
    """What a class is made of on every rank.

    kind, sizes, seed: of the serial module (`wholes.build`). world: ranks in groups of t, one after another. sharing:
    how many ranks of a group, one after another, have the same KV head. shapes: of the parameters that a rank must
    have. options: keywords for the class.
    """

    kind: str
    sizes: tuple[tuple[str, Any], ...]
    seed: int
    world: int
    t: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sharing: int = 1
    options: tuple[tuple[str, Any], ...] = ()


def group_of(each: int) -> Any:
    """This rank's group of `each` ranks, one after another; the whole world's where that is all."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    if each == world:
        return dist.group.WORLD
    made = [dist.new_group(list(range(begin, begin + each))) for begin in range(0, world, each)]
    dist.barrier()  # making a group puts bytes on gloo's sockets, which without a collective would be hidden traffic
    return made[rank // each]


def mark() -> None:
    """Put a mark into the record: it is known by its place, this line of this file."""
    import torch

    with torch.profiler.record_function("labkit"):
        pass


def marks(record: RankRecord) -> list[int]:
    """Event indexes of the marks in a record; one that the learner's own code has set is none."""
    begins = mark.__code__.co_firstlineno
    lines = {f"{__file__}:{line}" for line in range(begins, begins + 6)}
    enters = "profiler._record_function_enter_new"
    return [event.index for event in record.ops if event.name == enters and event.place in lines]


def module_calls(cls: Callable, plan: Plan, asks: Sequence[tuple[tuple, Any]]) -> Any:
    """Make `cls(*serial modules, group, ...)`, then call it and run backward, once per ask: (inputs, output's
    gradient).

    Gives {"shapes": of its parameters, "weights": copies by name, "asks": [values by name], "early"}; only shapes where
    they are not the plan's. Marks: before anything, when the answer is made, then three per ask (before the call, after
    it, after backward). NotImplemented or an Unusable where there is nothing to judge.
    """
    import torch

    group, extra = group_of(plan.t), ()
    if plan.kind == "attention":
        extra = (group_of(plan.sharing) if plan.sharing > 1 else None,)
    found = _unfinished(cls, 2 + len(extra) + (plan.kind == "sequence"), plan)
    if found is not None:
        return found
    mark()
    whole = wholes.build(plan.kind, plan.sizes, plan.seed)
    with waits.noted() as early, ready_made.watched() as used:
        answer = cls(*whole, group, *extra, **dict(plan.options))
        spoilt = not _as_built(whole, plan)
        del whole
        gc.collect()
        mark()
        if spoilt:
            return _spoilt(cls)
        if not isinstance(answer, torch.nn.Module):
            return _no_module(cls, answer)
        named = dict(answer.named_parameters())
        shapes = {name: tuple(p.shape) for name, p in named.items()}
        if shapes != dict(plan.shapes):
            return {"shapes": shapes, "others": _others(answer, dict(plan.shapes), shapes)}
        weights = {name: p.detach().clone() for name, p in named.items()}
        seen = []
        for inputs, gradient in asks:
            values = one_call(getattr(cls, "__name__", "the answer"), answer, named, inputs, gradient)
            if attempts.no_result(values):
                return values
            seen.append(values)
        return used() or {"shapes": shapes, "weights": weights, "asks": seen, "early": early()}


def one_call(
    name: str, answer: Callable, named: dict[str, Any], inputs: tuple, gradient: Any, trained: int = 1
) -> Any:
    """One forward and backward: output, inputs' gradients ("input gradient"), parameters' ("gradient of NAME").

    trained: how many of the inputs need a gradient, the second's being "input gradient 1". A value that is not there is
    None. "changed" names what of the given tensors was written into, "hooked" tells whether one has hooks.
    """
    import torch

    given = tuple(x.clone().requires_grad_(x.is_floating_point() and at < trained) for at, x in enumerate(inputs))
    for p in named.values():
        p.grad = None
    mark()
    out = answer(*given)
    mark()
    if out is NotImplemented:
        return out
    if type(out) is not torch.Tensor:
        return Unusable("wrong_type", f"{name} returned {type(out).__name__}; a tensor is due.")
    values: dict[str, Any] = {"output": out.detach().clone(), "input gradient": None, "changed": "", "hooked": False}
    values |= {f"gradient of {each}": None for each in named}
    if out.shape != gradient.shape:
        return values
    if not out.requires_grad:
        return Unusable("no_graph", f"{name}'s output has no gradient function: backward cannot pass through it.")
    kept = gradient.contiguous().clone()
    out.backward(gradient)
    mark()
    values |= {f"gradient of {each}": None if p.grad is None else p.grad.detach().clone() for each, p in named.items()}
    for at, x in enumerate(given[:trained]):
        values["input gradient" + f" {at}" * (at > 0)] = None if x.grad is None else x.grad.detach().clone()
    if not torch.equal(gradient, kept):
        values["changed"] = "the gradient"
    values["hooked"] = any(x._backward_hooks or x._post_accumulate_grad_hooks for x in given)
    if any(not torch.equal(mine.detach(), theirs) for mine, theirs in zip(given, inputs, strict=True)):
        values["changed"] = "the input"
    return values


def function_calls(fn: Callable, names: str, t: int, asks: Sequence[tuple[tuple, Any]], trained: int = 1) -> Any:
    """`fn(*inputs, group)` and backward, once per ask. names: its arguments in words. Gives {"asks": ..., "early"}.

    trained: as `one_call`. A gradient may be a number: the output's, everywhere, as `sum().backward()` gives it
    (expanded).
    """
    import torch

    from labkit.check.stubs import is_stub

    if is_stub(fn):
        return NotImplemented
    group, seen = group_of(t), []

    def called(*inputs: Any) -> Any:
        return attempts.called(fn, names, *inputs, group)

    with waits.noted() as early, ready_made.watched() as used:
        for inputs, gradient in asks:
            if not isinstance(gradient, torch.Tensor):
                gradient = torch.tensor(float(gradient)).expand(inputs[0].shape)
            values = _function_call(fn, called, inputs, gradient, trained)
            if attempts.no_result(values):
                return values
            seen.append(values)
        found = used()
    return found or {"asks": seen, "early": early()}


def _function_call(fn: Callable, called: Callable, inputs: tuple, gradient: Any, trained: int) -> Any:
    found: list[Any] = []

    def answer(*given: Any) -> Any:
        out = called(*given)
        found.append(out)
        return out

    values = one_call(getattr(fn, "__name__", "the function"), answer, {}, inputs, gradient, trained)
    return found[0] if found and attempts.no_result(found[0]) else values


def _unfinished(cls: Any, count: int, plan: Plan) -> Any:
    if not isinstance(cls, type):
        sentence = f"this is {type(cls).__name__}, not a class: hand in the class, the check makes the object."
        return Unusable("not_a_class", sentence)
    found = attempts.still_open(cls)
    if found is not None:
        return found
    try:
        inspect.signature(cls).bind(*[None] * count, **dict(plan.options))
    except TypeError:
        sentence = f"the check makes {cls.__name__}({wholes.ARGUMENTS[plan.kind]}), and yours takes other arguments."
        return Unusable("wrong_signature", sentence)
    except ValueError:
        pass
    return None


def _spoilt(cls: Any) -> Unusable:
    sentence = f"{cls.__name__} changes the module that it is given: others still need it, so copy from it."
    return Unusable("changed_in_place", sentence)


def _as_built(whole: tuple, plan: Plan) -> bool:
    """Whether the serial modules still have the parameters that they were built with."""
    import torch

    for mine, again in zip(whole, wholes.build(plan.kind, plan.sizes, plan.seed), strict=True):
        now = dict(mine.named_parameters())
        for name, p in again.named_parameters():
            if name not in now or now[name].shape != p.shape or not torch.equal(now[name], p):
                return False
    return True


def _no_module(cls: Any, answer: Any) -> Any:
    if answer is NotImplemented:
        return answer
    return Unusable("not_a_module", f"{cls.__name__} makes no torch.nn.Module: derive the class from it.")


def _others(answer: Any, due: dict, shapes: dict) -> list[str]:
    """Names among the missing that the module has as something else than a Parameter."""
    import torch

    missing = [name for name in due if name not in shapes]
    found = []
    for name in missing:
        value: Any = answer
        for part in name.split("."):
            value = getattr(value, part, None)
        found += [name] if isinstance(value, torch.Tensor) else []
    return found
