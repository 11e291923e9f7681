"""GPipe, 1F1B and the interleaved 1F1B: schedules with full backwards.

Left out: PipeDream's schedules without a flush, whose weights differ between the forward and the backward of a
microbatch, so that gradients are not those of a serial run; GPipe's re-materialization, with which a rank keeps m
stage inputs and computes the rest again.
"""

from __future__ import annotations

from labkit.schedule.actions import Action, Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965, section 2.2; drawn as there, but backwards in the
    order of the forwards, as torch's ScheduleGPipe has them). In flight: all m. ValueError for sizes below 1."""
    check_sizes(ranks, microbatches)
    lists = []
    for rank in range(ranks):
        forwards = [Action("F", rank, i) for i in range(microbatches)]
        lists.append((*forwards, *(Action("B", rank, i) for i in range(microbatches))))
    return Schedule("GPipe", ranks, microbatches, tuple(range(ranks)), tuple(lists))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with a flush (PipeDream-Flush, arXiv:2006.09503, section 3.2; Megatron-LM, arXiv:2104.04473, section 2.2.1).

    Rank r does p - r - 1 forwards, then one forward and one backward in turn, then what is left of the backwards. In
    flight: min(m, p - r). ValueError for sizes below 1.
    """
    check_sizes(ranks, microbatches)
    lists = []
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - rank - 1)
        forwards = [Action("F", rank, i) for i in range(microbatches)]
        backwards = [Action("B", rank, i) for i in range(microbatches)]
        lists.append(in_turn(forwards, backwards, warm_up))
    return Schedule("1F1B", ranks, microbatches, tuple(range(ranks)), tuple(lists))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Megatron-LM's interleaved 1F1B (arXiv:2104.04473, section 2.2.2): rank r has stages r, r + p, r + 2p, ...

    Microbatches go through in groups of p: a rank does a group's forwards at its first chunk, then at its second, and
    so on; backwards the other way round. chunks: v, stages per rank. ValueError for sizes below 1, and for
    microbatches that are no multiple of the ranks.
    """
    check_sizes(ranks, microbatches, chunks)
    if microbatches % ranks:
        raise ValueError(
            f"interleaved: microbatches go through in groups of p, and {microbatches} is no multiple of {ranks} ranks"
        )
    lists = []
    for rank in range(ranks):
        order = [
            (chunk, first + i)
            for first in range(0, microbatches, ranks)
            for chunk in range(chunks)
            for i in range(ranks)
        ]
        forwards = [Action("F", chunk * ranks + rank, i) for chunk, i in order]
        backwards = [Action("B", (chunks - 1 - chunk) * ranks + rank, i) for chunk, i in order]
        warm_up = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        lists.append(in_turn(forwards, backwards, min(warm_up, len(order))))
    placement = tuple(stage % ranks for stage in range(ranks * chunks))
    return Schedule("interleaved", ranks, microbatches, placement, tuple(lists))


def in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    found = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        found += [forward, backward]
    return (*found, *backwards[len(forwards) - warm_up :])


def check_sizes(ranks: int, microbatches: int, chunks: int = 1) -> None:
    """ValueError for sizes that no schedule has."""
    for what, size in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{what} is {size!r}; it is a whole number of 1 or more")
