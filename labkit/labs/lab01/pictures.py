"""Data behind the pictures of lab 01 that use the learner's own function.

While a function is still a stub the data is what the cost model says is due, and the title says "not yet yours".
Left out: drawing, and timing (`sweep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

STUB = "not yet yours"


def sent_picture(fn: Callable, world_size: int = 4, num_elements: int = 1_000_000) -> tuple[list[float], str]:
    """(bytes that each rank sends in `fn(tensor)`, in shares of the tensor; title). By the ranks' own ledgers.

    Raises RankFailed when the ranks fail.
    """
    from labkit.check import evidence
    from labkit.cost import comm

    seen = _observed(fn, world_size, num_elements, ())
    if seen is None:
        return [comm.bus_factor("all_reduce", world_size)] * world_size, f"{fn.__name__}, {STUB}: what is due"
    return [num_bytes / (4 * num_elements) for num_bytes in evidence.sent_bytes(seen)], fn.__name__


def leaving_picture(
    fn: Callable, world_size: int = 4, ranks_per_node: int = 2, args: Sequence[Any] = (), due: float = 0.0
) -> tuple[list[float], str]:
    """(bytes that leave each node in `fn(tensor, *args)`, in shares of the tensor; title).

    due: what is shown for every node while fn is a stub. Raises RankFailed when the ranks fail.
    """
    import labkit.labs.lab01.crossing as crossing

    num_elements = 2**16
    seen = _observed(fn, world_size, num_elements, tuple(args))
    if seen is None:
        return [due] * (world_size // ranks_per_node), f"{fn.__name__}, {STUB}: what is due"
    found = crossing.crossings(seen, ranks_per_node)
    nodes = crossing.by_node(found, world_size, ranks_per_node)
    return [num_bytes / (4 * num_elements) for num_bytes in nodes], fn.__name__


def by_eye(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(alpha_s, beta_s) read off the first and the last measurement alone, for pictures while there is no fit."""
    return times[0], times[-1] / sizes[-1]


def _observed(fn: Callable, world_size: int, num_elements: int, args: tuple) -> Any:
    from labkit.check import evidence
    from labkit.ranks.outcome import RankFailed

    seen = evidence.observe(_on_ones, world_size, args=(fn, num_elements, args))
    if seen.outcome.cause is not None:
        raise RankFailed(seen.outcome.cause)
    return None if NotImplemented in seen.results else seen


def _on_ones(fn: Callable, num_elements: int, args: tuple) -> Any:
    """Runs in a rank."""
    import torch

    out = fn(torch.ones(num_elements), *args)
    return out if out is NotImplemented else None
