"""What exercises 4.1 to 4.3 are tried on: models, hyperparameters and batches, as plain data drawn from a seed.

Every rank begins with the same model and sees batches of its own. Left out: what serial training gives (`serial`), and
what an answer did (`training`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plan:
    """Sizes of a `net.Net`. depth: layers of width x width. branches: small layers that not every batch uses.

    frozen: so many deep layers, those in the middle, do not train.
    order: in which the deep layers are used; () as registered.
    """

    inputs: int
    width: int
    outputs: int
    depth: int = 2
    branches: int = 0
    frozen: int = 0
    order: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Hyper:
    """AdamW's numbers, as they are given to an answer. eps is large, so that a gradient's scale matters."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class Case:
    """One training run. what: what is special about it, in words for a card.

    batches: by rank, step, microbatch: ((x, numbers of the branches in use), targets).
    """

    what: str
    plan: Plan
    hyper: Hyper
    seed: int
    batches: tuple[tuple[tuple[tuple, ...], ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.batches)

    @property
    def steps(self) -> int:
        return len(self.batches[0])

    @property
    def micro(self) -> tuple[int, ...]:
        """Microbatches of each step."""
        return tuple(len(step) for step in self.batches[0])

    @property
    def tried(self) -> str:
        micro = f", {max(self.micro)} backwards a step" if max(self.micro) > 1 else ""
        return f"world_size={self.world_size}, {self.what}, {self.plan.dtype}, {self.steps} steps{micro}"

    @property
    def rank_args(self) -> list[tuple]:
        """Per rank, the last arguments of `training.train`."""
        return [(self.plan, self.hyper.kwargs, self.seed, batches) for batches in self.batches]


def build(plan: Plan, seed: int) -> torch.nn.Module:
    """The module of a plan, its parameters drawn from `seed` alone."""
    import torch

    import labkit.labs.lab04.net as net

    with torch.random.fork_rng(devices=[]):  # the CPU's alone: asking a GPU's makes a context there
        torch.manual_seed(seed)
        return net.Net(plan)


def loss_of(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Half the mean square."""
    return (out.to(targets.dtype) - targets).pow(2).mean() / 2


def sizes(plan: Plan) -> tuple[int, ...]:
    """Elements of each parameter that trains, in the order of `parameters()`."""
    return tuple(each.numel() for each in build(plan, 0).parameters() if each.requires_grad)


def draw(
    rng: random.Random, what: str, plan: Plan, micro: tuple[int, ...], world_size: int, alike: bool = False
) -> Case:
    """A case on so many ranks; micro: backwards of each step.

    alike: in each backward all ranks use the same branches, and in each step every branch is used.
    """
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))

    def batch(use: list[int]) -> tuple:
        x = torch.randn(3, plan.inputs, generator=generator).to(getattr(torch, plan.dtype))
        targets = torch.randn(3, plan.outputs, generator=generator)
        return (x, torch.tensor(use, dtype=torch.int64)), targets

    if alike:
        used = [[_share_of(plan.branches, i, count)] * world_size for count in micro for i in range(count)]
    else:
        used = [_branches_used(rng, plan.branches, world_size) for _ in range(sum(micro))]
    by_rank = []
    for rank in range(world_size):
        flat = [batch(each[rank]) for each in used]
        by_rank.append(tuple(tuple(flat.pop(0) for _ in range(count)) for count in micro))
    betas = round(rng.uniform(0.7, 0.85), 3), round(rng.uniform(0.9, 0.97), 3)
    # In bf16 a step is smaller than the distance between two numbers, so that fp32 copies matter.
    lr = rng.uniform(0.02, 0.04) if plan.dtype == "float32" else rng.uniform(0.001, 0.0015)
    eps, decay = rng.uniform(0.01, 0.02), rng.uniform(0.2, 0.4)
    hyper = Hyper(round(lr, 5), betas, round(eps, 5), round(decay, 3))
    return Case(what, plan, hyper, rng.getrandbits(30), tuple(by_rank))


def _branches_used(rng: random.Random, branches: int, world_size: int) -> list[list[int]]:
    """Per rank the branches that a batch uses: each on some ranks and not on others."""
    used: list[list[int]] = [[] for _ in range(world_size)]
    for branch in range(branches):
        for rank in rng.sample(range(world_size), rng.randint(1, world_size - 1)):
            used[rank].append(branch)
    return used


def _share_of(branches: int, number: int, count: int) -> list[int]:
    """Branches of microbatch `number` of `count`."""
    return [branch for branch in range(branches) if branch % count == number]


def odd_plan(rng: random.Random, world_size: int, widths: tuple[int, int] = (7, 11), **options: Any) -> Plan:
    """A small plan whose number of trained elements the number of ranks does not divide."""
    while True:
        plan = Plan(rng.randint(4, 7), rng.randint(*widths), rng.randint(2, 3), **options)
        if sum(sizes(plan)) % world_size:
            return plan
