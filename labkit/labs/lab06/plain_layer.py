"""A Llama layer as one rank of a tensor-parallel group has it: a rank's sizes, and four all_reduces. For `shares`.

Left out: weights that mean anything; it is run on tensors without memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.model import llama


def _summed(x: Any, in_forward: bool) -> Any:
    """all_reduce forward or backward, the identity the other way. The class is made here, as `standins` explains."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return _all_reduced(x) if in_forward else x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient if in_forward else _all_reduced(gradient)

    return Summed.apply(x)


def _all_reduced(x: Any) -> Any:
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


class PlainLayer(nn.Module):
    """x (b, s, hidden) to the same, for one rank of `degree`."""

    def __init__(self, degree: int, hidden: int, heads: int, kv_heads: int, ffn: int):
        super().__init__()
        whole = llama.Shape(hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)
        self.norms = nn.ModuleList(llama.RMSNorm(hidden, 1e-5) for _ in range(2))
        self.attention, self.mlp = llama.Attention(whole), llama.MLP(whole)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _narrow(self.attention, name, degree)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _narrow(self.mlp, name, degree)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """Norm, attention and MLP, with residuals."""
        inner = self.attention(_summed(self.norms[0](x), False), cos, sin)
        x = x + _summed(inner, True)
        return x + _summed(self.mlp(_summed(self.norms[1](x), False)), True)


def _narrow(module: Any, name: str, degree: int) -> None:
    """Put a rank's own block in place of a linear layer: inputs are cut of o and down, outputs of the others."""
    linear = getattr(module, name)
    sizes = [linear.in_features, linear.out_features]
    sizes[name[0] not in "od"] //= degree
    setattr(module, name, nn.Linear(*sizes, bias=False))
