"""lab 06's Llama with its positions shared out: in sequence parallel (6.5) and with ring attention (6.6).

Between regions a rank of `SequenceLlama` has s/t positions; attention gathers them by DTensor (keep=False: again in
backward, with the products that follow, by torch's checkpoint), the MLP is the learner's. A rank of `RingLlama` has two
chunks of the sequence and whole weights. Left out: embeddings and heads cut by vocabulary.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import labkit.labs.lab06.ring_told as ring_told
import labkit.labs.lab06.standins as standins
from labkit.model.llama import Llama, loss_of, rotary, rotate


class SequenceLayer(nn.Module):
    """x (b, s/t, h) to the same: attention between gather and scatter, the MLP by the answer's class."""

    def __init__(self, layer: Any, group: Any, kv_group: Any, cls: Any, keep: bool):
        super().__init__()
        self.group, self.keep = group, keep
        self.input_layernorm = copy.deepcopy(layer.input_layernorm)
        self.input_layernorm.weight.register_hook(lambda gradient: standins.summed(gradient, group))
        self.self_attn = standins.ParallelAttention(layer.self_attn, group, kv_group)
        self.mlp = cls(layer.post_attention_layernorm, layer.mlp, group, keep=keep)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """As `labkit.model.llama.Layer`."""
        normed = self.input_layernorm(x)
        q, k, v = self._products(normed) if self.keep else checkpoint(self._products, normed, use_reentrant=False)
        out = self.self_attn.o_proj(attended(q, k, v, cos, sin, self.self_attn.head_dim))
        x = x + standins.scatter(out, self.group)
        return x + self.mlp(x)

    def _products(self, x: Any) -> tuple[Any, ...]:
        x = standins.gather(x, self.group)
        return tuple(getattr(self.self_attn, f"{name}_proj")(x) for name in "qkv")


def attended(q: Any, k: Any, v: Any, cos: Any, sin: Any, head_dim: int, fn: Any = None) -> Any:
    """(b, s, heads * head_dim) of q, k, v with their heads side by side. fn: (q, k, v) -> output; default: torch's."""
    b, s, _ = q.shape
    q, k, v = (each.view(b, s, -1, head_dim).transpose(1, 2) for each in (q, k, v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    if fn is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        out = fn(q.contiguous(), k.contiguous(), v.contiguous())
    return out.transpose(1, 2).reshape(b, s, -1)


class SequenceLlama(nn.Module):
    """Tokens and targets (b, s) to (the loss, the embedding's output on the rank's positions (b, s/t, h))."""

    def __init__(self, whole: Llama, group: Any, kv_group: Any, cls: Any, keep: bool):
        super().__init__()
        self.shape, self.group = whole.shape, group
        self.embed_tokens, self.lm_head = copy.deepcopy(whole.embed_tokens), copy.deepcopy(whole.lm_head)
        self.layers = nn.ModuleList(SequenceLayer(layer, group, kv_group, cls, keep) for layer in whole.layers)
        self.norm = copy.deepcopy(whole.norm)
        summed_over(group, self.embed_tokens, self.norm, self.lm_head)

    def forward(self, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """The loss is the rank's part of the mean: its positions' losses over all positions."""
        rank, t = dist.get_rank(self.group), dist.get_world_size(self.group)
        first = x = self.embed_tokens(tokens.chunk(t, 1)[rank])
        cos, sin = rotary(tokens.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(self.lm_head(self.norm(x)), targets.chunk(t, 1)[rank]) / t, first


class RingAttention(nn.Module):
    """Attention with whole weights on a rank's chunks; keys and values go round by `fn`."""

    def __init__(self, attention: Any, group: Any, fn: Any):
        super().__init__()
        self.group, self.fn, self.head_dim = group, fn, attention.head_dim
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, copy.deepcopy(getattr(attention, name)))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """As Attention's; cos and sin are those of the rank's positions."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        fn = functools.partial(_on_group, self.fn, self.group)
        return self.o_proj(attended(q, k, v, cos, sin, self.head_dim, fn))


def _on_group(fn: Any, group: Any, q: Any, k: Any, v: Any) -> Any:
    return fn(q, k, v, group)


class RingLlama(nn.Module):
    """Tokens and targets (b, s) to (the loss, the embedding's output on the rank's positions (b, s/n, h))."""

    def __init__(self, whole: Llama, group: Any, fn: Any):
        super().__init__()
        self.shape, self.group = whole.shape, group
        self.embed_tokens, self.lm_head = copy.deepcopy(whole.embed_tokens), copy.deepcopy(whole.lm_head)
        self.layers, self.norm = copy.deepcopy(whole.layers), copy.deepcopy(whole.norm)
        for layer in self.layers:
            layer.self_attn = RingAttention(layer.self_attn, group, fn)
        summed_over(group, self)

    def forward(self, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """The loss is the rank's part of the mean."""
        n = dist.get_world_size(self.group)
        mine = ring_told.positions(dist.get_rank(self.group), n, tokens.shape[1]).to(tokens.device)
        first = x = self.embed_tokens(tokens[:, mine])
        cos, sin = rotary(tokens.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens.device)
        for layer in self.layers:
            x = layer(x, cos[mine], sin[mine])
        return loss_of(self.lm_head(self.norm(x)), targets[:, mine]) / n, first


def summed_over(group: Any, *modules: Any) -> None:
    """Each rank's positions give a part of these modules' gradients: they are summed over the group in backward."""
    for module in modules:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: standins.summed(gradient, group))


def whole_of(parts: list[Any], ring: bool) -> Any:
    """A tensor (b, s, h) from those of the ranks' positions."""
    if not ring:
        return torch.cat(parts, 1)
    n, length = len(parts), len(parts) * parts[0].shape[1]
    whole = torch.empty_like(torch.cat(parts, 1))
    for rank, part in enumerate(parts):
        whole[:, ring_told.positions(rank, n, length)] = part
    return whole
