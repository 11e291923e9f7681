"""What stands in for 7.2 and 7.3 while they are stubs: labkit's executor, which takes a schedule as data and runs it.

Left out: solutions, which are the loop itself, in plain torch.distributed; the other exercises (`reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Stage, Shape = Any, Sequence[int]


def gpipe(stage: Stage, inputs: Sequence, targets: Sequence, shape: Shape, loss_fn: Any = None) -> Any:
    """In place of 7.2. loss_fn: mean squared error by default."""
    from labkit.schedule import classic

    return _run(classic.gpipe, stage, inputs, targets, shape, loss_fn)


def one_f_one_b(stage: Stage, inputs: Sequence, targets: Sequence, shape: Shape, loss_fn: Any = None) -> Any:
    """In place of 7.3."""
    from labkit.schedule import classic

    return _run(classic.one_f_one_b, stage, inputs, targets, shape, loss_fn)


def _run(make: Callable, stage: Stage, inputs: Sequence, targets: Sequence, shape: Shape, loss_fn: Any) -> Any:
    import torch.distributed as dist
    import torch.nn.functional as F

    from labkit.model.pipeline import run

    pairs = list(zip(inputs, targets, strict=True))
    schedule = make(dist.get_world_size(), len(pairs))
    return run(schedule, {dist.get_rank(): stage}, pairs, loss_fn or F.mse_loss, shape)
