"""What can go wrong on a rank, one function per kind, each with the verdict it must get.

The line at fault carries a HERE mark; `lines_of` finds it, so that a drill also tests the place that is told.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Drill:
    """A function for every rank, called with the culprit's rank; and what the launch must say of it."""

    name: str
    fn: Callable
    code: str = ""  # "": it must return
    names_rank: bool = True  # the culprit is the cause's rank
    deadline_s: float = 60.0
    limit_s: float = 5.0  # told in at most so many seconds
    least_world: int = 2


def lines_of(fn: Callable) -> list[int]:
    """The lines with a HERE mark in a drill: the cause must name one of them."""
    lines, first = inspect.getsourcelines(fn)
    return [first + i for i, line in enumerate(lines) if "HERE" in line]


def returns(culprit):
    x = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(x)
    return float(x[0])


def raises(culprit):
    if dist.get_rank() == culprit:
        raise ValueError("my own mistake")  # HERE
    dist.all_reduce(torch.ones(10))


def leaves_by_exit(culprit):
    if dist.get_rank() == culprit:
        os._exit(3)  # HERE
    dist.all_reduce(torch.ones(10))


def killed(culprit):
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)  # HERE
    dist.all_reduce(torch.ones(10))


def calls_sys_exit(culprit):
    if dist.get_rank() == culprit:
        sys.exit(2)  # HERE
    dist.all_reduce(torch.ones(10))


def endless_loop(culprit):
    while dist.get_rank() == culprit:  # HERE
        pass  # HERE
    dist.all_reduce(torch.ones(10))


def endless_wait(culprit):
    if dist.get_rank() == culprit:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # HERE
    dist.all_reduce(torch.ones(10))


def skips_collective(culprit):
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() != culprit:
        dist.all_reduce(torch.ones(10))  # HERE
    return 1


def swapped_order(culprit):
    a, b = torch.ones(64), torch.zeros(64)
    if dist.get_rank() == culprit:
        dist.all_reduce(b)  # HERE
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)
    return float(a[0])


def swapped_in_helpers(culprit):
    gradients = {"first": torch.ones(64), "second": torch.zeros(32)}
    names = sorted(gradients, reverse=dist.get_rank() == culprit)
    for name in names:
        dist.all_reduce(gradients[name])  # HERE
    return names


def wrong_shape(culprit):
    rows = 5 if dist.get_rank() == culprit else 4
    dist.all_reduce(torch.ones(rows))  # HERE
    return rows


def wrong_dtype(culprit):
    kind = torch.float64 if dist.get_rank() == culprit else torch.float32
    dist.all_reduce(torch.ones(16, dtype=kind))  # HERE
    return str(kind)


def wrong_root(culprit):
    root = culprit if dist.get_rank() == culprit else (culprit + 1) % dist.get_world_size()
    dist.broadcast(torch.ones(8), src=root)  # HERE
    return root


def both_send_first(culprit):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((8,), float(rank))
    dist.send(x, (rank + 1) % world_size)  # HERE
    dist.recv(x, (rank - 1) % world_size)
    return float(x[0])


def unpicklable_result(culprit):
    dist.barrier()
    return threading.Lock() if dist.get_rank() == culprit else 1


def hundred_megabytes(culprit):
    return torch.ones(25_000_000) if dist.get_rank() == culprit else None


def prints_ten_megabytes(culprit):
    if dist.get_rank() == culprit:
        for i in range(100_000):
            print(f"{i:099d}")
    dist.barrier()
    return dist.get_rank()


DRILLS = (
    Drill("returns", returns),
    Drill("raises on one rank", raises, "raised"),
    Drill("os._exit", leaves_by_exit, "died"),
    Drill("SIGKILL", killed, "died"),
    Drill("sys.exit", calls_sys_exit, "exited"),
    Drill("endless Python loop", endless_loop, "deadline", deadline_s=2.0),
    Drill("endless C++ wait", endless_wait, "stalled"),
    Drill("skips a collective", skips_collective, "returned_early"),
    Drill("swapped order", swapped_order, "mismatch", least_world=3),
    Drill("swapped order in a loop", swapped_in_helpers, "mismatch", least_world=3),
    Drill("wrong shape", wrong_shape, "mismatch", least_world=3),
    Drill("wrong dtype", wrong_dtype, "mismatch", least_world=3),
    Drill("wrong root", wrong_root, "mismatch", least_world=3),
    Drill("both send first", both_send_first, "deadlock", names_rank=False),
    Drill("unpicklable result", unpicklable_result, "unpicklable_result"),
    Drill("100 MB result", hundred_megabytes),
    Drill("prints 10 MB", prints_ten_megabytes),
)
