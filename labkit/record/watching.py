"""Watch the learner's code while it runs: an audit hook, a torch-function mode, and telltales over some calls.

All ask the same question of the stack: whose code does this? An import, a warning's source line or what torch
does within is nobody's cheat. In a rank each finding also goes into the report pipe at once, from where no code of
the rank can take it back. Left out: what leaves no trace in Python (native code's own system calls).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch.overrides import TorchFunctionMode

from labkit.ranks.rank import RANK
from labkit.record import telltales
from labkit.record.places import Places
from labkit.record.waits import Patches

# Audit events (docs.python.org/3/library/audit_events.html) by what they show.
_EVENTS = {
    "open": "file_used", "os.listdir": "file_used", "os.rename": "file_used", "os.mkdir": "file_used",
    "os.remove": "file_used", "os.link": "file_used", "os.symlink": "file_used", "os.mkfifo": "file_used",
    "shutil.copyfile": "file_used", "sqlite3.connect": "file_used", "tempfile.mkstemp": "file_used",
    "os.scandir": "file_used", "os.truncate": "file_used", "os.rmdir": "file_used", "os.chmod": "file_used",
    "os.utime": "file_used", "os.setxattr": "file_used", "os.getxattr": "file_used", "os.listxattr": "file_used",
    "os.lockf": "file_used", "fcntl.flock": "file_used", "fcntl.lockf": "file_used", "fcntl.fcntl": "file_used",
    "socket.__new__": "socket_used", "socket.connect": "socket_used", "socket.bind": "socket_used",
    "subprocess.Popen": "process_started", "os.fork": "process_started", "os.forkpty": "process_started",
    "os.system": "process_started", "os.exec": "process_started", "os.posix_spawn": "process_started",
    "os.spawn": "process_started",
    "mmap.__new__": "shared_memory_used",
    "ctypes.dlopen": "native_code_used", "ctypes.dlsym": "native_code_used", "ctypes.cdata": "native_code_used",
    "ctypes.string_at": "native_code_used", "ctypes.call_function": "native_code_used",
    "sys._current_frames": "frame_read", "object.__getattr__": "frame_read", "gc.get_objects": "frame_read",
    "gc.get_referrers": "frame_read", "gc.get_referents": "frame_read",
    "sys.settrace": "frame_read", "sys.setprofile": "frame_read",
}  # fmt: skip
_ALONE = ("object.__getattr__", "os.truncate")  # only where the learner's own line raises them
_SENTENCES = {
    "file_used": "a file was used ({})",
    "socket_used": "a socket of its own was used ({})",
    "process_started": "a process was started ({})",
    "shared_memory_used": "shared memory was used ({})",
    "native_code_used": "native code was called ({})",
    "thread_started": "a thread was started ({})",
    "frame_read": "frames or objects of the callers were looked at ({})",
    "store_used": "the rendezvous store was used ({})",
    "numpy_used": "a tensor was handed to numpy or taken as a raw pointer ({}), where the record cannot follow it; "
    "use tolist() or item() instead",
    "modes_disabled": "dispatch modes were switched off ({})",
    "own_group": "a process group or a store of its own was made ({}); dist.new_group is the way to another group",
    "ready_made": "torch's own reducer was used ({}), which is what was to be written",
    "backend_called": "a group's backend was called past torch.distributed ({})",
}
# Standard library code that shows source lines or imports: what it opens is no data, unless the learner's own line
# calls what it reads with.
_IMPORTS, _SHOWS = ("_find_and_load", "_gcd_import"), ("warnings.py", "traceback.py", "inspect.py", "doctest.py")
_LOOKERS = ("inspect.py", "traceback.py")
_NUMPY = "numpy __array__ data_ptr __dlpack__ storage _typed_storage".split()
_MEMORY = "share_memory_".split()
WITNESS = "labkit.witness"  # the name under which a finding travels among a rank's reports
# Where torch's Python hands a call to a torch-function mode: not whose code it is.
_SAVING = ("torch/serialization.py", "torch/storage.py", "torch/hub.py", "torch/utils/_pytree.py")
# Whose use of the store is torch's own: joining, new groups, barriers. What else of torch's takes a store to pass on
# what it was given (torch/distributed/elastic, say).
_RENDEZVOUS = ("torch/distributed/distributed_c10d.py", "torch/distributed/rendezvous.py")
_STORES = ("store_used", "own_group")
_HANDS_OVER = tuple(torch.__file__.replace("__init__.py", name) for name in ("overrides.py", "_tensor.py"))


class Findings:
    """What was found, each code and place once. pipe: descriptor to which each finding is written as well; None for
    none. It holds nothing but these slots, so that no method can be laid over one instance."""

    __slots__ = ("found", "places", "pipe")

    def __init__(self, pipe: int | None = None):
        self.found: dict[tuple[str, str], str] = {}
        self.places = Places()
        self.pipe = pipe

    def add(self, code: str, sentence: str, place: str = "") -> None:
        if (code, place) not in self.found:
            self.found[code, place] = sentence
            witness(self.pipe, [code, sentence, place])

    def listed(self) -> list[tuple[str, str, str]]:
        return [(code, sentence, place) for (code, place), sentence in self.found.items()]

    def by_learner(self, code: str, what: str, frame: FrameType | None, alone: bool = False) -> None:
        """Note `what` if the learner's code, directly or (unless `alone`) through the standard library, does it."""
        learners = self.culprit(frame, code, alone)
        if learners is not None:
            place = f"{learners.f_code.co_filename}:{learners.f_lineno}"
            self.add(code, _SENTENCES[code].format(what) + ".", place)

    def culprit(self, frame: FrameType | None, code: str, alone: bool = False) -> FrameType | None:
        """The learner's frame with nothing within it but what passes its calls on; None for torch's, labkit's, an
        import's. A read of frames passes through `inspect` and `traceback` alone."""
        while frame is not None:
            name = frame.f_code.co_filename
            if self.places.frame(frame) is frame:
                return frame
            if name == telltales.__file__:
                frame = frame.f_back
                continue
            imports = "importlib" in name and frame.f_code.co_name in _IMPORTS
            shows = code != "frame_read" and name.startswith(_LIBRARY) and name.endswith(_SHOWS)
            if imports or shows or not _passes_on(name, code in _STORES):
                return None
            if code == "frame_read" and not name.endswith(_LOOKERS) and name != "<string>":  # exec's is the learner's
                return None
            if alone and not name.endswith(_SAVING):
                return None
            frame = frame.f_back
        return None

    def is_learners_thread(self, thread: threading.Thread) -> bool:
        target = getattr(thread, "_target", None) or type(thread).run
        code = getattr(target, "__code__", None)
        return code is not None and self.places.frame(_Stub(code)) is not None


