"""Whether everything that was sent was waited for, also by other means than `Work.wait`, for the judge of 2.1.

A future of a communication, what `then` and `collect_all` make of it, and `is_completed()` or `done()` that said True
are waits as good. `noted`, in a rank, makes each of them a wait that the record has; `not_waited`, in the parent, asks
the records. Left out: a future that the answer makes and completes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit.check.observed import Observed
from labkit.record.events import Collective, Op, PointToPoint, RankRecord

# These take a tensor for its shape and dtype alone: no race with who writes into it.
_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")


class _Noted:
    """Works by the id of a future: those it stands for. early: used in a callback, which nobody has waited for yet."""

    def __init__(self):
        self.works: dict[int, list[Any]] = {}
        self.early: dict[int, Any] = {}
        self.kept: list[Any] = []  # else an id could come again
        self.calling = 0

    def learn(self, future: Any, works: list[Any]) -> Any:
        self.kept.append(future)
        self.works[id(future)] = works
        return future

    def of(self, future: Any) -> list[Any]:
        return self.works.get(id(future), [])

    def join(self, works: list[Any]) -> None:
        """They are done, so a wait for each returns at once, and the record has it."""
        if threading.current_thread() is threading.main_thread():  # in gloo's own, they are not done to the last
            for work in works:
                if not self.calling:
                    self.early.pop(id(work), None)
                work.wait()


@contextmanager
def noted() -> Iterator[Callable[[], int]]:
    """Waits by futures and by asking enter the record meanwhile. Gives a function: how many were used without one."""
    import torch
    import torch.distributed as dist

    from labkit.record.waits import Patches

    seen, patches, future_class = _Noted(), Patches(), torch._C.Future
    get_future, then, collect_all = dist.Work.get_future, future_class.then, torch._C._collect_all

    def get_noted(work):
        return seen.learn(get_future(work), [work])

    def then_noted(future, callback):
        works = seen.of(future)
        return seen.learn(then(future, _noted_callback(seen, works, callback)), works)

    def collect_noted(futures):
        futures = list(futures)
        return seen.learn(collect_all(futures), [work for future in futures for work in seen.of(future)])

    patches.put(dist.Work, "get_future", get_noted)
    patches.put(dist.Work, "is_completed", _joins(seen, dist.Work.is_completed, lambda work: [work]))
    patches.put(future_class, "then", then_noted)
    patches.put(torch._C, "_collect_all", collect_noted)
    for name in ("wait", "value", "done"):
        patches.put(future_class, name, _joins(seen, getattr(future_class, name), seen.of))
    try:
        yield lambda: len(seen.early)
    finally:
        patches.undo()


def _noted_callback(seen: _Noted, works: list[Any], callback: Callable) -> Callable:
    def called(done):
        if threading.current_thread() is not threading.main_thread():
            return callback(done)
        seen.join(works)  # it was done already, so this runs within then(), and the record sees it
        seen.early.update((id(work), work) for work in works)
        seen.calling += 1
        try:
            return callback(done)
        finally:
            seen.calling -= 1

    return called


def _joins(seen: _Noted, original: Callable, works_of: Callable) -> Callable:
    def joining(self):
        out = original(self)
        if out is not False:
            seen.join(works_of(self))
        return out

    return joining


def not_waited(observed: Observed) -> tuple[int, str, bool] | None:
    """(rank, op, whether it was used) of the first communication that nothing waited for before it was used, or at all.

    None where there is none.
    """
    for rank, record in enumerate(observed.records):
        for event in record.communications if record is not None else ():
            raced = _raced(record, event)
            if raced is not None and event.op != "barrier":
                return rank, event.op, raced
        out = observed.results[rank]
        if type(out) is dict and out.get("early"):
            return rank, "all_reduce", True
    return None


def _raced(record: RankRecord, event: Collective | PointToPoint) -> bool | None:
    """Whether the event was used without a wait (True), or never waited for (False); None where all is well."""
    waits = [wait for wait in record.waits if wait.of == event.index]
    if not waits:
        return False
    if any(wait.how != "touched" for wait in waits):
        return None
    user = next((each for each in record.events[waits[0].index + 1 :] if isinstance(each, Op | Collective)), None)
    harmless = isinstance(user, Op) and user.name.split(".")[1] in _SHAPE_ONLY
    return None if harmless else True
