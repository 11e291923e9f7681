"""Virtual time: every rank does its list in order, each action as soon as what it needs is there.

Exact in whatever numbers it is given (int, Fraction, float). A message takes `hand_over` and nobody stands still for
sending it. Left out: links that are shared, and sends that wait for their receiver (`messages`, and the replay of a
recorded run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from labkit.schedule.actions import Action, Result, Schedule, needs
from labkit.schedule.validate import check_valid

Seconds = Real | Sequence[Real]


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a rank, from start_s to end_s."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timing:
    """A schedule played. spans: by rank, then in order. time_s: when the last rank is done."""

    schedule: Schedule
    spans: tuple[Span, ...]
    time_s: float

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(span.end_s - span.start_s for span in self.spans if span.rank == rank)

    def idle_s(self, rank: int) -> float:
        """Seconds in which a rank does not compute, from the step's start to its end."""
        return self.time_s - self.busy_s(rank)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they do not compute; 0 when nothing takes any time."""
        whole = self.schedule.ranks * self.time_s
        return sum(map(self.idle_s, range(self.schedule.ranks))) / whole if whole else 0.0

    def in_flight(self, rank: int) -> tuple[tuple[float, int], ...]:
        """(time, forwards whose activations the rank keeps from then on), as `actions.in_flight` counts: one comes
        with the start of F, and goes with the end of B or W."""
        changes = []
        for span in self.spans:
            if span.rank == rank and span.action.kind != "I":
                changes.append((span.start_s, 1) if span.action.kind == "F" else (span.end_s, -1))
        found: dict[float, int] = {}
        count = 0
        for time_s, change in sorted(changes):  # at one instant what goes makes room for what comes
            count += change
            found[time_s] = count
        return tuple(found.items())


def play(
    schedule: Schedule, forward: Seconds = 1, input: Seconds = 1, weight: Seconds = 1, hand_over: Real = 0
) -> Timing:
    """Play a schedule with F, I and W taking these times, and B as long as I and W together.

    Each a number, or one per stage of the model. hand_over: from the end of an action to the start of the one on
    another rank that needs it. Raises ValueError for a schedule that is not valid, for times below 0, and for another
    number of times than stages.
    """
    check_valid(schedule)
    times = {kind: per_stage(schedule, kind, each) for kind, each in (("F", forward), ("I", input), ("W", weight))}
    if hand_over < 0:
        raise ValueError(f"hand_over is {hand_over}; a time is 0 or more")
    done: dict[Result, tuple[float, int]] = {}
    clocks, at = [0] * schedule.ranks, [0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(schedule.actions):
            while at[rank] < len(own) and all(need in done for need in needs(schedule, own[at[rank]])):
                action = own[at[rank]]
                ready = [_arrival(done[need], rank, hand_over) for need in needs(schedule, action)]
                start = max([clocks[rank], *ready])
                end = start + sum(times[kind][action.stage % schedule.num_stages] for kind, *_ in action.results)
                done.update((result, (end, rank)) for result in action.results)
                spans[rank].append(Span(rank, action, start, end))
                clocks[rank], moved = end, True
                at[rank] += 1
    return Timing(schedule, tuple(span for own in spans for span in own), max(clocks))


def _arrival(done: tuple[float, int], rank: int, hand_over: Real) -> float:
    end, source = done
    return end if source == rank else end + hand_over


def per_stage(schedule: Schedule, kind: str, seconds: Seconds) -> tuple[Real, ...]:
    """One time a stage of the model."""
    found = tuple(seconds) if isinstance(seconds, Sequence) else (seconds,) * schedule.num_stages
    if len(found) != schedule.num_stages:
        raise ValueError(f"{len(found)} times of {kind} for {schedule.num_stages} stages")
    if any(each < 0 for each in found):
        raise ValueError(f"times of {kind} are {seconds}; a time is 0 or more")
    return found
