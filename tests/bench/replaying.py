"""The replay against this laptop: replayed and measured step time of data parallelism; and how fast a replay is."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from pathlib import Path

from labkit.cost.cores import usable_cores
from labkit.cost.hardware import cluster
from labkit.cost.laptop import cluster_of
from labkit.ranks.launch import launch
from labkit.record.laptop import laptop, summed_up
from labkit.record.prices import prices
from labkit.record.replay import replay
from tests.record.played import at_once, collective, compute, recv, send, wait
from tests.record.played import records as by_hand

PRELOAD = ("tests.bench.replaying", "labkit.record.trace", "labkit.record.laptop")
STAT = Path("/proc/stat")
STEPS, EVENTS = 20, 100_000
WAYS = ("naive", "bucketed")
BATCH, WIDTH, LAYERS = 256, 512, 8


def main() -> None:
    """Print replayed and measured step times at 2 and 4 ranks, and the time of a replay of 100,000 events."""
    for num_ranks in (2, 4):
        compared(num_ranks)
    for name, recs, on in speeds():
        start = time.process_time()
        replay(recs, on)
        took_s = time.process_time() - start
        print(f"a replay of {sum(len(r.events) for r in recs):,} events, {name:22} {took_s:5.2f} s  (to be under 2 s)")


def compared(num_ranks: int) -> None:
    """Print per way a step measured and replayed, how far off, and how busy the machine was with other work.

    The laptop's figures are read between the steps, so that both see the same machine.
    """
    before_s, start = busy_s() if STAT.exists() else None, time.perf_counter()
    found = launch(measured, num_ranks, prints="quiet", preload=PRELOAD, deadline_s=400)
    passed_s = time.perf_counter() - start
    others = None if before_s is None else busy_s() - before_s - sum(rank["cpu_s"] for rank in found)
    mine = summed_up([rank["readings"] for rank in found], usable_cores())
    speed, memory, wire = mine.flops / 1e9, mine.memory_bandwidth / 1e9, mine.bandwidth / 1e9
    print(
        f"  {num_ranks} ranks on {mine.cores:g} cores: {speed:.1f} GFLOP/s, memory {memory:.1f} GB/s, "
        f"messages {mine.alpha_s * 1e6:.0f} us and {wire:.2f} GB/s, "
        f"communicating keeps {mine.busy_share:.2f} of a core busy"
    )
    told = f"load {os.getloadavg()[0]:.1f}"
    if others is not None:
        told += f", other work took {max(0.0, others) / passed_s:.1f} of {mine.cores:g} cores"
    for way in WAYS:
        step_s = statistics.median(max(times) for times in zip(*(rank[way][0] for rank in found), strict=True))
        played_s = replay([rank[way][1] for rank in found], prices(cluster_of(mine))).time_s
        print(
            f"{way:9} on {num_ranks} ranks: measured {step_s * 1e3:6.1f} ms (median of {STEPS} steps), "
            f"replayed {played_s * 1e3:6.1f} ms, {played_s / step_s - 1:+.0%} (to be within 25%); {told}",
            flush=True,
        )


def busy_s() -> float:
    """Seconds that this machine's cores have worked since it started, and those in which another took them away.

    Only Linux tells.
    """
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measured() -> dict:
    """In a rank: per way, seconds of each of 20 steps, and the record of one more; the laptop's readings between."""
    from labkit.record import laptop as measuring
    from labkit.record.trace import Trace

    began_s = time.process_time()
    steps = {way: make_step(way) for way in WAYS}
    times = {way: [] for way in WAYS}
    for _ in range(3):
        for step in steps.values():
            step()

    def between() -> None:
        for _ in range(-(-STEPS // measuring.ROUNDS)):
            for way, step in steps.items():
                times[way].append(step())

    readings = measuring.busy_rank(between)
    found = {"readings": readings}
    for way, step in steps.items():
        with Trace() as t:
            step()
        found[way] = times[way][:STEPS], t.record
    return {**found, "cpu_s": time.process_time() - began_s}


def make_step(way: str):
    """A step of training an MLP, which gives its seconds; ranks start it together."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2) if way == "bucketed" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        wrapped(x).pow(2).mean().backward()
        if way == "naive":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def speeds():
    """(name, records, prices) of replays of about 100,000 events."""
    mine = cluster_of(laptop(4))
    step = [*[dataclasses.replace(compute(0), flops=10**6)] * 22]
    reduced = [*step, collective(range(4), 10**6), *step, wait(22)]
    whole = shifted(reduced, EVENTS // 4 // len(reduced))
    yield "collectives", by_hand(*[whole] * 4), prices(cluster("DGX A100", per_node=4))
    yield "on shared cores", by_hand(*[whole] * 4), prices(mine)
    ring = [[at_once(send((r + 1) % 4, 10**5)), at_once(recv((r - 1) % 4))][:: 1 - 2 * (r % 2)] for r in range(4)]
    messages = [[event for _ in range(EVENTS // 16) for event in program] for program in ring]
    yield "messages over cards", by_hand(*messages), prices(cluster("T4", 2, per_node=2, nic="10 GbE"))


def shifted(program, times):
    """A program over and over, each wait for the communication of its own round."""
    return [
        dataclasses.replace(event, of=event.of + i * len(program)) if hasattr(event, "of") else event
        for i in range(times)
        for event in program
    ]


if __name__ == "__main__":
    main()
