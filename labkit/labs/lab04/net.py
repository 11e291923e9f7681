"""A small network whose parameters are of many shapes, for the checks of lab 04: see `labkit.labs.lab04.models.Plan`.

Every parameter belongs to a module that uses it itself, one of them beside a child's. For an empty x every module gives
its parameters, one after another and flat, so that they can be had where they are whole in forward alone. Left out:
sense; its numbers are random.
"""

from __future__ import annotations

import torch
from torch import nn


class Affine(nn.Linear):
    """As nn.Linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.numel() else torch.cat([self.weight.flatten(), self.bias])


class Gain(nn.Module):
    """x times one number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.numel() else self.weight.clone()


class Blend(nn.Module):
    """(b, w) to (b, w) by a weight of three dimensions."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, width, 3) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return self.weight.flatten().clone()
        return torch.tanh((x[:, None, :, None] * self.weight).sum((1, 3)))


class Block(nn.Module):
    """A parameter of its own, used before and after a child that has its own."""

    def __init__(self, width: int):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width) / 2)
        self.inner = Affine(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return torch.cat([self.shift, self.inner(x)])
        return torch.tanh(self.inner(x * (1 + self.shift))) + self.shift


class Net(nn.Module):
    """x (b, inputs) and the numbers of the branches to use, to (b, outputs).

    An empty x gives all parameters, flat, in the order of `parameters()`.
    """

    def __init__(self, plan):
        super().__init__()
        self.first = Affine(plan.inputs, plan.width)
        self.gain, self.blend, self.block = Gain(), Blend(plan.width), Block(plan.width)
        self.deep = nn.ModuleList(Affine(plan.width, plan.width) for _ in range(plan.depth))
        self.branches = nn.ModuleList(Affine(plan.width, plan.outputs) for _ in range(plan.branches))
        self.last = Affine(plan.width, plan.outputs)
        self.order = plan.order or tuple(range(plan.depth))
        self.to(getattr(torch, plan.dtype))
        for layer in self.deep[(plan.depth - plan.frozen + 1) // 2 :][: plan.frozen]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            parts = (self.first, self.gain, self.blend, self.block, *self.deep, *self.branches, self.last)
            return torch.cat([part(x) for part in parts])
        x = self.block(self.blend(self.gain(torch.tanh(self.first(x)))))
        for number in self.order:
            x = x + torch.tanh(self.deep[number](x))
        out = self.last(x)
        for number in use.tolist():
            out = out + self.branches[number](x)
        return out
