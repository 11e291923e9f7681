"""Zero-bubble schedules, whose backward is cut in two: I hands the gradient on, W waits for a gap.

Left out: ZB-H2, whose bubble is gone only when the optimizer's synchronisation is, too (its formula is in `theory`),
and the automatic search of the paper's section 3.
"""

from __future__ import annotations

from labkit.schedule.actions import Action, Schedule
from labkit.schedule.classic import check_sizes
from labkit.schedule.greedy import shortest


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (arXiv:2401.10241, section 2.1): 1F1B, with the W of rank r starting r microbatches late.

    So at most p microbatches are in flight on every rank, as many as on 1F1B's first one, and the delayed Ws fill the
    gaps at the end. ValueError for sizes below 1.
    """
    check_sizes(ranks, microbatches)
    lists = []
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - rank - 1)
        own = [Action("F", rank, i) for i in range(warm_up)]
        for i in range(microbatches):
            if warm_up + i < microbatches:
                own.append(Action("F", rank, warm_up + i))
            own.append(Action("I", rank, i))
            if i >= rank:
                own.append(Action("W", rank, i - rank))
        own += [Action("W", rank, i) for i in range(max(0, microbatches - rank), microbatches)]
        lists.append(tuple(own))
    return Schedule("ZB-H1", ranks, microbatches, tuple(range(ranks)), tuple(lists))


# With few microbatches: forwards first, and the first stage's Ws at once (never the longer one from p - 1 microbatches
# up) or with all others in the gaps that are left (below that).
PREFERENCES = (
    (("F", 1), ("F", 0), ("I", 0), ("W", 0), ("I", 1), ("W", 1)),
    (("F", 1), ("F", 0), ("I", 0), ("I", 1), ("W", 0), ("W", 1)),
)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (arXiv:2401.10241, section 6): rank r has stages r and 2p - 1 - r, so that a microbatch goes down and up.

    In the order of torch's ScheduleZBVZeroBubble, which is made for F, I and W that take equally long and for at least
    2p - 1 microbatches; with fewer, lists by `greedy`, whose bubble is the same down to p microbatches. At most 2p
    chunks in flight, which are as many layers as p stages of 1F1B. ValueError for sizes below 1.
    """
    check_sizes(ranks, microbatches)
    placement = (*range(ranks), *reversed(range(ranks)))
    if microbatches < 2 * ranks - 1:
        return shortest(Schedule("ZB-V", ranks, microbatches, placement, ((),) * ranks), PREFERENCES, 2 * ranks)
    lists = [tuple(_v_list(ranks, rank, microbatches)) for rank in range(ranks)]
    return Schedule("ZB-V", ranks, microbatches, placement, tuple(lists))


def _v_list(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """One rank's list: `down` is its first stage, `up` its second."""
    down, up = rank, 2 * ranks - 1 - rank
    own: list[Action] = []
    done: dict[tuple[str, int], int] = {}

    def do(kind: str, stage: int) -> None:
        microbatch = done.get((kind, stage), 0)
        done[kind, stage] = microbatch + 1
        own.append(Action(kind, stage, microbatch))

    for _ in range(2 * (ranks - rank) - 1):
        do("F", down)
    for _ in range(rank):
        do("F", up)
        do("F", down)
    for _ in range(ranks - rank):
        for kind in "FIW":
            do(kind, up)
    while done["F", up] < microbatches:
        if done["F", down] < microbatches:
            do("F", down)
        do("I", down)
        do("W", down)
        for kind in "FIW":
            do(kind, up)
    for _ in range(rank):
        do("I", down)
        do("I", up)
    for _ in range(ranks - rank):
        do("I", down)
        do("W", down)
    for stage in (up, down):
        while done["W", stage] < microbatches:
            do("W", stage)
    return own
