"""Schedules run on ranks by labkit's executor: how long ranks idle by theory, replayed, and by the clock.

Stages are equal, and all schedules have the same layers a rank, in one stage or in two. Left out: models with an
embedding and a head (`engines`), the learner's own step, which the notebook records, and GPUs: there an op and a wait
return before they are done, and a clock of the host tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

import labkit.labs.lab07.pictures as pictures
from labkit.model.pipeline import run
from labkit.ranks.launch import launch
from labkit.record.events import RankRecord
from labkit.record.trace import Trace
from labkit.schedule.actions import Schedule

LAYERS = 4  # of a rank: tanh, whose output is kept, then Linear without bias
WIDTH, ROWS = 512, 128
STEPS = 3  # recorded, after one that warms up
PRELOAD = ("labkit.labs.lab07.measured",)


@dataclass(frozen=True)
class Measured:
    """Shares of all ranks' time in which they idle. theory: with F = I = W; replayed: of the record, on equal devices
    with a free link; clock: of the recorded steps, the median. kept_bytes: of activations, the most on rank 0,
    which under ZB-V has the last stage and so the loss's input besides."""

    name: str
    theory: float
    replayed: float
    clock: float
    kept_bytes: int


def measured(p: int, m: int, width: int = WIDTH, rows: int = ROWS) -> tuple[Measured, ...]:
    """Five schedules on p CPU ranks. ValueError for microbatches that are no multiple of p; RankFailed as `launch`."""
    return tuple(_measured(schedule, share, width, rows) for schedule, _, share in pictures.five(p, m))


def _measured(schedule: Schedule, share: float, width: int, rows: int) -> Measured:
    how = {"prints": "quiet", "preload": PRELOAD, "deadline_s": 120.0, "backend": "gloo"}
    by_rank = launch(_recorded, schedule.ranks, schedule, width, rows, **how)
    steps = list(zip(*by_rank, strict=True))
    clock, kept = median(map(idle_by_clock, steps)), pictures.kept_bytes(steps[-1])[0]
    return Measured(schedule.name, share, pictures.on_link(steps[-1]).idle_share, clock, kept)


def idle_by_clock(records: Sequence[RankRecord]) -> float:
    """Share of all ranks' time, from the first one's start to the last one's end, in which they waited or were done."""
    began_s = min(record.began_s for record in records)
    step_s = max(record.began_s + record.time_s for record in records) - began_s
    waited_s = [sum(wait.end_s - wait.start_s for wait in record.waits) for record in records]
    busy_s = sum(record.time_s - waited for record, waited in zip(records, waited_s, strict=True))
    return 1 - busy_s / (len(records) * step_s)


def _recorded(schedule: Schedule, width: int, rows: int) -> list[RankRecord]:
    """Runs in a rank."""
    own = schedule.stages_of(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    stages = {stage: _stage(width, LAYERS // len(own)) for stage in own}
    size = (rows, width)
    pairs = [(torch.randn(size), torch.randn(size)) for _ in range(schedule.microbatches)]
    run(schedule, stages, pairs, F.mse_loss, size)
    records = []
    for _ in range(STEPS):
        dist.barrier()
        with Trace() as trace:
            run(schedule, stages, pairs, F.mse_loss, size)
        records.append(trace.record)
    return records


def _stage(width: int, layers: int) -> torch.nn.Module:
    """Keeps one hidden state a layer, and none that is a message, so that two halves keep as much as the whole."""
    parts = [(torch.nn.Tanh(), torch.nn.Linear(width, width, bias=False)) for _ in range(layers)]
    return torch.nn.Sequential(*[each for part in parts for each in part])
