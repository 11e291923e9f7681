"""The tensors with a storage of their own that lie behind a tensor of any kind.

Sparse: indices and values; compressed sparse: both index tensors and values; nested: the values, one after another;
a wrapper (functionalisation, vmap, grad, a subclass that can be flattened): what it wraps. Left out: tensors in a
format of a library (MKLDNN), which show neither storage nor parts: their bytes are counted, their life is not.
"""

from __future__ import annotations

import torch

_functorch = torch._C._functorch
_SCALARS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
# What asking for a storage raises: of a sparse tensor, of a wrapper, of a lazy module's parameter.
NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)
# By layout, the methods that give the parts. The values come first: their dtype is the tensor's.
_PARTS = {
    torch.sparse_coo: ("_values", "_indices"),
    torch.sparse_csr: ("values", "crow_indices", "col_indices"),
    torch.sparse_bsr: ("values", "crow_indices", "col_indices"),
    torch.sparse_csc: ("values", "ccol_indices", "row_indices"),
    torch.sparse_bsc: ("values", "ccol_indices", "row_indices"),
}


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one block with strides: as nearly all are, and cheap to ask. Not asked: wrappers."""
    return tensor.layout is torch.strided and not tensor.is_nested


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors behind a tensor: itself, or its parts. Parts share their storages with it, so they live as long.

    A tensor that shows no parts is given as it is.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [each for part in inner if isinstance(part, torch.Tensor) for each in components(part)]
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return components(_functorch.get_unwrapped(tensor))
    if torch._is_functional_tensor(tensor):
        return components(torch._from_functional_tensor(tensor))
    if tensor.is_nested:
        return [tensor.detach().values()]
    if tensor.layout in _PARTS:
        bare = tensor.detach()  # no autograd node for having looked
        return [getattr(bare, part)() for part in _PARTS[tensor.layout]]
    return [tensor]


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of all its components, where it has some."""
    return tensor.nbytes if is_strided(tensor) else sum(part.nbytes for part in components(tensor))


def collect(value, into: list) -> None:
    """Add every tensor in an argument or a result, as it is, to a list."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        into.append(value)
    elif kind in _SCALARS:
        return
    elif isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            collect(each, into)
    elif isinstance(value, dict):
        for each in value.values():
            collect(each, into)


def parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, but in place of one that is not strided its components."""
    return [part for tensor in tensors for part in ((tensor,) if is_strided(tensor) else components(tensor))]


def arguments(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Every tensor among an op's arguments, as it is."""
    given: list[torch.Tensor] = []
    for value in args:
        kind = type(value)
        if kind is torch.Tensor:
            given.append(value)
        elif kind not in _SCALARS:
            collect(value, given)
    if kwargs:
        collect(kwargs, given)
    return given
