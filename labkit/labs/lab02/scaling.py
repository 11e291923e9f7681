"""Train a small Llama with DistributedDataParallel on 1, 2, 4 ranks, and see what more ranks give: tokens per second.

Weak scaling (each rank keeps its batch) or strong scaling (one batch, cut between ranks). Efficiency is tokens per
second at n ranks over n times those at 1. Every step's time is kept; the median of those after a warm-up counts, of
the slowest rank. On a machine with fewer cores than ranks the ranks take turns: the table says so. Left out: mixed
precision, several nodes in one table (under torchrun there is one world size a run).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import labkit.labs.lab02.asked as asked
from labkit.cost.cores import usable_cores

SHAPE = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 344}
WARM_UP = 2  # steps: the first makes buckets and connections


@dataclass(frozen=True)
class Scaling:
    """Training on world_size ranks. Seconds of every step after the warm-up (slowest rank), and its mean loss.

    tokens: of a step, over all ranks. cores: that the ranks may use together. device: "cpu", "cuda".
    """

    world_size: int
    tokens: int
    step_times_s: tuple[float, ...]
    losses: tuple[float, ...]
    cores: float
    device: str

    @property
    def step_time_s(self) -> float:
        return median(self.step_times_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time_s

    @property
    def shares_cores(self) -> bool:
        """Whether there are more ranks than cores, so that they take turns."""
        return self.device == "cpu" and self.world_size > self.cores


def efficiency(found: Sequence[Scaling]) -> tuple[float, ...]:
    """Tokens per second over those of as many times the first one's ranks: 1.0 is perfect. The first is 1.0."""
    per_rank = [each.tokens_per_s / each.world_size for each in found]
    return tuple(each / per_rank[0] for each in per_rank)


def train_on(
    world_sizes: Sequence[int],
    steps: int = 8,
    batch: int = 4,
    length: int = 64,
    strong: bool = False,
    deadline_s: float = 120.0,
    told: Callable[[str], Any] | None = None,
) -> list[Scaling]:
    """Train anew on each of `world_sizes`, `steps` steps after the warm-up; one Scaling each.

    batch: rows of `length` tokens per rank; with strong=True of all ranks together. deadline_s: for each world size.
    told: called with a line per world size, as it begins. Raises ValueError, before any rank starts, for arguments
    that cannot be (a batch that cannot be cut for all of `world_sizes`); RankFailed as `launch`.
    """
    from labkit.ranks.launch import launch

    world_sizes, found = tuple(world_sizes), []
    _check(world_sizes, steps, batch, length, strong, deadline_s)
    for n in world_sizes:
        rows = batch // n if strong else batch
        if told is not None:
            told(f"{n} rank{'s' * (n > 1)}, {WARM_UP + steps} steps of {n * rows * length} tokens ...")
        found.append(launch(_train, n, rows, length, steps, prints="quiet", deadline_s=deadline_s)[0])
    return [Scaling(**each) for each in found]


def scaling(
    steps: int = 8,
    batch: int = 4,
    length: int = 64,
    strong: bool = False,
    most: int = 4,
    deadline_s: float = 120.0,
) -> None:
    """Train on 1, 2, 4 ranks and print tokens per second. Under torchrun: on the ranks that torchrun started.

    most: the largest number of ranks. strong: one batch cut between ranks, not one for each. deadline_s: for each
    number of ranks; torchrun has none. Raises as `train_on`.
    """
    asked.whole("most", most, 4)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        _check((int(os.environ["WORLD_SIZE"]),), steps, batch, length, strong, deadline_s)
        _under_torchrun(steps, batch, length, strong)
        return
    sizes = [2**power for power in range(int(most).bit_length())]
    found = train_on(sizes, steps, batch, length, strong, deadline_s, told=lambda line: print(line, flush=True))
    print(table(found, strong))


def table(found: Sequence[Scaling], strong: bool = False) -> str:
    """World size, tokens of a step, median step time, tokens/s, efficiency, first and last loss; and a note."""
    kind = "strong: one batch, cut between ranks" if strong else "weak: a batch for each rank"
    lines = [f"DistributedDataParallel, {kind}", "ranks   tokens   step (ms)   tokens/s   efficiency   loss"]
    for each, share in zip(found, efficiency(found), strict=True):
        told = "-" if each is found[0] else f"{share:.0%}"
        losses = f"{each.losses[0]:.2f} to {each.losses[-1]:.2f}"
        lines.append(
            f"{each.world_size:5}{each.tokens:9}{each.step_time_s * 1e3:12.1f}{each.tokens_per_s:11.0f}{told:>13}"
            f"   {losses}"
        )
    crowded = [each for each in found if each.shares_cores]
    if crowded:
        ranks = ", ".join(str(each.world_size) for each in crowded)
        lines.append(
            f"There are {found[0].cores:g} cores, one thread a rank: {ranks} ranks take turns on them, and efficiency "
            "falls for that reason already."
        )
    return "\n".join(lines)


def _check(
    world_sizes: tuple[int, ...], steps: int, batch: int, length: int, strong: bool, deadline_s: float
) -> None:
    from labkit.model.text import text

    if not world_sizes:
        raise ValueError("world_sizes is empty; world_sizes=(1, 2, 4) would do")
    for n in world_sizes:
        asked.whole("world_size", n, 2)
    asked.whole("steps", steps, 8)
    asked.whole("batch", batch, 4)
    asked.whole("length", length, 64, most=len(text()) - 1)
    asked.yes_or_no("strong", strong)
    asked.seconds("deadline_s", deadline_s, 120)
    if strong:
        asked.cut(batch, world_sizes)


def _under_torchrun(steps: int, batch: int, length: int, strong: bool) -> None:
    import torch
    import torch.distributed as dist

    from labkit.ranks.backend import choose_backend
    from labkit.ranks.rank import DEVICE

    backend, devices = choose_backend(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])), None)
    os.environ[DEVICE] = devices[int(os.environ.get("LOCAL_RANK", 0))]
    if os.environ[DEVICE].startswith("cuda"):
        torch.cuda.set_device(torch.device(os.environ[DEVICE]))
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        found = Scaling(**_train(batch // dist.get_world_size() if strong else batch, length, steps))
        if dist.get_rank() == 0:
            print(table([found], strong))
    finally:
        dist.destroy_process_group()


def _train(rows: int, length: int, steps: int) -> dict[str, Any]:
    """Runs in a rank: what a Scaling holds, the same on all ranks."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from labkit.model import llama, text
    from labkit.ranks.rank import device

    rank, n, where = dist.get_rank(), dist.get_world_size(), device()
    torch.manual_seed(0)
    model = DistributedDataParallel(llama.Llama(llama.Shape(**SHAPE)).to(where))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    measured = torch.zeros(2, WARM_UP + steps, dtype=torch.float64)
    batches = text.batches(rows, length, rank=rank, world_size=n, steps=WARM_UP + steps)
    for step, (tokens, targets) in enumerate(batches):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = llama.loss_of(model(tokens.to(where)), targets.to(where))
        loss.backward()
        optimizer.step()
        measured[1, step] = loss.item()  # waits until a GPU is done
        measured[0, step] = time.perf_counter() - began
    measured = measured.to(where) if dist.get_backend() == "nccl" else measured
    dist.all_reduce(measured[0], op=dist.ReduceOp.MAX)
    dist.all_reduce(measured[1])
    times, losses = measured[:, WARM_UP:].tolist()
    return {
        "world_size": n,
        "tokens": n * rows * length,
        "step_times_s": tuple(times),
        "losses": tuple(loss / n for loss in losses),
        "cores": usable_cores(),
        "device": where.type,
    }
