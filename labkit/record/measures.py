"""Figures that are graded: how much of communication is hidden, from a record or from a replay.

Left out: what a replay says by itself (`time_s`, `idle_share`, `exposed_s`), and bounds on these figures, which are
the labs' own. Work hidden in CUDA streams of a library (FSDP2's prefetch, DeepSpeed's overlap_comm) cannot be graded
from a CPU record, where it is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from labkit.record.events import Collective, RankRecord, Wait
from labkit.record.prices import counting_rounds
from labkit.record.replay import replay
from labkit.record.timeline import Replay


def exposed_s(played: Replay) -> tuple[float, ...]:
    """Seconds per rank in which it stands still for communication."""
    return tuple(map(played.exposed_s, range(played.world_size)))


def rounds(records: Sequence[RankRecord], sends: str = "rendezvous") -> float:
    """Rounds that messages take: alpha 1, beta 0, one send and one receive port per rank, computing free.

    Raises ValueError, with who waits for whom, where they never end.
    """
    played = replay(records, counting_rounds(), sends)
    if played.deadlock:
        raise ValueError(played.deadlock)
    return played.time_s


def chain_time_s(ready_s: Sequence[float], bucket_s: Sequence[float], compute_s: float) -> float:
    """Time of a step whose buckets are reduced one after another, each as soon as it is ready: the chain formula.

    Bucket i, ready at ready_s[i], begins when it is ready and the one before has ended, and takes bucket_s[i]; the
    step ends with the last bucket, and not before compute_s. So for L equal buckets of a backward that gives one
    every b seconds after a forward of f: f + L b + c when c <= b, f + b + L c when c >= b.
    Raises ValueError when there are not as many times of readiness as of buckets.
    """
    ends = accumulate(
        zip(ready_s, bucket_s, strict=True), lambda end, bucket: max(end, bucket[0]) + bucket[1], initial=0.0
    )
    return max(compute_s, *ends)


def overlapped_share(record: RankRecord) -> float | None:
    """Share of a rank's collectives with arithmetic (FLOPs) between issue and wait; None when it has none.

    Near 1 for buckets that are reduced while backward goes on (the last has nothing left to hide behind: 15/16 with
    16 buckets), 0 for blocking calls and for calls that are waited for at once. Barriers do not count. One that is
    never waited for counts as not overlapped: nothing says how long it may take.
    """
    waited: dict[int, int] = {}
    for wait in record.waits:
        waited.setdefault(wait.of, wait.index)
    collectives = _counted(record)
    if not collectives:
        return None
    flops = list(accumulate((getattr(event, "flops", 0) for event in record.events), initial=0))
    hidden = [c for c in collectives if c.index in waited and flops[waited[c.index]] > flops[c.index]]
    return len(hidden) / len(collectives)


def early_waits(record: RankRecord) -> tuple[Wait, ...]:
    """Waits for a collective that come before the last collective was issued; () when a rank first issues them all.

    Barriers do not count.
    """
    collectives = {collective.index for collective in _counted(record)}
    last = max(collectives, default=-1)
    return tuple(wait for wait in record.waits if wait.of in collectives and wait.index < last)


def _counted(record: RankRecord) -> list[Collective]:
    return [collective for collective in record.collectives if collective.op != "barrier"]
