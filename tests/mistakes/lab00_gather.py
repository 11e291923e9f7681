"""Answers to exercise 0.4, `gather_uneven`: wrong ones with the cause each must be told, and right ones.

Cheats stand in `lab00_cheats`. What is judged, and in which order, stands in `labkit.labs.lab00.gather`.
"""

import torch
import torch.distributed as dist


def padded_to_the_longest(tensor, root):
    """The usual trick, and the one this exercise is against."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = torch.zeros(world_size, dtype=torch.int64)
    rows[rank] = len(tensor)
    dist.all_reduce(rows)
    padded = tensor.new_zeros(int(rows.max()), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    if rank != root:
        dist.send(padded, dst=root)
        return None
    parts = []
    for source in range(world_size):
        held = padded.clone()
        if source != root:
            dist.recv(held, src=source)
        parts.append(held[: rows[source]])
    return torch.cat(parts)


def padded_by_a_power_of_two(tensor, root):
    """Padding again, hidden in a round number."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        room = 1 << max(len(tensor) - 1, 0).bit_length()
        padded = tensor.new_zeros(room, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        dist.send(torch.tensor([len(tensor)]), dst=root)
        dist.send(padded, dst=root)
        return None
    parts = [tensor] * world_size
    for source in range(world_size):
        if source != root:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=source)
            room = 1 << max(int(count) - 1, 0).bit_length()
            held = tensor.new_empty(room, *tensor.shape[1:])
            dist.recv(held, src=source)
            parts[source] = held[: int(count)]
    return torch.cat(parts)


def counts_by_all_gather(tensor, root):
    """No padding, but every rank is told every count."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(tensor)]))
    if rank != root:
        dist.send(tensor, dst=root)
        return None
    parts = [tensor.new_empty(int(count), *tensor.shape[1:]) for count in counts]
    parts[root] = tensor
    for source in range(world_size):
        if source != root:
            dist.recv(parts[source], src=source)
    return torch.cat(parts)


def everyone_gets_it(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [tensor] * world_size
    for destination in range(world_size):
        for source in range(world_size):
            if source == destination:
                continue
            if rank == source:
                dist.send(torch.tensor([len(tensor)]), dst=destination)
                dist.send(tensor, dst=destination)
            elif rank == destination:
                count = torch.zeros(1, dtype=torch.int64)
                dist.recv(count, src=source)
                parts[source] = tensor.new_empty(int(count), *tensor.shape[1:])
                dist.recv(parts[source], src=source)
    return torch.cat(parts)


def others_return_their_own(tensor, root):
    whole = counts_first(tensor, root)
    return whole if dist.get_rank() == root else tensor


def root_goes_first(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(torch.tensor([len(tensor)]), dst=root)
        dist.send(tensor, dst=root)
        return None
    parts = [tensor]
    for source in range(world_size):
        if source != root:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=source)
            parts.append(tensor.new_empty(int(count), *tensor.shape[1:]))
            dist.recv(parts[-1], src=source)
    return torch.cat(parts)


def root_forgets_its_own(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(torch.tensor([len(tensor)]), dst=root)
        dist.send(tensor, dst=root)
        return None
    parts = [tensor[:0]]
    for source in range(world_size):
        if source != root:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=source)
            parts.append(tensor.new_empty(int(count), *tensor.shape[1:]))
            dist.recv(parts[-1], src=source)
    return torch.cat(parts)


def as_many_rows_as_the_root(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(tensor, dst=root)
        return None
    parts = [torch.zeros_like(tensor) for _ in range(world_size)]
    parts[root] = tensor
    for source in range(world_size):
        if source != root:
            dist.recv(parts[source], src=source)
    return torch.cat(parts)


def always_to_rank_zero(tensor, root):
    return counts_first(tensor, 0)


def an_empty_rank_says_nothing(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        if len(tensor):
            dist.send(torch.tensor([len(tensor)]), dst=root)
            dist.send(tensor, dst=root)
        return None
    parts = [tensor] * world_size
    for source in range(world_size):
        if source != root:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=source)
            parts[source] = tensor.new_empty(int(count), *tensor.shape[1:])
            dist.recv(parts[source], src=source)
    return torch.cat(parts)


def handed_along_the_ranks(tensor, root):
    """Each rank hands on all that it was handed: the rows of the first rank travel n-1 times."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = (rank - root - 1) % world_size
    held = [tensor]
    for _ in range(place):
        count = torch.zeros(1, dtype=torch.int64)
        dist.recv(count, src=(rank - 1) % world_size)
        held.append(tensor.new_empty(int(count), *tensor.shape[1:]))
        dist.recv(held[-1], src=(rank - 1) % world_size)
    if rank == root:
        own, *rest = held
        parts = {root: own} | {(root - 1 - i) % world_size: part for i, part in enumerate(rest)}
        return torch.cat([parts[r] for r in range(world_size)])
    for part in held:
        dist.send(torch.tensor([len(part)]), dst=(rank + 1) % world_size)
        dist.send(part, dst=(rank + 1) % world_size)
    return None


