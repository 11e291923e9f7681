"""Notes every collective and message of this rank in its ledger, whoever issues it. Runs inside ranks.

A kernel for each c10d operator at the dispatch key BackendSelect, which every call passes on its way to the
backend: those of torch.distributed, of DDP's C++ reducer, FSDP2, DTensor and the functional collectives, also in
inference_mode and below autograd; a TorchDispatchMode sees the operator before it gets there. The ProcessGroup
methods are wrapped to learn which Work belongs to which entry, Work.wait to mark waiting and done.

Limits: a wait inside C++ (DDP's reducer) is not seen. With NCCL a wait returns once the GPU is told, so "done"
means enqueued. A process group written in Python that overrides all_reduce itself passes no dispatcher.
"""

import functools
import os
import signal
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from labkit.ranks import calls, sites
from labkit.ranks.book import Book

_METHODS = (
    "broadcast allreduce allreduce_coalesced reduce allgather all_gather_single _allgather_base allgather_coalesced "
    "all_gather_single_coalesced allgather_into_tensor_coalesced gather scatter reduce_scatter "
    "reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
    "all_to_all_single alltoall_base alltoall send recv recv_anysource barrier _end_coalescing"
).split()
_FUNCTIONAL = (
    "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ reduce_scatter_tensor "
    "reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"
).split()
_MOST_STORAGES = 4096
_LABKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass
class _Hold:
    """What the wrappers share. `here` is per thread: indices noted since the ProcessGroup method began, its
    reduce operation, indices of a coalesced block."""

    book: Book
    here: Any = field(default_factory=threading.local)
    works: Any = field(default_factory=weakref.WeakKeyDictionary)  # Work or Future -> indices of its entries
    storages: dict[int, int] = field(default_factory=dict)  # storage -> index, of calls whose Work stays in C++
    any_source: dict[int, tuple[int, ...]] = field(default_factory=dict)  # index -> ranks of the group
    libraries: list = field(default_factory=list)  # torch drops the kernels with the Library objects


def install(book: Book) -> object:
    """Start noting; once per process, before the process group is made. Lasts as long as the process (the
    wrappers keep what they need alive); the returned handle is only for tests."""
    import torch
    import torch.distributed as dist

    hold = _Hold(book)
    hold.libraries = [_hook_operators(hold, torch), _hook_functional(hold, torch)]
    for name in _METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _noting_method(hold, getattr(dist.ProcessGroup, name)))
    _wrap_coalescing(hold, dist)
    for name in ("wait", "synchronize"):
        setattr(dist.Work, name, _waiting(hold, getattr(dist.Work, name)))
    torch._C.Future.wait = _waiting(hold, torch._C.Future.wait)
    _wrap_polling(hold, dist.Work)
    _wrap_sleep(book)
    _wrap_endings(book)
    return hold


def _hook_operators(hold: _Hold, torch):
    library = torch.library.Library("c10d", "IMPL")
    for name in calls.FORMS:
        if hasattr(torch.ops.c10d, name):
            operator = getattr(torch.ops.c10d, name).default
            library.impl(name, _noting_operator(hold, name, operator, torch), "BackendSelect", with_keyset=True)
    return library


def _noting_operator(hold: _Hold, name: str, operator, torch):
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    blocks = name == "monitored_barrier_"  # it returns no Work: the call is the wait

    def issue(keyset, *args, **kwargs):
        if not hold.book.is_mine:
            return operator.redispatch(keyset & below, *args, **kwargs)
        index = _note(hold, name, args, torch)
        if blocks:
            hold.book.mark(index, "waiting", True)
        try:
            result = operator.redispatch(keyset & below, *args, **kwargs)
        except BaseException:
            hold.book.mark(index, "failed") if blocks else hold.book.refuse(index)
            raise
        if blocks:
            hold.book.mark(index, "done")
        return result

    return issue


