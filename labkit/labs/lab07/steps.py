"""What exercises 7.2 and 7.3 are tried on: a model cut into equal stages, one a rank, and a step of m microbatches.

A stage notes when a microbatch's forward ends and its backward begins, so that its order is known; the rest of the
evidence is the record's. Inputs require grad, so that every stage does the same work. Left out: what to make of it
(`told`), and the exercises' own questions.
"""

from __future__ import annotations

import numbers
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import labkit.labs.lab03.own_work as own_work
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.attempts import Unusable
from labkit.labs.lab07.pictures import on_link
from labkit.ranks.rank import report
from labkit.record.events import RankRecord
from labkit.record.timeline import Replay

READY_MADE = ("labkit.schedule", "labkit.model", "torch.distributed.pipelining")
LAYERS = 2  # of a stage


@dataclass(frozen=True)
class Case:
    """A step. weights[rank]: of that rank's stage, each (width, width). inputs, targets: (rows, width) a microbatch."""

    ranks: int
    microbatches: int
    weights: tuple[tuple[torch.Tensor, ...], ...]
    inputs: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    tried: str

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.inputs[0].shape)

    @property
    def flops(self) -> int:
        """Of one rank's forwards and backwards, nothing done twice."""
        rows, width = self.shape
        return self.microbatches * len(self.weights[0]) * 3 * 2 * rows * width * width

    @property
    def input_flops(self) -> int:
        """Of that, the gradients of a stage's inputs, which the first stage may leave out."""
        return self.flops // (3 * len(self.weights[0]))

    @property
    def rank_args(self) -> list[tuple]:
        """Inputs for the first rank, targets for the last, None in their place elsewhere."""
        none = [None] * self.microbatches
        found = []
        for rank, weights in enumerate(self.weights):
            inputs = list(self.inputs) if rank == 0 else none
            found.append((list(weights), inputs, list(self.targets) if rank == self.ranks - 1 else none, self.shape))
        return found


def draw(rng: random.Random, name: str, ranks: int, microbatches: int) -> Case:
    """A case of random numbers and sizes."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    rows, width = rng.randint(24, 32), 8 * rng.randint(12, 16)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = tuple(tuple(normal(width, width) * 1.5 / width**0.5 for _ in range(LAYERS)) for _ in range(ranks))
    inputs = tuple(normal(rows, width) for _ in range(microbatches))
    targets = tuple(normal(rows, width) * rng.uniform(0.5, 2) for _ in range(microbatches))
    tried = f"{name}(stage, inputs, targets, {(rows, width)}) on {ranks} ranks, {microbatches} microbatches"
    return Case(ranks, microbatches, weights, inputs, targets, tried)


class Stage(nn.Module):
    """Linear layers without bias, tanh after each. notes: "F0", "B0", ... as forwards end and backwards begin.

    shared: the first two microbatches in flight that came in one storage, None for none.
    """

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight.clone()) for weight in weights)
        self.notes: list[str] = []
        self.shared: tuple[int, int] | None = None
        self._held: dict[tuple[int, int], int] = {}  # where the input of a microbatch in flight lies: which microbatch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        number = sum(note[0] == "F" for note in self.notes)
        self.notes.append(f"F{number}")
        if x.requires_grad:
            self._hold(given, number)
            x.register_hook(lambda gradient: self._begun(number))
        return x

    def _hold(self, given: torch.Tensor, number: int) -> None:
        place = given.untyped_storage()._cdata, given.storage_offset()  # data_ptr() is watched, and refused
        if place in self._held:
            self.shared = self.shared or (self._held[place], number)
        self._held[place] = number
        if not given.requires_grad and dist.is_initialized():
            report(without_graph=number)

    def _begun(self, number: int) -> None:
        self.notes.append(f"B{number}")
        self._held = {place: held for place, held in self._held.items() if held != number}


def call(fn: Callable, weights: list, inputs: list, targets: list, shape: tuple[int, int]) -> Any:
    """Runs in a rank: (loss or what came instead in words, gradients, notes, `Stage.shared`)."""
    found = own_work.borrowed(fn, READY_MADE)
    if found:
        return Unusable("ready_made", own_work.verdict(found, "").sentence)
    stage = Stage(weights)
    inputs = [x if x is None else x.requires_grad_() for x in inputs]
    out = attempts.called(fn, "stage, inputs, targets, shape", stage, inputs, targets, shape)
    if attempts.no_result(out):
        return out
    if isinstance(out, torch.Tensor) and out.numel() == 1:
        out = float(out.detach())
    if isinstance(out, numbers.Real) and not isinstance(out, bool):  # numpy's, too
        out = float(out)
    out = out if out is None or isinstance(out, float) else kind(out)
    gradients = [None if weight.grad is None else weight.grad.detach().clone() for weight in stage.weights]
    return out, gradients, list(stage.notes), stage.shared


def observe(fn: Callable, case: Case) -> Observed:
    """Run the answer on ranks, under watch."""
    return evidence.observe(call, case.ranks, args=(fn,), rank_args=case.rank_args, deadline_s=60.0)


def serial(case: Case) -> tuple[list[float], list[list[list[torch.Tensor]]]]:
    """Per microbatch its loss, and per microbatch and rank its gradients: of the loss, not of its share of the mean."""
    losses, gradients = [], []
    for x, target in zip(case.inputs, case.targets, strict=True):
        stages = [Stage(list(weights)) for weights in case.weights]
        with torch.enable_grad():
            y = x.clone()
            for stage in stages:
                y = stage(y)
            loss = F.mse_loss(y, target)
            loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([[weight.grad for weight in stage.weights] for stage in stages])
    return losses, gradients


def replayed(observed: Observed) -> Replay:
    """The recorded step on equal devices with a free link, sends being rendezvous."""
    return on_link(observed.records)


def order(record: RankRecord) -> list[str]:
    """"F" and "B" as a stage's forwards and backwards came, by the record: their notes are in reach of the answer."""
    kinds = {"aten.tanh": "F", "aten.tanh_backward": "B"}
    return [kinds[op.name] for op in record.ops if op.name in kinds][::LAYERS]


def idle_share(played: Replay) -> float:
    """Share of the step in which a rank waits, if all had as much to do as the busiest: the first one may leave its
    inputs' gradients out, and nobody is the slower for it."""
    busy = max(map(played.busy_s, range(played.world_size)))
    return 1.0 - busy / played.time_s if played.time_s else 0.0
