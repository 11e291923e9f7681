"""Measures this laptop once, with as many busy ranks as will share it, and keeps the figures (`labkit.cost.laptop`).

All ranks measure at the same time, because they share cores, caches and memory: a rank that runs alone is faster than
any of them will be. Of many short readings the median counts. Left out: anything but fp32 on the CPU and gloo.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timezone

from labkit.cost import comm
from labkit.cost import laptop as kept
from labkit.cost.cores import usable_cores
from labkit.cost.laptop import Laptop
from labkit.ranks.launch import launch

SMALL, LARGE = 1024, 8 * 2**20
SMALL_CALLS, LARGE_CALLS = 10, 3
SIDE, LONG = 512, 2**18
PRODUCT_FLOPS, SUM_BYTES = 2 * SIDE**3, 3 * 4 * LONG
# A while is longer than the turns of ranks that share a core, which are some milliseconds.
ROUNDS, BUSY_S = 9, 0.12


@dataclass(frozen=True)
class Reading:
    """Seconds in one rank of a product, of a sum, and of a small and a large all_reduce; and of a core's time in both
    all_reduces.
    """

    product_s: float
    sum_s: float
    small_s: float
    large_s: float
    cpu_s: float


def laptop(num_ranks: int, cores: float | None = None, again: bool = False) -> Laptop:
    """The figures of this machine with num_ranks ranks busy, measured if they are not kept yet (some seconds).

    cores: cores that may be used, by default those that this process may use. again: measure in any case. Warns
    when the figures cannot be kept. Raises ValueError for a num_ranks below 1, and RankFailed when ranks fail.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is 1 or more, not {num_ranks}")
    cores = usable_cores() if cores is None else float(cores)
    found = None if again else kept.load(num_ranks, cores)
    if found is None:
        found = measured(num_ranks, cores)
        if told := kept.save(found):
            warnings.warn(told, stacklevel=2)
    return found


def measured(num_ranks: int, cores: float) -> Laptop:
    """Measure now, keep nothing. Errors as `laptop`."""
    return summed_up(launch(busy_rank, num_ranks, prints="quiet", deadline_s=120.0, backend="gloo"), cores)


def summed_up(readings: Sequence[Sequence[Reading]], cores: float) -> Laptop:
    """The figures of ranks that gave these readings: of each the slowest rank's, and of that the median over rounds.

    The slowest, because a step waits for it; a median, because the machine has other work too, and what falls on less
    than half of the rounds leaves no trace.
    """
    rounds = [map(max, zip(*map(astuple, ranks), strict=True)) for ranks in zip(*readings, strict=True)]
    product_s, sum_s, small_s, large_s, _ = (statistics.median(column) for column in zip(*rounds, strict=True))
    num_ranks, alpha_s, bandwidth, share = len(readings), 0.0, float(2**60), 0.0  # one rank talks to nobody
    if num_ranks > 1:
        s_per_byte = max((large_s - small_s) / (LARGE - SMALL), 1e-15)
        latency_s = max(small_s - SMALL * s_per_byte, 0.0)
        wire = comm.link_of("loopback", "all_reduce", num_ranks, latency_s, s_per_byte)
        alpha_s, bandwidth = wire.alpha_s, wire.bandwidth
        shares = [r.cpu_s / (r.small_s + r.large_s) for rank in readings for r in rank]
        share = min(statistics.median(shares), cores / num_ranks)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    speeds = PRODUCT_FLOPS / product_s, SUM_BYTES / sum_s
    return Laptop(num_ranks, cores, *speeds, memory, alpha_s, bandwidth, 0.0, now, platform.node(), share)


def busy_rank(between: Callable[[], object] | None = None) -> list[Reading]:
    """In a rank: readings of ROUNDS rounds, all ranks together, each followed by `between()` where that is given.

    As a training step sees them: every operand is another one than a moment ago, results are new memory, and one
    all_reduce follows another. The things are read in turn, so a while in which the machine has other work falls on
    all of them alike.
    """
    import torch
    import torch.distributed as dist

    squares = [torch.randn(SIDE, SIDE) for _ in range(16)]
    longs = [torch.randn(LONG) for _ in range(16)]
    small, large = ([torch.zeros(num_bytes // 4) for _ in range(4)] for num_bytes in (SMALL, LARGE))
    found = []
    for _ in range(ROUNDS):
        product_s, _ = _each_s(lambda i: torch.mm(squares[i % 16], squares[(i + 5) % 16]))
        sum_s, _ = _each_s(lambda i: longs[i % 16] + longs[(i + 5) % 16])
        small_s, small_cpu_s = _each_s(lambda i: dist.all_reduce(small[i % 4]), SMALL_CALLS)
        large_s, large_cpu_s = _each_s(lambda i: dist.all_reduce(large[i % 4]), LARGE_CALLS)
        found.append(Reading(product_s, sum_s, small_s, large_s, small_cpu_s + large_cpu_s))
        if between is not None:
            between()
    return found


def _each_s(call: Callable[[int], object], calls: int | None = None) -> tuple[float, float]:
    """Seconds of one of so many calls, made one after another while every rank makes them, and of a core's time in
    all threads of this process; without `calls`, as many as take BUSY_S.

    A mean, no median: ranks that share a core take turns, and a call that happens not to be interrupted says nothing
    about that.
    """
    import torch.distributed as dist

    call(0)
    dist.barrier()
    start, start_cpu, made = time.perf_counter(), time.process_time(), 0
    while made < (calls or 1) or (calls is None and time.perf_counter() - start < BUSY_S):
        call(made)
        made += 1
    return (time.perf_counter() - start) / made, (time.process_time() - start_cpu) / made
