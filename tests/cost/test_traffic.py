"""Bytes per rank to the byte, against rings that are really walked."""

import pytest

from labkit.cost import traffic


def walked(parts, first):
    """Bytes that each rank sends and receives when every rank passes on n-1 parts, the first being `first(rank)`."""
    n = len(parts)
    sent, received = [0] * n, [0] * n
    for step in range(n - 1):
        for rank in range(n):
            size = parts[(first(rank) - step) % n]
            sent[rank] += size
            received[(rank + 1) % n] += size
    return list(zip(sent, received, strict=True))


@pytest.mark.parametrize("num_elements, n", [(10, 4), (7, 3), (2, 5), (12, 4), (9, 2), (5, 1)])
def test_rings_count_the_parts_really_sent(num_elements, n):
    parts = traffic.parts_of(num_elements, 4, n)
    assert sum(parts) == 4 * num_elements and max(parts) - min(parts) <= 4
    gather = walked(parts, lambda rank: rank)  # a rank starts with its own part
    scatter = walked(parts, lambda rank: rank - 1)  # and ends reduce-scatter with its own
    assert [traffic.ring_all_gather(parts, rank) for rank in range(n)] == gather
    assert [traffic.ring_reduce_scatter(parts, rank) for rank in range(n)] == scatter
    both = [(a + c, b + d) for (a, b), (c, d) in zip(gather, scatter, strict=True)]
    assert [traffic.ring_all_reduce(parts, rank) for rank in range(n)] == both


def test_chains_start_at_the_root_and_end_before_it_or_the_other_way_round():
    assert [traffic.chain_broadcast(10, 3, rank, 1) for rank in range(3)] == [(0, 10), (10, 0), (10, 10)]
    assert [traffic.chain_reduce(10, 3, rank, 1) for rank in range(3)] == [(10, 10), (0, 10), (10, 0)]
    assert traffic.chain_broadcast(10, 1, 0, 0) == traffic.chain_reduce(10, 1, 0, 0) == (0, 0)


def test_direct_ones_count_all_but_ones_own_part():
    assert [traffic.direct_gather(own, 9, rank, 1) for rank, own in enumerate((2, 3, 4))] == [(2, 0), (0, 6), (4, 0)]
    assert [traffic.direct_scatter(own, 9, rank, 1) for rank, own in enumerate((2, 3, 4))] == [(0, 2), (6, 0), (0, 4)]
    assert traffic.direct_all_to_all([1, 2, 3], [2, 5, 9], 1) == (4, 11)
