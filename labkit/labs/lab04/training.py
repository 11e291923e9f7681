"""Training steps on a rank for exercises 4.1 to 4.3, with marks in the record between their parts.

A mark is a `torch.profiler.record_function` in this file: `cuts` finds them again. Beside the record a rank says what
this file itself keeps (copies of parameters), and how many bytes Python's own objects take, where no tensor shows them.
Left out: what is right (`serial`), and the models (`models`).
"""

from __future__ import annotations

import gc
import inspect
import linecache
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import labkit.labs.lab02.average_waits as waits
import labkit.labs.lab04.models as models
from labkit.check import ready
from labkit.labs.lab00.attempts import Unusable, still_open
from labkit.record import threads
from labkit.record.events import RankRecord

_ENTERS = "profiler._record_function_enter_new"
_NAMES = "lr, betas, eps, weight_decay"
COUNTED = 20_000  # parameters of a model from which on Python's objects are counted, which takes time
SETTLE_S, SETTLES = 0.005, 200  # how long, and how often at most, gloo's threads are waited for


@dataclass(frozen=True)
class Cut:
    """Where in a rank's record one training step has its parts, as event indexes.

    backwards: (begin, end) of each backward. step: begin and end of the call of step(). cleared: after zero_grad().
    """

    begin: int
    backwards: tuple[tuple[int, int], ...]
    step: tuple[int, int]
    cleared: int


def train(cls: Callable, plan: models.Plan, hyper: dict, seed: int, batches: Sequence, whole: bool = False) -> Any:
    """Runs in a rank: train by `cls`, one optimizer step per item of `batches`; what was seen, as plain containers.

    whole: cls wraps the module (4.3), else it takes its parameters. Gives losses and after (by step and microbatch;
    after: bytes in `.grad` then), params (by step, name -> tensor), and at the end of each step kept (bytes of this
    function's own), grads (bytes in `.grad`) and left (names of gradients that are not zero); and once early (of
    `average_waits.noted`), python (bytes of Python's objects; 0 for a small model) and traced (False where the answer
    stopped that). NotImplemented or an Unusable where there is nothing to judge.
    """
    found = _unfinished(cls, "module" if whole else "parameters", hyper, whole)
    if found is not None:
        return found
    module = models.build(plan, seed)
    shapes = {name: p.shape for name, p in module.named_parameters()}  # an answer may free parameters by emptying them
    seen: dict[str, list] = {name: [] for name in ("losses", "after", "params", "kept", "grads", "left")}
    gc.collect()
    counted = sum(p.numel() for p in module.parameters()) >= COUNTED
    if counted:
        tracemalloc.start()
    try:
        _mark()
        answer = cls(module if whole else module.parameters(), **hyper)
        found = _unusable(cls, answer, whole)
        if found is not None:
            return found
        with waits.noted() as early:
            for step in batches:
                found = _one_step(cls, answer, module, shapes, step, seen, whole)
                if found is not None:
                    return found
            used_early = early()
        traced, python = not counted or tracemalloc.is_tracing(), _python_bytes()
    finally:
        tracemalloc.stop()
    return _ready_made(module) or {**seen, "early": used_early, "traced": traced, "python": python}


def _one_step(
    cls: Callable, answer: Any, module: Any, shapes: dict, step: Sequence, seen: dict, whole: bool
) -> Unusable | None:
    """Backwards, step() and zero_grad(), with what is to be told of them."""
    import torch

    name = getattr(cls, "__name__", "the answer")
    losses, after = [], []
    _settled_mark()
    for inputs, targets in step:
        out = (answer if whole else module)(*inputs)
        if not isinstance(out, torch.Tensor):
            sentence = f"{name}'s forward must return what the module returns, a tensor here."
            return Unusable("half_attempted" if out is NotImplemented else "forward_result", sentence)
        loss = models.loss_of(out, targets)
        losses.append(float(loss.detach()))
        del out
        _settled_mark()
        loss.backward()
        del loss
        _settled_mark()
        after.append(sum(p.grad.nbytes for p in module.parameters() if p.grad is not None))
    for method in ("step", "zero_grad"):
        _mark()
        if getattr(answer, method)() is NotImplemented:
            return Unusable("half_attempted", f"{name}.{method} is still a stub: it returns NotImplemented.")
    gc.collect()
    seen["losses"].append(losses)
    seen["after"].append(after)
    seen["kept"].append(sum(each.nbytes for params in seen["params"] for each in params.values()))
    grads = {each: p.grad for each, p in module.named_parameters() if p.grad is not None}
    seen["grads"].append(sum(grad.nbytes for grad in grads.values()))
    _settled_mark()
    seen["left"].append([each for each, grad in grads.items() if grad.any()])
    del grads
    seen["params"].append(_parameters(answer if whole else module, shapes, step[0][0]))
    return None


