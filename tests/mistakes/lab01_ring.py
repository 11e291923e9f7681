"""Answers to exercise 1.1, `ring_all_reduce`: wrong ones with the cause each must be told, and right ones.

Cheats stand in `lab01_cheats`. What is judged, and in which order, stands in `labkit.labs.lab01.ring`.
"""

import torch
import torch.distributed as dist


def _swap(chunk, got):
    """One step of a ring: `chunk` to the right, `got` from the left, at the same time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(chunk, dst=(rank + 1) % world_size)
    dist.recv(got, src=(rank - 1) % world_size)
    sending.wait()


def _ring(tensor, chunks, scatter=True, gather=True, step=_swap, combine="add"):
    """Both halves of a ring all_reduce over `chunks`, views of `tensor`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size - 1) if scatter else ():
        got = torch.empty_like(chunks[(rank - turn - 1) % world_size])
        step(chunks[(rank - turn) % world_size], got)
        chunks[(rank - turn - 1) % world_size] += got
    for turn in range(world_size - 1) if gather else ():
        into = chunks[(rank - turn) % world_size]
        got = torch.empty_like(into)
        step(chunks[(rank - turn + 1) % world_size], got)
        into.copy_(got) if combine == "add" else into.add_(got)
    return tensor


def _chunks(tensor):
    return list(tensor.view(-1).tensor_split(dist.get_world_size()))


