"""One small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Plain torch, nothing parallel.

Module names and the rotary convention (halves, not pairs) are those of transformers' LlamaForCausalLM, whose
weights fit with the prefix "model." taken off. Left out: caching, dropout, rope scaling, initialisation tricks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. Raises ValueError when heads do not divide."""

    vocab: int = 256
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 344
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self):
        if self.hidden % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: heads must divide hidden into "
                "an even head size, and kv_heads must divide heads"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, in fp32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(length: int, head_dim: int, theta: float, device=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each (length, head_dim) in fp32; both halves of the last dim hold the same angles."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x (b, heads, s, head_dim) by its positions' angles (https://arxiv.org/abs/2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal attention; each of the kv_heads serves heads/kv_heads query heads (https://arxiv.org/abs/2305.13245)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # The number of heads is taken from the data, so that a shard of the projections works as it is.
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Tokens (b, s) to logits (b, s, vocab). Weights are drawn from N(0, 0.02) with torch's current seed."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per token; logits (b, s, vocab), targets (b, s)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
