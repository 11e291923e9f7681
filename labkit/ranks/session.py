"""One launch's ranks as the notebook holds them: descriptors, frames that came in, processes to be ended.

Everything here is mechanical: open, pump, dump stacks, close. Left out: judging what happened (`watch`), and
showing prints (`output`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit.ranks import ledger, server, wire
from labkit.ranks.rank import DUMP_SIGNAL, Setup
from labkit.ranks.sockets import SocketBytes, socket_bytes

_FINAL_TAGS = ("result", "raised", "exited", "nopickle")


@dataclass
class Member:
    """One rank seen from the notebook."""

    rank: int
    sock: socket.socket
    frames: wire.FrameReader
    out: int
    status: int
    ledger: int
    dump: int
    pid: int | None = None
    exit_status: int | None = None
    problem: str = ""  # the server could not fork it
    ready: bool = False
    final: tuple[str, bytes] | None = None
    open_fds: set[int] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """It has said its last word or is dead."""
        return self.final is not None or self.exit_status is not None or bool(self.problem)

    @property
    def state(self) -> str:
        """running, returned, raised, exited or died."""
        if self.final is not None:
            return {"result": "returned", "nopickle": "returned"}.get(self.final[0], self.final[0])
        return "died" if self.exit_status is not None or self.problem else "running"


@dataclass
class Session:
    """All ranks of one launch, and what they sent."""

    members: list[Member]
    selector: selectors.BaseSelector
    reports_fd: int
    store: int
    store_path: str
    on_output: Callable[[int, bytes], None]
    on_report: Callable[[int, dict[str, Any]], None]
    reports: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    report_tail: bytes = b""

    @property
    def over(self) -> bool:
        return all(member.over for member in self.members)

    @property
    def ready(self) -> bool:
        return all(member.ready or member.over for member in self.members)


def start(setups: list[Setup], preload: tuple[str, ...], on_output, on_report) -> Session:
    """Fork one rank per setup and send it. Raises OSError when the server cannot be started."""
    store, store_path = _make_store()
    report_read, report_write = os.pipe()
    os.set_blocking(report_read, False)
    session = Session([], selectors.DefaultSelector(), report_read, store, store_path, on_output, on_report)
    session.selector.register(report_read, selectors.EVENT_READ, None)
    fork_server = server.fork_server(os.getpid())
    try:
        for setup in setups:
            member, given = _open_member(setup.rank, report_write, store)
            session.members.append(member)
            for fd in (member.sock.fileno(), member.out, member.status):
                session.selector.register(fd, selectors.EVENT_READ, member)
            try:
                fork_server.fork(preload, given)
            finally:
                for fd in given[:3]:  # status, control, out: the rank's ends; without ours, a dead rank shows
                    os.close(fd)
            send(member, "setup", pickle.dumps(_with_store(setup, store_path)))
    except BaseException:
        close(session)
        raise
    finally:
        os.close(report_write)
    return session


def _with_store(setup: Setup, store_path: str) -> Setup:
    import dataclasses

    return dataclasses.replace(setup, store_path=store_path)


def _make_store() -> tuple[int, str]:
    """A FileStore's file: one without a name, reached through /proc; a named temporary file where there is none."""
    if os.path.isdir("/proc/self/fd"):
        return wire.anonymous_file("labkit-store"), ""
    import tempfile

    return tempfile.mkstemp(prefix="labkit-store-")


def _open_member(rank: int, report_write: int, store: int) -> tuple[Member, tuple[int, ...]]:
    mine, theirs = socket.socketpair()
    out_read, out_write = os.pipe()
    status_read, status_write = os.pipe()
    for fd in (out_read, status_read):
        os.set_blocking(fd, False)
    book, dump = ledger.create(), wire.anonymous_file("labkit-dump")
    member = Member(rank, mine, wire.FrameReader(mine), out_read, status_read, book, dump)
    member.open_fds = {out_read, status_read}
    control = theirs.detach()
    return member, (status_write, control, out_write, report_write, book, dump, store)


def send(member: Member, tag: str, payload: bytes = b"") -> None:
    """Send a frame to a rank; a rank that is gone is found out elsewhere."""
    member.sock.setblocking(True)
    try:
        with contextlib.suppress(OSError):
            wire.send_frame(member.sock, tag, payload)
    finally:
        member.sock.setblocking(False)


def pump(session: Session, timeout_s: float) -> bool:
    """Take in what the ranks sent, waiting up to `timeout_s` for something. True when something came."""
    events = session.selector.select(timeout_s)
    for key, _ in events:
        if key.data is None:
            _read_reports(session)
        elif key.fd == key.data.out:
            _read_output(session, key.data)
        elif key.fd == key.data.status:
            _read_status(session, key.data)
        else:
            _read_frames(session, key.data)
    return bool(events)


