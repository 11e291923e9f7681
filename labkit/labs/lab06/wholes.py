"""The serial modules that lab 06's checks cut: built in a rank and in the parent from sizes and a seed.

Left out: anything parallel.
"""

from __future__ import annotations

from typing import Any

ARGUMENTS = {
    "column": "linear, group",
    "row": "linear, group",
    "attention": "attention, group, kv_group",
    "embedding": "embedding, group",
    "sequence": "norm, mlp, group, keep=...",
}


def build(kind: str, sizes: tuple[tuple[str, Any], ...], seed: int) -> tuple[Any, ...]:
    """The serial modules of an exercise's class, all parameters drawn from `seed`. kind: of ARGUMENTS."""
    import torch
    from torch import nn

    from labkit.model import llama

    given = dict(sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind in ("column", "row"):
            made: tuple[Any, ...] = (nn.Linear(given["inputs"], given["outputs"], bias=given["bias"]),)
        elif kind == "embedding":
            made = (nn.Embedding(given["vocab"], given["hidden"]),)
        elif kind == "attention":
            made = (llama.Attention(llama.Shape(**given)),)
        else:
            shape = llama.Shape(**given)
            made = llama.RMSNorm(shape.hidden, shape.norm_eps), llama.MLP(shape)
        for module in made:
            for parameter in module.parameters():
                nn.init.normal_(parameter, mean=0.2, std=0.5)
    return made


def block(tensor: Any, part: int, parts: int, dim: int = 0) -> Any:
    """Block `part` of `parts` equal ones along a dim."""
    return tensor.chunk(parts, dim=dim)[part]
