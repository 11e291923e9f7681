"""The life of one rank, from the fork to its last frame; and what a function may ask inside one.

A rank is a fork of the server: torch is imported, nothing else has happened. Frames to the notebook:
ready, then result | raised | exited | nopickle; frames from it: setup, go, bye.

Left out: everything that watches ranks from outside (`watch`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from labkit.ranks import receiving, sending, wire

DUMP_SIGNAL = signal.SIGUSR2
REPORT_FD = "LABKIT_REPORT_FD"
RANK = "LABKIT_RANK"
DEVICE = "LABKIT_DEVICE"


_leave = os._exit  # as it is before `intercept` notes who calls it


@dataclass(frozen=True)
class Setup:
    """What the notebook tells a rank before its function: who it is and where it should feel at home."""

    rank: int
    world_size: int
    backend: str
    device: str
    threads: int
    timeout_s: float
    environ: dict[str, str]
    folder: str
    path: tuple[str, ...]
    store_path: str


def report(**values: Any) -> None:
    """Stream named numbers from inside a rank to the notebook, e.g. `report(step=3, loss=loss.item())`.

    Values are numbers, strings or one-element tensors. Outside a launch (under torchrun) they are printed.
    Raises ValueError when one report is over 4000 bytes.
    """
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    pipe = os.environ.get(REPORT_FD)
    if pipe is None:
        print("  ".join(f"{name}={value}" for name, value in plain.items()), flush=True)
        return
    line = json.dumps([int(os.environ[RANK]), plain]).encode() + b"\n"
    if len(line) > 4000:  # a pipe keeps lines of several writers whole only up to 4096 bytes
        raise ValueError(f"a report is {len(line)} bytes long; it holds numbers, up to 4000 bytes")
    os.write(int(pipe), line)


def device():
    """The torch.device of this rank: its own GPU, a shared one, or the CPU."""
    import torch

    named = os.environ.get(DEVICE)
    if named:
        return torch.device(named)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def main(control: int, out: int, reports: int, ledger_fd: int, dump: int, store: int) -> None:
    """Run the rank and end the process. Descriptors: control socket, output and report pipe, ledger, stack
    dump and store files."""
    sock = socket.socket(fileno=control)
    _redirect_output(out)
    faulthandler.enable(dump, all_threads=True)  # an abort may come from a thread of gloo
    faulthandler.register(DUMP_SIGNAL, dump, all_threads=False)
    try:
        _live(sock, reports, ledger_fd, store)
    except (ConnectionError, EOFError):
        pass  # the notebook is gone: nobody to tell
    except BaseException:
        traceback.print_exc()
        _leave(1)
    finally:
        _flush()
        _leave(0)


def _live(sock: socket.socket, reports: int, ledger_fd: int, store: int) -> None:
    from labkit.ranks import intercept, ledger

    setup: Setup = pickle.loads(wire.receive_frame(sock)[1])
    try:
        _settle(setup, reports)
        book = ledger.open_in_rank(ledger_fd)
        handle = intercept.install(book)
        if _hung_up(sock):
            return
        _join(setup, store)
    except Exception as error:
        return _tell_raised(sock, error)
    wire.send_frame(sock, "ready")
    code, arguments = pickle.loads(wire.receive_frame(sock)[1])
    book.set_state("running")
    tag, payload = _call(code, arguments)
    book.set_state("returned" if tag == "result" else "raised")
    _flush()
    wire.send_frame(sock, tag, payload)
    wire.receive_frame(sock)  # bye: until then the sockets stay open, to be read from outside
    del handle


def _settle(setup: Setup, reports: int) -> None:
    import torch

    os.environ.clear()
    os.environ.update(setup.environ)
    os.environ.update(
        {
            "RANK": str(setup.rank),
            "LOCAL_RANK": str(setup.rank),
            "WORLD_SIZE": str(setup.world_size),
            "LOCAL_WORLD_SIZE": str(setup.world_size),
            "OMP_NUM_THREADS": str(setup.threads),
            "MPLBACKEND": "Agg",  # the notebook's own backend shows pictures in a kernel, which a rank is not
            RANK: str(setup.rank),
            DEVICE: setup.device,
            REPORT_FD: str(reports),
        }
    )
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    if sys.platform != "linux":
        _watch_parent()
    sys.path[:] = setup.path
    with contextlib.suppress(OSError):
        os.chdir(setup.folder)
    torch.set_num_threads(setup.threads)
    if setup.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(setup.device))


def _join(setup: Setup, store: int) -> None:
    import torch.distributed as dist

    path = setup.store_path or f"/proc/self/fd/{store}"
    dist.init_process_group(
        setup.backend,
        store=dist.FileStore(path, setup.world_size),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.timeout_s),
    )


def _call(code: bytes, arguments: bytes) -> tuple[str, bytes]:
    """Unpickle and call the function; the last frame's tag and payload."""
    try:
        function = pickle.loads(code)
        result = function(*pickle.loads(arguments))
    except SystemExit as error:
        return "exited", _described(error)
    except BaseException as error:  # KeyboardInterrupt too: the reader sees what the rank saw
        return "raised", _described(error)
    try:
        return "result", _pickled((result, _sequence_numbers()))
    except Exception as error:
        return "nopickle", json.dumps([type(result).__name__, f"{type(error).__name__}: {error}"]).encode()


def _pickled(value: Any) -> bytes:
    import torch

    def to_host(tensor: torch.Tensor) -> tuple:
        # A GPU tensor would need a GPU (and a context on it) in the notebook.
        if tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized:
            return receiving.tensor_from, receiving.tensor_parts(tensor)
        return tensor.__reduce_ex__(4)

    return sending.dumps(value, {torch.Tensor: to_host})


def _sequence_numbers() -> dict[str, int]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return {}
    numbers = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        with contextlib.suppress(Exception):  # a backend without a counter
            numbers[name] = group._get_sequence_number_for_group()
    return numbers


def _described(error: BaseException) -> bytes:
    """Classes, message, exit code and frames of an exception as JSON: the notebook must not open what an
    answer's exception carries. Never raises, whatever the exception does."""
    own = os.path.dirname(os.path.abspath(__file__))
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)
              if not f.filename.startswith(own)]  # fmt: skip
    try:
        only = "".join(traceback.format_exception_only(type(error), error)).rstrip()
    except Exception:
        only = f"{type(error).__name__} (its message cannot be shown)"
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return json.dumps([kinds, only, frames, _short_repr(getattr(error, "code", None))]).encode()


def _short_repr(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def _hung_up(sock: socket.socket) -> bool:
    """Whether the notebook has left meanwhile: then no peer will ever join."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _tell_raised(sock: socket.socket, error: Exception) -> None:
    wire.send_frame(sock, "raised", _described(error))
    wire.receive_frame(sock)


def _redirect_output(out: int) -> None:
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = open(1, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _watch_parent() -> None:
    """Where the kernel cannot kill a child with its parent (macOS): look twice a second."""
    parent = os.getppid()

    def watch() -> None:
        import time

        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()
