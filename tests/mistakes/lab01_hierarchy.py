"""Answers to exercise 1.4, `hierarchical_all_reduce`: wrong ones with the cause each must be told, and right ones.

Cheats stand in `lab01_cheats`. What is judged, and in which order, stands in `labkit.labs.lab01.hierarchy`.
"""

import lab01_ring
import torch
import torch.distributed as dist


def _groups(ranks_per_node, strided=False):
    """(this rank's node, the ranks of its place in every node), as process groups."""
    world_size = dist.get_world_size()
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node)]
    places = [list(range(place, world_size, ranks_per_node)) for place in range(ranks_per_node)]
    if strided:
        nodes, places = places, nodes
    return dist.new_subgroups_by_enumeration(nodes)[0], dist.new_subgroups_by_enumeration(places)[0]


def _in_three_steps(tensor, inside, across, gather=True, size=None):
    """reduce_scatter within a group, all_reduce across, all_gather within."""
    g = dist.get_world_size(inside)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % g))
    parts = list(padded.chunk(g))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=inside)
    dist.all_reduce(mine, group=across)
    if gather:
        dist.all_gather(parts, mine, group=inside)
    else:
        parts[dist.get_rank(inside)].copy_(mine)
    return tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


def flat_ring(tensor, ranks_per_node):
    return lab01_ring.in_two_loops(tensor)


def all_reduce_on_both_levels(tensor, ranks_per_node):
    """Right values; every rank sends the whole of its node's sum across."""
    inside, across = _groups(ranks_per_node)
    dist.all_reduce(tensor, group=inside)
    dist.all_reduce(tensor, group=across)
    return tensor


