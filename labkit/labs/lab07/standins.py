"""What stands in for exercises of lab 07 that are still stubs: labkit's executor, which runs any schedule.

Left out: solutions; a learner's own send and receive by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def split_stages(layers: int, num_stages: int, embedding: float, head: float) -> list[int]:
    """In place of 7.1: layers as even as can be, with no thought of what the ends do besides."""
    from labkit.cost.shapes import stage_layers

    return list(stage_layers(layers, num_stages))


def gpipe(stage: torch.nn.Module, inputs: Sequence, targets: Sequence, shape: Sequence[int], loss_fn: Any = None) -> Any:
    """In place of 7.2. loss_fn: mean squared error by default."""
    from labkit.schedule import classic

    return _run(classic.gpipe, stage, inputs, targets, shape, loss_fn)


def one_f_one_b(
    stage: torch.nn.Module, inputs: Sequence, targets: Sequence, shape: Sequence[int], loss_fn: Any = None
) -> Any:
    """In place of 7.3."""
    from labkit.schedule import classic

    return _run(classic.one_f_one_b, stage, inputs, targets, shape, loss_fn)


def _run(make: Callable, stage: Any, inputs: Sequence, targets: Sequence, shape: Sequence[int], loss_fn: Any) -> Any:
    import torch.distributed as dist
    import torch.nn.functional as F

    from labkit.model.pipeline import run

    pairs = list(zip(inputs, targets, strict=True))
    schedule = make(dist.get_world_size(), len(pairs))
    return run(schedule, {dist.get_rank(): stage}, pairs, loss_fn or F.mse_loss, shape)


def sum_tied(weight: torch.nn.Parameter | None) -> None:
    """In place of 7.4: all ranks gather both gradients as objects; right, and far too much traffic."""
    import torch
    import torch.distributed as dist

    grads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grads, None if weight is None else weight.grad)
    if weight is not None:
        weight.grad = torch.stack([grad for grad in grads if grad is not None]).sum(0)


def beat_1f1b(ranks: int, microbatches: int) -> str:
    """In place of 7.5: 1F1B itself, which beats nothing."""
    from labkit.schedule import classic, grid

    return grid.text(classic.one_f_one_b(ranks, microbatches))
