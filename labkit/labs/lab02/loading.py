"""A slow dataset and the loaders that hide it: how long a training step waits for its data, and what not waiting costs.

A sample costs what samples of real data cost: a wait for storage (asleep) and work of the processor (zlib). Workers of
torch's DataLoader take both out of the training step, and in return take memory, cores and a start; a dataset kept in
memory takes its time once, before the first step. All is measured in ranks: a worker is a fork, and forking a
notebook's own process, whose torch threads have run, can hang. Left out: pinned memory, which is for GPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import labkit.labs.lab02.asked as asked

SHAPE = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 344}


@dataclass(frozen=True)
class Setting:
    """How data are loaded. prefetch_factor: batches that each worker keeps ready. cached: all decoded beforehand."""

    num_workers: int = 0
    prefetch_factor: int = 2
    cached: bool = False

    @property
    def name(self) -> str:
        if self.cached:
            return "in memory"
        if not self.num_workers:
            return "no workers"
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        return workers if self.prefetch_factor == 2 else f"{workers}, prefetch {self.prefetch_factor}"


SETTINGS = (Setting(0), Setting(1), Setting(2), Setting(2, prefetch_factor=6), Setting(0, cached=True))


@dataclass(frozen=True)
class Loading:
    """What one rank measured under one setting. Seconds per step: waiting for the batch, then training on it.

    start_s: from asking for the first batch to having it; with workers they are started then, with data in memory all
    are decoded. worker_bytes: memory that each worker has to itself. worker_cores: cores that the workers kept busy
    together. Both () and 0.0 without workers, and where the system has no /proc.
    """

    setting: Setting
    rank: int
    wait_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    start_s: float
    worker_bytes: tuple[int, ...]
    worker_cores: float

    @property
    def starved(self) -> float:
        """The share of the time, after the first batch, in which the rank waits for data."""
        return sum(self.wait_s) / (sum(self.wait_s) + sum(self.compute_s))


def load_with(
    settings: Sequence[Setting],
    world_size: int = 1,
    steps: int = 16,
    batch: int = 8,
    read_s: float = 0.002,
    told: Callable[[str], Any] | None = None,
    deadline_s: float = 60.0,
) -> list[Loading]:
    """Train a small Llama on a slow dataset under each of `settings`: one Loading per setting and rank, in this order.

    world_size: ranks, each with its own loader, training together (DistributedDataParallel from two ranks up), so that
    a rank which waits for data makes the others wait in their all_reduce. read_s: what storage takes for most samples.
    told: called with a line per setting, as it begins. deadline_s: for each setting, its decoding included. Raises
    ValueError, before any rank starts, for arguments that cannot be; RankFailed as `launch`.
    """
    from labkit.ranks.launch import launch

    settings, found = tuple(settings), []
    _check(settings, world_size, steps, batch, read_s, deadline_s)
    for setting in settings:
        if told is not None:
            told(f"{setting.name}, {steps} steps ...")
        found += launch(measure, world_size, setting, steps, batch, read_s, prints="quiet", deadline_s=deadline_s)
    return found


def loading(
    world_size: int = 1, steps: int = 16, batch: int = 8, read_s: float = 0.002, deadline_s: float = 60.0
) -> None:
    """Train on a slow dataset with 0, 1, 2 workers and from memory; print what each step waits for, and the cost."""

    def told(line: str) -> None:
        print(line, flush=True)

    print(loading_table(load_with(SETTINGS, world_size, steps, batch, read_s, told, deadline_s)))


def _check(
    settings: tuple[Setting, ...], world_size: int, steps: int, batch: int, read_s: float, deadline_s: float
) -> None:
    if not settings:
        raise ValueError("settings is empty; settings=(Setting(0), Setting(2)) would do")
    for setting in settings:
        asked.whole("num_workers", setting.num_workers, 2, least=0)
        asked.whole("prefetch_factor", setting.prefetch_factor, 2)
    asked.whole("world_size", world_size, 2)
    asked.whole("steps", steps, 16)
    asked.whole("batch", batch, 8)
    asked.seconds("read_s", read_s, 0.002, zero=True)
    asked.seconds("deadline_s", deadline_s, 60)


def loading_table(found: Sequence[Loading]) -> str:
    """Per setting and rank: median wait and compute of a step, share starved, seconds to the first batch, cost."""
    lines = ["setting                rank   wait (ms)   compute (ms)   starved   start (s)   MB a worker   their cores"]
    for each in found:
        memory = max(each.worker_bytes, default=0) / 1e6
        lines.append(
            f"{each.setting.name:22}{each.rank:5}{median(each.wait_s) * 1e3:12.1f}{median(each.compute_s) * 1e3:15.1f}"
            f"{each.starved:10.0%}{each.start_s:12.2f}{memory:14.1f}{each.worker_cores:14.2f}"
        )
    return "\n".join(lines)


def measure(setting: Setting, steps: int, batch: int, read_s: float) -> Loading:
    """Runs in a rank: train `steps` steps after a first one, and look at the workers before they end."""
    import time

    from labkit.labs.lab02.shards import Decoded, SlowText

    train = _trainer()
    dataset = SlowText((steps + 1) * batch, read_s=read_s)
    began = time.perf_counter()
    batches = iter(_loader(Decoded(dataset) if setting.cached else dataset, setting, batch))
    first = next(batches)
    start_s = time.perf_counter() - began
    train(first)
    wait, compute, before, began = [], [], _cpu_seconds(), time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        tokens = next(batches)
        came = time.perf_counter()
        train(tokens)
        wait.append(came - asked)
        compute.append(time.perf_counter() - came)
    busy_s, wall_s = _cpu_seconds() - before, time.perf_counter() - began
    workers = tuple(_private_bytes(pid) for pid in _workers())
    del batches  # ends the workers
    return Loading(setting, _rank(), tuple(wait), tuple(compute), start_s, workers, max(0.0, busy_s) / wall_s)


def _trainer() -> Callable[[Any], None]:
    """A function that takes one training step on a batch, (batch, length + 1) tokens."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from labkit.model import llama
    from labkit.ranks.rank import device

    torch.manual_seed(0)
    model = llama.Llama(llama.Shape(**SHAPE)).to(device())
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(tokens: Any) -> None:
        tokens = tokens.to(device())
        optimizer.zero_grad()
        loss = llama.loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        loss.item()  # waits until a GPU is done

    return train


def _loader(dataset: Any, setting: Setting, batch: int) -> Any:
    from torch.utils.data import DataLoader

    if not setting.num_workers:
        return DataLoader(dataset, batch_size=batch)
    return DataLoader(
        dataset,
        batch_size=batch,
        num_workers=setting.num_workers,
        prefetch_factor=setting.prefetch_factor,
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        worker_init_fn=functools.partial(end_with_rank, os.getpid()),
    )


def end_with_rank(rank_pid: int, worker: int) -> None:
    """Runs in a worker: have it end with its rank, which may be ended without notice, and may be gone by now."""
    from labkit.ranks.server import die_with_parent

    die_with_parent(rank_pid)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _workers() -> list[int]:
    """Process ids of this process's workers."""
    import multiprocessing

    return sorted(child.pid for child in multiprocessing.active_children())


def _cpu_seconds() -> float:
    """Processor time that the workers have used so far."""
    ticks = 0
    for pid in _workers():
        try:
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])  # utime and stime, proc_pid_stat(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def _private_bytes(pid: int) -> int:
    """Memory that a process has to itself, 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            lines = [line.split() for line in rollup]
    except OSError:
        return 0
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:"))
