"""What exercise 2.2 is tried on: models, batches and bucket sizes, and what serial training of each would give.

Every rank's module is drawn from a seed of its own; serial training has rank 0's and sees the batches of all ranks.
Left out: what an answer gave (`bucketed`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.models as models

# The model, cluster and bucket size for which hidden communication is asked: a Llama of 0.78M parameters in fp32,
# 2 x 256 tokens a rank, on 4 T4 over PCIe 3, in buckets of 256 KiB.
LLAMA = (("hidden", 128), ("layers", 4), ("heads", 4), ("kv_heads", 2), ("ffn", 336))
TOKENS = (2, 256)
NUM_RANKS = 4
BUCKET_BYTES = 256 * 1024
CLUSTER = "4 T4 over PCIe 3"


@dataclass(frozen=True)
class Case:
    """One training run. what: what is special about it. seeds: of the modules, by rank. batches: by rank, then step:
    (inputs, targets).
    """

    what: str
    plan: models.Plan
    bucket_bytes: int
    seeds: tuple[int, ...]
    batches: tuple[tuple[tuple, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.seeds)

    @property
    def steps(self) -> int:
        return len(self.batches[0])

    @property
    def tried(self) -> str:
        return f"world_size={self.world_size}, bucket_bytes={self.bucket_bytes}, {models.describe(self.plan)}"

    @property
    def rank_args(self) -> list[tuple]:
        """Per rank, the last arguments of `bucketed_steps.train`."""
        pairs = zip(self.seeds, self.batches, strict=True)
        return [(self.plan, seed, batches, self.bucket_bytes) for seed, batches in pairs]


@dataclass(frozen=True)
class Serial:
    """What serial training gives. start, end: name -> tensor of parameters and buffers. losses: by step, then rank.
    means, own: gradients by step, and by step and rank (None where it took no part). sizes: bytes of each gradient.
    """

    start: dict[str, Any]
    end: dict[str, Any]
    losses: list[list[float]]
    means: list[dict[str, Any]]
    own: list[list[dict[str, Any]]]
    sizes: dict[str, int]


def cases(rng: random.Random) -> list[Case]:
    """From the plain to the special, the large one last."""
    odd = lambda low, high: 2 * rng.randint(low // 2, high // 2) + 1  # noqa: E731
    a, b, c, d = odd(7, 15), odd(17, 25), odd(27, 35), odd(3, 5)
    # Layer 3, which is used first, shares a bucket with a bias of layer 2, whose gradient comes long before.
    order = models.Plan(widths=(a, b, 2 * c + 1, a, b, d), used=(3, 0, 4, 2, 1), dtype="float64")
    frozen = models.Plan(widths=(a, b, a, d), frozen=(1,), buffers=True)
    tied = models.Plan(widths=(a, a, c, 2 * c + 1, a, a), tied=True, dtype="float64")
    unused = models.Plan(widths=(a, b, d), branches=4, dtype="float64")
    mixed = models.Plan(widths=(a, b, a, b, d), second="bfloat16")
    return [
        plain(rng, 3),
        _net(rng, "order", order, 2, 8 * (a * b + b) + 8 * rng.randint(40, 90)),
        _net(rng, "frozen", frozen, 3, 4 * a * b + 4 * rng.randint(1, 9)),
        _net(rng, "tied", tied, 2, 8 * a * a + 8 * rng.randint(1, 9)),
        _net(rng, "unused", unused, 4, 8 * 4 * a),
        _net(rng, "mixed", mixed, 2, 4 * a * b),
        llama(rng),
    ]


def plain(rng: random.Random, world_size: int) -> Case:
    """Nothing special, on so many ranks."""
    a, b, c, d = (2 * rng.randint(*each) + 1 for each in ((3, 7), (8, 12), (13, 17), (1, 2)))
    plan = models.Plan(widths=(a, b, c, b, d), dtype="float64")
    return _net(rng, "plain", plan, world_size, 8 * (a * b + b) + 8 * rng.randint(1, 9))


def llama(rng: random.Random, steps: int = 2) -> Case:
    """The named model on real text."""
    from labkit.model.text import batches

    seed = rng.getrandbits(30)
    by_rank = tuple(
        tuple(((x,), y) for x, y in batches(*TOKENS, seed, rank, NUM_RANKS, steps)) for rank in range(NUM_RANKS)
    )
    plan = models.Plan(llama=LLAMA, returns_state=False)
    return Case("llama", plan, BUCKET_BYTES, _seeds(rng, NUM_RANKS), by_rank)


def _seeds(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(2**30), count))


def _net(rng: random.Random, what: str, plan: models.Plan, world_size: int, bucket_bytes: int) -> Case:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    wide = torch.float64 if plan.dtype == "float64" else torch.float32

    def batch(use: list[int]) -> tuple:
        x = torch.randn(5, plan.widths[0], generator=generator, dtype=wide)
        targets = torch.randn(5, plan.widths[-1], generator=generator, dtype=wide)
        return (x, torch.tensor(use, dtype=torch.int64)), targets

    used = [models.branches_used(rng, plan.branches, world_size) for _ in range(3)]
    by_rank = tuple(tuple(batch(used[step][rank]) for step in range(3)) for rank in range(world_size))
    return Case(what, plan, bucket_bytes, _seeds(rng, world_size), by_rank)


def serial(case: Case) -> Serial:
    """Train rank 0's module on the batches of all ranks, one after the other. On one thread, as a rank has."""
    with models.one_thread():
        return _trained(case)


def _trained(case: Case) -> Serial:
    import torch

    module = models.build(case.plan, case.seeds[0])
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    start, optimizer = models.state(module), torch.optim.SGD(trained.values(), lr=case.plan.lr)
    losses, means, own = [], [], []
    for step in range(case.steps):
        found = [_alone(module, trained, *case.batches[rank][step]) for rank in range(case.world_size)]
        losses.append([loss for loss, _ in found])
        own.append([grads for _, grads in found])
        means.append({name: _mean([grads[name] for grads in own[-1]]) for name in trained})
        for name, each in trained.items():
            each.grad = means[-1][name]
        optimizer.step()
    sizes = {name: each.nbytes for name, each in trained.items()}
    return Serial(start, models.state(module), losses, means, own, sizes)


def _alone(module: Any, trained: dict[str, Any], inputs: tuple, targets: Any) -> tuple[float, dict[str, Any]]:
    """(loss, gradients) of one rank's batch."""
    module.zero_grad()
    loss = models.loss_of(module(*inputs), targets)
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in trained.items()}


def _mean(grads: list) -> Any:
    """The mean over ranks, in the gradients' dtype; a rank without one counts as zero. None if none has one."""
    present = [grad.double() for grad in grads if grad is not None]
    return (sum(present) / len(grads)).to(next(g for g in grads if g is not None).dtype) if present else None


def module_of(case: Case, rank: int = 0) -> Any:
    """A rank's module as it is drawn."""
    return models.build(case.plan, case.seeds[rank])


def drawn(case: Case, rank: int) -> dict[str, Any]:
    """A rank's parameters and buffers before any broadcast, by name."""
    return models.state(module_of(case, rank))
