"""What a replay gives: spans of time on the streams of every rank, and what was found on the way.

Left out: how it comes about (`engine`), and figures that are graded (`measures`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Something that occupies a stream of a rank from start_s to end_s.

    kind: "compute", "communication", or "wait" (a compute stream stands still for communication `event`).
    stream: "compute" ("compute 2", ... for further CUDA streams), "group <name>", "send" or "recv".
    event: index in the rank's record, of the op or of the communication.
    """

    rank: int
    stream: str
    kind: str
    label: str
    start_s: float
    end_s: float
    event: int

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Message:
    """A message that passed from start_s to end_s. send, recv: event indexes in the records of its two ranks."""

    source: int
    destination: int
    send: int
    recv: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with communication `event` (an index in the record of `rank`). code:

    "never_waited": the rank was done without having waited for it, so nothing says that it had ended.
    "unmatched": its other end never came.
    """

    code: str
    rank: int
    event: int
    sentence: str


@dataclass(frozen=True)
class Replay:
    """A replayed record. time_s is the latest end over all streams of all ranks.

    deadlock: "" or the sentence that says who waits for whom; then time_s is when all stood still.
    """

    world_size: int
    time_s: float
    spans: tuple[Span, ...]
    messages: tuple[Message, ...]
    findings: tuple[Finding, ...]
    deadlock: str

    @property
    def never_waited(self) -> tuple[Finding, ...]:
        """The findings "never waited for": communication in flight when its rank was done."""
        return tuple(finding for finding in self.findings if finding.code == "never_waited")

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank computes, on one stream or on several at once."""
        return length_s(union(self._of(rank, "compute")))

    def exposed_s(self, rank: int) -> float:
        """Seconds in which a rank stands still for communication: some stream waits and none computes."""
        computing = self._of(rank, "compute")
        return length_s(union(computing + self._of(rank, "wait"))) - length_s(union(computing))

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they do not compute; 0 when nothing takes any time."""
        if not self.time_s:
            return 0.0
        return 1.0 - sum(map(self.busy_s, range(self.world_size))) / (self.world_size * self.time_s)

    def _of(self, rank: int, kind: str) -> list[tuple[float, float]]:
        return [(span.start_s, span.end_s) for span in self.spans if span.rank == rank and span.kind == kind]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments as intervals that are apart, in order."""
    apart: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if apart and start <= apart[-1][1]:
            if end > apart[-1][1]:
                apart[-1] = (apart[-1][0], end)
        else:
            apart.append((start, end))
    return apart


def length_s(apart: Iterable[tuple[float, float]]) -> float:
    """Seconds that intervals take together."""
    return sum(end - start for start, end in apart)
