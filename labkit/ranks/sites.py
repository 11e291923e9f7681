"""Where in the reader's code a rank is, and what the reader calls a tensor there. Runs inside ranks, at each call.

Names matter because two tensors of one shape are otherwise alike: if rank 1 reduces `b` before `a` and the others
`a` before `b`, nothing else can tell. Left out: attributes of modules and objects (slow to search).
"""

import inspect
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from labkit.ranks import places

_DEEP, _FRAMES, _NAMES, _ITEMS, _TEXT = 16, 3, 100, 64, 88


@dataclass(frozen=True)
class Site:
    """`place` is "filename:lineno", `path` a checksum of the places of all the reader's frames, `tensor` the names of
    the tensor in the innermost three, sorted and joined by commas."""

    place: str
    path: int
    tensor: str


def locate(tensor=None) -> Site:
    """The reader's innermost frame of this thread (of the main thread for a thread of torch's own)."""
    frames = _readers_frames(sys._getframe(1))
    if not frames:
        main = sys._current_frames().get(threading.main_thread().ident)
        frames = _readers_frames(main)
    if not frames:
        return Site(_library_place(sys._getframe(1)), 0, "")
    path = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
    near = [] if tensor is None else frames[:_FRAMES]
    names = sorted({name for frame in near for name in _names(frame, tensor)})
    return Site(path[0], zlib.crc32("\n".join(path).encode()), _joined(names))


def _readers_frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None and len(frames) < _DEEP:
        if places.is_readers(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _library_place(frame: FrameType | None) -> str:
    while frame is not None:
        if not places.is_torchs(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _names(frame: FrameType, tensor) -> list[str]:
    local = frame.f_locals
    try:
        found = list(_matches(list(local.items())[:_NAMES], tensor))
        code_names = [(name, frame.f_globals.get(name)) for name in frame.f_code.co_names[:_NAMES]]
        return found + list(_matches(code_names, tensor))
    finally:
        # Before Python 3.13 f_locals is a copy that the frame keeps: it would hold every tensor in it until the
        # function ends. Emptied at once, unless the reader holds it (locals()) or a debugger works with it.
        is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if is_copy and sys.gettrace() is None and sys.getrefcount(local) <= 3:
            local.clear()


def _matches(named: list[tuple], tensor) -> Iterator[str]:
    for name, value in named:
        if value is tensor:
            yield name
        elif isinstance(value, type(tensor)):
            if _is_grad(tensor, value):
                yield f"{name}.grad"
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _ITEMS:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if item is tensor:
                    yield f"{name}[{key!r}]"
                elif isinstance(item, type(tensor)) and _is_grad(tensor, item):
                    yield f"{name}[{key!r}].grad"


def _is_grad(tensor, value) -> bool:
    return value.is_leaf and value.requires_grad and value.grad is tensor


def _joined(names: list[str]) -> str:
    text = ""
    for name in names:
        if len(text) + len(name.encode()) + 1 <= _TEXT and "," not in name:
            text += "," * bool(text) + name
    return text