def _note(hold: _Hold, name: str, args: tuple, torch) -> int:
    import torch.distributed as dist

    boxed = next(a for a in args if isinstance(a, torch.ScriptObject))  # the group precedes a reduce operation
    group = dist.ProcessGroup.unbox(boxed)
    call = calls.parse(name, args)
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group)
    ranks = tuple(ranks) if ranks else tuple(range(group.size()))
    site = sites.locate(call.tensor)
    index = hold.book.note(
        call.op, group.group_name, ranks, shape=call.shape, dtype=call.dtype, num_bytes=call.num_bytes,
        root=_global_rank(ranks, call.root), tag=call.tag, uneven=call.uneven,
        reduce_op=_reduction(hold) if "reduce" in call.op else "", any_source=call.any_source,
        place=site.place, path=site.path, tensor=site.tensor,
    )  # fmt: skip
    if call.any_source:
        hold.any_source[index] = ranks
    _remember(hold, index, args)
    return index


def _global_rank(ranks: tuple[int, ...], root: int | None) -> int | None:
    """A root or peer as a global rank. Raises ValueError for one that does not exist: gloo would wait for it."""
    if root is None or 0 <= root < len(ranks):
        return None if root is None else ranks[root]
    raise ValueError(f"rank {root} does not exist: the ranks of this group are 0 to {len(ranks) - 1}")


def _reduction(hold: _Hold) -> str:
    """That of the method or functional operator around; torch's own C++ (DDP's reducer) sums and says nothing."""
    return getattr(hold.here, "reduce_op", "") or ("sum" if getattr(hold.here, "noted", None) is None else "")


def _remember(hold: _Hold, index: int, args: tuple) -> None:
    """For the Work to come: with the method that runs, or (called from C++) by the storages of the tensors."""
    noted = getattr(hold.here, "noted", None)
    if noted is not None:
        noted.append(index)
        return
    if len(hold.storages) > _MOST_STORAGES:
        hold.storages.clear()
    for argument in args:
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if hasattr(tensor, "untyped_storage"):
                hold.storages[_address(tensor)] = index


