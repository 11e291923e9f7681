"""What ranks do in exercise 4.5: save and load under watch, be killed in mid-save, meet a full disk, load again.

A kill in mid-write is the kernel's: with RLIMIT_FSIZE a write beyond so many bytes ends the rank by SIGXFSZ, or, where
that is ignored as Python does, fails as on a full disk. In a normal save, an audit hook copies the folder before each
change of it that Python's audit events tell: what a crash at that moment would leave. Left out: the verdict
(`checkpoint`), and changes that C++ makes, which a kill alone meets.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from labkit.labs.lab00.attempts import Unusable, still_open
from labkit.labs.lab04.checkpoint_cases import copied, files, truncate

NAME = "ShardedCheckpoint"
TRIES = 40  # to copy a folder that other ranks change meanwhile
_CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
_WRITES = os.O_WRONLY | os.O_RDWR

Given = tuple[int, dict[str, Any], dict[str, int]]  # step, this rank's shards, sizes


def save_and_load(cls: Callable, folder: str, states: str, rank: int, given: list[Given]) -> Any:
    """Load where there is nothing, then save and load by turns; crash states of all saves but the first go to `states`,
    as does the folder as it is after each (by rank 0, as "whole 1", and so on).

    Gives {"empty", "loads", "written" (bytes by the kernel's count, per save; None where it does not tell), "states"
    (of each save but the first, [(name of the copy, event, file)]), "before" (of each of those, the files before),
    "after", "ready_made" (whether torch.distributed.checkpoint was imported)}.
    """
    found = unfinished(cls)
    if found is not None:
        return found
    seen: dict[str, Any] = {"loads": [], "written": [], "states": [], "before": [], "after": []}
    checkpoint = cls(folder)
    seen["empty"] = _empty(checkpoint)
    changes: list = []
    watch = _watch(folder, states, rank, changes)
    for number, (step, shards, sizes) in enumerate(given):
        _together()
        if number:
            seen["before"].append(files(folder))
            _together()
            watch.append(True)
        begun = len(changes)
        _told(item=f"save {number}")
        began = _written_bytes()
        out = checkpoint.save(step, _views(shards, rank), sizes)
        ended = _written_bytes()
        watch.clear()
        if out is NotImplemented:
            return Unusable("half_attempted", f"{NAME}.save is still a stub: it returns NotImplemented.")
        seen["written"].append(None if began is None or ended is None else ended - began)
        _told(item=f"load {number}")
        seen["loads"].append(plain(checkpoint.load()))
        if number:
            seen["states"].append(changes[begun:])
            seen["after"].append(_after(folder, os.path.join(states, f"whole {number}"), rank))
    seen["ready_made"] = "torch.distributed.checkpoint" in sys.modules
    return seen


def _after(folder: str, whole: str, rank: int) -> dict[str, tuple[int, int, int]]:
    """All files once every rank has saved and loaded; rank 0 copies the folder to `whole`."""
    _together()
    if rank == 0:
        copied(folder, whole)
    return files(folder)


def save_limited(cls: Callable, folder: str, rank: int, given: Given, limit: int, kill: bool) -> str:
    """Save while no file of this rank may become larger than `limit` bytes (0: no limit): it is killed in mid-write, or
    its write fails.
    """
    import resource
    import signal

    checkpoint = cls(folder)
    if limit:
        if kill:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    step, shards, sizes = given
    checkpoint.save(step, _views(shards, rank), sizes)
    return "saved"


def load_all(cls: Callable, folders: list[tuple[str, str]], rank: int, again: tuple[str, Given] | None) -> Any:
    """Load from each of (item, folder); then, with `again`, save in a folder and load from it: by item, what came."""
    found: dict[str, Any] = {}
    for item, folder in folders:
        _told(item=item)
        found[item] = plain(cls(folder).load())
    if again is not None:
        folder, (step, shards, sizes) = again
        _together()
        _told(item="again")
        cls(folder).save(step, _views(shards, rank), sizes)
        found["again"] = plain(cls(folder).load())
    return found


def unfinished(cls: Callable) -> Any:
    """NotImplemented for a stub, an Unusable for what cannot be called as the task says."""
    found = still_open(cls, NAME)
    if found is not None:
        return found
    for name, args, asked in (
        ("__init__", (None, ""), "(folder)"),
        ("save", (None, 1, {}, {}), ".save(step, shards, sizes)"),
        ("load", (None,), ".load()"),
    ):
        method = getattr(cls, name, None)
        if not callable(method):
            return Unusable("half_attempted", f"{NAME} has no {name}(): the task wants save and load.")
        try:
            inspect.signature(method).bind(*args)
        except TypeError:
            return Unusable("wrong_signature", f"the check calls {NAME}{asked}; yours takes other arguments.")
        except ValueError:
            continue
    return None


def plain(out: Any) -> Any:
    """What load() returned, as plain containers and tensors; as its kind in words, where it is something else."""
    import torch

    from labkit.check.compare import kind

    if type(out) not in (tuple, list) or len(out) != 2 or not isinstance(out[1], dict):
        inner = f" of {', '.join(kind(each) for each in out)}" if type(out) in (tuple, list) else ""
        return f"{kind(out)}{inner}"
    step, shards = out
    shards = {
        str(name): each.detach().clone() if isinstance(each, torch.Tensor) else kind(each)
        for name, each in shards.items()
    }
    return (int(step) if isinstance(step, int) and not isinstance(step, bool) else kind(step)), shards


def _views(shards: dict[str, Any], rank: int) -> dict[str, Any]:
    """The shards as a sharded optimizer has them: each a view of a longer flat tensor."""
    found = {}
    for name, shard in shards.items():
        whole = shard.new_zeros(4 * shard.numel())
        found[name] = whole[(rank % 4) * shard.numel() : (rank % 4 + 1) * shard.numel()].copy_(shard)
    return found


def _empty(checkpoint: Any) -> str:
    """What load() does where there is no checkpoint: the name of what it raises, or what it gives, in words."""
    from labkit.check.compare import kind

    _told(item="empty")
    try:
        out = checkpoint.load()
    except Exception as error:
        return type(error).__name__ if not isinstance(error, FileNotFoundError) else "FileNotFoundError"
    return "returned NotImplemented" if out is NotImplemented else f"returned {kind(out)}"


def _together() -> None:
    """No rank saves while another still loads: a job does not either."""
    import torch.distributed as dist

    dist.barrier()


def _told(**values: Any) -> None:
    from labkit.ranks.rank import report

    report(**values)


def _written_bytes() -> int | None:
    """Bytes that this process has written so far, sockets included, by the kernel; None where it does not tell."""
    try:
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("wchar"))
    except (OSError, StopIteration):
        return None


def _watch(folder: str, states: str, rank: int, found: list) -> list:
    """Copy the folder before every change of it, while the list that comes back is not empty."""
    on: list[bool] = []
    busy: list[bool] = []
    prefix = os.path.join(os.path.abspath(folder), "")

    def hook(event: str, arguments: tuple) -> None:
        if not on or busy or event not in _CHANGES:
            return
        busy.append(True)
        try:
            path = _path_of(event, arguments, prefix)
            if path is not None:
                _keep(folder, states, rank, event, arguments, path, found)
        finally:
            busy.clear()

    sys.addaudithook(hook)
    return on


def _path_of(event: str, arguments: tuple, prefix: str) -> str | None:
    """The file that an event is about, when it is one below the folder and is changed; "" for one of unknown place."""
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return None
    path = arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    path = os.fsdecode(path)
    if not os.path.isabs(path) and any(isinstance(each, int) and each >= 0 for each in arguments[1:]):
        if event not in ("os.remove", "os.rmdir"):
            return ""
        try:  # below an open folder, as shutil.rmtree removes
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
        except OSError:
            return ""
    path = os.path.abspath(path)
    return path if (path + os.sep).startswith(prefix) else None


def _keep(folder: str, states: str, rank: int, event: str, arguments: tuple, path: str, found: list) -> None:
    """A copy of the folder as it is now; and one with the file emptied, where it is opened anew."""
    name = os.path.basename(path)
    kept = _copy(folder, states, f"{rank}-{len(found)}")
    if kept:
        found.append((kept, event, name))
    if event == "open" and arguments[2] & os.O_TRUNC and path and os.path.getsize(path) if os.path.exists(path) else 0:
        kept = _copy(folder, states, f"{rank}-{len(found)}")
        inner = os.path.join(states, kept, os.path.relpath(path, folder)) if kept else ""
        if kept and os.path.exists(inner):
            truncate(inner)
            found.append((kept, "emptied", name))


def _copy(folder: str, states: str, name: str) -> str:
    """The name of a copy of the folder as it was at one moment; "" where other ranks changed it all the while."""
    for attempt in range(TRIES):
        kept = f"{name}-{attempt}"
        before = _listed(folder)
        try:
            copied(folder, os.path.join(states, kept))
        except OSError:  # a file went while it was copied (shutil.Error is an OSError)
            continue
        if before is not None and before == _listed(folder):
            return kept
    return ""


def _listed(folder: str) -> Any:
    try:
        return files(folder)
    except OSError:
        return None
