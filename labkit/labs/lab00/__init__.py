"""Lab 00, Ranks: its exercises, its experiments, and the data behind its pictures.

Experiments (`labkit run lab00.deadlock`): hello, deadlock, mismatch, skipped. Each exercise's judge stands
in a module of its own: `rows`, `broadcast`, `ring`, `gather`. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab00 import broadcast, gather, ring, rows
from labkit.labs.lab00.experiments import deadlock, hello, mismatch, skipped
from labkit.labs.lab00.pictures import broadcast_picture, gather_picture, messages, ring_picture, rows_picture

EXERCISES: tuple[Exercise, ...] = (
    Exercise("0.1", "rows_of_rank", "Rows of a rank", minutes=6, points=1, judge=rows.judge),
    Exercise("0.2", "broadcast", "Broadcast from send and recv", minutes=12, points=3, judge=broadcast.judge),
    Exercise("0.3", "ring_exchange", "A ring that cannot hang", minutes=8, points=2, judge=ring.judge),
    Exercise("0.4", "gather_uneven", "Gather without padding", minutes=10, points=2, judge=gather.judge),
)

__all__ = [
    "EXERCISES",
    "broadcast_picture",
    "deadlock",
    "gather_picture",
    "hello",
    "messages",
    "mismatch",
    "ring_picture",
    "rows_picture",
    "skipped",
]
