"""What recording costs: a training step of 50 ms or more, bare, under Trace, and watched, in turn in one rank."""

from __future__ import annotations

import gc
import statistics
import time

from labkit.ranks.launch import launch

PRELOAD = ("labkit.record.integrity", "labkit.model.llama", "labkit.model.text")
LIMIT = 1.75
SHORTEST_S = 0.05


def main(rounds: int = 11) -> None:
    """Print the medians of 2 ranks under DDP and the ratio; the slower rank counts."""
    found = launch(measured, 2, rounds, prints="quiet", preload=PRELOAD, deadline_s=300)
    bare, traced, watched, num_events = max(found, key=lambda times: times[0])
    print(f"training step, bare                  {bare * 1e3:7.1f} ms   median of {rounds}, DDP on 2 ranks")
    print(f"the same under Trace                 {traced * 1e3:7.1f} ms   {traced / bare:.2f} x   {num_events} events")
    print(f"the same, record and evidence read   {watched * 1e3:7.1f} ms   {watched / bare:.2f} x   (at most {LIMIT})")
    if bare < SHORTEST_S:
        print(f"the step is shorter than {SHORTEST_S * 1e3:.0f} ms: this figure says little")


def measured(rounds: int) -> tuple[float, float, float, int]:
    """In a rank: median seconds of a step bare, under Trace, watched; and the number of events."""
    from labkit.record.integrity import watched
    from labkit.record.trace import Trace

    step = make_step()

    def traced():
        with Trace() as t:
            step()
        return t

    actions = (step, traced, lambda: watched(step))
    times = [[], [], []]
    for number in range(rounds + 2):
        for column, action in zip(times, actions, strict=True):
            gc.collect()
            start = time.perf_counter()
            action()
            if number >= 2:
                column.append(time.perf_counter() - start)
    return *(statistics.median(column) for column in times), len(traced().record.events)


def make_step():
    """One step of DDP on a Llama of 2 layers."""
    import torch

    from labkit.model.llama import Llama, Shape, loss_of
    from labkit.model.text import batches

    torch.manual_seed(0)
    model = Llama(Shape(hidden=256, layers=2, heads=8, kv_heads=4, ffn=688))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    source = batches(4, 128, 0, rank, world_size)

    def step() -> None:
        tokens, targets = next(source)
        loss_of(wrapped(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
