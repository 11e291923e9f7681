"""What is wrong with a schedule, in one sentence.

Looked for in this order, the first found is told: stages and microbatches that are not there, what is done twice or
not at all, a backward before its forward, W before I, a wait that never ends, too many microbatches in flight, sends
that wait for each other. Actions of a list are counted from 1. Left out: whether a schedule is a good one (`timing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.schedule.actions import Action, Result, Schedule, in_flight, needs
from labkit.schedule.messages import SENDS, Stuck, circle, stuck_messages

WORDS = {"F": "the forward", "I": "the backward", "W": "the weights' gradient"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong. rank, position: where, position counted from 1 within the rank's list; 0 where it is nowhere.

    code: "unknown" (a stage or microbatch that is not there), "misplaced" (a stage of another rank), "twice",
    "missing", "backward_first", "weight_first", "dependency", "in_flight" or "deadlock".
    """

    code: str
    rank: int
    position: int
    sentence: str


def validate(schedule: Schedule, limits: int | Sequence[int] | None = None, sends: str = "isend") -> Fault | None:
    """The first fault of a schedule, None for a valid one.

    limits: how many microbatches may be in flight (`actions.in_flight`), one number or one per rank; None for no limit.
    sends: how a rank sends, when a send is over only once its receiver takes it (`messages.SENDS`). Raises ValueError
    for another `sends`, and for another number of limits than ranks.
    """
    if sends not in SENDS:
        raise ValueError(f"sends is {sends!r}; it can be {', '.join(SENDS)}")
    found = _strange(schedule) or _uncounted(schedule) or _misordered(schedule) or _stuck(schedule)
    if found is None and limits is not None:
        found = _too_many(schedule, limits)
    if found is None and (waits := stuck_messages(schedule, sends)):
        found = Fault("deadlock", waits[0].rank, waits[0].position, _told(waits))
    return found


def check_valid(schedule: Schedule) -> None:
    """ValueError with what is wrong, for a schedule whose ranks would not come to an end."""
    if (fault := validate(schedule)) is not None:
        raise ValueError(f"schedule {schedule.name}: {fault.sentence}")


def _strange(schedule: Schedule) -> Fault | None:
    for rank, own in enumerate(schedule.actions):
        for position, action in enumerate(own, 1):
            where = f"{action} of rank {rank} (action {position})"
            if action.stage >= len(schedule.placement):
                last = len(schedule.placement) - 1
                return Fault("unknown", rank, position, f"{where}: stages are 0 to {last}")
            passing = schedule.microbatches_of(action.stage)
            if action.microbatch not in passing:
                sentence = f"{where}: through stage {action.stage} pass microbatches {passing[0]} to {passing[-1]}"
                return Fault("unknown", rank, position, sentence)
            if schedule.placement[action.stage] != rank:
                sentence = f"{where}: stage {action.stage} is on rank {schedule.placement[action.stage]}"
                return Fault("misplaced", rank, position, sentence)
    return None


def _uncounted(schedule: Schedule) -> Fault | None:
    """Every result of every stage and microbatch is made once."""
    made = Counter(result for own in schedule.actions for action in own for result in action.results)
    for rank, own in enumerate(schedule.actions):
        seen: dict[Result, int] = {}
        for position, action in enumerate(own, 1):
            for result in action.results:
                if result in seen:
                    return Fault("twice", rank, position, _twice(rank, action, position, result, own, seen[result]))
                seen[result] = position
    for stage, rank in enumerate(schedule.placement):
        for microbatch in schedule.microbatches_of(stage):
            lacking = [kind for kind in "FIW" if not made[kind, stage, microbatch]]
            if lacking:
                return Fault("missing", rank, 0, _missing(rank, stage, microbatch, lacking))
    return None


