"""What a pipeline schedule is: per rank a list of actions, each a kind, a stage and a microbatch.

The kinds are those of torch.distributed.pipelining: F (forward), B (full backward), I (backward for the input), W
(backward for the weights); a B is an I and its W at once. Sends and receives are not in the lists, for they follow
from them (`messages`). Left out: what a list must be like (`validate`), time (`timing`), overlapped pairs of forward
and backward, which stand one after the other here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("F", "B", "I", "W")
# What is there once an action is done: outputs, gradients with respect to inputs, gradients with respect to weights.
GIVES = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",)}

Result = tuple[str, int, int]  # (F, I or W; stage; microbatch)


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One thing that a rank computes; written "2F0": stage 2, forward, microbatch 0.

    Raises ValueError for another kind, or numbers below 0.
    """

    kind: str
    stage: int
    microbatch: int

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"an action's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(f"{self}: stages and microbatches are numbered from 0")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def results(self) -> tuple[Result, ...]:
        """What it makes."""
        return tuple((kind, self.stage, self.microbatch) for kind in GIVES[self.kind])


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order.

    ranks: p. microbatches: m, of a step. placement[stage]: the rank that has the stage. actions[rank]: in order.
    copies: of the model. The stages of copy c are the c-th part of the stages, and its microbatches the c-th part of
    the microbatches; the gradients of all copies are added up at the end of the step.
    Raises ValueError when the stages or microbatches cannot be shared out among the copies, for a placement on ranks
    that are not there, and when there are not as many lists as ranks.
    """

    name: str
    ranks: int
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    copies: int = 1

    def __post_init__(self):
        if self.ranks < 1 or self.microbatches < 1 or self.copies < 1:
            raise ValueError(f"{self.name}: ranks, microbatches and copies are 1 or more")
        for what, count in (("stages", len(self.placement)), ("microbatches", self.microbatches)):
            if not count or count % self.copies:
                raise ValueError(f"{self.name}: {count} {what} cannot be shared out among {self.copies} copies")
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.ranks:
                raise ValueError(f"{self.name}: stage {stage} is on rank {rank}, but ranks are 0 to {self.ranks - 1}")
        if len(self.actions) != self.ranks:
            raise ValueError(f"{self.name}: {len(self.actions)} lists of actions for {self.ranks} ranks")

    @property
    def num_stages(self) -> int:
        """Stages of one copy of the model."""
        return len(self.placement) // self.copies

    def is_first(self, stage: int) -> bool:
        """Whether a stage takes the tokens."""
        return stage % self.num_stages == 0

    def is_last(self, stage: int) -> bool:
        """Whether a stage gives the loss."""
        return stage % self.num_stages == self.num_stages - 1

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass through a stage."""
        share, copy = self.microbatches // self.copies, stage // self.num_stages
        return range(copy * share, (copy + 1) * share)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has, in order."""
        return tuple(stage for stage, where in enumerate(self.placement) if where == rank)

    def with_actions(self, rank: int, actions: tuple[Action, ...]) -> Schedule:
        """The same schedule with another list for one rank."""
        return replace(self, actions=(*self.actions[:rank], tuple(actions), *self.actions[rank + 1 :]))


def needs(schedule: Schedule, action: Action) -> tuple[Result, ...]:
    """Results that must be there before an action."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return () if schedule.is_first(stage) else (("F", stage - 1, microbatch),)
    own = ("F", stage, microbatch)
    if action.kind == "W":
        return own, ("I", stage, microbatch)
    return (own,) if schedule.is_last(stage) else (own, ("I", stage + 1, microbatch))


def in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per rank, after each of its actions: forwards whose activations it still keeps.

    They are kept until the gradients of the weights are there, that is to the end of B or W; every stage counts by
    itself, so with v stages a rank one of them is about a v-th of the activations that 1F1B counts.
    """
    counts = []
    for own in schedule.actions:
        count, after = 0, []
        for action in own:
            count += {"F": 1, "I": 0}.get(action.kind, -1)
            after.append(count)
        counts.append(tuple(after))
    return tuple(counts)


def most_kept(schedule: Schedule) -> list[float]:
    """Per rank, the most in flight, in activations that one microbatch leaves in a p-th of the model.

    `in_flight` counts every stage by itself; a stage of two a rank is half as much.
    """
    return [max(counts, default=0) * schedule.ranks / schedule.num_stages for counts in in_flight(schedule)]
