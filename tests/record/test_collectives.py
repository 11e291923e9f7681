"""The stated algorithms: what ranks send equals what ranks receive, and the closed forms."""

import pytest
import torch

from labkit.cost import traffic as collectives

RINGS = {
    collectives.ring_all_reduce: lambda n: 2 * (n - 1) / n,
    collectives.ring_all_gather: lambda n: (n - 1) / n,
    collectives.ring_reduce_scatter: lambda n: (n - 1) / n,
}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("ring", RINGS)
def test_equal_parts_give_the_closed_form(ring, n):
    parts = [40] * n
    assert {ring(parts, rank) for rank in range(n)} == {(RINGS[ring](n) * 40 * n,) * 2}


@pytest.mark.parametrize("elements", [0, 1, 2, 5, 1001])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_parts_are_those_of_tensor_split(elements, n):
    split = [4 * part.numel() for part in torch.tensor_split(torch.empty(elements), n)]
    assert collectives.parts_of(elements, 4, n) == split


@pytest.mark.parametrize("ring", RINGS)
def test_what_a_rank_sends_its_neighbour_receives(ring):
    parts = [8, 8, 4, 0]
    pairs = [ring(parts, rank) for rank in range(4)]
    assert [sent for sent, _ in pairs] == [pairs[(rank + 1) % 4][1] for rank in range(4)]
    assert sum(sent for sent, _ in pairs) == RINGS[ring](4) * sum(parts) * 4


@pytest.mark.parametrize("chain", [collectives.chain_broadcast, collectives.chain_reduce])
@pytest.mark.parametrize("root", [0, 2])
def test_a_chain_moves_the_tensor_over_every_link_but_one(chain, root):
    pairs = [chain(100, 4, rank, root) for rank in range(4)]
    assert sum(sent for sent, _ in pairs) == sum(received for _, received in pairs) == 300


def test_the_root_of_a_broadcast_receives_nothing_and_that_of_a_reduce_sends_nothing():
    assert collectives.chain_broadcast(100, 3, 1, 1) == (100, 0)
    assert collectives.chain_reduce(100, 3, 1, 1) == (0, 100)


def test_gather_and_scatter_go_straight():
    assert collectives.direct_gather(10, 30, 0, 0) == (0, 20)
    assert collectives.direct_gather(10, 30, 1, 0) == (10, 0)
    assert collectives.direct_scatter(10, 30, 0, 0) == (20, 0)
    assert collectives.direct_scatter(10, 30, 1, 0) == (0, 10)


def test_all_to_all_keeps_its_own_part():
    assert collectives.direct_all_to_all([1, 2, 4], [8, 16, 32], 1) == (5, 40)
