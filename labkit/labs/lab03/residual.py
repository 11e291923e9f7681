"""The torch module of `labkit.labs.lab03.blocks`. Left out: norms, which would keep more small things."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """x (tokens, hidden) to x + its MLP."""

    def __init__(self, block):
        super().__init__()
        self.kind = block.kind
        self.first = nn.Linear(block.hidden, block.ffn, bias=False)
        if block.kind != "gelu":
            self.second = nn.Linear(block.ffn if block.kind == "deep" else block.hidden, block.ffn, bias=False)
        self.last = nn.Linear(block.ffn, block.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        if self.kind == "swiglu":
            wide = F.silu(wide) * self.second(x)
        elif self.kind == "deep":
            wide = F.gelu(self.second(F.gelu(wide)))
        else:
            wide = F.gelu(wide)
        return x + self.last(wide)
