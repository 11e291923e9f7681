"""Opening what ranks send back. A pickle can run any code, so results of unknown answers are opened with care.

`tensor_parts` and `tensor_from` carry a dense tensor as plain bytes: torch's own way nests a second pickle, which
would be opened without care. Left out: sparse and nested tensors in untrusted results.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
from typing import Any

_PLAIN = frozenset(
    "builtins.range builtins.slice builtins.set builtins.frozenset builtins.complex builtins.bytearray "
    "builtins.NotImplemented builtins.Ellipsis collections.OrderedDict torch._utils._rebuild_parameter torch.Size "
    "torch.device labkit.ranks.receiving.tensor_from numpy.ndarray numpy.dtype numpy._core.multiarray._reconstruct "
    "numpy._core.multiarray.scalar numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar".split()
)


def loads(payload: bytes, trusted: bool) -> Any:
    """The object in a pickle. Untrusted: tensors, numpy values, plain containers, ranges and labkit's records only.

    Raises pickle.UnpicklingError that names the class of anything else.
    """
    return pickle.loads(payload) if trusted else _Careful(io.BytesIO(payload)).load()


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _PLAIN:
            return super().find_class(module, name)
        if module == "torch":
            import torch

            value = getattr(torch, name, None)
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
        if module.startswith("labkit.") and name.isidentifier():
            value = getattr(importlib.import_module(module), name, None)
            if isinstance(value, type) and value.__module__ == module and dataclasses.is_dataclass(value):
                return value
        raise pickle.UnpicklingError(f"a check opens tensors, numbers and plain containers, not {module}.{name}")


def tensor_parts(tensor: Any) -> tuple[str, tuple[int, ...], bytes, bool]:
    """Name of the dtype, shape, bytes in row-major order, requires_grad of a dense tensor on any device."""
    import torch

    host = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    raw = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return str(host.dtype).removeprefix("torch."), tuple(host.shape), raw, tensor.requires_grad


def tensor_from(dtype: str, shape: tuple[int, ...], raw: bytes, requires_grad: bool) -> Any:
    """The inverse of `tensor_parts`, on the CPU."""
    import torch

    kind = getattr(torch, dtype)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind) if raw else torch.empty(0, dtype=kind)
    tensor = flat.reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor
