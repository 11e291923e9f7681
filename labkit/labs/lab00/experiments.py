"""Experiments of lab 00 that need no notebook: `labkit run lab00.hello`, and three that go wrong on purpose.

Each prints what happens. Left out: exercises, and anything that a learner should write.
"""

from __future__ import annotations


def hello(world_size: int = 4) -> None:
    """Start ranks and let each say who it is. Under torchrun: one of the ranks that torchrun started."""
    import os

    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        _say_hello()
        dist.destroy_process_group()
        return
    from labkit.ranks.launch import launch

    launch(_say_hello, world_size, prints="ordered")


def deadlock(world_size: int = 2) -> None:
    """Every rank sends first: all wait in send, for ever if nobody looked."""
    _show(_send_first, world_size)


def mismatch(world_size: int = 2) -> None:
    """Two all_reduces in swapped order on one rank: wrong numbers, and gloo says nothing."""
    outcome = _show(_swapped_order, world_size)
    for rank, held in enumerate(outcome.results):
        print(f"rank {rank} holds {held}; right is {{'weight': {world_size}, 'bias': {100 * world_size}}}")


def skipped(world_size: int = 4) -> None:
    """The last rank has one batch fewer than the others and returns early."""
    _show(_one_batch_fewer, world_size)


def _show(fn, world_size: int):
    from labkit.ranks.launch import run_ranks

    outcome = run_ranks(fn, world_size)
    print(f"after {outcome.time_s:.1f} s: {outcome.cause.code}")
    print(outcome.cause.sentence)
    for whereabouts in outcome.cause.whereabouts:
        print(f"  {whereabouts}")
    return outcome


def _say_hello() -> None:
    import os

    import torch.distributed as dist

    from labkit.ranks.rank import device

    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"I am rank {rank} of {world_size}: process {os.getpid()}, device {device()}")


def _send_first() -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((1,), float(rank))
    got = torch.empty(1)
    dist.send(mine, dst=(rank + 1) % world_size)
    dist.recv(got, src=(rank - 1) % world_size)


def _swapped_order() -> dict[str, float]:
    import torch
    import torch.distributed as dist

    grads = {"weight": torch.full((2, 2), 1.0), "bias": torch.full((4,), 100.0)}
    names = ["weight", "bias"] if dist.get_rank() == 0 else ["bias", "weight"]
    for name in names:
        dist.all_reduce(grads[name])
    return {name: grad.flatten()[0].item() for name, grad in grads.items()}


def _one_batch_fewer() -> None:
    import torch
    import torch.distributed as dist

    last = dist.get_rank() == dist.get_world_size() - 1
    for _ in range(3 if last else 4):
        dist.all_reduce(torch.ones(1))
