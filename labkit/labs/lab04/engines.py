"""DeepSpeed at stages 0 to 3 on lab 04's model, recorded like any other step; and its switches, one at a time.

One launch tries all configurations by turns, for starting DeepSpeed costs seconds. Buckets are kept small unless a
configuration says otherwise: the default of 5e8 elements is far larger than this model. Left out: offload (lab 05), and
what only CUDA streams do: on a CPU `overlap_comm` overlaps nothing, so no record of one can grade it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.labs.lab04.recorded import BATCH, LEARNING_RATE, LENGTH, Step, model, step_of

BUCKET = 200_000  # elements
DEFAULT_BUCKET = 500_000_000  # elements: DeepSpeed's own
# Of stage 2's "zero_optimization", one at a time.
SWITCHES = {
    "as it is": {},
    "smaller buckets": {"reduce_bucket_size": 20_000},
    "default bucket": {"reduce_bucket_size": DEFAULT_BUCKET},
    "overlap_comm": {"overlap_comm": True},
    "no contiguous_gradients": {"contiguous_gradients": False},
    "a reduce to each owner": {"use_multi_rank_bucket_allreduce": False},
}
# At stage 3: nothing is kept gathered longer than it is used.
FREED_AT_ONCE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def config(stage: int, **switches: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed for one stage. switches: more of "zero_optimization"."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 0, **FREED_AT_ONCE}
    return {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero | switches}


def record(configs: dict[str, dict], world_size: int = 2, steps: int = 3) -> dict[str, Step]:
    """A recorded step by each configuration, by name. Raises RankFailed as `launch`."""
    from labkit.ranks.launch import launch

    preload = ("deepspeed", "labkit.record.trace", "labkit.record.held")
    found = launch(
        _in_rank, world_size, list(configs.values()), steps, prints="quiet", preload=preload, deadline_s=180.0
    )
    return {name: step_of(name, of_ranks) for name, of_ranks in zip(configs, zip(*found, strict=True), strict=True)}


def _in_rank(configs: Sequence[dict], steps: int) -> list[tuple]:
    import gc

    found = []
    for settings in configs:
        found.append(_trained(settings, steps))
        gc.collect()  # an engine and its buckets are held in circles
    return found


def _trained(settings: dict, steps: int) -> tuple:
    """(record of the last step, losses, parameters of the model, when backward ended in it)."""
    import time

    import torch.distributed as dist

    from labkit.model.deepspeed import start_deepspeed
    from labkit.model.llama import loss_of
    from labkit.model.text import batches
    from labkit.ranks.rank import device
    from labkit.record.trace import Trace

    plain = model().to(device())
    count = sum(parameter.numel() for parameter in plain.parameters())
    engine, _ = start_deepspeed(plain, settings, learning_rate=LEARNING_RATE)
    losses, ended = [], [0.0]

    def step(tokens: Any, targets: Any) -> Any:
        loss = loss_of(engine(tokens.to(device())), targets.to(device()))
        engine.backward(loss)
        ended[0] = time.monotonic()
        engine.step()
        return loss.detach()

    rows = batches(BATCH, LENGTH, 0, dist.get_rank(), dist.get_world_size(), steps=steps)
    for number, (tokens, targets) in enumerate(rows):
        if number < steps - 1:
            losses.append(step(tokens, targets).item())
            continue
        with Trace() as trace:
            loss = step(tokens, targets)
        losses.append(loss.item())
    engine.destroy()
    return trace.record, losses, count, ended[0]