def _read_reports(session: Session) -> None:
    chunk = _read(session.reports_fd)
    if not chunk:
        session.selector.unregister(session.reports_fd)
    *lines, session.report_tail = (session.report_tail + (chunk or b"")).split(b"\n")
    for line in lines:
        try:  # a rank can write anything into its report pipe
            rank, values = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if type(rank) is not int or not 0 <= rank < len(session.members) or type(values) is not dict:
            continue
        session.reports.append((rank, values))
        session.on_report(rank, values)


def _read_output(session: Session, member: Member) -> None:
    chunk = _read(member.out)
    if chunk:
        session.on_output(member.rank, chunk)
    elif chunk == b"":
        _forget(session, member, member.out)


def _read_status(session: Session, member: Member) -> None:
    chunk = _read(member.status)
    for line in (chunk or b"").splitlines():
        facts = json.loads(line)
        member.pid = facts.get("pid", member.pid)
        member.exit_status = facts.get("status", member.exit_status)
        member.problem = facts.get("error", member.problem)
    if chunk == b"":
        if member.exit_status is None and not member.problem:
            member.problem = "the process that forks ranks has ended, and every rank with it"
        _forget(session, member, member.status)


def _read_frames(session: Session, member: Member) -> None:
    for tag, payload in member.frames.read():
        if tag == "ready":
            member.ready = True
        elif tag in _FINAL_TAGS:
            member.final = (tag, payload)
    if member.frames.closed:
        session.selector.unregister(member.sock.fileno())


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return None


def _forget(session: Session, member: Member, fd: int) -> None:
    session.selector.unregister(fd)
    member.open_fds.discard(fd)
    os.close(fd)


def traffic(session: Session) -> tuple[SocketBytes, ...] | None:
    """Bytes on every rank's sockets since they were opened; None where the system forbids to look."""
    counts = [socket_bytes(member.pid) if member.pid else None for member in session.members]
    return None if None in counts else tuple(counts)


def dump_stacks(session: Session, patience_s: float = 0.5) -> dict[int, list[tuple[str, int]]]:
    """Ask every rank still alive where it is; per rank the (file, line) frames, innermost first."""
    asked = [m for m in session.members if m.pid and m.exit_status is None and m.final is None]
    sizes = {m.rank: os.fstat(m.dump).st_size for m in asked}
    for member in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, DUMP_SIGNAL)
    end = time.monotonic() + patience_s
    while time.monotonic() < end and any(os.fstat(m.dump).st_size <= sizes[m.rank] for m in asked):
        time.sleep(0.01)
    time.sleep(0.02)  # the first line is there: let the handler write the rest
    return {member.rank: stack(member) for member in session.members}


def stack(member: Member) -> list[tuple[str, int]]:
    """Frames of the last dump (on request, or of a fatal signal), innermost first."""
    text = os.pread(member.dump, 1 << 20, 0).decode(errors="replace")
    last = text.split("most recent call first")[-1]
    frames = []
    for line in last.splitlines():
        head, _, rest = line.strip().partition('", line ')
        number = rest.split(" ")[0]
        if head.startswith('File "') and number.isdigit():
            frames.append((head[6:], int(number)))
    return frames


def finish(session: Session, patience_s: float = 1.0) -> None:
    """Say goodbye to ranks that have returned and wait until they have ended."""
    for member in session.members:
        send(member, "bye")
    end = time.monotonic() + patience_s
    while time.monotonic() < end and any(m.open_fds for m in session.members):
        pump(session, 0.05)


def close(session: Session) -> None:
    """Kill what still runs (with everything it started), take in the last output, close every descriptor."""
    session.on_report = _ignore  # a callback that raised would raise again
    try:
        _end_all(session)
    finally:
        session.selector.close()
        for member in session.members:
            member.sock.close()
            for fd in (*member.open_fds, member.ledger, member.dump):
                _close(fd)
            member.open_fds.clear()
        _close(session.reports_fd)
        _close(session.store)
        if session.store_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(session.store_path)


def _end_all(session: Session) -> None:
    started = time.monotonic()
    killed: set[int] = set()
    while any(m.status in m.open_fds for m in session.members):
        for member in session.members:
            if member.pid and member.exit_status is None and member.rank not in killed:
                killed.add(member.rank)  # its pid may have come only now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(member.pid, signal.SIGKILL)
        unborn = any(m.pid is None and not m.problem for m in session.members)
        if time.monotonic() - started > (0.5 if unborn else 2.0):
            if unborn:  # the server is busy importing, or worse: the next launch has a new one
                server.fork_server(os.getpid()).discard()
            return
        pump(session, 0.05)


def _ignore(rank: int, values: dict[str, Any]) -> None:
    """For reports that come too late."""


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
