"""Launches drawn by seed from everything that goes wrong on ranks: each told its cause, rank and line in time,
the next one works, nothing is left. 300 under --soak, 40 otherwise.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from labkit.ranks.launch import launch, run_ranks
from tests.soak.drills import DRILLS, Drill, lines_of

SEED = 20261129


def draws(count: int) -> list[tuple[Drill, int, int]]:
    """(drill, world size, culprit), every kind once before chance decides."""
    chance = random.Random(SEED)
    drills = [*DRILLS, *(chance.choice(DRILLS) for _ in range(max(0, count - len(DRILLS))))]
    chance.shuffle(drills)
    result = []
    for drill in drills[:count] if count >= len(DRILLS) else drills:
        world_size = chance.choice([n for n in (2, 3, 4) if n >= drill.least_world])
        result.append((drill, world_size, chance.randrange(world_size)))
    return result


def leftovers() -> dict[str, set]:
    """Processes below this one, its open descriptors, listening sockets and temporary files."""
    mine = psutil.Process()
    family = mine.children(recursive=True)
    return {
        "processes": {p.pid for p in family},
        "descriptors": {(fd, _target(fd)) for fd in os.listdir("/proc/self/fd") if _target(fd)},
        "listening": {c.laddr for p in [mine, *family] for c in p.net_connections() if c.status == "LISTEN"},
        "files": set(Path(tempfile.gettempdir()).iterdir()),
    }


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError:
        return ""


def faults(drill: Drill, world_size: int, culprit: int) -> tuple[list[str], float]:
    """What was wrong with the verdict, in words; and the seconds it took."""
    started = time.monotonic()
    outcome = run_ranks(drill.fn, world_size, culprit, deadline_s=drill.deadline_s, prints="quiet")
    time_s = time.monotonic() - started
    cause, wrong = outcome.cause, []
    code = cause.code if cause else ""
    if code != drill.code:
        wrong.append(f"told {code or 'nothing'!r}, not {drill.code!r}: {cause}")
    elif cause:
        if drill.names_rank and cause.rank != culprit:
            wrong.append(f"named rank {cause.rank}, not {culprit}: {cause.sentence}")
        told = " ".join([cause.sentence, *map(str, cause.whereabouts)])
        lines = lines_of(drill.fn)
        if lines and not any(f"line {line}" in told for line in lines):
            wrong.append(f"none of the lines {lines} is in: {told}")
    elif None in outcome.results and drill.name != "100 MB result":
        wrong.append("returned without a result")
    if time_s > drill.limit_s:
        wrong.append(f"took {time_s:.1f} s")
    return wrong, time_s


@pytest.fixture(scope="module")
def drawn(request) -> list[tuple[Drill, int, int]]:
    return draws(300 if request.config.getoption("--soak") else 40)


@pytest.mark.timeout(3600)
def test_every_drawn_launch_is_told_its_true_cause_and_leaves_nothing(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what other programs put into /tmp is not ours to answer for
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert launch(dist.get_rank, 2) == [0, 1]  # the server is warm and counts among what was there before
    before, failures, times = leftovers(), [], defaultdict(list)
    for number, (drill, world_size, culprit) in enumerate(drawn):
        wrong, time_s = faults(drill, world_size, culprit)
        times[drill.name].append(time_s)
        if launch(dist.get_world_size, 2) != [2, 2]:
            wrong.append("the next launch did not work")
        left = {kind: found - before[kind] for kind, found in leftovers().items() if found - before[kind]}
        if left:
            wrong.append(f"left behind: {left}")
        if number % 50 == 49:
            print(f"{number + 1} launches, {len(failures)} faults", flush=True)
        failures += [f"#{number} {drill.name}, {world_size} ranks, culprit {culprit}: {w}" for w in wrong]
    for name, values in sorted(times.items()):
        print(f"{name:28s} {len(values):3d} launches, slowest {max(values):5.2f} s")
    assert not failures, "\n".join(failures)
