"""Answers to exercise 0.3, `ring_exchange`: wrong ones with the cause each must be told, and right ones.

Cheats stand in `lab00_cheats`. What is judged, and in which order, stands in `labkit.labs.lab00.ring`.
"""

import torch
import torch.distributed as dist


def everyone_sends_first(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    dist.send(tensor, dst=(rank + 1) % world_size)
    dist.recv(got, src=(rank - 1) % world_size)
    return got


def everyone_receives_first(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    dist.recv(got, src=(rank - 1) % world_size)
    dist.send(tensor, dst=(rank + 1) % world_size)
    return got


def isend_but_waited_for_at_once(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    dist.isend(tensor, dst=(rank + 1) % world_size).wait()
    dist.irecv(got, src=(rank - 1) % world_size).wait()
    return got


def the_other_way_round(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    send = dist.isend(tensor, dst=(rank - 1) % world_size)
    dist.recv(got, src=(rank + 1) % world_size)
    send.wait()
    return got


def a_line_not_a_ring(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    got = tensor.clone()
    send = dist.isend(tensor, dst=rank + 1) if rank + 1 < world_size else None
    if rank > 0:
        dist.recv(got, src=rank - 1)
    if send:
        send.wait()
    return got


def receives_over_what_it_sends(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor
    send = dist.isend(tensor.clone(), dst=(rank + 1) % world_size)
    dist.recv(tensor, src=(rank - 1) % world_size)
    send.wait()
    return tensor


def never_waits(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.zeros_like(tensor)
    dist.isend(tensor, dst=(rank + 1) % world_size)
    dist.irecv(got, src=(rank - 1) % world_size)
    return got


def returns_its_own(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor
    send = dist.isend(tensor, dst=(rank + 1) % world_size)
    dist.recv(torch.empty_like(tensor), src=(rank - 1) % world_size)
    send.wait()
    return tensor


def swaps_in_pairs(tensor):
    """A partner instead of a neighbour: right on two ranks only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1
    if partner >= world_size:
        return tensor.clone()
    got = torch.empty_like(tensor)
    send = dist.isend(tensor, dst=partner)
    dist.recv(got, src=partner)
    send.wait()
    return got


def even_ranks_send_first_without_odd_worlds(tensor):
    """Rank 0 and the last rank both call themselves even and both skip the message between them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    got = tensor.clone()
    if rank % 2 == 0:
        if right % 2 == 1:
            dist.send(tensor, dst=right)
        if left % 2 == 1:
            dist.recv(got, src=left)
    else:
        dist.recv(got, src=left)
        dist.send(tensor, dst=right)
    return got


def sends_to_itself_when_alone(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(tensor)
    send = dist.isend(tensor, dst=(rank + 1) % world_size)
    dist.recv(got, src=(rank - 1) % world_size)
    send.wait()
    return got


def all_round_the_ring(tensor):
    """Everyone hears everything and keeps one part of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    heard, holds = {rank: tensor}, rank
    for _ in range(world_size - 1):
        got = torch.empty_like(tensor)
        send = dist.isend(heard[holds], dst=(rank + 1) % world_size)
        dist.recv(got, src=(rank - 1) % world_size)
        send.wait()
        holds = (holds - 1) % world_size
        heard[holds] = got
    return heard[(rank - 1) % world_size].clone()


WRONG = [
    (everyone_sends_first, "send_first"),
    (everyone_receives_first, "recv_first"),
    (isend_but_waited_for_at_once, "send_first"),
    (the_other_way_round, "wrong_direction"),
    (a_line_not_a_ring, "no_wraparound"),
    (receives_over_what_it_sends, "overwrites_input"),
    (never_waits, "not_waited"),
    (returns_its_own, "returns_own"),
    (swaps_in_pairs, "pairs"),
    (even_ranks_send_first_without_odd_worlds, "odd_world"),
    (sends_to_itself_when_alone, "world_of_one"),
    (all_round_the_ring, "too_many_messages"),
]


def send_in_the_background(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    send = dist.isend(tensor, dst=(rank + 1) % world_size)
    dist.recv(got, src=(rank - 1) % world_size)
    send.wait()
    return got


def both_in_one_batch(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    batch = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, got, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return got


def even_ranks_send_first(tensor):
    """Blocking calls only. On an odd ring the first and last rank are both even: it takes a round more."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, dst=(rank + 1) % world_size)
        dist.recv(got, src=(rank - 1) % world_size)
    else:
        dist.recv(got, src=(rank - 1) % world_size)
        dist.send(tensor, dst=(rank + 1) % world_size)
    return got


def rank_zero_starts_the_wave(tensor):
    """Slow, one message after another, and yet it cannot hang."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(tensor)
    if world_size == 1:
        return tensor.clone()
    if rank == 0:
        dist.send(tensor, dst=1)
        dist.recv(got, src=world_size - 1)
    else:
        dist.recv(got, src=rank - 1)
        dist.send(tensor, dst=(rank + 1) % world_size)
    return got


RIGHT = [send_in_the_background, both_in_one_batch, even_ranks_send_first, rank_zero_starts_the_wave]
