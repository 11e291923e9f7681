"""Run a function on ranks under watch, and keep everything that was seen of it.

Left out: what to make of it (`evidence`, `honesty`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.ranks.outcome import Outcome


@dataclass(frozen=True)
class Observed:
    """What `observe` saw of one run. Tuples are in rank order.

    results: what fn returned. records: RankRecord of `labkit.record.trace`. integrity: Integrity of
    `labkit.record.integrity`. All three are None for a rank that did not return.
    witnesses: per rank, the findings that it told at once, [code, sentence, place] each, and at its end their number.
    outcome: the Outcome of `run_ranks` (cause, ledgers, socket bytes, sequence numbers, output).
    """

    world_size: int
    results: tuple[Any, ...]
    records: tuple[Any, ...]
    integrity: tuple[Any, ...]
    outcome: Outcome
    witnesses: tuple[tuple[Any, ...], ...] = ()


def observe(
    fn: Callable,
    world_size: int,
    rank_args: Sequence[tuple] | None = None,
    args: tuple = (),
    deadline_s: float = 20.0,
    backend: str | None = None,
) -> Observed:
    """Run `fn(*args, *rank_args[rank])` on `world_size` ranks under watch. Never raises for what a rank did.

    What the ranks print is kept in `outcome.output` and not shown. fn and its arguments travel as bytes that a rank
    opens under watch. What comes back must be tensors, numbers, plain containers or labkit's records: anything else
    is the cause "unpicklable_result". Raises LaunchError as `run_ranks` does.
    """
    from labkit.ranks.launch import run_ranks
    from labkit.ranks.sending import pack_arguments
    from labkit.record.watching import WITNESS

    own = rank_args if rank_args is not None else [()] * world_size
    outcome = run_ranks(
        watched_call,
        world_size,
        rank_args=[(pack_arguments((fn, *args, *mine)),) for mine in own],
        deadline_s=deadline_s,
        backend=backend,
        prints="quiet",
        on_report=_unshown,
        preload=("labkit.record.integrity",),
        trusted=False,
    )
    triples = [r if type(r) is tuple and len(r) == 3 else (None, None, None) for r in outcome.results]
    results, records, integrity = zip(*triples, strict=True)
    told = [tuple(v[WITNESS] for r, v in outcome.reports if r == rank and WITNESS in v) for rank in range(world_size)]
    outcome = replace(outcome, reports=tuple(each for each in outcome.reports if WITNESS not in each[1]))
    return Observed(world_size, results, records, integrity, outcome, tuple(told))


def watched_call(payload: bytes) -> tuple:
    """Runs in a rank: (value, RankRecord, Integrity) of a pickled (fn, *args)."""
    from labkit.record.integrity import watched_bytes

    return watched_bytes(payload)


def _unshown(rank: int, values: dict[str, Any]) -> None:
    """Reports of a judged run are kept in the outcome."""
