"""Watching ranks until they are done, and saying why they are not.

The cause, in this order: ledgers of a group that differ; a rank that raised something of its own; one that
died; ranks that wait for one that returned, or for each other; then silence and the deadline. A broken
connection is never a cause while a better one is known: it is what the neighbours of the culprit see.

Left out: reading ledgers against each other (`verdict`).
"""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from labkit.ranks import ledger, places, verdict, words
from labkit.ranks.outcome import Cause, Whereabouts
from labkit.ranks.session import Member, Session, dump_stacks, pump, stack

START_DEADLINE_S = 180.0  # the first launch imports torch, a preload may import more
SETTLE_S = 1.0  # after a first sign of trouble, for the others to show theirs
CALM_S = 0.2  # nothing written to any ledger for so long: worth reading them
IDLE_S = 2.5  # no rank computes, sleeps or has a child at work for so long: they never will
IDLE_TICKS = 3  # of 10 ms, within IDLE_S: what gloo's threads use to wait
_NETWORK_WORDS = (
    "connection closed by peer", "connection reset", "connection refused", "broken pipe", "timed out waiting",
    "socket closed", "socket timeout", "read error", "write error", "application timeout",
    "gloo/transport",    "connection was closed", "connectfullmesh",
)  # fmt: skip


def wait_ready(session: Session) -> Cause | None:
    """Until every rank has joined the group; the cause when one cannot."""
    end = time.monotonic() + START_DEADLINE_S
    while not session.ready and not _failed(session) and time.monotonic() < end:
        pump(session, 0.05)
    if _failed(session):
        _settle(session)  # the others wait for it in the rendezvous
    if all(member.ready for member in session.members):
        return None
    problems = [member for member in session.members if member.problem]
    if problems:
        return Cause("server", f"no rank could be started: {problems[0].problem}", None)
    return _judge(session, _read_ledgers(session), {}, "", START_DEADLINE_S)


def wait_done(session: Session, deadline_s: float) -> Cause | None:
    """Until every rank has returned, or something is wrong. The cause, or None when all is well."""
    started = time.monotonic()
    calm = _Calm(started, _progress(session))
    limit = ""
    while not session.over and not _failed(session):
        pump(session, 0.05)
        now = time.monotonic()
        if calm.noticed(now, _progress(session)) and _stuck_twice(session, calm):
            break
        if calm.idle_for(now, session) > IDLE_S:
            limit = "stalled"
            break
        if now - started > deadline_s:
            limit = "deadline"
            break
    if _failed(session):
        _settle(session)
    stacks = {} if session.over else dump_stacks(session)
    return _judge(session, _read_ledgers(session), stacks, limit, deadline_s)


def where_all_are(session: Session) -> tuple[Whereabouts, ...]:
    """Where every rank is at this moment."""
    return _whereabouts(session, _read_ledgers(session), dump_stacks(session))


def _failed(session: Session) -> bool:
    return any(member.over and member.state != "returned" for member in session.members)


def _settle(session: Session) -> None:
    end = time.monotonic() + SETTLE_S
    while not session.over and time.monotonic() < end:
        pump(session, 0.05)
    # A rank whose abort closed its socket has its exit status a moment later.
    while time.monotonic() < end and any(m.frames.closed and m.final is None and m.exit_status is None
                                         for m in session.members):
        pump(session, 0.02)


def _progress(session: Session) -> tuple:
    return tuple((ledger.peek(m.ledger), m.state) for m in session.members)


def _read_ledgers(session: Session) -> tuple[ledger.Ledger, ...]:
    return tuple(ledger.read(member.ledger) for member in session.members)


def _states(session: Session) -> tuple[str, ...]:
    return tuple({"exited": "raised"}.get(member.state, member.state) for member in session.members)


def _stuck_twice(session: Session, calm: _Calm) -> bool:
    """The same finding in two readings with nothing written in between."""
    ledgers, states = _read_ledgers(session), _states(session)
    finding = verdict.definite(ledgers) or verdict.stuck(ledgers, states)
    before, calm.finding = calm.finding, finding
    return finding is not None and finding == before


