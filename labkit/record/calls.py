"""What a c10d op says about itself: which collective on which group, what it reads and writes, how many bytes.

Arguments are found by the names in the op's schema, which torch 2.11 and 2.13 share, so that DDP's reducer,
FSDP2, DTensor (functional collectives) and code written by hand all come out the same. Left out: gloo's and
NCCL's own algorithms; bytes are those of `collectives`. A sparse all_reduce gathers everybody's components (as
gloo does) and counts as if every rank had as many as this one; its name ends in `_sparse`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit.cost import traffic as collectives
from labkit.record.components import is_strided, num_bytes_of
from labkit.record.events import SPARSE

NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")
FUNCTIONAL = "_c10d_functional"

# The field's name of a torch op, by the op's name without underscores at its ends.
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recv_any_source": "recv",
}
_INPUTS = ("input_tensors", "input_tensor", "input_list", "input", "inputs")
_OUTPUTS = ("output_tensors", "output_tensor", "output_lists", "output", "outputs", "out")
_BOTH = ("tensors", "tensor")


@dataclass(slots=True)
class Call:
    """One communication as called. `inputs` and `outputs` are flat lists of this rank's tensors; `peer` and
    `root` are global ranks; `in_group` is this rank within the group."""

    op: str
    name: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    in_group: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    reduce_op: str = ""
    splits: tuple[list[int], list[int]] = ((), ())
    nested: bool = False


def op_name(func) -> str:
    """The field's name of a communication op; "" for another op of these namespaces."""
    if func.namespace not in NAMESPACES:
        return ""
    return _NAMES.get(func._opname.strip("_"), "")


def describe(func, args: tuple, kwargs: dict) -> Call:
    """Read a communication op's arguments. Outputs that a functional op returns are added by the caller."""
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    group = _group(named)
    ranks = tuple(dist.get_process_group_ranks(group))
    op = op_name(func)
    call = Call(op, func._opname.strip("_"), group, ranks, group.rank(), [], [])
    for key, value in named.items():
        if key in _INPUTS:
            call.inputs += _flat(value)
        elif key in _OUTPUTS:
            call.outputs += _flat(value)
        elif key in _BOTH:
            _add_both(call, _flat(value))
    for key in ("root_rank", "src", "dst"):
        if key in named and named[key] is not None and named[key] >= 0:
            peer = ranks[named[key]]
            call.peer, call.root = (peer, None) if op in ("send", "recv") else (None, peer)
    call.tag = named.get("tag", 0)
    call.reduce_op = _reduce_op(named.get("reduce_op"))
    call.splits = (named.get("output_split_sizes") or [], named.get("input_split_sizes") or [])
    if op == "all_reduce" and not all(map(is_strided, call.inputs)):
        call.name += SPARSE
    if func.namespace == FUNCTIONAL and func._schema.name.endswith("_") and not call.outputs:
        call.outputs = list(call.inputs)  # all_reduce_, broadcast_: in place
    return call


def _add_both(call: Call, tensors: list[torch.Tensor]) -> None:
    """An argument that is read, written or both, by the kind of op."""
    if call.op == "barrier":
        return
    if call.op != "recv":
        call.inputs += tensors
    if call.op != "send":
        call.outputs += tensors


def _flat(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value or () for t in _flat(each)]


def _group(named: dict) -> dist.ProcessGroup:
    group = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _reduce_op(value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return dist.ReduceOp.RedOpType(value.op()).name.lower()
    except (AttributeError, RuntimeError, ValueError):
        return "custom"


def sizes(call: Call) -> tuple[int, int, int]:
    """(num_bytes, sent_bytes, received_bytes) of a collective, as `collectives` states them."""
    n, rank = len(call.ranks), call.in_group
    inputs, outputs = _bytes(call.inputs), _bytes(call.outputs)
    op = call.op
    if call.name.endswith(SPARSE):
        return sum(inputs), *collectives.ring_all_gather([sum(inputs)] * n, rank)
    if op == "all_reduce":
        pairs = [collectives.ring_all_reduce(_parts(t, n), rank) for t in call.inputs]
        return sum(inputs), sum(s for s, _ in pairs), sum(r for _, r in pairs)
    if op == "all_gather":
        parts = _summed(outputs, n) if len(outputs) % n == 0 and len(outputs) > len(inputs) else None
        parts = parts or [sum(inputs)] * n
        return sum(parts), *collectives.ring_all_gather(parts, rank)
    if op == "reduce_scatter":
        parts = _summed(inputs, n) if len(inputs) % n == 0 and len(inputs) > len(outputs) else None
        parts = parts or [sum(outputs) or sum(inputs) // n] * n
        return sum(parts), *collectives.ring_reduce_scatter(parts, rank)
    if op == "all_to_all":
        gone, come = _all_to_all_parts(call, inputs, outputs)
        return sum(gone), *collectives.direct_all_to_all(gone, come, rank)
    if op == "barrier":
        return 0, 0, 0
    return _rooted(call, sum(inputs), sum(outputs))


def _rooted(call: Call, read: int, written: int) -> tuple[int, int, int]:
    n, rank = len(call.ranks), call.in_group
    root = call.ranks.index(call.root) if call.root is not None else 0
    if call.op == "broadcast":
        return read, *collectives.chain_broadcast(read, n, rank, root)
    if call.op == "reduce":
        return read, *collectives.chain_reduce(read, n, rank, root)
    if call.op == "gather":
        full = written if rank == root else n * read
        return full, *collectives.direct_gather(read, full, rank, root)
    full = read if rank == root else n * written
    return full, *collectives.direct_scatter(written, full, rank, root)


def _all_to_all_parts(call: Call, inputs: list[int], outputs: list[int]) -> tuple[list[int], list[int]]:
    n = len(call.ranks)
    if len(inputs) == n and len(outputs) == n and n > 1:
        return inputs, outputs
    into, out_of = call.splits[1], call.splits[0]
    return _cut(inputs[0], into, n), _cut(outputs[0] if outputs else inputs[0], out_of, n)


def _cut(num_bytes: int, splits: list[int], n: int) -> list[int]:
    """Bytes per peer of a tensor that is split along its first dim, evenly where no sizes are given."""
    rows = sum(splits)
    return [num_bytes * rows_of // rows for rows_of in splits] if rows else [num_bytes // n] * n


def _summed(each: list[int], n: int) -> list[int]:
    """Per rank, over the tensors of a coalesced call: lists of n follow one another."""
    return [sum(each[i::n]) for i in range(n)]


def _parts(tensor: torch.Tensor, n: int) -> list[int]:
    return collectives.parts_of(tensor.numel(), tensor.element_size(), n)


def _bytes(tensors: list[torch.Tensor]) -> list[int]:
    return [num_bytes_of(t) for t in tensors]
