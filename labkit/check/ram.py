"""RAM that a piece of code takes for itself: bytes of tensors, of numpy's arrays and of other large objects.

What is mapped from a file is not counted, for its pages can be dropped at any time. Tensors are watched by a dispatch
mode, the rest by tracemalloc, to which numpy reports; what libraries keep in C is in the kernel's count alone
(`resident`). And `full_disk`, which makes the disk look full. Left out: the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

LARGE_BYTES = 16 * 1024  # an object of less is no state


class Made(TorchDispatchMode):
    """Bytes of tensors that ops make meanwhile: now, and at most. Files mapped by torch.from_file are none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self):
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self.alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "from_file" in str(func):
            return out
        given = {each.untyped_storage()._cdata for each in tree_flatten((args, kwargs))[0] if _dense(each)}
        for each in tree_flatten(out)[0]:
            if _dense(each) and each.untyped_storage()._cdata not in given:
                self.enter(each.untyped_storage())
        return out

    def enter(self, storage: Any) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self.alive:
            return

        def freed(_):
            self.alive.pop(address, None)
            self.now_bytes -= num_bytes

        self.alive[address] = weakref.ref(storage, freed)
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def _dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


class Peak:
    """`with Peak() as peak:` then `peak.num_bytes`: what the block took at most, beyond what there was before."""

    def __enter__(self) -> Peak:
        self._own = not tracemalloc.is_tracing()
        if self._own:
            tracemalloc.start()
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        self._made = Made()
        self._made.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._made.__exit__(*error)
        now, most = tracemalloc.get_traced_memory()
        # A record of what the block does grows meanwhile and stays: it is the watcher's, and not counted.
        self.num_bytes = self._made.peak_bytes + max(0, most - max(now, self._before))
        if self._own:
            tracemalloc.stop()


def large_objects() -> int:
    """Bytes of large objects that are no tensors, made since tracemalloc began: arrays, bytes, lists.

    Python's own memory is domain 0; numpy's numbers are in another, and count however small their arrays are.
    """
    traces = tracemalloc.take_snapshot().traces
    return sum(trace.size for trace in traces if trace.size >= LARGE_BYTES or trace.domain)


def resident() -> dict[str, int] | None:
    """RssAnon and RssFile of this process in bytes, from Linux's /proc/self/status; None where it is not there.

    What no file backs and no other process shares is RssAnon, whether Python, torch or C took it. What was freed, and
    C's allocator keeps for the next time, is given back first (glibc).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/status") as status:
            pairs = [line.split(":") for line in status]
    except OSError:
        return None
    found = {name: int(value.split()[0]) * 1024 for name, value in pairs if name in ("RssAnon", "RssFile")}
    return found if len(found) == 2 else None


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """Meanwhile no file of this process grows beyond free_bytes, and whoever asks is told that so much is free.

    On a full disk writes fail with "No space left on device"; here, by the system's own limit on the size of a file,
    with "File too large". Without such a limit (Windows) only the answers are changed.
    """
    kept = [(holder, name, getattr(holder, name, None)) for holder, name in _ASKED]
    told = _disk_usage(kept[0][2], free_bytes), _statvfs(kept[1][2], free_bytes), _fallocate(kept[2][2], free_bytes)
    for (holder, name, was), new in zip(kept, told, strict=True):
        if was is not None:
            setattr(holder, name, new)
    try:
        with _no_larger_file(free_bytes):
            yield
    finally:
        for holder, name, was in kept:
            if was is not None:
                setattr(holder, name, was)


_ASKED = ((shutil, "disk_usage"), (os, "statvfs"), (os, "posix_fallocate"))


@contextmanager
def _no_larger_file(num_bytes: int) -> Iterator[None]:
    try:
        import resource
    except ImportError:
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _disk_usage(original: Any, free_bytes: int) -> Any:
    def disk_usage(path):
        usage = original(path)
        return usage._replace(used=usage.total - free_bytes, free=free_bytes)

    return disk_usage


def _statvfs(original: Any, free_bytes: int) -> Any:
    def statvfs(path):
        found = list(original(path))
        found[3] = found[4] = free_bytes // found[1]
        return os.statvfs_result(found)

    return statvfs


def _fallocate(original: Any, free_bytes: int) -> Any:
    def posix_fallocate(fd, offset, length):
        if offset + length > max(free_bytes, os.fstat(fd).st_size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, offset, length)

    return posix_fallocate