@dataclass
class _Calm:
    """Since when nothing has moved."""

    since: float
    progress: tuple
    read_at: float = 0.0
    finding: verdict.Finding | None = None
    ticks: tuple[int, ...] | None = None
    idle_since: float = 0.0

    def noticed(self, now: float, progress: tuple) -> bool:
        """True when the ledgers are worth a (further) reading."""
        if progress != self.progress:
            self.since, self.progress, self.finding, self.ticks = now, progress, None, None
            return False
        pause = CALM_S if self.finding or not self.read_at or self.read_at < self.since else 5 * CALM_S
        if now - self.since < CALM_S or now - self.read_at < pause:
            return False
        self.read_at = now
        return True

    def idle_for(self, now: float, session: Session) -> float:
        """Seconds for which no rank computed, slept on purpose or had a child process at work."""
        if now - self.since < CALM_S:
            return 0.0
        ticks = tuple(_ticks(member) for member in session.members if not member.over)
        busy = None in ticks or self.ticks is None or len(ticks) != len(self.ticks)
        if busy or any(b - a > IDLE_TICKS for a, b in zip(self.ticks, ticks, strict=True)):
            self.ticks, self.idle_since = None if None in ticks else ticks, now
        return now - self.idle_since


def _ticks(member: Member) -> int | None:
    """Processor time a rank has used, in ticks of 10 ms; None while it may yet go on by itself: it wants the
    processor or the disk, sleeps on purpose, waits with a time limit or for a child. Also where /proc does not
    tell: there only the deadline ends a silence."""
    book = ledger.read_header(member.ledger)
    if book.asleep_until > time.monotonic() - 0.5 or _has_children(member.pid):
        return None
    in_a_call = any(entry.state == "waiting" for entry in ledger.read(member.ledger, last=64).entries)
    if not in_a_call and not _waits_for_ever(member.pid):
        return None
    try:
        fields = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "RD" else int(fields[11]) + int(fields[12])


def _waits_for_ever(pid: int | None) -> bool:
    """Whether every thread of a process, but gloo's own, is in a wait without a time limit (a futex)."""
    futex = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            if "gloo" in (task / "comm").read_text():
                continue
            number, *arguments = (task / "syscall").read_text().split()
            if number != futex or int(arguments[3], 16) != 0:  # the fourth argument is the time limit
                return False
    except (OSError, IndexError):
        return False
    return True


def _has_children(pid: int | None) -> bool:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return any(Path(f"/proc/{pid}/task/{task}/children").read_text().strip() for task in tasks)
    except OSError:
        return False


def _judge(session: Session, ledgers, stacks, limit: str, deadline_s: float) -> Cause | None:
    states = _states(session)
    whereabouts = _whereabouts(session, ledgers, stacks)
    finding = verdict.definite(ledgers)
    problem = next((member.problem for member in session.members if member.problem), "")
    if problem:
        return Cause("server", problem, None, whereabouts)
    if finding is None:
        cause = _own_error(session) or _death(session, ledgers) or _unpicklable(session)
        if cause is not None:
            return Cause(cause.code, cause.sentence, cause.rank, whereabouts, cause.traceback)
        if set(states) == {"returned"}:
            finding = verdict.at_end(ledgers)
        elif {"running", "returned"} & set(states):
            finding = verdict.stuck(ledgers, states) or (verdict.unwaited(ledgers, states) if limit else None)
    if finding is not None:
        return Cause(finding.code, finding.sentence, finding.rank, whereabouts)
    return _connection(session, whereabouts) or _limit(whereabouts, limit, deadline_s)


def _at(place: str) -> str:
    said = places.readable(place)
    return f" ({said})" if said else ""


def _own_error(session: Session) -> Cause | None:
    """A rank that raised something of its own, or left by sys.exit."""
    for member in session.members:
        if member.state == "exited":
            _, _, frames, code = json.loads(member.final[1])
            how = f"sys.exit({code}){_at(places.of_frames(frames))}"
            return Cause("exited", f"rank {member.rank} called {how} and returned nothing", member.rank)
    raised = [member for member in session.members if member.state == "raised"]
    own = [member for member in raised if not _is_network(*json.loads(member.final[1])[:2])]
    return _raised(own[0]) if own else None


