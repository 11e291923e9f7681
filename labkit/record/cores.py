"""Cores that ranks share: the more of them compute at once, the longer each takes.

Rates on a node change when a rank begins or ends computing, or a transfer. A transfer keeps a share of a core busy for
each of its ranks: it copies and adds, and wakes threads, as gloo does; the rest of its time it waits. Left out: which
core a rank is on, and what a scheduler does for threads that have slept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from labkit.record.events import Op
from labkit.record.meeting import Communication
from labkit.record.prices import Prices
from labkit.record.streams import Stream
from labkit.record.timeline import Span


class Cores:
    """The work under way on every node. tell(time_s, stream): called with the time at which a stream's work will end,
    each time anew when that changes.
    """

    def __init__(self, prices: Prices, tell: Callable[[float, Stream], None]):
        self.prices, self.tell = prices, tell
        self.busy: dict[int, list[Stream | Communication]] = defaultdict(list)  # a transfer stands for each rank of it

    def begin(self, host: int, stream: Stream, work: list[tuple[Op, float]]) -> None:
        """A stream has work from `stream.now` on."""
        stream.work = deque(work)
        stream.left_s = sum(seconds for _, seconds in work)
        stream.moved_s = stream.now
        self.busy[host].append(stream)

    def finish(self, host: int, stream: Stream, time_s: float) -> list[Span]:
        """A stream's work is over; the spans of the ops that were left."""
        spans = _played(stream, float("inf"), time_s)
        self.busy[host].remove(stream)
        stream.now = time_s
        return spans

    def retime(self, host: int, time_s: float) -> list[Span]:
        """Who is busy here has changed: say anew when the streams' work will end. Gives spans of what is done."""
        spans, stretch = [], self.stretch(host)
        for stream in self.busy[host]:
            if isinstance(stream, Stream):
                spans += _played(stream, (time_s - stream.moved_s) * stream.rate, time_s)
                stream.rate = 1.0 / stretch
                stream.version += 1
                self.tell(time_s + stream.left_s / stream.rate, stream)
        return spans

    def stretch(self, host: int) -> float:
        """How many times longer computing takes on a node now."""
        busy, moving = self.busy[host], len(self.transfers(host))
        return self.prices.stretch(len(busy) - moving + moving * self.prices.busy_share)

    def transfers(self, host: int) -> list[Communication]:
        """Transfers under way on a node."""
        return [busy for busy in self.busy[host] if isinstance(busy, Communication)]


def _played(stream: Stream, seconds: float, time_s: float) -> list[Span]:
    """Take `seconds` of work, done by time_s, off a stream; the spans of the ops that have ended.

    `stream.now` is where the op under way began.
    """
    spans, clock = [], stream.moved_s
    stream.left_s = max(0.0, stream.left_s - seconds)
    while stream.work and stream.work[0][1] <= seconds:
        op, left = stream.work.popleft()
        seconds -= left
        clock = min(clock + left / stream.rate, time_s) if stream.work else time_s
        spans.append(Span(stream.rank, stream.name, "compute", op.name, stream.now, clock, op.index))
        stream.now = clock
    if stream.work:
        op, left = stream.work[0]
        stream.work[0] = op, left - seconds
    stream.moved_s = time_s
    return spans