def _address(tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse: without a storage, and the components become others meanwhile
        return id(tensor)


def _hook_functional(hold: _Hold, torch):
    """The functional operators issue c10d operators in C++: here only their reduce operation and their wait."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def reducing(operator):
        def issue(keyset, tensors, reduce_op, *args, **kwargs):
            hold.here.reduce_op = reduce_op.lower()
            try:
                return operator.redispatch(keyset & below, tensors, reduce_op, *args, **kwargs)
            finally:
                hold.here.reduce_op = ""

        return issue

    for name in _FUNCTIONAL:
        if hasattr(torch.ops._c10d_functional, name):
            operator = getattr(torch.ops._c10d_functional, name).default
            library.impl(name, reducing(operator), "BackendSelect", with_keyset=True)
    wait = torch.ops._c10d_functional.wait_tensor.default

    def wait_tensor(keyset, tensor):
        index = hold.storages.pop(_address(tensor), None)
        with _Waiting(hold, () if index is None else (index,), blocking=False):
            return wait.redispatch(keyset & below, tensor)

    library.impl("wait_tensor", wait_tensor, "BackendSelect", with_keyset=True)
    return library


def _noting_method(hold: _Hold, original):
    @functools.wraps(original)
    def method(group, *args, **kwargs):
        here = hold.here
        before, before_op = getattr(here, "noted", None), getattr(here, "reduce_op", "")
        here.noted, here.reduce_op = [], _reduce_op(args, kwargs)
        try:
            work = original(group, *args, **kwargs)
        finally:
            noted, here.noted, here.reduce_op = here.noted, before, before_op
        block = getattr(here, "block", None)
        if block is not None:
            block.extend(noted)
            noted = block
        if work is not None and noted:
            hold.works[work] = noted
        return work

    return method


def _reduce_op(args: tuple, kwargs: dict) -> str:
    for value in (*args, *kwargs.values()):
        operation = getattr(value, "reduceOp", value)
        operation = getattr(operation, "op", operation)
        if type(operation).__name__ == "RedOpType":
            return operation.name.lower()
    return ""


def _wrap_coalescing(hold: _Hold, dist) -> None:
    """Between start and end (NCCL's batched messages) the entries share the Work that the end returns."""
    start, end = dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing

    def started(group, *args, **kwargs):
        hold.here.block = []
        return start(group, *args, **kwargs)

    def ended(group, *args, **kwargs):
        try:
            return end(group, *args, **kwargs)
        finally:
            hold.here.block = None

    dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing = started, ended


class _Waiting:
    """Marks entries waiting, then done or failed. Only for the main thread and torch's own threads: a thread that
    the reader started to listen does not hold up its rank."""

    def __init__(self, hold: _Hold, indices, blocking: bool):
        self.hold, self.indices, self.blocking = hold, indices, blocking

    def __enter__(self):
        thread = threading.current_thread()
        if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
            for index in self.indices:
                self.hold.book.mark(index, "waiting", self.blocking)

    def __exit__(self, kind, error, trace):
        for index in self.indices:
            self.hold.book.mark(index, "done" if kind is None else "failed")


def _waiting(hold: _Hold, original):
    @functools.wraps(original)
    def wait(work, *args, **kwargs):
        indices = tuple(hold.works.get(work, ()))
        if not indices:
            return original(work, *args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_LABKIT):  # a Trace wraps it, too
            frame = frame.f_back
        caller = frame.f_code  # a blocking collective, unless it is the wait of a coalescing manager
        at_once = caller.co_filename.endswith("distributed_c10d.py") and caller.co_name != "wait"
        with _Waiting(hold, indices, at_once):
            result = original(work, *args, **kwargs)
        _finish(hold, work, indices)
        return result

    return wait


def _finish(hold: _Hold, work, indices: tuple[int, ...]) -> None:
    """A recv from any source now knows its source."""
    for index in indices:
        ranks = hold.any_source.pop(index, None)
        source = -1 if ranks is None or not hasattr(work, "_source_rank") else work._source_rank()
        if source >= 0:
            hold.book.resolve(index, ranks[source])


def _wrap_polling(hold: _Hold, work_class) -> None:
    is_completed, get_future = work_class.is_completed, work_class.get_future

    def polled(work):
        completed = is_completed(work)
        indices = tuple(hold.works.get(work, ())) if completed else ()
        for index in indices:
            hold.book.mark(index, "done")
        _finish(hold, work, indices)
        return completed

    def future_of(work):
        future = get_future(work)
        if work in hold.works:
            hold.works[future] = hold.works[work]
        return future

    work_class.is_completed, work_class.get_future = polled, future_of


def _wrap_sleep(book: Book) -> None:
    sleep = time.sleep

    def noted_sleep(seconds, /):
        if threading.current_thread() is not threading.main_thread() or not book.is_mine:
            return sleep(seconds)
        book.sleep_until(time.monotonic() + float(seconds))
        try:
            return sleep(seconds)
        finally:
            book.sleep_until(0.0)

    time.sleep = functools.wraps(sleep)(noted_sleep)


def _wrap_endings(book: Book) -> None:
    """What ends this process without a trace says so first, and takes it back if it did not end it."""

    def saying(original, words):
        @functools.wraps(original)
        def ending(*args):
            said = words(*args) if book.is_mine else ""
            if said:
                book.say_last(said, sites.locate().place)
            try:
                return original(*args)
            finally:
                if said:
                    book.say_last("")

        return ending

    def to_itself(name, own_id):
        def words(target, number):
            return f"os.{name}({_signal_name(number)})" if target in own_id() and number else ""

        return words

    os._exit = saying(os._exit, lambda status: f"os._exit({status})")
    os.abort = saying(os.abort, lambda: "os.abort()")
    os.kill = saying(os.kill, to_itself("kill", lambda: (os.getpid(), 0, -1)))
    os.killpg = saying(os.killpg, to_itself("killpg", lambda: (os.getpgrp(), 0)))
    signal.raise_signal = saying(signal.raise_signal, lambda number: f"signal.raise_signal({_signal_name(number)})")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