def leaders_alone_cross(tensor, ranks_per_node):
    """Node sums meet at one rank per node, which carries everything across."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inside, _ = _groups(ranks_per_node)
    first = rank // ranks_per_node * ranks_per_node
    leaders = dist.new_group(list(range(0, world_size, ranks_per_node)))
    dist.reduce(tensor, dst=first, group=inside)
    if rank == first:
        dist.all_reduce(tensor, group=leaders)
    dist.broadcast(tensor, src=first, group=inside)
    return tensor


def nodes_are_every_other_rank(tensor, ranks_per_node):
    inside, across = _groups(ranks_per_node, strided=True)
    return _in_three_steps(tensor, inside, across)


def sums_within_the_node_only(tensor, ranks_per_node):
    inside, _ = _groups(ranks_per_node)
    dist.all_reduce(tensor, group=inside)
    return tensor


def sums_across_only(tensor, ranks_per_node):
    _, across = _groups(ranks_per_node)
    dist.all_reduce(tensor, group=across)
    return tensor


def never_gathers(tensor, ranks_per_node):
    return _in_three_steps(tensor, *_groups(ranks_per_node), gather=False)


def adds_everything_once_more(tensor, ranks_per_node):
    inside, across = _groups(ranks_per_node)
    _in_three_steps(tensor, inside, across)
    dist.all_reduce(tensor, group=inside)
    return tensor


def always_two_per_node(tensor, ranks_per_node):
    """Right on nodes of two. With 2 nodes of 3 it makes 3 nodes of 2: more bytes leave than must."""
    return _in_three_steps(tensor, *_groups(2))


def pairs_of_nodes_only(tensor, ranks_per_node):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inside, _ = _groups(ranks_per_node)
    g = ranks_per_node
    padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % g))
    parts = list(padded.chunk(g))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=inside)
    if world_size > g:
        got, other = torch.empty_like(mine), (rank + g) % (2 * g)
        sending = dist.isend(mine.clone(), dst=other)
        dist.recv(got, src=other)
        sending.wait()
        mine += got
    dist.all_gather(parts, mine, group=inside)
    return tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


def in_a_copy(tensor, ranks_per_node):
    return _in_three_steps(tensor.clone(), *_groups(ranks_per_node))


def returns_nothing(tensor, ranks_per_node):
    _in_three_steps(tensor, *_groups(ranks_per_node))


def equal_chunks_only(tensor, ranks_per_node):
    inside, across = _groups(ranks_per_node)
    parts = list(tensor.view(-1).chunk(ranks_per_node))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=inside)
    dist.all_reduce(mine, group=across)
    dist.all_gather(parts, mine, group=inside)
    return tensor


def everyone_exchanges_with_the_other_node(tensor, ranks_per_node):
    """Sends its own whole tensor to every rank of the other nodes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node, mine = rank // ranks_per_node, tensor.clone()
    inside, _ = _groups(ranks_per_node)
    others = [other for other in range(world_size) if other // ranks_per_node != node]
    got = [torch.empty_like(tensor) for _ in others]
    works = [dist.isend(mine, dst=other) for other in others]
    works += [dist.irecv(each, src=other) for each, other in zip(got, others, strict=True)]
    for work in works:
        work.wait()
    dist.all_reduce(tensor, group=inside)
    for each in got:
        tensor += each
    return tensor


WRONG = [
    (flat_ring, "flat_ring"),
    (all_reduce_on_both_levels, "whole_tensor"),
    (leaders_alone_cross, "leaders_only"),
    (nodes_are_every_other_rank, "nodes_mixed_up"),
    (sums_within_the_node_only, "node_only"),
    (sums_across_only, "across_only"),
    (never_gathers, "not_gathered"),
    (adds_everything_once_more, "counted_twice"),
    (always_two_per_node, ("too_much", "nodes_mixed_up", "whole_tensor")),
    (pairs_of_nodes_only, ("two_nodes", "wrong_values", "ends_early")),
    (in_a_copy, "not_in_place"),
    (returns_nothing, "returns_nothing"),
    (equal_chunks_only, "uneven_chunks"),
    (everyone_exchanges_with_the_other_node, "whole_tensor"),
]


def with_groups(tensor, ranks_per_node):
    return _in_three_steps(tensor, *_groups(ranks_per_node))


def _ring_among(ranks, chunks, rounds):
    """`rounds` steps of a ring among `ranks`, this rank's first chunk being that of its place; adds n-1 times."""
    n, place = len(ranks), ranks.index(dist.get_rank())
    for step in rounds:
        mine, theirs = chunks[(place - step - 1) % n], chunks[(place - step - 2) % n]
        got = torch.empty_like(theirs)
        sending = dist.isend(mine, dst=ranks[(place + 1) % n])
        dist.recv(got, src=ranks[place - 1])
        sending.wait()
        theirs.copy_(theirs + got if step < n - 1 else got)


def from_messages_alone(tensor, ranks_per_node):
    """Three rings of send and recv, chunks cut by torch.tensor_split."""
    rank, g = dist.get_rank(), ranks_per_node
    node = [rank // g * g + place for place in range(g)]
    places = list(range(rank % g, dist.get_world_size(), g))
    chunks = tensor.view(-1).tensor_split(g)
    _ring_among(node, chunks, range(g - 1))
    across = chunks[rank % g].tensor_split(len(places))
    _ring_among(places, across, range(2 * (len(places) - 1)))
    _ring_among(node, chunks, range(g - 1, 2 * (g - 1)))
    return tensor


def with_reduces_and_broadcasts(tensor, ranks_per_node):
    """Every rank of a node is the root of one part: reduce to it, sum across, broadcast from it."""
    rank, g = dist.get_rank(), ranks_per_node
    inside, across = _groups(g)
    first = rank // g * g
    parts = [part.clone() for part in tensor.view(-1).tensor_split(g)]
    for place, part in enumerate(parts):
        dist.reduce(part, dst=first + place, group=inside)
    dist.all_reduce(parts[rank % g], group=across)
    for place, part in enumerate(parts):
        dist.broadcast(part, src=first + place, group=inside)
    return tensor.copy_(torch.cat(parts).view_as(tensor))


RIGHT = [with_groups, from_messages_alone, with_reduces_and_broadcasts]
