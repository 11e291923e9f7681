"""Answers to exercises 0.2 to 0.4 that miss by a detail, each with the cause that helps: the detail.

Trees, rings and gathers that are wrong as a whole stand in the module of their exercise. Here: calls
that cannot work, counts and pieces, recvs left open, results of another kind; and what must not be refused.
"""

import lab00_broadcast
import lab00_gather
import lab00_ring
import torch
import torch.distributed as dist


def _places(root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return world_size, (rank - root) % world_size


def _tree(root, send, recv):
    """The tree by doubling, with the learner's own way to send to a rank and to receive from one."""
    world_size, place = _places(root)
    reach = 1
    while reach < world_size:
        if place < reach and place + reach < world_size:
            send((place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            recv((place - reach + root) % world_size)
        reach *= 2


# Exercise 0.2


def count_before_the_tensor(tensor, root):
    count = torch.tensor([tensor.numel()])

    def send(rank):
        dist.send(count, dst=rank)
        dist.send(tensor, dst=rank)

    def recv(rank):
        dist.recv(count, src=rank)
        dist.recv(tensor, src=rank)

    _tree(root, send, recv)
    return tensor


def row_by_row(tensor, root):
    _tree(
        root,
        lambda rank: [dist.send(row, dst=rank) for row in tensor],
        lambda rank: [dist.recv(row, src=rank) for row in tensor],
    )
    return tensor


def the_tensor_twice(tensor, root):
    _tree(
        root,
        lambda rank: [dist.send(tensor, dst=rank) for _ in range(2)],
        lambda rank: [dist.recv(tensor, src=rank) for _ in range(2)],
    )
    return tensor


def wait_without_parentheses(tensor, root):
    _tree(root, lambda rank: dist.isend(tensor, dst=rank).wait, lambda rank: dist.irecv(tensor, src=rank).wait)
    return tensor


def first_row_only(tensor, root):
    _tree(root, lambda rank: dist.send(tensor[0], dst=rank), lambda rank: dist.recv(tensor[0], src=rank))
    return tensor


def returns_a_parameter(tensor, root):
    lab00_broadcast.tree_by_doubling(tensor, root)
    return torch.nn.Parameter(tensor, requires_grad=False)


def returns_no_values(tensor, root):
    return lab00_broadcast.tree_by_doubling(tensor, root).to("meta")


class Named(torch.Tensor):
    """A tensor that knows its name; its class stays in the rank."""


def returns_a_subclass(tensor, root):
    return lab00_broadcast.tree_by_doubling(tensor, root).as_subclass(Named)


def broadcast_without_root(tensor):
    return lab00_broadcast.tree_by_doubling(tensor, 0)


async def broadcast_async(tensor, root):
    return lab00_broadcast.tree_by_doubling(tensor, root)


def root_alone_is_written(tensor, root):
    return tensor if dist.get_rank() == root else NotImplemented


def polls_instead_of_waiting(tensor, root):
    def until_done(work):
        while not work.is_completed():
            pass

    _tree(
        root,
        lambda rank: until_done(dist.isend(tensor, dst=rank)),
        lambda rank: until_done(dist.irecv(tensor, src=rank)),
    )
    return tensor


BROADCAST = [
    (count_before_the_tensor, "many_messages"),
    (row_by_row, "many_messages"),
    (the_tensor_twice, "sent_twice"),
    (wait_without_parentheses, "not_waited"),
    (first_row_only, "part_only"),
    (returns_a_parameter, "wrong_type"),
    (returns_a_subclass, "wrong_type"),
    (returns_no_values, "wrong_type"),
    (broadcast_without_root, "wrong_signature"),
    (broadcast_async, "async"),
    (root_alone_is_written, "half_attempted"),
    (polls_instead_of_waiting, "polled"),
]


def sends_are_waited_for_at_the_end(tensor, root):
    """A rank starts all its sends at once: they go through its one port in the order it started them."""
    world_size, place = _places(root)
    reach, works = 1, []
    while reach < world_size:
        if place < reach and place + reach < world_size:
            works.append(dist.isend(tensor, (place + reach + root) % world_size))
        elif reach <= place < 2 * reach:
            dist.recv(tensor, (place - reach + root) % world_size)
        reach *= 2
    for work in works:
        work.wait()
    return tensor


def prints_what_it_has(tensor, root):
    lab00_broadcast.tree_by_doubling(tensor, root)
    print(tensor.tolist(), tensor.shape, tensor)
    return tensor


BROADCAST_RIGHT = [sends_are_waited_for_at_the_end, prints_what_it_has]


# Exercise 0.3


def alone_an_empty_tensor(tensor):
    if dist.get_world_size() == 1:
        return torch.zeros_like(tensor)
    return lab00_ring.send_in_the_background(tensor)


def alone_nothing(tensor):
    if dist.get_world_size() > 1:
        return lab00_ring.send_in_the_background(tensor)


def alone_the_tensor_itself(tensor):
    return tensor if dist.get_world_size() == 1 else lab00_ring.send_in_the_background(tensor)


def ring_with_a_root(tensor, root):
    return lab00_ring.send_in_the_background(tensor)


RING = [
    (alone_an_empty_tensor, "world_of_one"),
    (alone_nothing, "world_of_one"),
    (alone_the_tensor_itself, "aliased"),
    (ring_with_a_root, "wrong_signature"),
]


# Exercise 0.4


def _gather(tensor, root, say, hear, send=dist.send, recv=dist.recv):
    """Counts first, then rows, with the learner's own way to say a count, and to send and receive rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        say(len(tensor))
        send(tensor, root)
        return None
    parts = [tensor] * world_size
    for source in range(world_size):
        if source != root:
            parts[source] = tensor.new_empty(hear(source), *tensor.shape[1:])
            recv(parts[source], source)
    return torch.cat(parts)


def _heard(held, source):
    dist.recv(held, src=source)
    return int(held.flatten()[0])


def count_as_int32(tensor, root):
    return _gather(
        tensor,
        root,
        lambda count: dist.send(torch.tensor([count], dtype=torch.int32), dst=root),
        lambda source: _heard(torch.zeros(1, dtype=torch.int32), source),
    )


def whole_shape_as_the_count(tensor, root):
    return _gather(
        tensor,
        root,
        lambda count: dist.send(torch.tensor(tensor.shape), dst=root),
        lambda source: _heard(torch.zeros(tensor.ndim, dtype=torch.int64), source),
    )


def a_flag_before_each_row(tensor, root):
    more = torch.zeros(1, dtype=torch.int64)

    def send(rows, rank):
        for row in rows:
            dist.send(torch.ones(1, dtype=torch.int64), dst=rank)
            dist.send(row, dst=rank)

    def recv(rows, source):
        for row in rows:
            dist.recv(more, src=source)
            dist.recv(row, src=source)

    count = torch.zeros(1, dtype=torch.int64)
    return _gather(
        tensor,
        root,
        lambda rows: dist.send(torch.tensor([rows]), dst=root),
        lambda source: _heard(count, source),
        send,
        recv,
    )


def rows_as_float64(tensor, root):
    """Nothing is lost and nothing padded, but float32 rows travel twice as wide."""
    if tensor.dtype != torch.float32:
        return lab00_gather.counts_first(tensor, root)
    whole = lab00_gather.counts_first(tensor.double(), root)
    return None if whole is None else whole.to(tensor.dtype)


def counts_by_reduce(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(world_size, dtype=torch.int64)
    counts[rank] = len(tensor)
    dist.reduce(counts, dst=root)
    return _gather(tensor, root, lambda count: None, lambda source: int(counts[source]))


def counts_by_gather_object(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = [None] * world_size if rank == root else None
    dist.gather_object(len(tensor), counts, dst=root)
    return _gather(tensor, root, lambda count: None, lambda source: counts[source])


def barrier_first(tensor, root):
    dist.barrier()
    return lab00_gather.counts_first(tensor, root)


def root_leaves_out_empty_ranks(tensor, root):
    return _gather(
        tensor,
        root,
        lambda count: dist.send(torch.tensor([count]), dst=root),
        lambda source: _heard(torch.zeros(1, dtype=torch.int64), source),
        recv=lambda rows, source: dist.recv(rows, source) if len(rows) else None,
    )


def rows_not_waited_for(tensor, root):
    return _gather(
        tensor,
        root,
        lambda count: dist.send(torch.tensor([count]), dst=root),
        lambda source: _heard(torch.zeros(1, dtype=torch.int64), source),
        recv=lambda rows, source: dist.irecv(rows.zero_(), source),
    )


def gather_with_dst(tensor, dst, root):
    return lab00_gather.counts_first(tensor, root)


GATHER = [
    (count_as_int32, "count_not_int64"),
    (whole_shape_as_the_count, "count_too_large"),
    (a_flag_before_each_row, "count_too_large"),
    (rows_as_float64, "dtype_changed"),
    (counts_by_reduce, "count_collective"),
    (counts_by_gather_object, "count_collective"),
    (barrier_first, "collective"),
    (root_leaves_out_empty_ranks, "empty_recv_missing"),
    (rows_not_waited_for, "not_waited"),
    (gather_with_dst, "wrong_signature"),
]
