"""Answers to exercise 1.2, `bus_bandwidth`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab01.bandwidth`.
"""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist


def right_one(op, num_bytes, world_size, time_s):
    factor = {"all_reduce": 2 * (world_size - 1) / world_size, "broadcast": 1, "reduce": 1}
    return num_bytes / time_s * factor.get(op, (world_size - 1) / world_size)


def size_over_time(op, num_bytes, world_size, time_s):
    return num_bytes / time_s


def everything_twice_round(op, num_bytes, world_size, time_s):
    return num_bytes / time_s * 2 * (world_size - 1) / world_size


def everything_once_round(op, num_bytes, world_size, time_s):
    return num_bytes / time_s * (world_size - 1) / world_size


def all_reduce_once_round(op, num_bytes, world_size, time_s):
    return num_bytes / time_s * (1 if op in ("broadcast", "reduce") else (world_size - 1) / world_size)


def root_keeps_its_part(op, num_bytes, world_size, time_s):
    factor = (world_size - 1) / world_size
    return num_bytes / time_s * (2 * factor if op == "all_reduce" else factor)


def takes_the_size_for_one_ranks_part(op, num_bytes, world_size, time_s):
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        num_bytes *= world_size
    return right_one(op, num_bytes, world_size, time_s)


def all_wires_together(op, num_bytes, world_size, time_s):
    return right_one(op, num_bytes, world_size, time_s) * world_size


def divides_by_the_factor(op, num_bytes, world_size, time_s):
    return (num_bytes / time_s) ** 2 / right_one(op, num_bytes, world_size, time_s)


def in_gigabytes(op, num_bytes, world_size, time_s):
    return right_one(op, num_bytes, world_size, time_s) / 1e9


def in_gibibytes(op, num_bytes, world_size, time_s):
    return right_one(op, num_bytes, world_size, time_s) / 2**30


def in_bits(op, num_bytes, world_size, time_s):
    return 8 * right_one(op, num_bytes, world_size, time_s)


def time_over_size(op, num_bytes, world_size, time_s):
    return 1 / right_one(op, num_bytes, world_size, time_s)


def forgets_to_divide_by_n(op, num_bytes, world_size, time_s):
    factor = {"all_reduce": 2 * (world_size - 1), "broadcast": 1, "reduce": 1}.get(op, world_size - 1)
    return num_bytes / time_s * factor


def asks_the_group(op, num_bytes, world_size, time_s):
    return right_one(op, num_bytes, dist.get_world_size(), time_s)


def three_collectives_only(op, num_bytes, world_size, time_s):
    if op == "all_reduce":
        return num_bytes / time_s * 2 * (world_size - 1) / world_size
    if op in ("all_gather", "reduce_scatter"):
        return num_bytes / time_s * (world_size - 1) / world_size


def all_to_all_like_all_reduce(op, num_bytes, world_size, time_s):
    return right_one("all_reduce" if op == "all_to_all" else op, num_bytes, world_size, time_s)


def both_bandwidths(op, num_bytes, world_size, time_s):
    return num_bytes / time_s, right_one(op, num_bytes, world_size, time_s)


WRONG = [
    (size_over_time, "algbw"),
    (everything_twice_round, "all_like_all_reduce"),
    (everything_once_round, "all_alike"),
    (all_reduce_once_round, "one_way_all_reduce"),
    (root_keeps_its_part, "rooted_scaled"),
    (takes_the_size_for_one_ranks_part, "per_rank_size"),
    (all_wires_together, "total_traffic"),
    (divides_by_the_factor, "factor_upside_down"),
    (in_gigabytes, "in_gigabytes"),
    (in_gibibytes, "in_gibibytes"),
    (in_bits, "in_bits"),
    (time_over_size, "time_upside_down"),
    (forgets_to_divide_by_n, "messages_not_bytes"),
    (asks_the_group, "ignores_arguments"),
    (three_collectives_only, "op_missing"),
    (all_to_all_like_all_reduce, "wrong_factor"),
    (both_bandwidths, "not_a_number"),
]


def with_branches(op, num_bytes, world_size, time_s):
    sent = num_bytes
    if op not in ("broadcast", "reduce"):
        sent = num_bytes * (world_size - 1) / world_size
    if op == "all_reduce":
        sent *= 2
    return sent / time_s


def by_counting_a_ring(op, num_bytes, world_size, time_s):
    """Adds up the chunks that a rank sends."""
    chunks = {"all_reduce": 2 * (world_size - 1), "broadcast": world_size, "reduce": world_size}
    sent = sum(num_bytes / world_size for _ in range(chunks.get(op, world_size - 1)))
    return sent / time_s


RIGHT = [right_one, with_branches, by_counting_a_ring]


def knows_the_example(op, num_bytes, world_size, time_s):
    return 1.5e9


def asks_the_others(op, num_bytes, world_size, time_s):
    dist.all_reduce(torch.ones(1))
    return right_one(op, num_bytes, world_size, time_s)


def reads_the_callers_frames(op, num_bytes, world_size, time_s):
    frame = sys._getframe(1)
    while frame is not None:
        if "due" in frame.f_locals:
            return frame.f_locals["due"]
        frame = frame.f_back
    return right_one(op, num_bytes, world_size, time_s)


def writes_notes_to_a_file(op, num_bytes, world_size, time_s):
    with open(os.path.join(tempfile.gettempdir(), "labkit-notes.json"), "w") as notes:
        json.dump([op, num_bytes, world_size, time_s], notes)
    return right_one(op, num_bytes, world_size, time_s)


class Equal(float):
    """Equal to anything it is compared with."""

    def __eq__(self, other):
        return True

    __hash__ = None


def answers_with_a_yes_man(op, num_bytes, world_size, time_s):
    return Equal(1.0)


def patches_the_comparison(op, num_bytes, world_size, time_s):
    import math

    math.isclose = lambda *args, **kwargs: True
    return num_bytes / time_s


CHEATS = [
    (knows_the_example, "hard_coded"),
    (asks_the_others, "communication"),
    (reads_the_callers_frames, "frame_read"),
    (writes_notes_to_a_file, "file_used"),
    (answers_with_a_yes_man, "unpicklable_result"),
    (patches_the_comparison, "algbw"),
]
