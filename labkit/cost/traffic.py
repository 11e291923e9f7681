"""How many bytes a rank sends and receives in a collective, by the stated algorithms, to the byte.

`num_bytes` is nccl-tests' S: the full unsharded tensor (https://github.com/NVIDIA/nccl-tests/blob/master/doc/
PERFORMANCE.md). For n ranks, each rank sends

    all_reduce       2(n-1)/n S   ring: reduce-scatter, then all-gather
    all_gather       (n-1)/n S    ring
    reduce_scatter   (n-1)/n S    ring
    all_to_all       (n-1)/n S    directly: all but its own part
    broadcast        S            chain from the root; the last in the chain, just before the root, sends nothing
    reduce           S            chain towards the root, which sends nothing
    gather           its part     directly; the root sends nothing
    scatter          S less its own part from the root, directly; the others send nothing
    barrier          0

In whole bytes: where n does not divide, a tensor is cut as by torch.tensor_split (the first parts one element
longer) and the parts really sent are summed. Ranks here are ranks *within the group*. Left out: what a backend puts
on the wire, which may go by another algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence


def parts_of(num_elements: int, element_bytes: int, n: int) -> list[int]:
    """Bytes of the n parts that a tensor is cut into, longer ones first (torch.tensor_split)."""
    short, longer = divmod(num_elements, n)
    return [(short + (i < longer)) * element_bytes for i in range(n)]


def ring_all_reduce(parts: Sequence[int], rank: int) -> tuple[int, int]:
    """(sent, received) bytes of a rank. `parts`: bytes of the n parts; 2(n-1)/n of their sum when equal."""
    scattered, gathered = ring_reduce_scatter(parts, rank), ring_all_gather(parts, rank)
    return scattered[0] + gathered[0], scattered[1] + gathered[1]


def ring_all_gather(parts: Sequence[int], rank: int) -> tuple[int, int]:
    """(sent, received): every part goes once round the ring and stops before its owner."""
    n, total = len(parts), sum(parts)
    return (total - parts[(rank + 1) % n], total - parts[rank]) if n > 1 else (0, 0)


def ring_reduce_scatter(parts: Sequence[int], rank: int) -> tuple[int, int]:
    """(sent, received): a rank sends on every part but the one that ends with it."""
    n, total = len(parts), sum(parts)
    return (total - parts[rank], total - parts[(rank - 1) % n]) if n > 1 else (0, 0)


def chain_broadcast(num_bytes: int, n: int, rank: int, root: int) -> tuple[int, int]:
    """(sent, received): root, root+1, ... pass the tensor on."""
    if n < 2:
        return 0, 0
    return (0 if rank == (root - 1) % n else num_bytes), (0 if rank == root else num_bytes)


def chain_reduce(num_bytes: int, n: int, rank: int, root: int) -> tuple[int, int]:
    """(sent, received): root+1, root+2, ... add and pass on, up to the root."""
    if n < 2:
        return 0, 0
    return (0 if rank == root else num_bytes), (0 if rank == (root + 1) % n else num_bytes)


def direct_gather(own: int, num_bytes: int, rank: int, root: int) -> tuple[int, int]:
    """(sent, received): each part goes straight to the root."""
    return (0, num_bytes - own) if rank == root else (own, 0)


def direct_scatter(own: int, num_bytes: int, rank: int, root: int) -> tuple[int, int]:
    """(sent, received): each part comes straight from the root."""
    return (num_bytes - own, 0) if rank == root else (0, own)


def direct_all_to_all(sent_parts: Sequence[int], received_parts: Sequence[int], rank: int) -> tuple[int, int]:
    """(sent, received): everything but what a rank keeps for itself."""
    return sum(sent_parts) - sent_parts[rank], sum(received_parts) - received_parts[rank]
