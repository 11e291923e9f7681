"""Where DeepSpeed's optimizers keep what is in no module, no `.grad` and no optimizer's state: by attribute's name.

Names as of DeepSpeed 0.19.8, in stage_1_and_2.py, stage3.py, bf16_optimizer.py and the fp16 optimizers; one that is not
there is passed over. Nothing of DeepSpeed is imported. Left out: what was moved to files.
"""

from __future__ import annotations

import types
from collections import deque

import torch

_ENGINES = ("DeepSpeedEngine", "PipelineEngine", "DeepSpeedHybridEngine")
_GRADIENTS = (
    "averaged_gradients", "grads_in_partition", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat",
    "fp32_groups_gradients",
)  # fmt: skip
_MASTERS = (
    "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition",
    "fp32_groups_flat", "fp32_groups",
)  # fmt: skip


def wrapper_of(module: torch.nn.Module) -> object | None:
    """DeepSpeed's own optimizer of an engine, which wraps torch's; None for any other module."""
    return getattr(module, "optimizer", None) if type(module).__name__ in _ENGINES else None


def inner_of(wrapper: object) -> torch.optim.Optimizer | None:
    """torch's optimizer within DeepSpeed's; at stage 0 in fp32 they are one and the same."""
    inner = wrapper if isinstance(wrapper, torch.optim.Optimizer) else getattr(wrapper, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def gradients_of(wrapper: object) -> list[torch.Tensor]:
    """Gradients that it keeps for its step."""
    return [tensor for name in _GRADIENTS for tensor in tensors_in(getattr(wrapper, name, None))]


def masters_of(wrapper: object) -> list[torch.Tensor]:
    """Weights in fp32 that torch's optimizer steps; of stage 3 it has them only while it does."""
    return [tensor for name in _MASTERS for tensor in tensors_in(getattr(wrapper, name, None))]


def buckets_of(wrapper: object) -> list[torch.Tensor]:
    """Buffers of constant size in which gradients are reduced. A parameter's `.grad` may point into one meanwhile."""
    buckets = getattr(wrapper, "ipg_buckets", None)
    values = buckets.values() if isinstance(buckets, dict) else ()
    return [tensor for bucket in values for tensor in tensors_in(getattr(bucket, "buffer", None))]


def tensors_in(thing: object, depth: int = 4) -> list[torch.Tensor]:
    """Tensors within dicts, lists and tuples."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if depth == 0:
        return []
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple | set) else ()
    return [tensor for each in list(inner) for tensor in tensors_in(each, depth - 1)]


def tensors_of(owner: object) -> list[torch.Tensor]:
    """Tensors that an object holds by its attributes, slots too, and by those of objects that it holds."""
    found, seen, waiting = [], set(), [(owner, 8)]
    while waiting:
        thing, depth = waiting.pop()
        if id(thing) in seen or depth == 0 or isinstance(thing, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, dict):
            waiting += [(each, depth - 1) for each in thing.values()]
        elif isinstance(thing, list | tuple | set | deque):
            waiting += [(each, depth - 1) for each in thing]
        else:
            slots = [name for cls in type(thing).__mro__ for name in _slots(cls) if hasattr(thing, name)]
            waiting += [(getattr(thing, name), depth - 1) for name in slots]
            waiting.append((getattr(thing, "__dict__", {}), depth - 1))
    return found


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