def star_through_rank_zero(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return tensor
    got = torch.empty_like(tensor)
    for other in range(1, world_size):
        dist.recv(got, src=other)
        tensor += got
    for other in range(1, world_size):
        dist.send(tensor, dst=other)
    return tensor


def whole_tensor_round_the_ring(tensor):
    travelling, got = tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        _swap(travelling, got)
        tensor += got
        travelling.copy_(got)
    return tensor


def everyone_to_everyone(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, others = tensor.clone(), [rank_ for rank_ in range(world_size) if rank_ != rank]
    got = {other: torch.empty_like(tensor) for other in others}
    works = [dist.isend(mine, dst=other) for other in others]
    works += [dist.irecv(got[other], src=other) for other in others]
    for work in works:
        work.wait()
    for other in others:
        tensor += got[other]
    return tensor


def stops_after_the_first_half(tensor):
    return _ring(tensor, _chunks(tensor), gather=False)


def one_turn_too_few(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = _chunks(tensor)
    for turn in range(world_size - 2):
        got = torch.empty_like(chunks[(rank - turn - 1) % world_size])
        _swap(chunks[(rank - turn) % world_size], got)
        chunks[(rank - turn - 1) % world_size] += got
    return _ring(tensor, chunks, scatter=False)


def adds_in_the_second_half_too(tensor):
    return _ring(tensor, _chunks(tensor), combine="always")


def adds_to_the_chunk_it_just_sent(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = [chunk.clone() for chunk in _chunks(tensor)]
    for turn in range(world_size - 1):
        got = torch.empty_like(chunks[(rank - turn - 1) % world_size])
        _swap(chunks[(rank - turn) % world_size], got)
        size = min(len(got), len(chunks[(rank - turn) % world_size]))
        chunks[(rank - turn) % world_size][:size] += got[:size]
    tensor.view(-1).copy_(torch.cat(chunks))
    return tensor


def drops_the_remainder(tensor):
    world_size = dist.get_world_size()
    size = tensor.numel() // world_size
    flat = tensor.view(-1)
    return _ring(tensor, [flat[i * size : (i + 1) * size] for i in range(world_size)])


def with_torch_chunk(tensor):
    """torch.chunk makes 3 chunks of 5 elements when asked for 4."""
    return _ring(tensor, list(tensor.view(-1).chunk(dist.get_world_size())))


def pads_to_equal_chunks(tensor):
    world_size = dist.get_world_size()
    padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % world_size))
    _ring(padded, list(padded.chunk(world_size)))
    return tensor.copy_(padded[: tensor.numel()].view_as(tensor))


def everyone_sends_first(tensor):
    def step(chunk, got):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.send(chunk, dst=(rank + 1) % world_size)
        dist.recv(got, src=(rank - 1) % world_size)

    return _ring(tensor, _chunks(tensor), step=step)


def takes_the_average(tensor):
    _ring(tensor, _chunks(tensor))
    return tensor.copy_((tensor / dist.get_world_size()).to(tensor.dtype))


def in_a_copy(tensor):
    copy = tensor.clone()
    return _ring(copy, _chunks(copy))


def returns_nothing(tensor):
    _ring(tensor, _chunks(tensor))


def adds_as_float(tensor):
    held = tensor.float()
    _ring(held, _chunks(held))
    return tensor.copy_(held)


def fails_alone(tensor):
    if dist.get_world_size() == 1:
        dist.send(tensor, dst=0)
    return _ring(tensor, _chunks(tensor))


def does_nothing(tensor):
    return tensor


def does_not_wait_for_its_sends(tensor):
    def step(chunk, got):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.isend(chunk.clone(), dst=(rank + 1) % world_size)
        dist.recv(got, src=(rank - 1) % world_size)

    return _ring(tensor, _chunks(tensor), step=step)


def straight_to_the_owner(tensor):
    """Every chunk goes to the rank that sums it and from there to everyone: the bytes of a ring, without one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks, others = _chunks(tensor), [other for other in range(world_size) if other != rank]
    got = {other: torch.empty_like(chunks[rank]) for other in others}
    works = [dist.isend(chunks[other].clone(), dst=other) for other in others]
    works += [dist.irecv(got[other], src=other) for other in others]
    for work in works:
        work.wait()
    for other in others:
        chunks[rank] += got[other]
    works = [dist.isend(chunks[rank], dst=other) for other in others]
    works += [dist.irecv(chunks[other], src=other) for other in others]
    for work in works:
        work.wait()
    return tensor


def even_ranks_send_first(tensor):
    def step(chunk, got):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank % 2 == 0:
            dist.send(chunk, dst=(rank + 1) % world_size)
            dist.recv(got, src=(rank - 1) % world_size)
        else:
            dist.recv(got, src=(rank - 1) % world_size)
            dist.send(chunk, dst=(rank + 1) % world_size)

    return _ring(tensor, _chunks(tensor), step=step)


def rank_zero_starts_every_turn(tensor):
    def step(chunk, got):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            dist.send(chunk, dst=1)
            dist.recv(got, src=world_size - 1)
        else:
            dist.recv(got, src=rank - 1)
            dist.send(chunk, dst=(rank + 1) % world_size)

    return _ring(tensor, _chunks(tensor), step=step)


def in_halves_of_chunks(tensor):
    """More messages than needed: each pays its alpha."""

    def step(chunk, got):
        middle = len(chunk) // 2, len(got) // 2
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for mine, theirs in (
            (chunk[: middle[0]], got[: middle[1]]),
            (chunk[middle[0] :], got[middle[1] :]),
        ):
            sending = dist.isend(mine, dst=(rank + 1) % world_size)
            dist.recv(theirs, src=(rank - 1) % world_size)
            sending.wait()

    return _ring(tensor, _chunks(tensor), step=step)


WRONG = [
    (star_through_rank_zero, "hot_rank"),
    (whole_tensor_round_the_ring, "whole_tensor"),
    (everyone_to_everyone, "whole_tensor"),
    (stops_after_the_first_half, "no_all_gather"),
    (one_turn_too_few, "ends_early"),
    (adds_in_the_second_half_too, "added_twice"),
    (adds_to_the_chunk_it_just_sent, "wrong_values"),
    (drops_the_remainder, "remainder"),
    (with_torch_chunk, "uneven_chunks"),
    (pads_to_equal_chunks, "padding"),
    (everyone_sends_first, "send_first"),
    (takes_the_average, "average"),
    (in_a_copy, "not_in_place"),
    (returns_nothing, "returns_nothing"),
    (adds_as_float, "dtype_lost"),
    (fails_alone, "world_of_one"),
    (does_nothing, "unchanged"),
    (does_not_wait_for_its_sends, "not_waited"),
    (straight_to_the_owner, "not_a_ring"),
    (even_ranks_send_first, "turns"),
    (rank_zero_starts_every_turn, "one_at_a_time"),
    (in_halves_of_chunks, "message_count"),
]


def in_two_loops(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.view(-1).tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        mine, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        got = torch.empty_like(theirs)
        sending = dist.isend(mine, dst=right)
        dist.recv(got, src=left)
        sending.wait()
        theirs.copy_(theirs + got if step < world_size - 1 else got)
    return tensor


def in_batches_to_the_left(tensor):
    """The other way round the ring, both messages of a step in one batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        mine, theirs = chunks[(rank + step) % world_size], chunks[(rank + step + 1) % world_size]
        got = torch.empty_like(theirs)
        batch = [
            dist.P2POp(dist.isend, mine, (rank - 1) % world_size),
            dist.P2POp(dist.irecv, got, (rank + 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        theirs.copy_(got) if step >= world_size - 1 else theirs.add_(got)
    return tensor


def with_chunks_rounded_up(tensor):
    """The last chunk is shorter, where torch.tensor_split makes the first ones longer."""
    world_size = dist.get_world_size()
    size = -(-tensor.numel() // world_size)
    flat = tensor.view(-1)
    return _ring(tensor, [flat[i * size : (i + 1) * size] for i in range(world_size)])


def second_half_received_in_place(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = _chunks(tensor)
    _ring(tensor, chunks, gather=False)
    for turn in range(world_size - 1):
        receiving = dist.irecv(chunks[(rank - turn) % world_size], src=(rank - 1) % world_size)
        dist.send(chunks[(rank - turn + 1) % world_size], dst=(rank + 1) % world_size)
        receiving.wait()
    return tensor


RIGHT = [in_two_loops, in_batches_to_the_left, with_chunks_rounded_up, second_half_received_in_place]
