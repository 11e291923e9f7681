"""Launches shared by the tests of this room: each training is run once per world size, however many tests look.

`grid` gives what is run: everything at 2 ranks and a part at 3 and 4 by default, all of it with `--soak`.
"""

import functools
import gc
import time

import pytest

from labkit.ranks.launch import run_ranks
from labkit.record.integrity import watched
from tests.record import training

PRELOAD = ("labkit.record.integrity", "tests.record.training")


def whole_and_step(name: str, arguments: tuple) -> tuple:
    """In a rank: ((record, integrity) of making and two steps, (record, integrity) of a third, steady one)."""
    training.quiet()
    kept = {}

    def begin() -> None:
        kept["step"] = getattr(training, name)(*arguments)
        kept["step"]()
        kept["step"]()

    def step_and_collect() -> None:
        kept["step"]()
        gc.collect()  # cycles of this step; those of the last one are gone, too
        time.sleep(0.2)  # gloo's own threads let go of a tensor a moment after it was waited for

    _, *whole = watched(begin)
    gc.collect()
    time.sleep(0.2)
    _, *step = watched(step_and_collect)
    return tuple(whole), tuple(step)


@pytest.fixture(scope="session")
def trained():
    """trained(name, world_size, *arguments): the Outcome of `whole_and_step` on ranks, run once."""

    @functools.cache
    def run(name, world_size, *arguments):
        preload = (*PRELOAD, "deepspeed") if name == "deepspeed" else PRELOAD
        outcome = run_ranks(
            whole_and_step, world_size, name, arguments, prints="quiet", preload=preload, deadline_s=120
        )
        assert outcome.cause is None, f"{outcome.cause.sentence}\n{outcome.cause.traceback}"
        return outcome

    return run
