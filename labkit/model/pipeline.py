"""Runs a pipeline schedule on ranks: any valid one, with several stages a rank, split backwards, copies of the model.

Messages are posted in the order of `labkit.schedule.messages.plan`, as isend and irecv, so that no two ranks wait for
each other though a send is over only when it is taken. Left out: the optimizer; sums over parameters that several
ranks have (`stages.sum_shared`); hidden states that differ in shape from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.model.split import Piece, backward_input, backward_weights
from labkit.schedule.actions import Action, Schedule
from labkit.schedule.messages import Message, plan, received, taken
from labkit.schedule.validate import check_valid

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Loss,
    hidden: Sequence[int],
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> float | None:
    """One forward and backward of all microbatches; gradients are added to `.grad` of the stages' parameters.

    Called by every rank of the group. stages: those of this rank, by number; a module from hidden states to hidden
    states, the last one to what loss_fn takes. A first stage with a method `enter` gets its input through it; what
    `enter` computes belongs to F, and its gradient to W. microbatches: per microbatch (input, target), of which a rank
    uses what its stages need. hidden: shape of what goes from stage to stage. The loss is the mean over microbatches;
    gives it on a rank that has a last stage (its copy's share of the sum), None elsewhere.
    Raises ValueError for a schedule that is not valid, for another group's size, other stages than this rank's, and
    another number of microbatches.
    """
    check_valid(schedule)
    rank = dist.get_rank(group)
    _check(schedule, rank, stages, microbatches, dist.get_world_size(group))
    steps = plan(schedule)
    runner = _Runner(schedule, stages, microbatches, loss_fn, tuple(hidden), dtype, group, taken(schedule, steps))
    for step in steps[rank]:
        getattr(runner, step.do)(step.what)
    return runner.end()


def _check(schedule: Schedule, rank: int, stages: Mapping, microbatches: Sequence, world_size: int) -> None:
    if world_size != schedule.ranks:
        raise ValueError(f"schedule {schedule.name} is for {schedule.ranks} ranks, and the group has {world_size}")
    if tuple(sorted(stages)) != schedule.stages_of(rank):
        raise ValueError(f"rank {rank} has stages {schedule.stages_of(rank)}, not {tuple(sorted(stages))}")
    if len(microbatches) != schedule.microbatches:
        raise ValueError(f"{len(microbatches)} microbatches for a schedule of {schedule.microbatches}")


@dataclass(eq=False)
class _Kept:
    """What a forward leaves for its backward. entered: what `enter` gave; entry: the leaf that the stage was given;
    output: what it gave, on a last stage the loss."""

    entered: torch.Tensor | None
    entry: torch.Tensor
    output: torch.Tensor


class _Runner:
    """One rank's run: what was kept, what came, what is under way. Methods have the names of a plan's steps."""

    def __init__(self, schedule: Schedule, stages, microbatches, loss_fn: Loss, hidden, dtype, group, known):
        self.schedule, self.stages, self.microbatches = schedule, stages, microbatches
        self.loss_fn, self.hidden, self.dtype, self.group, self.known = loss_fn, hidden, dtype, group, known
        self.device = next((p.device for stage in stages.values() for p in stage.parameters()), None)
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.put_off: dict[tuple[int, int], tuple[_Kept, torch.Tensor, list[Piece]]] = {}
        self.made: dict[tuple[str, int, int], torch.Tensor] = {}  # what a stage gave for its neighbour
        self.coming: dict[Message, tuple[Any, torch.Tensor]] = {}
        self.going: dict[Message, tuple[Any, torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []

    def send(self, message: Message) -> None:
        key = message.kind, message.stage, message.microbatch
        tensor = self.made.pop(key).contiguous()  # gloo and NCCL send nothing else
        self.going[message] = dist.isend(tensor, group=self.group, group_dst=message.destination), tensor

    def recv(self, message: Message) -> None:
        buffer = torch.empty(self.hidden, dtype=self.dtype, device=self.device)
        self.coming[message] = dist.irecv(buffer, group=self.group, group_src=message.source), buffer

    def compute(self, action: Action) -> None:
        message = received(self.schedule, action)
        if message is not None:
            work, buffer = self.coming.pop(message)
            work.wait()
            self.made[message.kind, message.stage, message.microbatch] = buffer
            for over in self.known[message]:  # taken, so that this waits for nothing and lets go of what was sent
                self.going.pop(over)[0].wait()
        {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weights}[action.kind](action)

    def forward(self, action: Action) -> None:
        stage, i = action.stage, action.microbatch
        module, entered = self.stages[stage], None
        if self.schedule.is_first(stage):
            x = self.microbatches[i][0]
            if hasattr(module, "enter"):
                x = entered = module.enter(x)
        else:
            x = self.made.pop(("F", stage - 1, i))
        # A leaf that requires grad, on the first stage, too: all stages do the same work then.
        entry = x.detach().requires_grad_()
        output = module(entry)
        if self.schedule.is_last(stage):
            output = self.loss_fn(output, self.microbatches[i][1]) / self.schedule.microbatches
            self.losses.append(output.detach())
        else:
            self.made["F", stage, i] = output.detach()
        self.kept[stage, i] = _Kept(entered, entry, output)

    def backward(self, action: Action) -> None:
        kept, gradient = self._take(action)
        kept.output.backward(gradient)
        self._hand_on(action, kept.entry.grad)
        _leave(kept, kept.entry.grad)

    def input(self, action: Action) -> None:
        kept, gradient = self._take(action)
        parameters = self.stages[action.stage].parameters()
        found, pieces = backward_input(kept.output, gradient, kept.entry, parameters)
        self.put_off[action.stage, action.microbatch] = kept, found, pieces
        self._hand_on(action, found)

    def weights(self, action: Action) -> None:
        kept, gradient, pieces = self.put_off.pop((action.stage, action.microbatch))
        backward_weights(pieces)
        _leave(kept, gradient)

    def end(self) -> float | None:
        """Wait for what is still going; gives the loss."""
        for work, _ in self.going.values():
            work.wait()
        return float(sum(self.losses)) if self.losses else None

    def _take(self, action: Action) -> tuple[_Kept, torch.Tensor | None]:
        """What the forward kept, and the output's gradient."""
        stage, i = action.stage, action.microbatch
        gradient = None if self.schedule.is_last(stage) else self.made.pop(("I", stage + 1, i))
        return self.kept.pop((stage, i)), gradient

    def _hand_on(self, action: Action, gradient: torch.Tensor) -> None:
        if not self.schedule.is_first(action.stage):
            self.made["I", action.stage, action.microbatch] = gradient


def _leave(kept: _Kept, gradient: torch.Tensor) -> None:
    """The backward of `enter`."""
    if kept.entered is not None and kept.entered.requires_grad:
        kept.entered.backward(gradient)
