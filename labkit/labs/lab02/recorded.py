"""A step of data parallelism as it was recorded on every rank: when each gradient was there, what it sent, its times.

The step is that of one named model, `model`, from the begin of forward until gradients are averaged; the optimizer is
not in it, being the same in every way of averaging. Left out: drawing (`labkit.view`), and buckets cut anew (`recut`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from labkit.record.events import RankRecord
    from labkit.record.timeline import Replay

BATCH, LENGTH = 4, 128  # windows of the text per rank, and their bytes


@dataclass(frozen=True)
class Step:
    """One step on ranks 0 ... n-1.

    records: per rank, of one step.
    losses: of the first steps in turn, the last being the recorded one; the mean over ranks.
    backward: events of rank 0's record before this index belong to forward. gradients: per parameter that took part, in
    the order of `model.parameters()`, (event of rank 0's record after which its gradient was there, its bytes).
    """

    records: tuple[RankRecord, ...]
    losses: tuple[float, ...]
    backward: int
    gradients: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients, once."""
        return sum(num_bytes for _, num_bytes in self.gradients)


def model() -> nn.Module:
    """The named model of lab 02: a Llama of 4 layers, 3.0 million parameters in float32, from seed 0."""
    import torch

    from labkit.model.llama import Llama, Shape

    torch.manual_seed(0)
    return Llama(Shape(hidden=256, layers=4, heads=8, kv_heads=4, ffn=688))


Way = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # wrap(model), and finish(wrapped) after every backward


def record_step(wrap: Callable[[Any], Any], finish: Callable[[Any], Any], world_size: int = 4) -> Step:
    """Train `wrap(model)` on ranks of one thread each, `finish(wrapped)` after every backward, and record one step.

    The first two steps only warm up: DDP cuts its buckets anew after the first. Raises RankFailed as `launch`.
    """
    from labkit.ranks.launch import launch

    found = launch(_recorded, world_size, wrap, finish, prints="quiet", preload=("labkit.record.trace",))
    records, losses, marks = zip(*found, strict=True)
    means = tuple(sum(of_ranks) / world_size for of_ranks in zip(*losses, strict=True))
    backward_s, grads = marks[0]
    gradients = tuple((_events_before(records[0], when_s) - 1, num_bytes) for when_s, num_bytes in grads)
    return Step(tuple(records), means, _events_before(records[0], backward_s), gradients)


def time_steps(ways: Sequence[Way], world_size: int = 4, repeats: int = 3) -> list[float]:
    """Seconds of a step by each way, not recorded: by turns, so that what else the machine does meets them all alike.

    The median of `repeats`, of the slowest rank each time, after two steps to warm up. Raises RankFailed as `launch`.
    """
    from statistics import median

    from labkit.ranks.launch import launch

    # Every way takes all its steps within one call, which a busy machine needs more than the usual minute for.
    found = launch(_timed, world_size, tuple(ways), repeats, prints="quiet", deadline_s=180.0)
    return [median(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*found, strict=True)]


def _recorded(wrap: Callable, finish: Callable) -> tuple:
    """Runs in a rank: (record, losses, (begin of backward, (when, bytes) per gradient))."""
    from labkit.record.trace import Trace

    marks: dict[Any, float] = {}
    plain, step, update = _stepper(wrap, finish, marks)
    losses = []
    for _ in range(2):
        losses.append(step()[0])
        update()
    with Trace() as trace:
        loss, backward_s = step()
    losses = [each.item() for each in (*losses, loss)]
    return trace.record, losses, (backward_s, [(marks[p], p.nbytes) for p in plain.parameters() if p in marks])


def _timed(ways: Sequence[Way], repeats: int) -> list[list[float]]:
    """Runs in a rank: per way, seconds of each step after two."""
    import torch.distributed as dist

    steppers = [_stepper(*way)[1:] for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(repeats + 2):
        for (step, update), mine in zip(steppers, times, strict=True):
            dist.barrier()
            began = time.perf_counter()
            step()
            _settle()
            if number >= 2:
                mine.append(time.perf_counter() - began)
            update()
    return times


def _stepper(wrap: Callable, finish: Callable, marks: dict[Any, float] | None = None) -> tuple:
    """(the model; a function that does forward, backward and `finish`, giving the loss and when backward began; one
    that updates the weights). marks: filled with when each parameter's gradient was there.
    """
    import torch
    import torch.distributed as dist

    from labkit.model.llama import loss_of
    from labkit.model.text import batches
    from labkit.ranks.rank import device

    plain = model().to(device())
    for parameter in plain.parameters() if marks is not None else ():  # before the hooks that `wrap` may add
        parameter.register_post_accumulate_grad_hook(lambda p: marks.update({p: time.perf_counter()}))
    wrapped = wrap(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    rows = batches(BATCH, LENGTH, 0, dist.get_rank(), dist.get_world_size())

    def step() -> tuple[Any, float]:
        tokens, targets = (part.to(device()) for part in next(rows))
        loss = loss_of(wrapped(tokens), targets)
        backward_s = time.perf_counter()
        loss.backward()
        finish(wrapped)
        return loss.detach(), backward_s

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return plain, step, update


def _settle() -> None:
    """A GPU has only been told what to do when a call returns: wait until it is done."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _events_before(record: RankRecord, when_s: float) -> int:
    """How many ops and communications had ended at a reading of the machine's monotonic clock."""
    ended = [event.index for event in record.events if record.began_s + event.end_s <= when_s]
    return max(ended, default=-1) + 1


Lanes = list[tuple[str, list[tuple[float, float, str]]]]


def lanes(step: Step, played: Replay, name: str = "", rank: int = 0) -> Lanes:
    """A replay of the step as lanes of one rank: what it computes and waits for, and what its network does.

    Per lane a name and (start_s, end_s, kind), kind being a key of `labkit.view.plot.COLOURS`.
    """
    computing, network = [], []
    for span in played.spans:
        if span.rank != rank:
            continue
        if span.kind == "compute":
            kind = "forward" if span.event < step.backward else "backward"
            computing.append((span.start_s, span.end_s, kind))
        elif span.kind == "wait":
            computing.append((span.start_s, span.end_s, "waiting"))
        else:
            network.append((span.start_s, span.end_s, "communication"))
    return [(f"{name}: computes" if name else "computes", computing), ("its network", network)]
