"""Batches: real text, seeded, ranks apart and together equal to one."""

import itertools

import pytest
import torch

from labkit.model.text import VOCABULARY, batches, text


def taken(count, *arguments, **options):
    return list(itertools.islice(batches(*arguments, **options), count))


def test_the_text_is_real_and_always_the_same():
    assert len(text()) > 200_000 and b"lambda" in text()
    assert text() is text() and max(text()) < VOCABULARY


def test_targets_are_the_inputs_one_byte_on():
    for inputs, targets in taken(3, 4, 16):
        assert inputs.shape == targets.shape == (4, 16) and inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert all(bytes(row.tolist()) in text() for row in torch.cat((inputs, targets[:, -1:]), dim=1))


def test_a_seed_gives_the_same_batches_and_another_seed_others():
    first, again, other = taken(2, 3, 8, seed=5), taken(2, 3, 8, seed=5), taken(2, 3, 8, seed=6)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_what_one_rank_would(world_size):
    alone = taken(3, 2 * world_size, 8, seed=1)
    ranks = [taken(3, 2, 8, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, (inputs, _) in enumerate(alone):
        assert torch.equal(inputs, torch.cat([batch[step][0] for batch in ranks]))


def test_a_pass_over_the_text_shows_every_window_once_and_the_next_pass_another_order():
    length = len(text()) // 12
    windows = (len(text()) - 1) // length
    rows = [bytes(inputs[0].tolist()) for inputs, _ in taken(2 * windows, 1, length, seed=2)]
    assert len(set(rows[:windows])) == windows and set(rows[:windows]) == set(rows[windows:])
    assert rows[:windows] != rows[windows:]


def test_steps_end_the_batches():
    assert len(list(batches(1, 8, steps=4))) == 4


@pytest.mark.parametrize("wrong", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"length": 10**9}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError):
        next(batches(**{"batch": 1, "length": 8, **wrong}))
