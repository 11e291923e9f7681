"""Attention of a rank's heads with one thing done otherwise: what mistakes inside them would give 6.3's output.

Left out: what goes wrong with ranks and groups (`attention`).
"""

from __future__ import annotations

import math
from typing import Any

SENTENCES = {
    "no_mask": "queries see keys that come after them: the causal mask is missing.",
    "no_rotary": "q and k are not turned by their positions: rotate both before they meet.",
    "k_not_rotated": "q is turned by its positions and k is not: rotate both.",
    "q_not_rotated": "k is turned by its positions and q is not: rotate both.",
    "v_rotated": "v is turned by positions as q and k are: values have none to tell, so rotate q and k alone.",
    "not_scaled": "scores are not divided by the square root of head_dim.",
    "heads_cut_wrongly": "(b, s, heads * head_dim) becomes (b, heads, s, head_dim) by view(b, s, heads, head_dim) and "
    "then transpose(1, 2), not by a view alone.",
    "heads_not_moved_back": "(b, heads, s, head_dim) is put together as it lies: transpose(1, 2) comes first.",
    "heads_never_moved": "(b, s, heads * head_dim) becomes (b, heads, s, head_dim) and back by views alone, which mix "
    "positions and heads: view(b, s, heads, head_dim), transpose(1, 2), and the same way back.",
    "k_v_swapped": "keys are taken for values and values for keys.",
}


def outputs(weights: dict[str, Any], head_dim: int, x: Any, cos: Any, sin: Any) -> dict[str, Any]:
    """By cause, the rank's part of the output. weights: of its projections."""
    return {cause: _output(weights, head_dim, x, cos, sin, cause) for cause in SENTENCES}


def _output(weights: dict[str, Any], head_dim: int, x: Any, cos: Any, sin: Any, cause: str) -> Any:
    import torch
    import torch.nn.functional as F

    from labkit.model.llama import rotate

    b, s, _ = x.shape
    q, k, v = (F.linear(x, weights[f"{name}_proj"]) for name in "qkv")
    if cause == "k_v_swapped":
        k, v = v, k
    if cause in ("heads_cut_wrongly", "heads_never_moved"):
        q, k, v = (each.view(b, -1, s, head_dim) for each in (q, k, v))
    else:
        q, k, v = (each.view(b, s, -1, head_dim).transpose(1, 2) for each in (q, k, v))
    if cause not in ("no_rotary", "q_not_rotated"):
        q = rotate(q, cos, sin)
    if cause not in ("no_rotary", "k_not_rotated"):
        k = rotate(k, cos, sin)
    if cause == "v_rotated":
        v = rotate(v, cos, sin)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = q @ k.mT * (1.0 if cause == "not_scaled" else head_dim**-0.5)
    if cause != "no_mask":
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v
    if cause not in ("heads_not_moved_back", "heads_never_moved"):
        out = out.transpose(1, 2)
    return F.linear(out.reshape(b, s, -1), weights["o_proj"])
