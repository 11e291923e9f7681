"""What the recorder knows of an op from its schema, and what it writes down of a communication.

Left out: the recording (`trace`), and the names of communications (`calls`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from labkit.record import calls
from labkit.record.components import NO_STORAGE, components, num_bytes_of

# An op with a kernel of its own there is run whole, as without a trace (silu_backward has one, and a decomposition).
_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


@dataclass(frozen=True, slots=True)
class Known:
    """What is worth knowing about an op once."""

    name: str
    op: str  # the field's name of a communication
    flops: object  # formula or None
    mutable: tuple[int, ...]  # positions of arguments it may write
    mutable_names: tuple[str, ...]
    gives_written: bool  # its results are arguments that it has written (in place, out=)
    view: bool
    composite: bool
    joins: bool  # wait_tensor
    looks: bool  # at what it is given; not torch's own wrapping of a result in flight


@functools.cache
def learn(func) -> Known:
    schema = func._schema
    joins = func.namespace == calls.FUNCTIONAL and func._opname == "wait_tensor"
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return Known(
        name=f"{func.namespace}.{func.__name__.removesuffix('.default')}",
        op=calls.op_name(func),
        flops=flop_registry.get(func._overloadpacket),
        mutable=tuple(i for i in written if not schema.arguments[i].kwarg_only),
        mutable_names=tuple(schema.arguments[i].name for i in written),
        gives_written=bool(schema.returns) and all(r.alias_info and r.alias_info.is_write for r in schema.returns),
        view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        or (func.namespace == calls.FUNCTIONAL and not joins),  # _wrap_tensor_autograd
        composite=func._can_decompose() and not any(map(func.has_kernel_for_dispatch_key, _BACKENDS)),
        joins=joins,
        looks=func.namespace != calls.FUNCTIONAL or joins,
    )


def facts_of(call: calls.Call) -> tuple:
    tensor = (call.inputs or call.outputs or [None])[0]
    if call.op in ("send", "recv"):
        num_bytes = sum(map(num_bytes_of, call.inputs or call.outputs))
        sizes = (num_bytes, 0, 0)
    else:
        sizes = calls.sizes(call)
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
    element_bytes = tensor.element_size() if tensor is not None else 0
    tensors = max(1, min(len(call.inputs), len(call.outputs))) if call.inputs and call.outputs else 1
    facts = (call.root, call.peer, call.tag, call.reduce_op)
    return (call.op, call.name, call.group.group_name, call.ranks, *sizes, element_bytes, tensors, dtype, *facts)


def stored(tensors: list[torch.Tensor], number_of: Callable[[torch.Tensor], int]):
    """(number, tensor) of the tensors, or of their components. After an op: one in place can make new components."""
    for tensor in tensors:
        number = number_of(tensor)
        if number >= 0:
            yield number, tensor
        else:
            yield from ((number_of(part), part) for part in components(tensor))


def address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NO_STORAGE:
        return 0
