"""lab 06's Llama, put together from the learner's parts (or their stand-ins) on one tensor-parallel group.

Names of parameters are those of `labkit.model.llama.Llama`. Left out: sequence and context parallel (`sequence_llama`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import nn

from labkit.model.llama import Layer, Llama, rotary


class ParallelMLP(nn.Module):
    """SwiGLU between f and the row-parallel layer's sum: one all_reduce each way."""

    def __init__(self, mlp: Any, group: Any, parts: Any):
        super().__init__()
        self.f, self.group = parts.f, group
        self.gate_proj, self.up_proj = parts.column(mlp.gate_proj, group), parts.column(mlp.up_proj, group)
        self.down_proj = parts.row(mlp.down_proj, group)

    def forward(self, x: Any) -> Any:
        """(b, s, h) to (b, s, h)."""
        x = self.f(x, self.group)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ParallelLayer(nn.Module):
    """As `labkit.model.llama.Layer`, norms whole on every rank."""

    def __init__(self, layer: Layer, group: Any, kv_group: Any, parts: Any):
        super().__init__()
        self.input_layernorm = copy.deepcopy(layer.input_layernorm)
        self.self_attn = parts.attention(layer.self_attn, group, kv_group)
        self.post_attention_layernorm = copy.deepcopy(layer.post_attention_layernorm)
        self.mlp = ParallelMLP(layer.mlp, group, parts)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """(b, s, h) to (b, s, h)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class ParallelLlama(nn.Module):
    """Tokens and targets (b, s) to (loss, the embedding's output (b, s, h))."""

    def __init__(self, whole: Llama, group: Any, kv_group: Any, parts: Any):
        super().__init__()
        self.shape, self.group, self.parts = whole.shape, group, parts
        self.embed_tokens = parts.embedding(whole.embed_tokens, group)
        self.layers = nn.ModuleList(ParallelLayer(layer, group, kv_group, parts) for layer in whole.layers)
        self.norm = copy.deepcopy(whole.norm)
        self.lm_head = parts.column(whole.lm_head, group)

    def forward(self, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """The loss is the mean over all tokens, on every rank the same."""
        first = x = self.embed_tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.parts.f(self.norm(x), self.group))
        return self.parts.cross_entropy(logits, targets, self.group), first