def _parameters(whole: Callable, shapes: dict[str, Any], inputs: tuple) -> dict[str, Any]:
    """Copies of the module's parameters by name, as its forward has them. inputs: any that it is called on."""
    import torch

    with torch.no_grad():
        flat = whole(torch.empty(0, dtype=inputs[0].dtype), *inputs[1:])
    parts = flat.detach().split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape).clone() for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _python_bytes() -> int:
    """Bytes of Python's objects made since tracing began, but for labkit's, torch's and source that warnings show."""
    import torch

    if not tracemalloc.is_tracing():
        return 0
    labkit = str(Path(__file__).parents[2])
    ours = (labkit, str(Path(torch.__file__).parent), "<frozen", tracemalloc.__file__, linecache.__file__)
    total = 0
    for trace in tracemalloc.take_snapshot().traces:
        name = trace.traceback[0].filename
        # A call that goes through the watch is the learner's.
        if not name.startswith(ours) or name.endswith("labkit/record/watching.py"):
            total += trace.size
    return total


def _settled_mark() -> None:
    """A mark, once gloo's own threads have let go of the tensors of what is done: they do so a moment after it is."""
    quiet = 0
    for _ in range(SETTLES):
        time.sleep(SETTLE_S)
        quiet = quiet + 1 if threads.others_sleep() else 0
        if quiet == 2:
            break
    _mark()


def _mark() -> None:
    """Put a mark into the record: it is known by its place, this line of this file."""
    import torch

    with torch.profiler.record_function("labkit"):
        pass


def cuts(record: RankRecord, micro: Sequence[int]) -> tuple[int, tuple[Cut, ...]]:
    """(event index before the answer was made, steps) of a record; fewer steps where a mark is missing.

    micro: backwards of each step. A mark that the learner's own code has set is none.
    """
    begins = _mark.__code__.co_firstlineno
    lines = {f"{__file__}:{line}" for line in range(begins, begins + 6)}
    marks = [event.index for event in record.ops if event.name == _ENTERS and event.place in lines]
    made, marks = (marks[0], marks[1:]) if marks else (0, [])
    steps = []
    for count in micro:
        if len(marks) < 2 * count + 4:
            break
        begin, *inner = marks[: 2 * count + 1]
        step, clear, cleared = marks[2 * count + 1 : 2 * count + 4]
        steps.append(Cut(begin, tuple(zip(inner[::2], inner[1::2], strict=True)), (step, clear), cleared))
        marks = marks[2 * count + 4 :]
    return made, tuple(steps)


def held_at(record: RankRecord, index: int) -> int:
    """Bytes held just before event number `index`."""
    return record.begin_bytes + sum(delta.num_bytes for delta in record.deltas if delta.index <= index)


def peak_in(record: RankRecord, begin: int, end: int) -> int:
    """Most bytes held at a time between two events."""
    held = peak = held_at(record, begin)
    for delta in record.deltas:
        if begin < delta.index <= end:
            held += delta.num_bytes
            peak = max(peak, held)
    return peak


def _ready_made(module: Any) -> Unusable | None:
    """Asked last: it unfreezes what the fork server had frozen, and then every gc.collect() copies its pages."""
    name = ready.ready_made(module)
    sentence = f"{name} does the work here; write it yourself, from collectives and AdamW."
    return Unusable("ready_made", sentence) if name else None


def _unfinished(cls: Callable, first: str, hyper: dict, whole: bool) -> Any:
    """NotImplemented for an untouched stub, an Unusable for a class with some methods still to be written."""
    if not callable(cls) or (not isinstance(cls, type) and hasattr(cls, "step")):
        sentence = f"this is an object of class {type(cls).__name__}: hand in the class, the check makes the object."
        return Unusable("not_a_class", sentence)
    found = still_open(cls)
    if found is not None:
        return found
    try:
        inspect.signature(cls).bind(None, **hyper)
    except TypeError:
        sentence = f"the check makes {getattr(cls, '__name__', 'it')}({first}, {_NAMES}), and yours takes other names."
        return Unusable("wrong_signature", sentence)
    except ValueError:
        pass
    return None


def _unusable(cls: Callable, answer: Any, whole: bool) -> Any:
    name = getattr(cls, "__name__", "the answer")
    if answer is NotImplemented:
        return NotImplemented
    if whole and not callable(answer):
        sentence = f"{name}(module) cannot be called on inputs: derive the class from torch.nn.Module."
        return Unusable("not_a_module", sentence)
    for method in ("step", "zero_grad"):
        if not callable(getattr(answer, method, None)):
            return Unusable(f"no_{method}", f"{name} has no {method}(): the training loop calls it.")
        try:
            inspect.signature(getattr(answer, method)).bind()
        except TypeError:
            return Unusable("wrong_signature", f"the check calls {method}() without arguments, and yours needs some.")
        except ValueError:
            pass
    return None
