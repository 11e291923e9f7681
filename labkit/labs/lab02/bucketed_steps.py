"""Training steps on a rank for exercise 2.2, and the record of each step cut out of a rank's whole record.

A step is what a training loop does between two optimizer steps: forward, backward, `finish()`. Its parts are marked in
the record by `torch.profiler.record_function`. Left out: what is right (`bucketed`), and the models (`models`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import labkit.labs.lab02.bucketed_futures as futures
import labkit.labs.lab02.models as models
from labkit.check import ready
from labkit.labs.lab00.attempts import Unusable, still_open
from labkit.record.events import Op, RankRecord, Wait

_ENTERS = "profiler._record_function_enter_new"


@dataclass(frozen=True)
class Step:
    """One step of one rank: its events alone, numbered from 0, and at which of them each further part begins."""

    record: RankRecord
    backward: int
    finish: int
    optimizer: int


def train(cls: Callable, plan: models.Plan, seed: int, batches: Sequence[tuple], bucket_bytes: int) -> Any:
    """Runs in a rank: train `cls(module, bucket_bytes)`, one step per batch; what was seen, as plain containers.

    seed: what this rank's own module is drawn from. batches: (inputs, targets), inputs a tuple of tensors.
    Gives start and end (name: tensor of parameters and buffers), losses, and per step the gradients (name: tensor or
    None); NotImplemented or an Unusable where there is nothing to judge.
    """
    import torch

    found = _unfinished(cls)
    if found is not None:
        return found
    module = models.build(plan, seed)
    wrapped = cls(module, bucket_bytes)
    found = wrapped if wrapped is NotImplemented else _unusable(cls, wrapped) or _ready_made(module)
    if found is not None:
        return found
    start = models.state(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=plan.lr)
    losses, grads = [], []
    with futures.watched():
        for inputs, targets in batches:
            optimizer.zero_grad()
            out = _one_step(cls, wrapped, inputs, targets)
            if type(out) is not float:
                return out
            losses.append(out)
            grads.append({name: _copy(p.grad) for name, p in module.named_parameters()})
            optimizer.step()
            _mark()
    state = (start, models.state(module)) if plan.returns_state else ({}, {})
    seen = {"start": state[0], "end": state[1], "losses": losses, "grads": grads}
    return _ready_made(module) or seen


def _ready_made(module: Any) -> Unusable | None:
    name = ready.ready_made(module)
    sentence = f"{name} does the work here; write the buckets and hooks yourself."
    return Unusable("ready_made", sentence) if name else None


def _one_step(cls: Callable, wrapped: Any, inputs: tuple, targets: Any) -> Any:
    """The loss of one step, whose gradients are then in place; or what cannot be judged."""
    import torch

    name = getattr(cls, "__name__", "the answer")
    _mark()
    out = wrapped(*inputs)
    if not isinstance(out, torch.Tensor):
        sentence = f"{name}'s forward must return what the module returns, a tensor here."
        return Unusable("half_attempted" if out is NotImplemented else "forward_result", sentence)
    loss = models.loss_of(out, targets)
    _mark()
    loss.backward()
    _mark()
    out = wrapped.finish()
    _mark()
    if out is NotImplemented:
        return Unusable("half_attempted", f"{name}.finish is still a stub: it returns NotImplemented.")
    return float(loss.detach())


def _mark() -> None:
    """Put a mark into the record: it is known by its place, this line of this file."""
    import torch

    with torch.profiler.record_function("labkit"):
        pass


def _unfinished(cls: Callable) -> Any:
    """NotImplemented for an untouched stub, an Unusable for a class with some methods still to be written."""
    import torch

    if isinstance(cls, torch.nn.Module):
        sentence = f"this is an object of class {type(cls).__name__}: hand in the class, the check makes the object."
        return Unusable("not_a_class", sentence)
    found = still_open(cls)
    if found is not None:
        return found
    try:
        inspect.signature(cls).bind(None, 1)
    except TypeError:
        sentence = f"the check makes {cls.__name__}(module, bucket_bytes), and yours takes other arguments."
        return Unusable("wrong_signature", sentence)
    except ValueError:
        pass
    return None


def _unusable(cls: Callable, wrapped: Any) -> Unusable | None:
    name = getattr(cls, "__name__", "the answer")
    if not callable(wrapped):
        sentence = f"{name}(module, bucket_bytes) cannot be called on inputs: derive the class from torch.nn.Module."
        return Unusable("not_a_module", sentence)
    if not callable(getattr(wrapped, "finish", None)):
        sentence = f"{name} has no finish(): it is called after backward, and before the optimizer's step."
        return Unusable("no_finish", sentence)
    try:
        inspect.signature(wrapped.finish).bind()
    except TypeError:
        mine = ", ".join(inspect.signature(wrapped.finish).parameters)
        return Unusable("wrong_signature", f"the check calls finish() without arguments, and yours is finish({mine}).")
    except ValueError:
        pass
    return None


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()


def steps_of(record: RankRecord) -> list[Step]:
    """The steps of a record, in order. A mark that the learner's own code has set is none."""
    begins = _mark.__code__.co_firstlineno
    lines = {f"{__file__}:{line}" for line in range(begins, begins + 6)}
    marks = [event.index for event in record.ops if event.name == _ENTERS and event.place in lines]
    return [_cut(record, *marks[i : i + 5]) for i in range(0, len(marks) - 4, 5)]


def _cut(record: RankRecord, first: int, backward: int, finish: int, optimizer: int, last: int) -> Step:
    """Events first ... last-1 as a record of their own. Waits for what was issued before are left out."""
    kept: list[Any] = []
    numbers: dict[int, int] = {}
    for event in record.events[first:last]:
        if isinstance(event, Wait):
            if event.of not in numbers:
                continue
            event = replace(event, of=numbers[event.of])
        numbers[event.index] = len(kept)
        kept.append(replace(event, index=len(kept)))
    cut = replace(record, events=tuple(kept), begin=(), deltas=(), kinds=())
    return Step(cut, numbers[backward], numbers[finish], numbers[optimizer])


def _is_ours(place: str) -> bool:
    """Whether an op was called by this file, and not by the learner's code within."""
    return place.rpartition(":")[0] == __file__


def backward_alone(step: Step) -> RankRecord:
    """The step's record, in which what the learner's code computes from backward on takes no time and has no FLOPs.

    So communication can hide behind backward's own work only, which autograd runs within the call in this file.
    """
    events = tuple(
        replace(event, flops=0, read_bytes=0, written_bytes=0)
        if isinstance(event, Op) and event.index > step.backward and not _is_ours(event.place)
        else event
        for event in step.record.events
    )
    return replace(step.record, events=events)


class Alone:
    """The module by itself, with the face of exercise 2.2: one rank's step without communication."""

    def __init__(self, module: Any, bucket_bytes: int):
        self.module = module

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def finish(self) -> None:
        """There is nobody to wait for."""
