"""Data behind the pictures of lab 02 that use the learner's own functions, and what stands in while they are stubs.

A stand-in is torch's own thing or what is due, and the title says "not yet yours". Left out: drawing, the recorded step
(`recorded`), and what judges look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

STUB = "not yet yours"
IGNORED = -100  # a target that counts for nothing
COUNTS = ((8, 88), (96, 24), (40, 80), (64, 16))  # tokens that count, per rank and microbatch


class TorchDDP:
    """torch's DistributedDataParallel with the face of exercise 2.2; it waits in C++, so `finish` has nothing to do."""

    def __init__(self, module: Any, bucket_bytes: float):
        from torch.nn.parallel import DistributedDataParallel

        self.module = DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / 2**20)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def finish(self) -> None:
        """Backward has left the mean in every `.grad`."""


def torchs_average(model: Any) -> None:
    """Every gradient becomes its mean, one by one, by torch's own `average_parameters`, which takes any tensors."""
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    for parameter in model.parameters():
        if parameter.grad is not None:
            average_parameters(iter([parameter.grad]), None)


def small_model() -> Any:
    """The Llama of 0.4 million parameters that the lab's first half trains, from seed 0, on this rank's device."""
    import torch

    from labkit.model.llama import Llama, Shape
    from labkit.ranks.rank import device

    torch.manual_seed(0)
    return Llama(Shape()).to(device())


def pieces(counts: Sequence[Sequence[int]] = COUNTS) -> list[list[tuple[Any, Any]]]:
    """Per rank, microbatches of real text of unequal length: counts[rank][i] targets count in microbatch i.

    Each is (tokens, targets), int64 of shape (1, longest); a target of IGNORED is padding.
    """
    import torch

    from labkit.model.text import text

    longest, start, made = max(max(row) for row in counts if row), 0, []
    for row in counts:
        made.append([])
        for count in row:
            start += 10_007  # somewhere else in the text each time
            window = torch.tensor(list(text()[start : start + count + 1]))
            tokens, targets = torch.zeros(1, longest, dtype=torch.int64), torch.full((1, longest), IGNORED)
            tokens[0, :count], targets[0, :count] = window[:-1], window[1:]
            made[-1].append((tokens, targets))
    return made


def as_one_batch(of_ranks: Sequence[Sequence[tuple[Any, Any]]]) -> tuple[float, Any]:
    """The mean loss over all counted tokens of all ranks, and its gradient as one vector: the serial truth."""
    import torch

    from labkit.model.llama import loss_of

    everything = [piece for of_rank in of_ranks for piece in of_rank]
    tokens, targets = (torch.cat([piece[side] for piece in everything]) for side in (0, 1))
    model = small_model()
    where = next(model.parameters()).device
    loss = loss_of(model(tokens.to(where)), targets.to(where))
    loss.backward()
    return loss.item(), flat_gradient(model)


def flat_gradient(model: Any) -> Any:
    """All gradients as one vector, in the order of the parameters, on the CPU; zeros where there is none."""
    import torch

    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]).cpu()


def accumulate_picture(fn: Callable, of_ranks: Sequence[Sequence[tuple[Any, Any]]]) -> tuple[float, float, str]:
    """What `fn(model, microbatches)` leaves in `.grad` on as many ranks as there are lists, against all tokens as one
    batch: (its error in percent of the true gradient's length, bytes all_reduced over one gradient's, title).

    What is due while fn is a stub. Raises RankFailed when the ranks fail.
    """
    from labkit.ranks.launch import launch

    true = as_one_batch(of_ranks)[1]
    found = launch(_accumulated, len(of_ranks), fn, rank_args=[(list(mine),) for mine in of_ranks], prints="quiet")
    if any(out is NotImplemented for out in found):
        return 0.0, 1.0, f"{fn.__name__}, {STUB}: what is due"
    mine, num_bytes = found[0]
    return 100 * ((mine - true).norm() / true.norm()).item(), num_bytes / (4 * true.numel()), fn.__name__


def _accumulated(fn: Callable, microbatches: list) -> Any:
    """Runs in a rank."""
    from labkit.ranks.rank import device
    from labkit.record.trace import Trace

    model = small_model()
    mine = [tuple(part.to(device()) for part in piece) for piece in microbatches]
    with Trace() as trace:
        out = fn(model, mine)
    if out is NotImplemented:
        return NotImplemented
    return flat_gradient(model), sum(c.num_bytes for c in trace.record.collectives)


def epoch_picture(
    fn: Callable, num_samples: int, batch_size: int, world_size: int, epoch: int = 0
) -> tuple[list[list[int]], list[list[int]], str, str]:
    """(per rank, the samples that it has in an epoch, in order; the step in which each comes; title; what the last step
    is like), by `fn` of 2.4.

    While fn is a stub, or gives what cannot be drawn: by torch's DistributedSampler, which gives some samples twice so
    that ranks have equally many.
    """
    why = STUB
    try:
        found = [fn(num_samples, batch_size, rank, world_size, epoch) for rank in range(world_size)]
        if all(steps is not NotImplemented for steps in found):
            rows = [[range(num_samples)[index] for indices, _ in steps for index in indices] for steps in found]
            when = [[at for at, (indices, _) in enumerate(steps) for _ in indices] for steps in found]
            last = [f"rank {r}: {len(steps[-1][0])} with weight {steps[-1][1]:.3g}" for r, steps in enumerate(found)]
            return rows, when, f"{fn.__name__}, epoch {epoch}: {_told_twice(rows)}", "; ".join(last)
    except Exception as error:  # an answer that is not right yet may do anything
        why = f"cannot be drawn ({type(error).__name__})"
    rows = [_by_torch(num_samples, rank, world_size, epoch) for rank in range(world_size)]
    when = [[at // batch_size for at in range(len(row))] for row in rows]
    return rows, when, f"{fn.__name__}, {why}: torch's DistributedSampler, {_told_twice(rows)}", "no weights yet"


def _told_twice(rows: Sequence[Sequence[int]]) -> str:
    """How many samples there are more than once, in words."""
    every = [index for of_rank in rows for index in of_rank]
    more = len(every) - len(set(every))
    return f"{more} sample{'s' * (more != 1)} twice" if more else "every sample once"


def _by_torch(num_samples: int, rank: int, world_size: int, epoch: int) -> list[int]:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(num_samples), world_size, rank)
    sampler.set_epoch(epoch)
    return list(sampler)
