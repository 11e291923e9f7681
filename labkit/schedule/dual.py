"""DualPipe and DualPipeV: microbatches enter a pipeline at both ends.

Left out: the overlap of a forward's communication with a backward's computing, for which it was made. Here a forward
and a backward that would overlap stand one after the other, and the forward's output is handed on before the backward.
"""

from __future__ import annotations

from labkit.schedule.actions import Action, Schedule
from labkit.schedule.classic import check_sizes


def dual_pipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1 and figure 5; github.com/deepseek-ai/DualPipe).

    Two copies of the model: rank r has stage r of the first and stage p - 1 - r of the second, which is stage
    2p - 1 - r of the schedule. Half of the microbatches go through each. ValueError for an odd number of ranks or
    microbatches, and for fewer than 2p microbatches.
    """
    check_sizes(ranks, microbatches)
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ValueError(
            f"DualPipe: an even number of ranks and an even number of at least twice as many microbatches, "
            f"not {ranks} ranks and {microbatches} microbatches"
        )
    half, lists = microbatches // 2, []
    for rank in range(ranks):
        near, far = (rank, 2 * ranks - 1 - rank) if rank < ranks // 2 else (2 * ranks - 1 - rank, rank)
        firsts = {near: 0 if near < ranks else half, far: 0 if far < ranks else half}
        lists.append(_both_ways(ranks // 2, min(rank, ranks - 1 - rank), half, near, far, firsts))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("DualPipe", ranks, microbatches, placement, tuple(lists), copies=2)


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: DualPipe on 2p ranks folded in the middle, so that one copy of the model is enough; rank r has stages
    r and 2p - 1 - r (github.com/deepseek-ai/DualPipe; the idea: sail-sg, "Cut-in-half"). ValueError for fewer than 2p
    microbatches."""
    check_sizes(ranks, microbatches)
    if microbatches < 2 * ranks:
        raise ValueError(f"DualPipeV: at least {2 * ranks} microbatches on {ranks} ranks, not {microbatches}")
    lists = []
    for rank in range(ranks):
        near, far = rank, 2 * ranks - 1 - rank
        lists.append(_both_ways(ranks, rank, microbatches, near, far, {near: 0, far: 0}))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("DualPipeV", ranks, microbatches, placement, tuple(lists))


class _List:
    """One rank's list as it grows: the next microbatch of each kind and stage, and Ws that were put off."""

    def __init__(self, firsts: dict[int, int]):
        self.actions: list[Action] = []
        self.next = {(kind, stage): first for stage, first in firsts.items() for kind in "FI"}
        self.put_off: list[Action] = []

    def forward(self, stage: int) -> None:
        self.actions.append(Action("F", stage, self._number("F", stage)))

    def backward(self, stage: int, split: bool = False) -> None:
        microbatch = self._number("I", stage)
        self.actions.append(Action("I" if split else "B", stage, microbatch))
        if split:
            self.put_off.append(Action("W", stage, microbatch))

    def weights(self) -> None:
        """The oldest W that was put off, if there is one."""
        if self.put_off:
            self.actions.append(self.put_off.pop(0))

    def _number(self, kind: str, stage: int) -> int:
        self.next[kind, stage] += 1
        return self.next[kind, stage] - 1


def _both_ways(half: int, depth: int, count: int, near: int, far: int, firsts: dict[int, int]) -> tuple[Action, ...]:
    """A rank's list. half: ranks from an end to the middle; depth: of this rank, from its end; count: microbatches from
    each end; near, far: its stages for those that came from its own end and from the other one."""
    own, to_go = _List(firsts), half - depth - 1
    for _ in range(2 * to_go):
        own.forward(near)
    for _ in range(depth + 1):
        own.forward(near)
        own.forward(far)
    for _ in range(to_go):
        own.backward(far, split=True)
        own.weights()
        own.forward(far)
    for _ in range(count - 2 * half + depth + 1):
        own.forward(near)
        own.backward(far)
        own.forward(far)
        own.backward(near)
    for _ in range(to_go):
        own.backward(far)
        own.forward(far)
        own.backward(near)
    # Of the last backwards the second half is split; which of the two stages begins depends on the rank.
    middle = (depth + 1) // 2
    for i in range(depth + 1):
        own.backward(far, split=i > middle or (i == middle and depth % 2 == 1))
        own.backward(near, split=i >= middle)
    for _ in range(to_go):
        own.weights()
        own.backward(near, split=True)
    while own.put_off:
        own.weights()
    return tuple(own.actions)
