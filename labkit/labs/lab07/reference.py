"""What stands in for 7.1, 7.4 and 7.5 while they are stubs, for `mine_or`: labkit's own means.

Left out: solutions (`even_stages` shares layers out without a look at embedding and head); 7.2 and 7.3 (`standins`).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from labkit.cost.shapes import stage_layers
from labkit.model.stages import sum_shared
from labkit.schedule import zero_bubble
from labkit.schedule.grid import text


def even_stages(layers: int, num_stages: int, embedding: float, head: float) -> list[int]:
    """Llama 3's way: what is over goes to the middle first."""
    return list(stage_layers(layers, num_stages))


def sum_by_labkit(weight: Any) -> None:
    """`stages.sum_shared` of one parameter."""
    if weight is not None:
        sum_shared({"tied": weight}, {"tied": (0, dist.get_world_size() - 1)})


def zb_h1_text(ranks: int, microbatches: int) -> str:
    """ZB-H1 as text."""
    return text(zero_bubble.zb_h1(ranks, microbatches))
