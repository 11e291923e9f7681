"""What exercise 2.3 is asked: a small model, and microbatches of real text whose targets count only in part.

Everything is drawn from a seed. Left out: the serial reference and the verdict (`accumulate`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

IGNORED = -100  # torch.nn.functional.cross_entropy's ignore_index
SHAPE = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 24}
MANY = 12  # microbatches of the first case: as many graphs are far more than one, see accumulate_seen.graphs_kept


@dataclass(frozen=True)
class Case:
    """One call. weights: the model's parameters by name. batches: per rank, its microbatches."""

    what: str
    weights: dict[str, Any]
    batches: tuple[tuple[tuple[Any, Any], ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.batches)

    @property
    def counts(self) -> list[list[int]]:
        """Counted tokens per rank and microbatch."""
        return [[int((targets != IGNORED).sum()) for _, targets in mine] for mine in self.batches]

    @property
    def tried(self) -> str:
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}, {self.what}; counted tokens {self.counts}"

    @property
    def gradient_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


def cases(rng: random.Random) -> list[Case]:
    """In the first all shapes are equal, so that nothing but counts tells a mean of means from the mean."""
    none = rng.randrange(3)
    numbers = rng.sample((1, 2, 3, 4), 4)
    return [
        Case(f"{MANY} microbatches each", weights(rng), tuple(microbatches(rng, MANY, (2, 24)) for _ in range(2))),
        Case("1 to 4 microbatches", weights(rng), tuple(microbatches(rng, number) for number in numbers)),
        Case(
            f"none on rank {none}, and a microbatch without a counted token",
            weights(rng),
            tuple(microbatches(rng, 0 if rank == none else 2, empty=rank == (none + 1) % 3) for rank in range(3)),
        ),
        Case("3 microbatches", weights(rng), (microbatches(rng, 3),)),
    ]


def weights(rng: random.Random) -> dict[str, Any]:
    """A model's parameters, far enough from 0 that microbatches have clearly different gradients."""
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    return {
        name: torch.randn(each.shape, generator=generator) * (0.3 if each.dim() > 1 else 0.1) + (each.dim() == 1)
        for name, each in model({}).named_parameters()
    }


def model(weights: dict[str, Any]) -> Any:
    """The model that is trained: a small Llama over bytes, with these parameters; `.grad` is None. {}: any."""
    import torch

    from labkit.model import llama

    with torch.random.fork_rng(devices=[]):
        made = llama.Llama(llama.Shape(**SHAPE))
    if weights:
        made.load_state_dict(weights)
    return made


def microbatches(
    rng: random.Random, number: int, shape: tuple[int, int] = (), empty: bool = False
) -> tuple[tuple[Any, Any], ...]:
    """Windows of real text, (tokens, targets) each; of a row's targets only a part counts, few or many.

    empty: the last microbatch has no counted token at all.
    """
    import torch

    from labkit.model.text import text

    data, made = text(), []
    for index in range(number):
        b, s = shape or (rng.randint(1, 3), rng.randint(12, 24))
        starts = [rng.randrange(len(data) - s - 1) for _ in range(b)]
        rows = torch.tensor([list(data[start : start + s + 1]) for start in starts])
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].clone()
        scarce = index % 2 == rng.randint(0, 1)
        for row in targets:
            kept = 0 if empty and index == number - 1 else rng.randint(1, s // 5) if scarce else rng.randint(s // 2, s)
            first = rng.randint(0, s - kept)
            row[:first] = IGNORED
            row[first + kept :] = IGNORED
        made.append((tokens, targets))
    return tuple(made)