def _raised(member: Member) -> Cause:
    _, only, frames, _ = json.loads(member.final[1])
    first = only.splitlines()[0] if only else "an exception"
    sentence = f"rank {member.rank} raised {first}{_at(places.of_frames(frames))}"
    return Cause("raised", sentence, member.rank, (), places.traceback_text(frames, only))


def _is_network(kinds: list[str], message: str) -> bool:
    if not {"RuntimeError", "ConnectionError", "TimeoutError"} & set(kinds):
        return False
    text = message.lower()
    return bool({"DistNetworkError", "DistBackendError"} & set(kinds)) or any(w in text for w in _NETWORK_WORDS)


def _connection(session: Session, whereabouts: tuple[Whereabouts, ...]) -> Cause | None:
    raised = [member for member in session.members if member.state == "raised"]
    if not raised:
        return None
    cause = _raised(raised[0])
    sentence = f"{cause.sentence}; no rank shows an error of its own"
    return Cause("connection", sentence, cause.rank, whereabouts, cause.traceback)


def _death(session: Session, ledgers) -> Cause | None:
    for member, book in zip(session.members, ledgers, strict=True):
        if member.state != "died":
            continue
        status = member.exit_status or 0
        last = book.last_words
        place = _at(book.last_words_place or _died_at(member, book))
        name = signal.Signals(-status).name if status < 0 else ""
        if last:
            how = f"ended itself by {last}{place}"
        elif status < 0:
            hint = "; the system does this when memory runs out" if status == -signal.SIGKILL else ""
            how = f"was ended by {name}{place}{hint}"
        else:
            how = f"ended with exit status {status}{place} and returned nothing"
        return Cause("died", f"rank {member.rank} {how}", member.rank)
    return None


def _died_at(member: Member, book) -> str:
    """The line of a fatal signal's dump, else the last one that the ledger knows."""
    frames = stack(member)
    if frames:
        return places.of_frames(frames)
    return f"after {book.entries[-1].place}" if book.entries else ""


def _unpicklable(session: Session) -> Cause | None:
    for member in session.members:
        if member.final is not None and member.final[0] == "nopickle":
            kind, reason = json.loads(member.final[1])
            return Cause(
                "unpicklable_result",
                f"rank {member.rank} returned a {kind}, which cannot be sent back ({reason}); "
                "return tensors, numbers or plain containers of them",
                member.rank,
            )
    return None


def _limit(whereabouts: tuple[Whereabouts, ...], limit: str, deadline_s: float) -> Cause | None:
    if not limit:
        return None
    busy = [w for w in whereabouts if w.state == "running"] or [w for w in whereabouts if w.state == "waiting"]
    rank = busy[0].rank if len(busy) == 1 else None
    who = str(busy[0]) if len(busy) == 1 else f"{words.ranks([w.rank for w in busy])} {busy[0].state}"
    if limit == "stalled":
        sentence = f"nothing has moved for {IDLE_S:g} s and no rank is at work: what is waited for never comes; {who}"
        return Cause("stalled", sentence, rank, whereabouts)
    return Cause("deadline", f"not done after {deadline_s:g} s (the deadline); {who}", rank, whereabouts)


def _whereabouts(session: Session, ledgers, stacks) -> tuple[Whereabouts, ...]:
    """Per rank: the ledger's view, and the line from its stack where the ledger knows none."""
    result = []
    for seen, member in zip(verdict.whereabouts(ledgers, _states(session)), session.members, strict=True):
        state, place = seen.state, seen.place
        if member.state in ("exited", "raised"):
            state, place = member.state, places.readable(places.of_frames(json.loads(member.final[1])[2]))
        elif seen.state == "running" and stacks.get(member.rank):
            place = places.readable(places.of_frames(stacks[member.rank]))
        result.append(Whereabouts(member.rank, state, seen.doing, place))
    return tuple(result)
