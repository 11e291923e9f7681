"""Norm and MLP of whole positions with one thing done otherwise: what mistakes inside them would give 6.5's output.

Left out: what goes wrong with ranks and groups (`sequence`).
"""

from __future__ import annotations

from typing import Any

SENTENCES = {
    "gate_up_swapped": "gate and up have changed places: silu(gate(x)) * up(x) is due.",
    "no_silu": "silu is missing: silu(gate(x)) * up(x) is due.",
    "silu_of_product": "silu is taken of the product: it is of gate(x) alone, and the product with up(x) comes after.",
    "no_norm": "x is not divided by its root mean square.",
    "mean_taken_off": "the mean is taken off x as LayerNorm does: RMSNorm only divides by the root mean square.",
    "norm_weight_missing": "what the norm has divided is not multiplied by its weight.",
    "eps_missing": "norm.eps is not added to the mean of squares.",
    "residual": "x is added to what comes out: the residual is the layer's, and mlp(norm(x)) is due.",
}


def outputs(weights: dict[str, Any], eps: float, x: Any) -> dict[str, Any]:
    """By cause, what comes out. weights: whole, by the answer's names."""
    return {cause: _output(weights, eps, x, cause) for cause in SENTENCES}


def _output(weights: dict[str, Any], eps: float, x: Any, cause: str) -> Any:
    import torch.nn.functional as F

    normed = x - x.mean(-1, keepdim=True) if cause == "mean_taken_off" else x
    if cause != "no_norm":
        eps = 0.0 if cause == "eps_missing" else eps
        normed = normed * (normed.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    if cause != "norm_weight_missing":
        normed = normed * weights["norm_weight"]
    gate, up = F.linear(normed, weights["gate"]), F.linear(normed, weights["up"])
    if cause == "gate_up_swapped":
        gate, up = up, gate
    inner = F.silu(gate * up) if cause == "silu_of_product" else (gate if cause == "no_silu" else F.silu(gate)) * up
    out = F.linear(inner, weights["down"])
    return x + out if cause == "residual" else out
