"""Answers to exercise 0.2, `broadcast`: wrong ones with the cause each must be told, and right ones.

Cheats stand in `lab00_cheats`. What is judged, and in which order, stands in `labkit.labs.lab00.broadcast`.
"""

import torch
import torch.distributed as dist


def star(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for other in range(world_size):
            if other != root:
                dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=root)
    return tensor


def star_all_at_once(tensor, root):
    """isend does not help: the root has one port to send through."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.recv(tensor, src=root)
        return tensor
    sends = [dist.isend(tensor, dst=other) for other in range(world_size) if other != root]
    for send in sends:
        send.wait()
    return tensor


def chain(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % world_size
    if place > 0:
        dist.recv(tensor, src=(rank - 1) % world_size)
    if place < world_size - 1:
        dist.send(tensor, dst=(rank + 1) % world_size)
    return tensor


def binary_tree(tensor, root):
    """Every rank passes on to two children: 4 rounds on 8 ranks, where 3 will do."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % world_size
    if place > 0:
        dist.recv(tensor, src=((place - 1) // 2 + root) % world_size)
    for child in (2 * place + 1, 2 * place + 2):
        if child < world_size:
            dist.send(tensor, dst=(child + root) % world_size)
    return tensor


def powers_of_two_only(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, reach = (rank - root) % world_size, 1
    while reach < world_size:
        if place < reach:
            dist.send(tensor, dst=(place + reach + root) % world_size)
        elif place < 2 * reach:
            dist.recv(tensor, src=(place - reach + root) % world_size)
        reach *= 2
    return tensor


def rounds_rounded_down(tensor, root):
    """log2 rounded down: on 5 ranks the last one never hears of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % world_size
    for step in range(world_size.bit_length() - 1):
        reach = 2**step
        if place < reach and place + reach < world_size:
            dist.send(tensor, dst=(place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            dist.recv(tensor, src=(place - reach + root) % world_size)
    return tensor


def always_from_rank_zero(tensor, root):
    rank, world_size, reach = dist.get_rank(), dist.get_world_size(), 1
    while reach < world_size:
        if rank < reach and rank + reach < world_size:
            dist.send(tensor, dst=rank + reach)
        elif reach <= rank < 2 * reach:
            dist.recv(tensor, src=rank - reach)
        reach *= 2
    return tensor


def tree_is_not_turned_to_the_root(tensor, root):
    """Counts places from the root, but sends to places as if they were ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, reach = (rank - root) % world_size, 1
    while reach < world_size:
        if place < reach and place + reach < world_size:
            dist.send(tensor, dst=place + reach)
        elif reach <= place < 2 * reach:
            dist.recv(tensor, src=place - reach)
        reach *= 2
    return tensor


def receives_into_a_copy(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    held = tensor.clone()
    place, reach = (rank - root) % world_size, 1
    while reach < world_size:
        if place < reach and place + reach < world_size:
            dist.send(held, dst=(place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            dist.recv(held, src=(place - reach + root) % world_size)
        reach *= 2
    return held


def returns_nothing(tensor, root):
    tree_by_doubling(tensor, root)


def sends_as_float(tensor, root):
    """Large whole numbers do not survive the trip through float32."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    held = tensor.float()
    place, reach = (rank - root) % world_size, 1
    while reach < world_size:
        if place < reach and place + reach < world_size:
            dist.send(held, dst=(place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            dist.recv(held, src=(place - reach + root) % world_size)
        reach *= 2
    return tensor.copy_(held)


def root_first_sends_to_rank_zero(tensor, root):
    """Moves the problem to rank 0 and pays one round more for it."""
    rank = dist.get_rank()
    if root != 0 and rank == root:
        dist.send(tensor, dst=0)
    if root != 0 and rank == 0:
        dist.recv(tensor, src=root)
    return always_from_rank_zero(tensor, 0)


def fails_alone(tensor, root):
    """Right from two ranks up; a single rank sends to itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == root and world_size == 1:
        dist.send(tensor, dst=root)
    return tree_by_doubling(tensor, root)


WRONG = [
    (star, "star"),
    (star_all_at_once, "star"),
    (chain, "chain"),
    (binary_tree, "slow_tree"),
    (powers_of_two_only, "powers_of_two"),
    (rounds_rounded_down, "unreached"),
    (always_from_rank_zero, "root_ignored"),
    (tree_is_not_turned_to_the_root, "tree_not_shifted"),
    (receives_into_a_copy, "not_in_place"),
    (returns_nothing, "returns_nothing"),
    (sends_as_float, "dtype_lost"),
    (root_first_sends_to_rank_zero, "detour"),
    (fails_alone, "world_of_one"),
]


def tree_by_doubling(tensor, root):
    """The ranks that know double each round."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, reach = (rank - root) % world_size, 1
    while reach < world_size:
        if place < reach and place + reach < world_size:
            dist.send(tensor, dst=(place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            dist.recv(tensor, src=(place - reach + root) % world_size)
        reach *= 2
    return tensor


def tree_by_bits(tensor, root):
    """As MPICH does it: receive from the place with the lowest bit cleared, then send to the lower bits."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, bit = (rank - root) % world_size, 1
    while bit < world_size and not place & bit:
        bit <<= 1
    if place:
        dist.recv(tensor, src=(place - bit + root) % world_size)
    bit >>= 1
    while bit:
        if place + bit < world_size:
            dist.isend(tensor, dst=(place + bit + root) % world_size).wait()
        bit >>= 1
    return tensor


def by_halves(tensor, root):
    """Recursive: hand the upper half to its first rank, then both halves go on by themselves."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def spread(first, last, place):
        if last - first <= 1:
            return
        middle = (first + last + 1) // 2
        if place == first:
            dist.send(tensor, dst=(middle + root) % world_size)
        elif place == middle:
            dist.recv(tensor, src=(first + root) % world_size)
        spread(*((first, middle) if place < middle else (middle, last)), place)

    spread(0, world_size, (rank - root) % world_size)
    return tensor


def with_batched_messages(tensor, root):
    """One batch of at most one message a round; works on NCCL without a warning."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, reach = (rank - root) % world_size, 1
    while reach < world_size:
        batch = []
        if place < reach and place + reach < world_size:
            batch = [dist.P2POp(dist.isend, tensor, (place + reach + root) % world_size)]
        elif reach <= place < 2 * reach:
            batch = [dist.P2POp(dist.irecv, tensor, (place - reach + root) % world_size)]
        for work in dist.batch_isend_irecv(batch) if batch else []:
            work.wait()
        reach *= 2
    return tensor


def into_a_buffer_then_copied(tensor, root):
    held = torch.empty_like(tensor).copy_(tensor)
    tree_by_bits(held, root)
    return tensor.copy_(held)


RIGHT = [tree_by_doubling, tree_by_bits, by_halves, with_batched_messages, into_a_buffer_then_copied]