class _Stub:
    """A frame of one code object, for `Places.frame`."""

    def __init__(self, code):
        self.f_code, self.f_back = code, None


@functools.cache
def _passes_on(filename: str, store: bool = False) -> bool:
    """Code that acts for whoever calls it: the standard library, numpy, torch's saving and loading; with the `store`
    all but torch's own rendezvous, labkit and other packages."""
    if "-packages" in filename:
        torchs = store and "/torch/" in filename and not filename.endswith(_RENDEZVOUS)
        return torchs or "/numpy/" in filename or filename.endswith(_SAVING)
    return filename.startswith((_LIBRARY, "<frozen", "<string>"))


def witness(pipe: int | None, finding: object) -> None:
    """Write a line into the report pipe of a rank: a finding, or at the end the number of them."""
    if pipe is not None:
        line = json.dumps([int(os.environ.get(RANK, -1)), {WITNESS: finding}]).encode()[:4000] + b"\n"
        with contextlib.suppress(OSError):  # closed by the learner's code: the parent misses the last line
            _write(pipe, line)


_write = os.write  # while the learner's code is watched, os has another
_getframe = sys._getframe  # while the learner's code is watched, sys has another
_LIBRARY = threading.__file__.rpartition("threading.py")[0]


@functools.cache
def _audit() -> list[Findings]:
    """The one audit hook of this process (Python cannot take one away), and the list of who listens."""
    listening: list[Findings] = []
    busy = threading.local()

    def hook(event: str, arguments: tuple) -> None:
        if not listening or event not in _EVENTS or getattr(busy, "now", False):
            return
        if event == "object.__getattr__" and not _is_frame_of_traceback(arguments):
            return
        busy.now = True
        try:
            frame = _getframe(1)
            for findings in listening:
                findings.by_learner(_EVENTS[event], event, frame, alone=event in _ALONE)
        finally:
            busy.now = False

    sys.addaudithook(hook)
    return listening


def _is_frame_of_traceback(arguments: tuple) -> bool:
    """`error.__traceback__.tb_frame`, from where `f_back` leads to the callers."""
    return len(arguments) == 2 and arguments[1] == "tb_frame"


@contextmanager
def watching_audit(findings: Findings) -> Iterator[None]:
    """Listen to the interpreter's audit events meanwhile."""
    listening = _audit()
    listening.append(findings)
    try:
        yield
    finally:
        if findings in listening:
            listening.remove(findings)
        else:
            findings.add("patched", "the audit hook was told to listen no more.")


class _Functions(TorchFunctionMode):
    """Sees the calls by which a tensor's values leave torch."""

    def __init__(self, findings: Findings):
        super().__init__()
        self.findings = findings
        self.codes = {getattr(torch.Tensor, name): "numpy_used" for name in _NUMPY if hasattr(torch.Tensor, name)}
        self.codes |= {getattr(torch._C.TensorBase, n): "numpy_used" for n in _NUMPY if hasattr(torch._C.TensorBase, n)}
        self.codes |= {getattr(torch.Tensor, name): "shared_memory_used" for name in _MEMORY}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        code = self.codes.get(func) if getattr(func, "__hash__", None) else None
        if code is not None:
            frame = telltales.outside(_getframe(1), _HANDS_OVER)
            self.findings.by_learner(code, getattr(func, "__name__", str(func)), frame)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching_calls(findings: Findings) -> Iterator[None]:
    """Watch calls by which data or work could pass beside the record."""
    patches = Patches()
    telltales.put_over(patches, findings.by_learner)
    try:
        with _Functions(findings):
            yield
    finally:
        patches.undo()
