"""Time collectives on real ranks as nccl-tests does: sizes from 1 KiB up, after a warm-up, slowest rank counts.

`num_bytes` is nccl-tests' S, the full unsharded tensor, of float32. Every repetition is kept, so that a fit can see
which were delayed. Left out: correctness of the results, and pipelined repetitions (nccl-tests issues 20 in a row).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
SIZES = tuple(2**power for power in (10, 14, 18, 22, 24, 26))  # 1 KiB to 64 MiB


@dataclass(frozen=True)
class Sweep:
    """Times of one collective in one group: per size, seconds of every repetition."""

    op: str
    world_size: int
    sizes: tuple[int, ...]
    times_s: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> tuple[float, ...]:
        """Per size, the median of its repetitions."""
        return tuple(median(times) for times in self.times_s)

    @property
    def samples(self) -> tuple[list[int], list[float]]:
        """(sizes, times) of every single repetition, in the order measured."""
        pairs = [(size, time) for size, times in zip(self.sizes, self.times_s, strict=True) for time in times]
        return [size for size, _ in pairs], [time for _, time in pairs]


def measure(
    world_size: int, ops: Sequence[str] = OPS, sizes: Sequence[int] = SIZES, budget_s: float = 12.0
) -> list[Sweep]:
    """Sweeps of `ops` on `world_size` new ranks, in the order of `ops`.

    budget_s: once so much time is used, every size is timed once only. Raises ValueError for an op that is not one
    of OPS; RankFailed as `launch`.
    """
    from labkit.ranks.launch import launch

    _known(ops)
    by_op = launch(_times_of_all, world_size, tuple(ops), tuple(sizes), budget_s, prints="quiet")[0]
    return [Sweep(op, world_size, tuple(sizes), times) for op, times in zip(ops, by_op, strict=True)]


def sweep(world_size: int = 4, largest_bytes: int = SIZES[-1]) -> None:
    """Time every collective, and print what nccl-tests prints. Under torchrun: on the ranks that torchrun started."""
    import os

    sizes = tuple(size for size in SIZES if size <= largest_bytes)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        by_op = _times_of_all(OPS, sizes, 12.0)
        found = [Sweep(op, dist.get_world_size(), sizes, times) for op, times in zip(OPS, by_op, strict=True)]
        if dist.get_rank() == 0:
            print("\n\n".join(map(table, found)))
        dist.destroy_process_group()
        return
    print("\n\n".join(map(table, measure(world_size, sizes=sizes))))


def table(found: Sweep, busbw: Callable[[str, int, int, float], float] | None = None) -> str:
    """A sweep as nccl-tests prints it: size, median time, algbw and busbw in GB/s (1e9).

    busbw: (op, num_bytes, world_size, time_s) -> bytes/s, by default `labkit.cost.comm.busbw`.
    """
    from labkit.cost import comm

    rate = busbw or comm.busbw
    lines = [f"{found.op}, {found.world_size} ranks", "    size (B)   time (us)  algbw (GB/s)  busbw (GB/s)"]
    for size, time_s in zip(found.sizes, found.medians, strict=True):
        fast = rate(found.op, size, found.world_size, time_s) / 1e9
        lines.append(f"{size:12}{time_s * 1e6:12.1f}{size / time_s / 1e9:14.3f}{fast:14.3f}")
    return "\n".join(lines)


def _known(ops: Sequence[str]) -> None:
    for op in ops:
        if op not in OPS:
            raise ValueError(f"no collective is called {op!r} here; there is {', '.join(OPS)}")


def _times_of_all(ops: Sequence[str], sizes: Sequence[int], budget_s: float) -> list[tuple[tuple[float, ...], ...]]:
    """Runs in a rank: per op and size, the times of all repetitions."""
    import time

    ends = time.perf_counter() + budget_s
    return [tuple(_times(op, size, ends) for size in sizes) for op in ops]


def _times(op: str, num_bytes: int, ends: float) -> tuple[float, ...]:
    """Repetitions of one collective at one size; of each, the time of the slowest rank."""
    import time

    import torch
    import torch.distributed as dist

    run = collective(op, num_bytes)
    run()  # connections and memory are made by the first call
    late = torch.tensor([time.perf_counter() > ends], dtype=torch.int32)
    dist.all_reduce(late)  # ranks must agree on how often
    repetitions = 1 if int(late) else 7 if num_bytes < 2**20 else 5 if num_bytes < 2**24 else 3
    mine = torch.zeros(repetitions, dtype=torch.float64)
    for repetition in range(repetitions):
        dist.barrier()
        began = time.perf_counter()
        run()
        _finish()
        mine[repetition] = time.perf_counter() - began
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return tuple(mine.tolist())


def _finish() -> None:
    """A GPU's collective is only begun when its call returns: wait until it is done."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def collective(op: str, num_bytes: int) -> Callable[[], Any]:
    """A call of `op` on tensors of its own, the full one of `num_bytes` (rounded down to equal parts of float32)."""
    import torch
    import torch.distributed as dist

    from labkit.ranks.rank import device

    n = dist.get_world_size()
    where = device() if "nccl" in dist.get_backend_config() else "cpu"
    full = torch.ones(max(1, num_bytes // 4 // n) * n, device=where)
    parts = list(full.chunk(n))
    part, other = torch.ones_like(parts[0]), torch.empty_like(full) if op == "all_to_all" else None
    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
        "broadcast": lambda: dist.broadcast(full, src=0),
        "reduce": lambda: dist.reduce(full, dst=0),
    }[op]
