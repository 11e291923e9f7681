"""The fork server: one process that has torch imported and forks a fresh rank in some milliseconds.

It talks over a socket pair and passes descriptors, so nothing listens anywhere and nothing lies on a disk.
It ends when the notebook does (end of the socket, or another parent), and takes every rank along.

Left out: `multiprocessing`'s fork server. It leaves its socket's folder behind when a kernel is killed, and
re-imports `__main__` in every child.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref

_POLL_S = 0.25
_NUM_FDS = 7
_BOOT = "import sys; sys.path[0:1] = [{root!r}]; from labkit.ranks.server import serve; serve({fd}, {parent})"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FIRST = threading.Lock()  # functools.cache alone would let two first launches make a server each
# torch._dynamo: every rank that makes an optimizer would import it, a second each.
_ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "cloudpickle", "labkit.ranks.rank", "labkit.ranks.intercept")


class ForkServer:
    """The notebook's end. `fork` starts one rank; the server process is started (again) when there is none."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.sock: socket.socket | None = None

    def fork(self, preload: tuple[str, ...], fds: tuple[int, ...]) -> None:
        """Ask for one rank that owns `fds` (in the order of `rank.main`); its pid comes on the status pipe.

        Raises OSError when no server can be started.
        """
        request = json.dumps({"preload": preload}).encode()
        with self.lock:
            for attempt in (1, 2):
                if self.process is None or self.process.poll() is not None:
                    self._start()
                try:
                    socket.send_fds(self.sock, [struct.pack("!I", len(request)) + request], fds)
                    return
                except (BrokenPipeError, ConnectionError):
                    # Killed since the last launch: once more with a new one.
                    self.process.kill()
                    self.process.wait()
                    if attempt == 2:
                        raise

    def discard(self) -> None:
        """End the server and its ranks; the next `fork` starts another."""
        with self.lock:
            if self.process is not None:
                self.process.kill()
                self.process.wait()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        boot = _BOOT.format(root=root, fd=theirs.fileno(), parent=os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            cwd="/",  # the notebook's folder may be deleted; ranks go there themselves
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the stop button's SIGINT is for the notebook alone
        )
        theirs.close()
        if self.sock is not None:
            self.sock.close()
        self.process, self.sock = process, mine
        weakref.finalize(self, _stop, process, mine)


def _stop(process: subprocess.Popen, sock: socket.socket) -> None:
    sock.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)


def fork_server(pid: int) -> ForkServer:
    """The server of process `pid` (pass os.getpid(): a forked copy of this process gets its own).

    Kept for the life of the process: it is what makes the second launch a tenth of a second long.
    """
    with _FIRST:
        return _server_of(pid)


@functools.cache
def _server_of(pid: int) -> ForkServer:
    return ForkServer()


def serve(fd: int, parent: int) -> None:
    """The server's whole life. Runs in its own process."""
    sock = socket.socket(fileno=fd)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # pid -> status pipe
    _adopt_orphans()
    problem = _preload(_ALWAYS)
    helpers = _children()  # what an import started, not a rank
    try:
        while os.getppid() == parent:
            ready, _, _ = select.select([sock, read_end], [], [], _POLL_S)
            if read_end in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(read_end, 4096)
            _reap(statuses, helpers)
            if sock in ready:
                request = _receive(sock)
                if request is None:
                    break
                preload, fds = request
                if len(fds) < _NUM_FDS:  # out of descriptors: that its status pipe closes is told
                    for given in fds:
                        os.close(given)
                    continue
                unable = problem or _preload(preload)
                if not statuses:  # while ranks live, a child that is not known may be one's orphan
                    helpers |= _children()
                _fork_rank(unable, fds, statuses, (fd, read_end, write_end))
    finally:
        for pid in statuses:
            _kill_family(pid)
        _kill_orphans(statuses, set())


def _receive(sock: socket.socket) -> tuple[tuple[str, ...], list[int]] | None:
    head, fds, _, _ = socket.recv_fds(sock, 4, _NUM_FDS)
    if len(head) < 4:
        return None
    body = sock.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL)
    for given in fds:
        os.set_inheritable(given, False)  # what a rank starts has no business with them
    return tuple(json.loads(body)["preload"]), fds


def _preload(names: tuple[str, ...]) -> str:
    """Import modules once, for every later rank. The error in a line, or ""."""
    import importlib

    parent, name = os.getppid(), ""
    signal.signal(signal.SIGALRM, lambda *_: os.getppid() == parent or os._exit(70))
    signal.setitimer(signal.ITIMER_REAL, _POLL_S, _POLL_S)  # an import is long; the notebook may end meanwhile
    try:
        for name in names:
            importlib.import_module(name)
    except BaseException as error:  # whatever an import throws belongs to the reader, not to the server
        return f"cannot import {name}: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    gc.freeze()  # no rank's collector, and no trace's walk over live objects, need look at what was imported
    return ""


def _fork_rank(problem: str, fds: list[int], statuses: dict[int, int], private: tuple[int, ...]) -> None:
    status = fds[0]
    if problem:
        _tell(status, error=problem)
    else:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _tell(status, error=f"this system starts no more processes ({error})")
            pid = -1
        if pid == 0:
            try:
                _become_rank(server, (*private, *statuses.values(), status))
                from labkit.ranks import rank

                rank.main(*fds[1:])
            finally:
                os._exit(70)  # main never returns
        if pid > 0:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # also done by the rank: whoever comes first
            _tell(status, pid=pid)
            statuses[pid] = status
    for fd in fds[1:] if status in statuses.values() else fds:
        os.close(fd)


def _become_rank(server: int, private: tuple[int, ...]) -> None:
    os.setpgid(0, 0)  # what a rank starts (loader workers, compilers) is killed with it
    die_with_parent(server)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for fd in private:
        os.close(fd)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends (Linux; elsewhere `rank` watches it)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(70)


def _adopt_orphans() -> None:
    """Have what a rank put into a session of its own become a child of this process when the rank ends (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """Pids of this process's children; none where the system does not list them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return set(map(int, listed.read().split()))
    return set()


def _reap(statuses: dict[int, int], helpers: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = statuses.pop(pid, None)
        helpers.discard(pid)
        _kill_family(pid)
        if not statuses:
            _kill_orphans(statuses, helpers)
        if pipe is not None:
            _tell(pipe, status=os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _kill_orphans(statuses: dict[int, int], helpers: set[int]) -> None:
    """End what ended ranks left. Whose it was is not known, so it is done when the last rank has ended."""
    for pid in _children() - set(statuses) - helpers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        _kill_family(pid)


def _kill_family(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _tell(pipe: int, **facts) -> None:
    with contextlib.suppress(OSError):
        os.write(pipe, json.dumps(facts).encode() + b"\n")
