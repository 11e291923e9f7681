"""What stands in for an exercise while it is a stub, for `mine_or`: labkit's own means, of the exercise's own face.

Left out: solutions. 7.2 and 7.3 are run by labkit's executor, which takes a schedule as data, where a solution is the
loop itself in plain torch.distributed; `even_stages` shares layers out without a look at embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F

from labkit.cost.shapes import stage_layers
from labkit.model.pipeline import run
from labkit.model.stages import sum_shared
from labkit.schedule import classic, zero_bubble
from labkit.schedule.grid import text

Stage, Shape = Any, Sequence[int]


def even_stages(layers: int, num_stages: int, embedding: float, head: float) -> list[int]:
    """In place of 7.1. Llama 3's way: what is over goes to the middle first."""
    return list(stage_layers(layers, num_stages))


def gpipe(stage: Stage, inputs: Sequence, targets: Sequence, shape: Shape, loss_fn: Any = F.mse_loss) -> Any:
    """In place of 7.2."""
    return _run(classic.gpipe, stage, inputs, targets, shape, loss_fn)


def one_f_one_b(stage: Stage, inputs: Sequence, targets: Sequence, shape: Shape, loss_fn: Any = F.mse_loss) -> Any:
    """In place of 7.3."""
    return _run(classic.one_f_one_b, stage, inputs, targets, shape, loss_fn)


def sum_by_labkit(weight: Any) -> None:
    """In place of 7.4: `stages.sum_shared` of one parameter."""
    if weight is not None:
        sum_shared({"tied": weight}, {"tied": (0, dist.get_world_size() - 1)})


def zb_h1_text(ranks: int, microbatches: int) -> str:
    """In place of 7.5: ZB-H1 as text."""
    return text(zero_bubble.zb_h1(ranks, microbatches))


def _run(make: Callable, stage: Stage, inputs: Sequence, targets: Sequence, shape: Shape, loss_fn: Any) -> Any:
    pairs = list(zip(inputs, targets, strict=True))
    schedule = make(dist.get_world_size(), len(pairs))
    return run(schedule, {dist.get_rank(): stage}, pairs, loss_fn, shape)
