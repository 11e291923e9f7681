"""A small network with everything that makes data parallel training hard: see `labkit.labs.lab02.models.Plan`.

Left out: sense; its numbers are random.
"""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """x (b, widths[0]) and the numbers of the branches to use, to (b, widths[-1])."""

    def __init__(self, plan):
        super().__init__()
        pairs = list(zip(plan.widths, plan.widths[1:], strict=False))
        self.used = plan.used or tuple(range(len(pairs)))
        # widths are those on the way from input to output, whichever layer comes when.
        sizes = dict(zip(self.used, pairs, strict=True))
        self.layers = nn.ModuleList(nn.Linear(*sizes[number]) for number in range(len(pairs)))
        # Widths differ, so that no two branches have gradients of one size.
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(plan.widths[0], 3 + 2 * i), nn.Linear(3 + 2 * i, plan.widths[-1], bias=False))
            for i in range(plan.branches)
        )
        if plan.buffers:
            self.register_buffer("scale", torch.rand(plan.widths[0]) + 0.5)
            self.register_buffer("offset", torch.randint(-9, 9, (plan.widths[0],)))
            self.register_buffer("shift", torch.rand(plan.widths[0]) - 0.5, persistent=False)
        self.to(getattr(torch, plan.dtype))
        for layer in self.layers[1::2] if plan.second else ():
            layer.to(getattr(torch, plan.second))
        if plan.tied:
            self.layers[-1].weight = self.layers[0].weight
        for number in plan.frozen:
            self.layers[number].requires_grad_(False)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "scale"):
            x = x * self.scale + self.offset + self.shift
        out = x
        for number in self.used:
            layer = self.layers[number]
            out = torch.tanh(layer(out.to(layer.weight.dtype)))
        out = out.to(x.dtype)
        for number in use.tolist():
            out = out + self.branches[number](x)
        return out
