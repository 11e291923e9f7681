"""Data behind lab 03's pictures: an exercise's answer in use, or torch's own way while it is still a stub.

Left out: drawing, which is `labkit.view`'s, and recorded steps (`recorded`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import labkit.labs.lab03.activations_told as told
import labkit.labs.lab03.states as states
from labkit.cost.shapes import Shape
from labkit.labs.lab03.blocks import Block

SMALL = Shape("a small Llama", 2, 128, 4, 2, 32, 344, 256)
# Layers of three kinds, the largest last.
LAYERS = tuple(
    Block(kind, 96, 32, ffn)
    for kind, ffn in (("gelu", 200), ("deep", 120), ("swiglu", 130), ("gelu", 280), ("deep", 160), ("swiglu", 260))
)
LAYERS_BUDGET = 900_000


def by_convention(num_parameters: int, precision: str, optimizer: str) -> tuple[int, int, int]:
    """What 3.1 is judged by, for pictures while it is a stub."""
    return states.due((num_parameters, precision, optimizer))


def by_the_table(shape: Shape, batch: int, seq: int, element_bytes: int, convention: str) -> float:
    """What `activation_bytes` counts, line by line, for pictures while 3.2 is a stub."""
    return told.due(shape, batch, seq, element_bytes, convention)


def everything_again(layers: Sequence[Any], x: Any, costs: Sequence[tuple], budget_bytes: int) -> Any:
    """torch's checkpoint over every layer, whatever the budget: what 3.3 improves on."""
    from torch.utils.checkpoint import checkpoint

    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


class TorchScaler:
    """torch.amp.GradScaler in the form of 3.4. Each rank decides for itself: torch leaves agreement to DDP's sums."""

    def __init__(self, scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0):
        import torch

        self.inner = torch.amp.GradScaler("cpu", scale, growth_factor, backoff_factor, growth_interval)
        self.min_scale = min_scale

    @property
    def scale(self) -> float:
        return self.inner.get_scale()

    def scale_loss(self, loss: Any) -> Any:
        return self.inner.scale(loss)

    def step(self, optimizer: Any) -> bool:
        before = self.scale
        self.inner.step(optimizer)
        self.inner.update()
        if self.scale < self.min_scale:
            self.inner.update(self.min_scale)
        return self.scale >= before


def checkpoint_picture(fn: Callable, budget_bytes: int = LAYERS_BUDGET) -> list[tuple[str, float, float]]:
    """(way, MFLOPs recomputed, kB of activations at the peak), recorded live: none, all, and fn's own.

    Without the last output, the loss's weights and their product, which no choice of layers changes.
    """
    ways = (("no checkpoints", _plain), ("all layers", everything_again), ("yours", fn))
    found = []
    for name, way in ways:
        peak, flops = ran_layers(way, LAYERS, budget_bytes)
        found.append((name, flops / 1e6, (peak - 3 * LAYERS[-1].input_bytes) / 1e3))
    return found


def ran_layers(fn: Callable, made: tuple[Block, ...], budget_bytes: int) -> tuple[int, int]:
    """(most bytes of activations held, FLOPs beyond a forward and a backward) of `fn` on such layers, recorded."""
    from labkit.labs.lab03.checkpoints import measured
    from labkit.labs.lab03.checkpoints_cases import Case
    from labkit.ranks.launch import launch

    costs = [block.costs for block in made]
    record = launch(_run_layers, 1, fn, made, costs, budget_bytes, prints="quiet", backend="gloo")[0]
    return measured(record, Case(made, budget_bytes, 0, ()))


def _run_layers(fn: Callable, made: tuple[Block, ...], costs: list, budget_bytes: int) -> Any:
    """Runs in a rank."""
    from labkit.labs.lab03.checkpoints import call
    from labkit.record.trace import Trace

    with Trace() as trace:
        call(fn, made, costs, budget_bytes, 0)
    return trace.record


def _plain(layers: Sequence[Any], x: Any, costs: Sequence[tuple], budget_bytes: int) -> Any:
    return functools.reduce(lambda y, layer: layer(y), layers, x)


def logit_gradient(vocab: int, tokens: int, rows: int = 4) -> Any:
    """Magnitudes of the gradient of some rows of logits, under a mean over `tokens` tokens, in fp32.

    Logits are drawn from N(0, 1), as before any training.
    """
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    (F.cross_entropy(logits, targets, reduction="sum") / tokens).backward()
    return logits.grad.flatten().abs()


def lost(magnitudes: Any, scale: float = 1.0, dtype: str = "float16") -> tuple[float, float]:
    """Of these values times scale, the shares that a cast to `dtype` makes (0, infinite)."""
    import torch

    cast = (magnitudes * scale).to(getattr(torch, dtype))
    return float((cast == 0).double().mean()), float(cast.isinf().double().mean())


def too_high(cls: type, power: int, steps: int = 40, gradient: float = 2.0**-3) -> tuple[list[float], int]:
    """(scale after each step, steps skipped) of a scaler that starts at 2**power, on one rank, in fp16.

    gradient: the largest of the true gradient.
    """
    from labkit.ranks.launch import launch

    return launch(_from_above, 1, cls, power, steps, gradient, prints="quiet", backend="gloo")[0]


def _from_above(cls: type, power: int, steps: int, gradient: float) -> tuple[list[float], int]:
    """Runs in a rank."""
    import torch

    scaler, weight = cls(scale=2.0**power), torch.nn.Parameter(torch.ones(4))
    optimizer, scales, skipped = torch.optim.SGD([weight], lr=1e-3), [], 0
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (weight.half().float() * gradient).sum()
        scaler.scale_loss(loss).backward()
        skipped += not scaler.step(optimizer)
        scales.append(float(scaler.scale))
    return scales, skipped
