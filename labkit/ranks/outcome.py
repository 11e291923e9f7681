"""What a launch leaves behind: frozen records of results, causes and whereabouts, and the error that carries them.

Left out: how a cause is found (`verdict`, `watch`) and how a place is turned into words (`places`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.ranks.ledger import Entry
    from labkit.ranks.sockets import SocketBytes


class LaunchError(ValueError):
    """The call itself cannot be carried out (world size, function that cannot be sent, ...)."""


@dataclass(frozen=True)
class Whereabouts:
    """Where one rank was: `state` is returned, raised, exited, died, waiting or running."""

    rank: int
    state: str
    doing: str = ""
    place: str = ""

    def __str__(self) -> str:
        doing = f" in {self.doing}" if self.doing else ""
        place = f" ({self.place})" if self.place else ""
        return f"rank {self.rank}: {self.state}{doing}{place}"


@dataclass(frozen=True)
class Cause:
    """Why a launch failed: a short `code`, one sentence, the rank at fault (None: no single one)."""

    code: str
    sentence: str
    rank: int | None = None
    whereabouts: tuple[Whereabouts, ...] = ()
    traceback: str = ""


@dataclass(frozen=True)
class Outcome:
    """Everything a launch knows afterwards. Tuples are in rank order.

    `socket_bytes` were read by this process from the ranks' own TCP sockets (None where the system
    forbids it); `sequence_numbers` map a group's name to the process group's own counter.
    """

    results: tuple[Any, ...]
    cause: Cause | None
    ledgers: tuple[tuple[Entry, ...], ...]
    reports: tuple[tuple[int, dict[str, Any]], ...]
    output: tuple[str, ...]
    socket_bytes: tuple[SocketBytes, ...] | None
    sequence_numbers: tuple[dict[str, int], ...]
    time_s: float
    backend: str


class RankFailed(RuntimeError):
    """Raised by `launch` when the ranks did not all return in agreement. `cause` says why."""

    def __init__(self, cause: Cause):
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return "\n".join(_lines(self.cause))

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines instead of a traceback through labkit; it must not raise.
        try:
            return [f"RankFailed [{self.cause.code}]", *_lines(self.cause)]
        except Exception as error:  # a broken cause must still reach the reader
            return [f"RankFailed ({type(error).__name__} while rendering the cause)"]


class Stopped(KeyboardInterrupt):
    """The stop button was pressed while ranks ran; they have been ended. Says where each of them was."""

    def __init__(self, whereabouts: tuple[Whereabouts, ...]):
        super().__init__("; ".join(map(str, whereabouts)))
        self.whereabouts = whereabouts

    def _render_traceback_(self) -> list[str]:
        return ["stopped; the ranks were ended", *(f"  {whereabouts}" for whereabouts in self.whereabouts)]


def _lines(cause: Cause) -> list[str]:
    lines = [cause.sentence]
    lines += [f"  {whereabouts}" for whereabouts in cause.whereabouts]
    return lines + ([cause.traceback.rstrip()] if cause.traceback else [])
