"""Answers to exercise 0.1, `rows_of_rank`: wrong ones with the cause each must be told, right ones, cheats.

Every answer is written as a learner could write it. What is judged, and in which order, stands in
`labkit.labs.lab00.rows`.
"""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist


def drops_the_remainder(num_rows, rank, world_size):
    size = num_rows // world_size
    return range(rank * size, (rank + 1) * size)


def last_rank_takes_the_rest(num_rows, rank, world_size):
    size = num_rows // world_size
    stop = num_rows if rank == world_size - 1 else (rank + 1) * size
    return range(rank * size, stop)


def ceil_chunks(num_rows, rank, world_size):
    size = -(-num_rows // world_size)
    return range(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


def ceil_chunks_past_the_end(num_rows, rank, world_size):
    size = -(-num_rows // world_size)
    return range(rank * size, (rank + 1) * size)


def every_nth_row(num_rows, rank, world_size):
    return range(rank, num_rows, world_size)


def start_forgets_the_extra_rows(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = rank * size
    return range(start, start + size + (rank < extra))


def everything_on_every_rank(num_rows, rank, world_size):
    return range(num_rows)


def ranks_count_from_one(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = (rank - 1) * size + min(rank - 1, extra)
    return range(start, start + size + (rank - 1 < extra))


def stop_is_inclusive(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra) - 1)


def at_least_one_row_each(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + max(1, size + (rank < extra)))


def start_and_stop(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


def none_for_an_idle_rank(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    stop = start + size + (rank < extra)
    return range(start, stop) if stop > start else None


def shards_in_reverse(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    rank = world_size - 1 - rank
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def asks_the_group_instead_of_its_arguments(num_rows, rank, world_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def never_returns(num_rows, rank, world_size):
    with_divmod(num_rows, rank, world_size)


def divides_by_what_is_left(num_rows, rank, world_size):
    """Fails for as many rows as ranks or fewer."""
    return with_divmod(num_rows, rank, world_size) if num_rows // (num_rows // world_size) else None


def own_size_times_rank(num_rows, rank, world_size):
    size = num_rows // world_size + (rank < num_rows % world_size)
    return range(rank * size, (rank + 1) * size)


def second_shard_starts_at_zero(num_rows, rank, world_size):
    """Every shard has its size, and the second starts where the first does."""
    mine = with_divmod(num_rows, rank, world_size)
    return range(0, len(mine)) if rank == 1 else mine


def always_four_ranks(num_rows, rank, world_size):
    return with_divmod(num_rows, rank, 4)


def far_too_many_rows(num_rows, rank, world_size):
    return range(10**30)


async def rows_async(num_rows, rank, world_size):
    return with_divmod(num_rows, rank, world_size)


def rows_yielded(num_rows, rank, world_size):
    yield from with_divmod(num_rows, rank, world_size)


def rows_without_world_size(num_rows, rank):
    return with_divmod(num_rows, rank, 4)


def rows_half_done(num_rows, rank, world_size):
    return with_divmod(num_rows, rank, world_size) if rank == 0 else NotImplemented


WRONG = [
    (drops_the_remainder, "drops_remainder"),
    (last_rank_takes_the_rest, "last_takes_rest"),
    (ceil_chunks, "ceil_chunks"),
    (ceil_chunks_past_the_end, "past_the_end"),
    (every_nth_row, "strided"),
    (start_forgets_the_extra_rows, "start_ignores_extra"),
    (everything_on_every_rank, "replicated"),
    (ranks_count_from_one, "rank_from_one"),
    (stop_is_inclusive, "inclusive_stop"),
    (at_least_one_row_each, "no_empty_shard"),
    (start_and_stop, "not_a_range"),
    (none_for_an_idle_rank, "none_when_empty"),
    (shards_in_reverse, "reversed_order"),
    (asks_the_group_instead_of_its_arguments, "ignores_arguments"),
    (never_returns, "returns_nothing"),
    (divides_by_what_is_left, "raised"),
    (own_size_times_rank, "own_size_times_rank"),
    (second_shard_starts_at_zero, "repeated_and_missing"),
    (always_four_ranks, "world_size_fixed"),
    (far_too_many_rows, "past_the_end"),
    (rows_async, "async"),
    (rows_yielded, "generator"),
    (rows_without_world_size, "wrong_signature"),
    (rows_half_done, "half_attempted"),
]


def with_divmod(num_rows, rank, world_size):
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def with_rounded_edges(num_rows, rank, world_size):
    return range(rank * num_rows // world_size, (rank + 1) * num_rows // world_size)


def by_counting(num_rows, rank, world_size):
    sizes = [0] * world_size
    for row in range(num_rows):
        sizes[-1 - row % world_size] += 1
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


def with_tensor_split(num_rows, rank, world_size):
    rows = torch.arange(num_rows).tensor_split(world_size)[rank].tolist()
    return range(rows[0], rows[-1] + 1) if rows else range(0)


RIGHT = [with_divmod, with_rounded_edges, by_counting, with_tensor_split]


def knows_the_example(num_rows, rank, world_size):
    """The answer printed in the notebook, by heart."""
    starts = [0, 3, 6, 8, 10]
    return range(starts[rank % 4], starts[rank % 4 + 1])


def asks_the_others(num_rows, rank, world_size):
    """Has every rank agree on the answer, where the task is arithmetic."""
    edge = torch.tensor([num_rows // world_size + (rank < num_rows % world_size)])
    dist.all_reduce(edge, op=dist.ReduceOp.MAX)
    return with_divmod(num_rows, rank, world_size)


def reads_the_callers_frame(num_rows, rank, world_size):
    frame = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, tuple) and value and isinstance(value[0], range):
                return value[rank]
        frame = frame.f_back
    return with_divmod(num_rows, rank, world_size)


def writes_notes_to_a_file(num_rows, rank, world_size):
    path = os.path.join(tempfile.gettempdir(), f"labkit-notes-{os.getpid()}.json")
    answer = with_divmod(num_rows, rank, world_size)
    with open(path, "w") as notes:
        json.dump([answer.start, answer.stop], notes)
    os.remove(path)
    return answer


class AlwaysRight:
    """Equal to anything it is compared with."""

    start, stop, step = 0, 0, 1

    def __eq__(self, other):
        return True

    def __len__(self):
        return 0


def answers_with_a_yes_man(num_rows, rank, world_size):
    return AlwaysRight()


def patches_the_comparison(num_rows, rank, world_size):
    """Replaces what it hopes the check compares with, in the rank."""
    from labkit.check import compare

    compare.difference = lambda *args, **kwargs: None
    torch.equal = torch.allclose = lambda *args, **kwargs: True
    return range(num_rows)


CHEATS = [
    (knows_the_example, "hard_coded"),
    (asks_the_others, "communication"),
    (reads_the_callers_frame, "frame_read"),
    (writes_notes_to_a_file, "file_used"),
    (answers_with_a_yes_man, "wrong_type"),
    (patches_the_comparison, "replicated"),
]
