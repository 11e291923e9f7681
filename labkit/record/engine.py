"""The clock of a replay: compute streams that run ahead, communications that meet, cards and cores that are shared.

A compute stream plays its events until it needs something that has not ended; a heap holds what ends or can start
next. Everything that happens at one instant happens in a fixed order, so a replay is the same to the last digit.
Left out: what things cost (`prices`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence

from labkit.record.cores import Cores
from labkit.record.events import Collective, Op, PointToPoint, RankRecord, Wait
from labkit.record.meeting import Communication, Meetings
from labkit.record.prices import Prices
from labkit.record.streams import Stream, streams_of
from labkit.record.timeline import Span

# At one instant: what ends makes room for what starts.
END, TRANSFER, COMPUTED, START = range(4)


class Engine:
    """Plays records. After `run`, `spans` and the state of `streams` and `meetings` tell what happened."""

    def __init__(self, records: Sequence[RankRecord], prices: Prices, eager: bool):
        self.prices = prices
        self.meetings = Meetings(records, eager)
        # Ranks that share a processor's cores have one stream: a CPU's.
        self.streams = [streams_of(record, prices.host(record.rank) is not None) for record in records]
        # By event: when it was done (communications, and what another stream needs), and who sleeps until then.
        self.done: list[dict[int, float]] = [{} for _ in records]
        self.sleepers: list[dict[int, list[Stream]]] = [{} for _ in records]
        self.waited: list[set[int]] = [set() for _ in records]
        self.runnable: deque[Stream] = deque()
        self.heap: list[tuple] = []
        self.pushed = 0
        self.taken: set[tuple[int, str]] = set()  # ports and communication streams in use
        self.parked: dict[tuple[int, str], list[tuple]] = defaultdict(list)  # heaps of what could start, but for them
        self.on_card: dict[str, list[Communication]] = defaultdict(list)
        self.cores = Cores(prices, self.push_computed)
        self.spans: list[Span] = []

    def run(self) -> None:
        self.runnable.extend(stream for streams in self.streams for stream in streams)
        while True:
            while self.runnable:
                self.advance(self.runnable.popleft())
            if not self.heap:
                return
            time_s, kind, _, _, what, version = heapq.heappop(self.heap)
            if kind == START:
                self.start(what, time_s)
            elif kind == TRANSFER:
                self.transfer(what, time_s)
            elif version == what.version:
                if kind == END:
                    self.end(what, time_s)
                else:
                    host = self.prices.host(what.rank)
                    self.spans += self.cores.finish(host, what, time_s)
                    self.share(time_s, hosts=(host,))
                    self.runnable.append(what)

    def push(self, time_s: float, kind: int, what: Communication | Stream, order: int = 0) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time_s, kind, order, self.pushed, what, what.version))

    def push_computed(self, time_s: float, stream: Stream) -> None:
        self.push(time_s, COMPUTED, stream)

    def advance(self, stream: Stream) -> None:
        """Play a stream's events up to the first that cannot go on."""
        events, host = stream.events, self.prices.host(stream.rank)
        while stream.at < len(events):
            event = events[stream.at]
            kind = type(event)
            if stream.needs and not self.has_what_it_needs(stream, event):
                return
            if kind is Op:
                if host is not None:
                    if self.compute_on(host, stream):
                        return
                    continue
                self.compute(stream, event)
            elif kind is Wait:
                if not self.join(stream, event):
                    return
            else:
                self.issue(stream, event)
            stream.at += 1

    def has_what_it_needs(self, stream: Stream, event: Op | Collective | PointToPoint | Wait) -> bool:
        """Whether what other streams had to do first is done; else the stream sleeps until then."""
        done = self.done[stream.rank]
        for index in stream.needs.get(event.index, ()):
            if index not in done:
                self.sleep(stream, index)
                return False
            stream.now = max(stream.now, done[index])
        return True

    def sleep(self, stream: Stream, event: int) -> None:
        self.sleepers[stream.rank].setdefault(event, []).append(stream)

    def mark_done(self, rank: int, event: int, time_s: float) -> None:
        self.done[rank][event] = time_s
        if event in self.sleepers[rank]:
            self.runnable.extend(self.sleepers[rank].pop(event))

    def compute(self, stream: Stream, op: Op) -> None:
        """On a device of its own: the stream runs ahead."""
        start = stream.now
        seconds = 0.0 if op.view else self.prices.op(stream.rank, op)
        if seconds > 0:
            stream.now = end = start + seconds
            self.spans.append(Span(stream.rank, stream.name, "compute", op.name, start, end, op.index))
        if op.index in stream.needed:
            self.mark_done(stream.rank, op.index, stream.now)

    def compute_on(self, host: int, stream: Stream) -> bool:
        """On shared cores: everything up to the next communication or wait, as one piece of work. False: nothing."""
        work = []
        while stream.at < len(stream.events) and type(op := stream.events[stream.at]) is Op:
            seconds = 0.0 if op.view else self.prices.op(stream.rank, op)
            if seconds > 0:
                work.append((op, seconds))
            stream.at += 1
        if not work:
            return False
        self.cores.begin(host, stream, work)
        self.share(stream.now, hosts=(host,))
        return True

    def join(self, stream: Stream, wait: Wait) -> bool:
        """The stream waits for a communication; False: it has not ended yet."""
        end = self.done[stream.rank].get(wait.of)
        if end is None:
            self.sleep(stream, wait.of)
            return False
        self.waited[stream.rank].add(wait.of)
        if end > stream.now:
            label = self.meetings.of[stream.rank, wait.of].label(stream.rank)
            self.spans.append(Span(stream.rank, stream.name, "wait", label, stream.now, end, wait.of))
            stream.now = end
        return True

    def issue(self, stream: Stream, event: Collective | PointToPoint) -> None:
        """Put a communication forward; it can start when all that must come have come."""
        communication, complete = self.meetings.issue(stream.rank, event, stream.now)
        if complete:
            self.meetings.price(communication, self.prices)
            self.push(communication.ready_s, START, communication, communication.number)
        elif communication.end_s is not None:  # a recv for what has come already
            self.arrived(communication, stream.rank, communication.stream(stream.rank))

    def start(self, communication: Communication, time_s: float) -> None:
        taken = self.taken.intersection(communication.streams)
        if taken:
            heapq.heappush(self.parked[min(taken)], (communication.number, communication))
            for stream in communication.streams:
                if stream not in taken:
                    self.wake(stream, time_s)
            return
        communication.start_s = time_s
        self.taken.update(communication.streams)
        latency_s, transfer_s = communication.latency_s, communication.transfer_s
        if (communication.cards or communication.hosts) and transfer_s > 0:
            self.push(time_s + latency_s, TRANSFER, communication, communication.number)
        else:
            self.push(time_s + latency_s + transfer_s, END, communication, communication.number)

    def wake(self, stream: tuple[int, str], time_s: float) -> None:
        """A port or communication stream is free: the first that is parked there may try."""
        if self.parked[stream]:
            number, communication = heapq.heappop(self.parked[stream])
            self.push(time_s, START, communication, number)

    def transfer(self, communication: Communication, time_s: float) -> None:
        """Its latency is over: from now on it shares cards and cores."""
        communication.left_s, communication.moved_s = communication.transfer_s, time_s
        for card in communication.cards:
            self.on_card[card].append(communication)
        for host in communication.hosts:
            self.cores.busy[host].append(communication)
        self.share(time_s, communication.cards, communication.hosts)

    def share(self, time_s: float, cards: tuple[str, ...] = (), hosts: tuple[int, ...] = ()) -> None:
        """The load of these cards and nodes has changed, and so the rate of all that goes on there."""
        flows = {flow.number: flow for card in cards for flow in self.on_card[card]}
        for host in dict.fromkeys(hosts):
            flows.update((flow.number, flow) for flow in self.cores.transfers(host))
            self.spans += self.cores.retime(host, time_s)
        for _, flow in sorted(flows.items()):
            flow.left_s = max(0.0, flow.left_s - (time_s - flow.moved_s) * flow.rate)
            flow.moved_s = time_s
            loads = [float(len(self.on_card[card])) for card in flow.cards]
            at_rest = self.prices.at_rest
            flow.rate = 1.0 / max(loads + [self.cores.stretch(host) / at_rest for host in flow.hosts])
            flow.version += 1
            self.push(time_s + flow.left_s / flow.rate, END, flow, flow.number)

    def end(self, communication: Communication, time_s: float) -> None:
        communication.end_s = time_s
        if communication.transfer_s > 0:
            for card in communication.cards:
                self.on_card[card].remove(communication)
            for host in communication.hosts:
                self.cores.busy[host].remove(communication)
            self.share(time_s, communication.cards, communication.hosts)
        self.taken.difference_update(communication.streams)
        for stream in communication.streams:
            self.wake(stream, time_s)
        for rank, stream in communication.streams:
            if rank in communication.members:
                self.arrived(communication, rank, stream)

    def arrived(self, communication: Communication, rank: int, stream: str) -> None:
        """A communication has ended and this member of it is there."""
        event, _ = communication.members[rank]
        start, end = communication.start_s, communication.end_s
        if end > start:
            label = communication.label(rank)
            self.spans.append(Span(rank, stream, "communication", label, start, end, event))
        self.mark_done(rank, event, end)