def _twice(rank: int, action: Action, position: int, result: Result, own: Sequence[Action], before: int) -> str:
    first = own[before - 1]
    if first == action:
        return f"rank {rank} does {action} twice, as actions {before} and {position}"
    what = f"{WORDS[result[0]]} of microbatch {action.microbatch} at stage {action.stage}"
    return f"rank {rank} does {what} twice, in {first} (action {before}) and in {action} (action {position})"


def _missing(rank: int, stage: int, microbatch: int, lacking: Sequence[str]) -> str:
    name = "B" if lacking[-2:] == ["I", "W"] else lacking[-1]
    if lacking[0] == "F":
        name = "F"
    also = {"B": f" (nor {stage}I{microbatch} and {stage}W{microbatch})", "W": ", though it has the I"}.get(name, "")
    return f"{stage}{name}{microbatch} is missing: rank {rank} never does it{also}"


def _misordered(schedule: Schedule) -> Fault | None:
    """Within a stage, which has one rank: F, then I, then W."""
    for rank, own in enumerate(schedule.actions):
        at = {result: position for position, action in enumerate(own, 1) for result in action.results}
        for position, action in enumerate(own, 1):
            stage, microbatch = action.stage, action.microbatch
            if action.kind == "F":
                continue
            where = f"rank {rank} does {action} (action {position}) before"
            if at["F", stage, microbatch] > position:
                later = f"{stage}F{microbatch} (action {at['F', stage, microbatch]})"
                return Fault("backward_first", rank, position, f"{where} {later}: a backward needs its forward")
            if action.kind == "W" and at["I", stage, microbatch] > position:
                later = f"{stage}I{microbatch} (action {at['I', stage, microbatch]})"
                return Fault("weight_first", rank, position, f"{where} {later}: W uses the gradients that I computes")
    return None


def _stuck(schedule: Schedule) -> Fault | None:
    """Let every rank go as far as it can, sending for nothing: whoever is left waits in a circle."""
    done: set[Result] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(schedule.actions):
            while at[rank] < len(own) and done.issuperset(needs(schedule, own[at[rank]])):
                done.update(own[at[rank]].results)
                at[rank] += 1
                moved = True
    waits = {}
    for rank, own in enumerate(schedule.actions):
        if at[rank] < len(own):
            action = own[at[rank]]
            kind, stage, microbatch = next(need for need in needs(schedule, action) if need not in done)
            other = schedule.placement[stage]
            who = "itself" if other == rank else f"rank {other}"
            words = f"for {WORDS[kind]} of microbatch {microbatch} at stage {stage}, from {who}"
            waits[rank] = Stuck(rank, at[rank] + 1, other, f"before {action} (action {at[rank] + 1}) {words}")
    if not waits:
        return None
    found = circle(waits)
    return Fault("dependency", found[0].rank, found[0].position, _told(found))


def _told(waits: Sequence[Stuck]) -> str:
    parts = "; ".join(f"rank {wait.rank} waits {wait.words}" for wait in waits)
    if len(waits) == 1 and waits[0].other == waits[0].rank:
        return f"{parts}, which it would do later"
    return f"{parts}; nobody goes on"


def _too_many(schedule: Schedule, limits: int | Sequence[int]) -> Fault | None:
    limits = [limits] * schedule.ranks if isinstance(limits, int) else list(limits)
    if len(limits) != schedule.ranks:
        raise ValueError(f"{len(limits)} limits of microbatches in flight for {schedule.ranks} ranks")
    for rank, (counts, limit) in enumerate(zip(in_flight(schedule), limits, strict=True)):
        for position, count in enumerate(counts, 1):
            if count > limit:
                action = schedule.actions[rank][position - 1]
                stages = len(schedule.stages_of(rank))
                what = "microbatches" if stages == 1 else f"forwards of its {stages} stages"
                sentence = (
                    f"rank {rank} has {count} {what} in flight after {action} (action {position}); "
                    f"at most {limit} may be"
                )
                return Fault("in_flight", rank, position, sentence)
    return None
