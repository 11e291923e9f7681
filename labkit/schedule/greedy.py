"""Lists made in virtual time: at each instant every free rank takes what it can do, by a fixed order of preference.

For schedules with too few microbatches for a list that is written by hand. F, I and W take one unit each. Left out:
any search; `shortest` takes the best of a few preferences, which need not be the best there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.schedule.actions import Action, Result, Schedule, needs

Preference = Sequence[tuple[str, int]]  # (kind, chunk), what is liked best first; chunk: of the rank's stages, from 0


def shortest(schedule: Schedule, preferences: Sequence[Preference], limit: int) -> Schedule:
    """The same stages with lists made anew, those of the preference with which a step ends first.

    limit: forwards whose activations a rank may keep (`actions.in_flight`). Raises ValueError when with none of the
    preferences a step ends within that limit.
    """
    made = [_lists(schedule, preference, limit) for preference in preferences]
    ended = [each for each in made if each is not None]
    if not ended:
        raise ValueError(f"{schedule.name}: no list was found with at most {limit} microbatches in flight")
    _, lists = min(ended, key=lambda each: each[0])
    for rank, own in enumerate(lists):
        schedule = schedule.with_actions(rank, tuple(own))
    return schedule


def _lists(schedule: Schedule, preference: Preference, limit: int) -> tuple[int, list[list[Action]]] | None:
    """(units of time, lists); None when nobody can go on."""
    lists: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    left = [_liked(schedule, rank, preference) for rank in range(schedule.ranks)]
    held, time, done = [0] * schedule.ranks, 0, set()
    while any(left):
        chosen = [_choice(schedule, own, done, held[rank] < limit) for rank, own in enumerate(left)]
        if not any(chosen):
            return None
        for rank, action in enumerate(chosen):
            if action is not None:
                left[rank].remove(action)
                lists[rank].append(action)
                held[rank] += {"F": 1, "W": -1}.get(action.kind, 0)
                done.update(action.results)
        time += 1
    return time, lists


def _liked(schedule: Schedule, rank: int, preference: Preference) -> list[Action]:
    """All that a rank is to do, by preference, then by microbatch."""
    stages = schedule.stages_of(rank)
    return [
        Action(kind, stages[chunk], microbatch)
        for kind, chunk in preference
        for microbatch in schedule.microbatches_of(stages[chunk])
    ]


def _choice(schedule: Schedule, own: list[Action], done: set[Result], room: bool) -> Action | None:
    for action in own:
        if (room or action.kind != "F") and done.issuperset(needs(schedule, action)):
            return action
    return None
