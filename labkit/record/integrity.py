"""In-process evidence that a traced function worked in the open: `watched` runs it and says what was odd.

Seen here: the dispatch mode left or switched off, collectives that the trace did not see but the group counted,
threads, the rendezvous store, files, sockets, processes, shared memory, numpy and raw pointers, reading of
callers' frames, and entries of torch or labkit that were replaced. Only what the learner's own code does counts;
what torch, DeepSpeed or an import does is nobody's cheat. A finding cannot be taken back (it goes to the parent at
once), but it can be forestalled: a determined author can undo anything in his own process before he is seen, with
memory rewritten by native code for one. What grades rest on is the parent's evidence (socket bytes, values, ledgers)
and a sandbox. Left out: native code that makes its own system calls, and torch.profiler, which costs
more than the trace.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labkit.ranks.rank import REPORT_FD
from labkit.record.entries import remember
from labkit.record.events import RankRecord
from labkit.record.trace import Trace
from labkit.record.watching import Findings, watching_audit, watching_calls, witness

CODES = (
    "modes_disabled", "collective_unseen", "thread_started", "store_used", "file_used", "socket_used",
    "process_started", "shared_memory_used", "native_code_used", "numpy_used", "frame_read", "patched",
    "own_group", "backend_called", "ready_made",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One odd thing: a code of CODES, a sentence, and the place "filename:line" it was done at, "" if unknown."""

    code: str
    sentence: str
    place: str = ""


@dataclass(frozen=True)
class Integrity:
    """What `watched` found odd; nothing for honest code.

    mode_was_on: the recorder was still the innermost dispatch mode at the end.
    threads_before, threads_after: threads of this process, C++ ones included where /proc tells.
    counted: per group name, collectives and messages by the group's own counter, and by the record.
    shared: positions in the returned tuple (0 where no tuple is returned) of tensors in the storage of an argument.
    """

    findings: tuple[Finding, ...]
    mode_was_on: bool
    threads_before: int
    threads_after: int
    counted: tuple[tuple[str, int, int], ...]
    shared: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.findings

    def has(self, code: str) -> bool:
        return any(finding.code == code for finding in self.findings)


def watched(fn: Callable, *args: Any) -> tuple[Any, RankRecord, Integrity]:
    """Run `fn(*args)` under a Trace and under watch: (its value, the record, what was odd).

    For a rank or serially. What fn raises passes through. Not re-entrant.
    """
    return _watch(lambda: (fn, *args))


def watched_bytes(payload: bytes) -> tuple[Any, RankRecord, Integrity]:
    """The same for a pickled (fn, *args), for a pickle runs code too: it is opened under watch, before the Trace."""
    return _watch(lambda: pickle.loads(payload))


def _watch(give: Callable[[], tuple]) -> tuple[Any, RankRecord, Integrity]:
    pipe = os.environ.get(REPORT_FD)
    findings = Findings(None if pipe is None else int(pipe))
    changed = remember()
    python_threads = set(threading.enumerate())
    threads, counters = _num_threads(), _counters()
    # What is patched meanwhile is told, and not used.
    trace, read, shared, tell = Trace(), Trace.record.fget, _shared, witness
    add, listed, look_around, is_learners = findings.add, findings.listed, _look_around, findings.is_learners_thread
    with ExitStack() as stack:
        stack.enter_context(watching_audit(findings))
        with watching_calls(findings):
            fn, *args = give()
        with trace:
            with watching_calls(findings):  # within the trace, so that no mode of ours lies over the recorder
                value = fn(*args)
            mode_on = trace.is_innermost()
            whole = trace.wrappers_in_place()
    started = set(threading.enumerate()) - python_threads
    look_around(add, changed(), mode_on, whole, [thread for thread in started if is_learners(thread)])
    record = read(trace)
    for op in record.ops:
        if "from_file" in op.name:  # by torch.ops, past every telltale
            add("file_used", f"a file was used ({op.name}).", op.place)
    counted = _counted(record, counters)
    for name, by_group, by_record in counted:
        if by_group > by_record:
            text = f"group {name} counts {by_group} operations, the record {by_record}: some went unseen."
            add("collective_unseen", text)
    found = tuple(Finding(*each) for each in listed())
    tell(findings.pipe, len(found))
    return value, record, Integrity(found, mode_on, threads, _num_threads(), counted, shared(value, args))


def _look_around(add: Callable, changed: list[str], mode_on: bool, whole: bool, threads: list) -> None:
    """Tell of what is to be seen after the function has returned."""
    for name in changed:
        add("patched", f"{name} was replaced while the function ran.")
    if not mode_on:
        add("modes_disabled", "the recorder's dispatch mode was left or switched off.")
    if not whole:
        add("patched", "a method of ProcessGroup or Work was replaced while the function ran.")
    for thread in threads:
        add("thread_started", f"thread {thread.name} still runs after the function returned.")


def _shared(value: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions in a tuple `value` (0 for another value) of tensors that have the storage of one of `args`."""
    given = {_storage(each) for each in args} - {None}
    items = value if type(value) is tuple else (value,)
    return tuple(i for i, each in enumerate(items) if _storage(each) in given)


def _storage(value: Any) -> int | None:
    """The identity of a tensor's storage; None for what has none."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return torch.Tensor.untyped_storage(value)._cdata
    except (RuntimeError, NotImplementedError):  # sparse, or another wrapper
        return None


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _counters() -> dict[str, int]:
    """Every group's own counter of what was issued on it, by group name; empty without process groups."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    counters = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        try:
            counters[name] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend without a counter
            continue
    return counters


def _counted(record: RankRecord, before: dict[str, int]) -> tuple[tuple[str, int, int], ...]:
    """(group, growth of its counter, communications in the record), for the groups there are now."""
    recorded: dict[str, int] = {}
    for event in record.communications:
        recorded[event.group] = recorded.get(event.group, 0) + _ticks(event.call, len(event.ranks))
    return tuple((name, now - before.get(name, 0), recorded.get(name, 0)) for name, now in sorted(_counters().items()))


def _ticks(call: str, n: int) -> int:
    """By how much gloo's counter grows in one call: a reduce_scatter of a list is n reductions within."""
    return n if call == "reduce_scatter" else 1
