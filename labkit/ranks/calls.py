"""The operators of torch's c10d namespace, and what each call of one says. Runs inside ranks.

Positions follow the schemas of torch 2.11 to 2.13; an operator a version lacks is skipped by its user.
Root and peer are ranks within the group here. Left out: c10d::check_for_nan, which communicates nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Form:
    """`op` in the field's name; `tensors(args)` the local tensors as called with; positions of root and tag."""

    op: str
    tensors: Callable[[tuple], list]
    root: int | None = None
    tag: int | None = None


@dataclass(frozen=True)
class Call:
    """One call, before it is issued: the arguments of Book.note that the operator alone gives."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    root: int | None
    tag: int
    uneven: bool
    any_source: bool
    tensor: Any


def _first(a):
    return a[0]


def _second(a):
    return a[1]


def _second_alone(a):
    return [a[1]]


FORMS = {
    "allreduce_": Form("all_reduce", _first),
    "allreduce_coalesced_": Form("all_reduce_coalesced", _first),
    "broadcast_": Form("broadcast", _first, root=2),
    "reduce_": Form("reduce", _first, root=3),
    "allgather_": Form("all_gather", _second),
    "_allgather_base_": Form("all_gather", _second_alone),
    "allgather_coalesced_": Form("all_gather_coalesced", _second),
    "allgather_into_tensor_coalesced_": Form("all_gather_coalesced", _second),
    "reduce_scatter_": Form("reduce_scatter", lambda a: a[1][0]),
    "_reduce_scatter_base_": Form("reduce_scatter", _second_alone),
    "reduce_scatter_tensor_coalesced_": Form("reduce_scatter_coalesced", _second),
    "alltoall_": Form("all_to_all", _second),
    "alltoall_base_": Form("all_to_all", _second_alone),
    "gather_": Form("gather", _second, root=3),
    "scatter_": Form("scatter", _first, root=3),
    "barrier": Form("barrier", lambda a: []),
    "monitored_barrier_": Form("monitored_barrier", lambda a: []),
    "send": Form("send", _first, root=2, tag=3),
    "recv_": Form("recv", _first, root=2, tag=3),
    "recv_any_source_": Form("recv", _first, tag=2),
}


def parse(name: str, args: tuple) -> Call:
    """What `c10d::name(*args)` says."""
    form = FORMS[name]
    tensors = form.tensors(args)
    shapes = [tuple(t.shape) for t in tensors]
    uneven = len(set(shapes)) > 1 and form.op == "reduce_scatter"
    if name == "allgather_":
        uneven = len({tuple(t.shape) for t in args[0][0]}) > 1
    return Call(
        form.op.removesuffix("_coalesced") if len(tensors) == 1 else form.op,
        _joint_shape(name, shapes),
        str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        sum(t.numel() * t.element_size() for t in tensors),
        None if form.root is None else args[form.root],
        0 if form.tag is None else args[form.tag],
        uneven,
        name == "recv_any_source_",
        tensors[0] if len(tensors) == 1 else None,
    )


def _joint_shape(name: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """That of one tensor; of a list to scatter, that of the list concatenated; else all elements in one dim."""
    if len(shapes) == 1 and name != "reduce_scatter_":
        return shapes[0]
    if name == "reduce_scatter_" and len(set(shapes)) == 1 and shapes[0]:
        return (len(shapes) * shapes[0][0], *shapes[0][1:])
    return (sum(_elements(shape) for shape in shapes),) if shapes else ()


def _elements(shape: tuple[int, ...]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements
