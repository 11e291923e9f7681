"""Futures of communications, for exercise 2.2: who waits by one, or asks one and finds it done, has waited.

A record knows Work.wait() and no futures, so each such moment calls wait() of the Works behind the future, which
returns at once. What a callback touches is no use of a result that may be half done, for it runs when the result is
there: it goes unrecorded on the rank's own thread, as it does on gloo's. Left out: futures that C++ waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watched() -> Iterator[None]:
    """Meanwhile waits by futures are in the record, as waits for what they stand for."""
    import torch
    import torch.distributed as dist

    from labkit.record.waits import Patches

    futures, patches = _Futures(), Patches()
    work, future = dist.Work, torch._C.Future
    patches.put(work, "get_future", futures.of_work(work.get_future))
    patches.put(work, "is_completed", futures.asked(work.is_completed, lambda each: [each]))
    patches.put(torch._C, "_collect_all", futures.collected(torch._C._collect_all))
    for name in ("then", "add_done_callback"):
        patches.put(future, name, futures.followed(getattr(future, name)))
    for name in ("wait", "value"):
        patches.put(future, name, futures.waited(getattr(future, name)))
    patches.put(future, "done", futures.asked(future.done, futures.works))
    try:
        yield
    finally:
        patches.undo()


class _Futures:
    """Which Works stand behind a future. known: id -> (the future, kept alive so that its id stays its own, Works)."""

    def __init__(self):
        self.known: dict[int, tuple[Any, list]] = {}
        self.thread = threading.get_ident()
        self.inside = 0  # callbacks that run on this thread

    def works(self, future: Any) -> list:
        return self.known.get(id(future), (None, []))[1]

    def note(self, future: Any, works: list) -> Any:
        if future is not None and works:
            self.known[id(future)] = future, works
        return future

    def enter(self, works: list) -> None:
        """The result is there. In gloo's own thread, or within a callback, nobody waits."""
        if threading.get_ident() == self.thread and not self.inside:
            for work in works:
                work.wait()

    def of_work(self, original: Callable) -> Callable:
        return lambda work: self.note(original(work), [work])

    def collected(self, original: Callable) -> Callable:
        def collect_all(futures):
            return self.note(original(futures), [work for each in futures for work in self.works(each)])

        return collect_all

    def followed(self, original: Callable) -> Callable:
        def follow(future, callback):
            return self.note(original(future, self.unrecorded(callback)), self.works(future))

        return follow

    def waited(self, original: Callable) -> Callable:
        def wait(future):
            out = original(future)
            self.enter(self.works(future))
            return out

        return wait

    def asked(self, original: Callable, works: Callable) -> Callable:
        def ask(each):
            done = original(each)
            if done:
                self.enter(works(each))
            return done

        return ask

    def unrecorded(self, callback: Callable) -> Callable:
        from labkit.record import waits

        def called(future):
            if threading.get_ident() != self.thread:
                return callback(future)
            self.inside += 1
            try:
                with waits.unrecorded():
                    return callback(future)
            finally:
                self.inside -= 1

        return called
