"""Calls that tell when the learner's code makes them: put over torch's and the interpreter's for a while.

A telltale is opaque: it sits within one of C's callables, so the original can be had neither by `__wrapped__` nor
from a closure (`gc.get_referents` could, and is told itself). Left out: what leaves no trace in Python, and C types
that cannot be given other methods (`torch._C.StorageBase`).
"""

from __future__ import annotations

import _thread
import functools
import os
import posix
import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist
import torch.utils._python_dispatch as dispatching

from labkit.record.waits import Patches

_getframe = sys._getframe  # while the learner's code is watched, sys has another
_STORE = (
    "set get add append compare_set multi_get multi_set queue_push queue_pop queue_len wait check clone barrier "
    "delete_key list_keys num_keys"
).split()
# Whoever makes one of these has a way of its own, past the ledger and the record; Reducer is what DDP is made of.
_MADE = (
    "ProcessGroup ProcessGroupGloo ProcessGroupNCCL ProcessGroupMPI ProcessGroupUCC FakeProcessGroup "
    "_ProcessGroupWrapper _StoreCollectives Store FileStore HashStore PrefixStore TCPStore Reducer"
).split()
_BACKEND = (
    "allreduce allreduce_coalesced broadcast reduce allgather _allgather_base allgather_coalesced "
    "allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced gather "
    "scatter alltoall alltoall_base barrier send recv recv_anysource"
).split()
# (where, names): what takes the recorder's mode away or goes beneath it.
_SWITCHES = (
    (dispatching, "_disable_current_modes _pop_mode _pop_mode_temporarily".split()),
    (torch._C, "_DisableTorchDispatch _pop_torch_dispatch_stack _unset_dispatch_mode _ForceDispatchKeyGuard".split()),
    (torch._C, "DisableTorchFunction _pop_torch_function_stack".split()),
    (torch._C, "_ExcludeDispatchKeyGuard _SetExcludeDispatchKeyGuard ExcludeDispatchKeyGuard".split()),
)
# Ways to the recorder and to what was found.
_MODES = (
    (torch._C, "_get_dispatch_stack_at _get_function_stack_at _get_dispatch_mode".split()),
    (dispatching, "_get_current_dispatch_mode _get_current_dispatch_mode_stack".split()),
    (torch.overrides, "_get_current_function_mode _get_current_function_mode_stack".split()),
)
# Read or write in C++, where no audit event tells.
_FILES = (
    (torch, "save load from_file".split()),
    (torch.jit, "save load".split()),
    (torch._C, "PyTorchFileReader PyTorchFileWriter".split()),
    (torch.UntypedStorage, "from_file _new_shared_filename_cpu _new_using_filename_cpu".split()),
    (torch.UntypedStorage, "_new_using_fd_cpu _new_shared_fd_cpu _write_file _set_from_file _new_with_file".split()),
    (torch.TypedStorage, "from_file".split()),
)
# No audit event tells of these either. A write to stdout or stderr is a print.
_DESCRIPTORS = (
    "read readv pread preadv write writev pwrite pwritev sendfile copy_file_range splice close closerange dup dup2 "
    "memfd_create pipe pipe2 eventfd"
).split()
_PRINTS, _WRITES = (1, 2), ("os.write", "os.writev", "write", "writev")


def put_over(patches: Patches, told: Callable) -> None:
    """Lay telltales over all of the above; `told(code, what, frame, alone=False)` decides whose call it was.

    alone: the standard library's own use, on the learner's behalf, is no matter.
    """
    _over(patches, told, "numpy_used", torch, ("from_numpy", "frombuffer"))  # unseen by a torch-function mode
    for holder, names in _SWITCHES:
        _over(patches, told, "modes_disabled", holder, names)
    for holder, names in _MODES:
        _over(patches, told, "frame_read", holder, names)
    for holder, names in _FILES:
        _over(patches, told, "file_used", holder, names)
    for holder in (os, posix):
        _over(patches, functools.partial(told, alone=True), "file_used", holder, _DESCRIPTORS)
    if dist.is_available():
        _over(patches, told, "store_used", dist.Store, _STORE)
        _over(patches, told, "backend_called", torch._C._distributed_c10d.Backend, _BACKEND)
        for name in _MADE:
            kind = getattr(torch._C._distributed_c10d, name, None)
            code = "ready_made" if name == "Reducer" else "own_group"
            if kind is not None and "__init__" in vars(kind):
                patches.put(kind, "__init__", telling(told, code, name, vars(kind)["__init__"]))
    # No audit event tells of a thread before Python 3.12.
    _over(patches, told, "thread_started", threading.Thread, ("start",))
    _over(patches, told, "thread_started", threading, ("_start_new_thread",))
    _over(patches, told, "thread_started", _thread, ("start_new_thread", "start_new"))
    # Its audit event would also be raised by the recorder, at every op.
    patches.put(sys, "_getframe", _telling_frames(told, sys._getframe))


def _over(patches: Patches, told: Callable, code: str, holder: object, names) -> None:
    where = holder.__name__ if isinstance(holder, type) or holder in (torch, os, torch.jit) else ""
    for name in names:
        if not hasattr(holder, name):
            continue
        given = getattr(holder, "__mro__", (holder,))
        raw = next((vars(each)[name] for each in given if name in vars(each)), None)
        what = f"{where}.{name}" if where else name
        if isinstance(raw, classmethod):
            patches.put(holder, name, classmethod(telling(told, code, what, raw.__func__)))
            continue
        tell = telling(told, code, what, getattr(holder, name))
        alone = isinstance(raw, staticmethod) or type(raw).__name__ == "classmethod_descriptor"
        patches.put(holder, name, staticmethod(tell) if alone else tell)


def telling(told: Callable, code: str, name: str, original: Callable) -> Callable:
    """`original`, telling first."""

    def tell(*args, **kwargs):
        if name not in _WRITES or not args or type(args[0]) is not int or args[0] not in _PRINTS:
            told(code, name, outside(_getframe(1), (dispatching.__file__,)))
        return original(*args, **kwargs)

    return _opaque(tell, original)


def _opaque(tell: Callable, original: Callable) -> Callable:
    """Within a C callable (a cache that keeps nothing), which shows no closure; it also binds as a method does."""
    shut = functools.lru_cache(maxsize=0)(tell)

    def again(*args, **kwargs):
        return shut(*args, **kwargs)

    shut.__wrapped__ = again  # inspect and torch.compile look for one; it leads round in a circle
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(shut, name, getattr(original, name, None))
    return shut


def _telling_frames(told: Callable, original: Callable) -> Callable:
    def _getframe(depth=0):
        frame = original(depth + 1)
        told("frame_read", "sys._getframe", original(1))
        return frame

    return _opaque(_getframe, original)


def outside(frame: FrameType | None, files: tuple[str, ...]) -> FrameType | None:
    """The first frame that is neither in these files nor in contextlib."""
    while frame is not None and frame.f_code.co_filename in (*files, _CONTEXTLIB):
        frame = frame.f_back
    return frame


_CONTEXTLIB = threading.__file__.replace("threading.py", "contextlib.py")