def flattened(tensor, root):
    whole = counts_first(tensor.reshape(-1), root)
    return whole


def through_float32(tensor, root):
    whole = counts_first(tensor.float(), root)
    return None if whole is None else whole.to(tensor.dtype)


def a_list_of_parts(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(torch.tensor([len(tensor)]), dst=root)
        dist.send(tensor, dst=root)
        return None
    parts = [tensor] * world_size
    for source in range(world_size):
        if source != root:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=source)
            parts[source] = tensor.new_empty(int(count), *tensor.shape[1:])
            dist.recv(parts[source], src=source)
    return parts


WRONG = [
    (padded_to_the_longest, "padding"),
    (padded_by_a_power_of_two, "padding"),
    (counts_by_all_gather, "others_receive"),
    (everyone_gets_it, "returned_everywhere"),
    (others_return_their_own, "returns_own"),
    (root_goes_first, "root_first"),
    (root_forgets_its_own, "root_missing"),
    (as_many_rows_as_the_root, "same_size_assumed"),
    (always_to_rank_zero, "root_ignored"),
    (an_empty_rank_says_nothing, "empty_rank"),
    (handed_along_the_ranks, "forwarded"),
    (flattened, "flattened"),
    (through_float32, "dtype_lost"),
    (a_list_of_parts, "not_concatenated"),
]


def counts_first(tensor, root):
    """Every rank says how many rows are to come, then sends them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(torch.tensor([len(tensor)]), dst=root)
        dist.send(tensor, dst=root)
        return None
    parts = [tensor] * world_size
    for source in range(world_size):
        if source != root:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, src=source)
            parts[source] = tensor.new_empty(int(count), *tensor.shape[1:])
            dist.recv(parts[source], src=source)
    return torch.cat(parts)


def counts_by_torch_gather(tensor, root):
    """The counts are all of one size, so torch's own gather may carry them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([len(tensor)])
    counts = [torch.zeros_like(mine) for _ in range(world_size)] if rank == root else None
    dist.gather(mine, counts, dst=root)
    if rank != root:
        if len(tensor):
            dist.send(tensor, dst=root)
        return None
    parts = [tensor.new_empty(int(count), *tensor.shape[1:]) for count in counts]
    parts[root] = tensor
    for source in range(world_size):
        if source != root and len(parts[source]):
            dist.recv(parts[source], src=source)
    return torch.cat(parts)


def straight_into_place(tensor, root):
    """All messages at once, each received into its own rows of the result."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.isend(torch.tensor([len(tensor)]), dst=root).wait()
        dist.isend(tensor, dst=root).wait()
        return None
    counts = torch.zeros(world_size, 1, dtype=torch.int64)
    counts[root] = len(tensor)
    works = [dist.irecv(counts[r], src=r) for r in range(world_size) if r != root]
    for work in works:
        work.wait()
    whole = tensor.new_empty(int(counts.sum()), *tensor.shape[1:])
    parts = whole.split(counts.flatten().tolist())
    parts[root].copy_(tensor)
    works = [dist.irecv(parts[r], src=r) for r in range(world_size) if r != root]
    for work in works:
        work.wait()
    return whole


RIGHT = [counts_first, counts_by_torch_gather, straight_into_place]
