"""Lab 05's live runs: DeepSpeed with offload, RAM of an optimizer by kind, and how fast memory and copies are here.

`labkit run lab05.copies` measures copies between host and GPU, pinned and not, where there is a GPU. Left out: drawing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

CPU = {"device": "cpu"}
OFFLOADS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("stage 2", {"stage": 2}),
    ("stage 2, optimizer to cpu", {"stage": 2, "offload_optimizer": CPU}),
    ("stage 3", {"stage": 3}),
    ("stage 3, optimizer to cpu", {"stage": 3, "offload_optimizer": CPU}),
    ("stage 3, both to cpu", {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
)


@dataclass(frozen=True)
class Run:
    """One DeepSpeed run. losses: of each step, the mean over ranks. folder_bytes: of files that it wrote."""

    name: str
    losses: tuple[float, ...]
    folder_bytes: int = 0


def with_deepspeed(steps: int = 4, world_size: int = 2, fp32: bool = True) -> list[Run]:
    """The same small Llama by each of OFFLOADS, one after another in the same ranks.

    Raises RankFailed as `launch`; DeepSpeedMissing comes as its cause.
    """
    from labkit.ranks.launch import launch

    configs = [(name, zero) for name, zero in OFFLOADS]
    found = launch(_runs, world_size, configs, steps, fp32, prints="quiet", preload=("deepspeed",), deadline_s=240.0)
    return [Run(name, _means(found, number)) for number, (name, _) in enumerate(configs)]


def to_files(folder: str, steps: int = 4, world_size: int = 2) -> list[Run]:
    """Stage 3 of a wider Llama without offload, and with the optimizer's state in files below `folder`.

    async_io must have been built (`async_io`). Wider, because DeepSpeed 0.19.8 leaves in memory what has less than
    1 MiB on a rank (MIN_AIO_BYTES in runtime/swap_tensor/utils.py).
    """
    from labkit.labs.lab05.disk_steps import files
    from labkit.ranks.launch import launch

    nvme = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    configs = [("stage 3", {"stage": 3}), ("stage 3, optimizer to files", {"stage": 3, "offload_optimizer": nvme})]
    arguments = configs, steps, True, {"hidden": 256, "ffn": 688}
    found = launch(_runs, world_size, *arguments, prints="quiet", preload=("deepspeed",), deadline_s=300.0)
    return [Run("stage 3", _means(found, 0)), Run(configs[1][0], _means(found, 1), sum(files(folder).values()))]


def _means(found: list, number: int) -> tuple[float, ...]:
    """Losses of a run, the mean over ranks."""
    return tuple(sum(of_step) / len(found) for of_step in zip(*(losses[number] for losses in found), strict=True))


def _runs(configs: list, steps: int, fp32: bool, shape: dict[str, int] | None = None) -> list[list[float]]:
    """Runs in a rank: per config, losses. shape: fields of the Llama's that differ from the small one's."""
    import torch
    import torch.distributed as dist

    from labkit.model.deepspeed import start_deepspeed
    from labkit.model.llama import Llama, Shape, loss_of
    from labkit.model.text import batches

    losses = []
    for _, zero in configs:
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": dict(zero)}
        config |= {} if fp32 else {"bf16": {"enabled": True}}
        engine, _ = start_deepspeed(Llama(Shape(**(shape or {}))), config, learning_rate=1e-3)
        losses.append([])
        for tokens, targets in batches(4, 64, rank=dist.get_rank(), world_size=dist.get_world_size(), steps=steps):
            loss = loss_of(engine(tokens.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.destroy()
    return losses


@dataclass(frozen=True)
class Ram:
    """Growth of a process's memory in bytes: anonymous (its own) and of mapped files, which can be dropped."""

    anonymous: int
    files: int


def ram_of(make: Callable[[Any], Any], elements: int) -> Ram | None:
    """Three updates of `elements` parameters by `make(parameters)`, in a rank of its own; None where no /proc tells."""
    from labkit.ranks.launch import launch

    return launch(_ram, 1, make, elements, prints="quiet")[0]


def _ram(make: Callable, elements: int) -> Ram | None:
    """Runs in a rank."""
    import torch

    from labkit.check.ram import resident

    parameter = torch.nn.Parameter(torch.randn(elements // 1024, 1024))
    parameter.grad = torch.randn_like(parameter)
    before = resident()
    optimizer = make([parameter])
    for _ in range(3):
        optimizer.step()
    after = resident()
    if before is None or after is None:
        return None
    return Ram(after["RssAnon"] - before["RssAnon"], after["RssFile"] - before["RssFile"])


def adam_bandwidth(elements: int = 2**22, repeats: int = 5) -> float:
    """Bytes per second at which torch's AdamW goes through memory here: 28 per parameter, as if it were in bf16."""
    import torch

    from labkit.labs.lab05.stations import TOUCHED

    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return TOUCHED * elements / median(times[1:])


@dataclass(frozen=True)
class Copies:
    """Bytes per second of one copy size."""

    num_bytes: int
    down_pageable: float
    down_pinned: float
    up_pageable: float
    up_pinned: float


def copies(sizes: tuple[int, ...] = (2**20, 2**24, 2**28), repeats: int = 5) -> list[Copies]:
    """Copies between host and GPU, from ordinary and from pinned memory; [] without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for size in sizes:
        on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
        rates = []
        for pinned in (False, True):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            rates.append(size / _copy_s(host, on_gpu, repeats))
            rates.append(size / _copy_s(on_gpu, host, repeats))
        found.append(Copies(size, rates[0], rates[2], rates[1], rates[3]))
    return found


def _copy_s(to: Any, source: Any, repeats: int) -> float:
    import torch

    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def copies_table(found: list[Copies]) -> str:
    """As text; what would be measured where there is no GPU."""
    from labkit.check.table import table

    if not found:
        return "No GPU here. With one, this measures copies of 1 MiB to 256 MiB, pageable and pinned, both ways."
    rows = [(f"{each.num_bytes / 2**20:g} MiB", *(f"{rate / 1e9:.1f}" for rate in _rates(each))) for each in found]
    return table(("GB/s", "down, pageable", "down, pinned", "up, pageable", "up, pinned"), rows)


def _rates(each: Copies) -> tuple[float, ...]:
    return each.down_pageable, each.down_pinned, each.up_pageable, each.up_pinned
