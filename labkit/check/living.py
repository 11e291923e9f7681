"""What lives in this process: tensors by where their bytes are, and objects of classes that do an exercise's work.

Asked in a rank, by judges that must know what an answer keeps, wherever it keeps it: in an attribute, a closure, a
global. File-backed memory is known by the ranges of /proc/self/maps. Left out: memory that is no tensor's (judges ask
tracemalloc), and systems without /proc, where no range is known.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any


def tensors() -> list[Any]:
    """Every ordinary, dense tensor with numbers: no subclass but Parameter, nothing on "meta"."""
    import torch

    gc.unfreeze()  # an object that was frozen is not listed
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return [each for each in found if not each.is_meta and each.layout is torch.strided]


def storages(keep: Callable[[Any], bool] = lambda tensor: True) -> dict[int, Any]:
    """A tensor of each storage, by the storage's identity, of the tensors for which `keep` is true."""
    return {each.untyped_storage()._cdata: each for each in tensors() if keep(each)}


def has_class(rooms: tuple[str, ...], word: str) -> str:
    """The name of a class from one of these rooms, with `word` in it, of which there is an object; "" for none."""
    kinds = {base for kind in {type(each) for each in gc.get_objects()} for base in kind.__mro__}
    names = [kind.__name__ for kind in kinds if str(kind.__module__).startswith(rooms) and word in kind.__name__]
    return min(names, default="")


def mapped(folder: str, private: bool = False) -> list[tuple[int, int]]:
    """Ranges of addresses (begin, end) that are mapped from files in this folder, so that what changes goes there.

    private: those instead that can be written, and whose changes stay in this process's RAM.
    """
    prefix = os.path.realpath(folder) + os.sep
    found = [(begin, end, _private(mode)) for begin, end, mode, path in _maps() if path.startswith(prefix)]
    return [(begin, end) for begin, end, own in found if own == private]


def shared_bytes(folder: str) -> int:
    """Bytes mapped to be shared with other processes, but from no file in this folder: anonymous ones, too."""
    prefix = os.path.realpath(folder) + os.sep
    others = [each for each in _maps() if each[2][1] + each[2][3] == "ws" and not each[3].startswith(prefix)]
    return sum(end - begin for begin, end, _, _ in others)


def _private(mode: str) -> bool:
    return mode[1] + mode[3] == "wp"


def _maps() -> list[tuple[int, int, str, str]]:
    """(begin, end, mode, path or "") of each range of addresses; mode as in "rw-s"."""
    found = []
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                parts = [*line.rstrip("\n").split(maxsplit=5), ""]
                begin, end = parts[0].split("-")
                found.append((int(begin, 16), int(end, 16), parts[1], parts[5]))
    except OSError:
        return []
    return found


def address(tensor: Any) -> int:
    """Where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()
