"""The messages that follow from a schedule: which there are, in which order ranks post them, and who gets stuck.

A send is a rendezvous: it is over when its receiver takes it, as with gloo and with NCCL's large messages. Left out:
sizes, and the gradients that copies and tied weights add up at the end of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.schedule.actions import Action, Result, Schedule, needs

# isend: sends are waited for at the end, and hold nothing up, as with gloo. (What two ranks post for each other, NCCL
# does one by one, isend or not: there one order on both sides helps, as in `plan`, or one batch.) paired: the send
# after an action and the receive before the next are one batch, waited for together (Megatron-LM's
# send_forward_recv_backward). blocking: each by itself, as dist.send.
SENDS = ("isend", "paired", "blocking")


@dataclass(frozen=True, order=True, slots=True)
class Message:
    """What one rank hands another: the output of `stage` (kind F), or the gradient of its input (kind I)."""

    kind: str
    stage: int
    microbatch: int
    source: int
    destination: int

    @property
    def words(self) -> str:
        what = "the output" if self.kind == "F" else "the input's gradient"
        return f"{what} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a rank's program: do is "send", "recv" or "compute"; what: the message or the action."""

    do: str
    what: Message | Action


def sent(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action gives rise to; None where nobody else needs its result."""
    if action.kind == "W":
        return None
    forward = action.kind == "F"
    if schedule.is_last(action.stage) if forward else schedule.is_first(action.stage):
        return None
    source, destination = schedule.placement[action.stage], schedule.placement[action.stage + (1 if forward else -1)]
    if source == destination:
        return None
    return Message("F" if forward else "I", action.stage, action.microbatch, source, destination)


def received(schedule: Schedule, action: Action) -> Message | None:
    """The message that must have come before an action; None where there is none."""
    for kind, stage, microbatch in needs(schedule, action):
        source = schedule.placement[stage]
        if source != schedule.placement[action.stage]:
            return Message(kind, stage, microbatch, source, schedule.placement[action.stage])
    return None


def plan(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Per rank, what to post and to compute in which order, so that no two ranks ever wait for each other.

    All messages have one order, and every rank posts its part of them in that order: a receive is posted when its
    sender sends, which is before the receiver needs it. So no send is kept waiting by a receive that comes after it on
    either side, and messages between two ranks match by order alone (NCCL knows no tags). The order is that of a run
    in which ranks take turns, an action each. For a valid schedule.
    """
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    done: set[Result] = set()
    at = [0] * schedule.ranks
    while any(at[rank] < len(own) for rank, own in enumerate(schedule.actions)):
        able = [
            rank
            for rank, own in enumerate(schedule.actions)
            if at[rank] < len(own) and done.issuperset(needs(schedule, own[at[rank]]))
        ]
        if not able:
            raise ValueError(f"schedule {schedule.name} never ends; `validate` says why")
        for rank in able:
            action = schedule.actions[rank][at[rank]]
            steps[rank].append(Step("compute", action))
            if (message := sent(schedule, action)) is not None:
                steps[rank].append(Step("send", message))
                steps[message.destination].append(Step("recv", message))
            done.update(action.results)
            at[rank] += 1
    return tuple(map(tuple, steps))


def taken(schedule: Schedule, steps: tuple[tuple[Step, ...], ...]) -> dict[Message, tuple[Message, ...]]:
    """Per message, which messages the other way have surely been taken once it is there.

    They are those that its sender had needed by then. Whoever sent them may let go of them without waiting: a rank
    that keeps what it sent until the step ends holds a tensor for every microbatch, whatever its schedule.
    """
    found: dict[Message, tuple[Message, ...]] = {}
    for own in steps:
        needed: dict[int, list[Message]] = {}
        for step in own:
            if step.do == "compute" and (message := received(schedule, step.what)) is not None:
                needed.setdefault(message.source, []).append(message)
            elif step.do == "send":
                found[step.what] = tuple(needed.pop(step.what.destination, ()))
    return found


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that waits for ever for `other` (or itself), `position` being the action before which or after which."""

    rank: int
    position: int
    other: int
    words: str


def stuck_messages(schedule: Schedule, sends: str) -> list[Stuck]:
    """Who waits for whom when sends are rendezvous and ranks send so (SENDS); [] when all come to the end.

    For a schedule whose actions can all be done; with "isend" it then always comes to the end.
    """
    if sends == "isend":
        return []
    programs = [_batches(schedule, rank, sends == "paired") for rank in range(schedule.ranks)]
    at = [0] * schedule.ranks
    over: set[Message] = set()
    moved = True
    while moved:
        posted: dict[Message, int] = {}
        for rank, program in enumerate(programs):
            for message, _, _ in program[at[rank]] if at[rank] < len(program) else ():
                posted[message] = posted.get(message, 0) + 1
        over.update(message for message, ends in posted.items() if ends == 2)
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] < len(program) and all(message in over for message, _, _ in program[at[rank]]):
                at[rank] += 1
                moved = True
    return _who_waits(programs, at, over)


Batch = list[tuple[Message, int, str]]  # (message, position of the action, how it stands to it in words)


def _batches(schedule: Schedule, rank: int, paired: bool) -> list[Batch]:
    """What a rank waits for together, in order."""
    found: list[Batch] = []
    after: Batch = []
    for position, action in enumerate(schedule.actions[rank], 1):
        before = received(schedule, action)
        needed = [(before, position, f"before {action} (action {position})")] if before is not None else []
        found += [after + needed] if paired else [after, needed]
        message = sent(schedule, action)
        after = [(message, position, f"after {action} (action {position})")] if message is not None else []
    return [batch for batch in [*found, after] if batch]


def _who_waits(programs: list[list[Batch]], at: list[int], over: set[Message]) -> list[Stuck]:
    """A circle of those that are stuck."""
    waits: dict[int, Stuck] = {}
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            message, position, where = next(each for each in program[at[rank]] if each[0] not in over)
            sends = message.source == rank
            other = message.destination if sends else message.source
            way = f"to send rank {other} {message.words}" if sends else f"for {message.words}, from rank {other}"
            waits[rank] = Stuck(rank, position, other, f"{where} {way}")
    return circle(waits)


def circle(waits: Mapping[int, Stuck]) -> list[Stuck]:
    """Of who waits for whom, a circle, in order of ranks; [] when nobody waits."""
    if not waits:
        return []
    path, rank = [], next(iter(waits))
    while rank not in path:
        path.append(rank)
        rank = waits[rank].other
    return [waits[each] for each in sorted(path[path.index(rank) :])]
