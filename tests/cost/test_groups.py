"""Which ranks share a node, and how network cards are shared."""

import pytest

from labkit.cost import comm, hardware
from labkit.cost.groups import nic_share, on_cluster, on_link

ONE_CARD = hardware.cluster("8xT4", 2)
EIGHT_CARDS = hardware.cluster("DGX H100", 2)
PAIRS = [(rank, rank + 8) for rank in range(8)]


def test_ranks_are_counted_node_by_node():
    assert on_cluster(EIGHT_CARDS).counts == (8, 8)
    assert on_cluster(EIGHT_CARDS, (9, 1, 3)).counts == (2, 1)
    assert on_cluster(EIGHT_CARDS, range(8)).counts == (8,)
    assert on_link(3, hardware.link("NVLink 4")).counts == (1, 1, 1)


def test_a_group_has_the_cards_of_its_own_ranks_and_at_least_one():
    assert [on_cluster(EIGHT_CARDS, range(4, 12)).num_nics, on_cluster(EIGHT_CARDS, PAIRS[0]).num_nics] == [4, 1]
    assert on_cluster(ONE_CARD).num_nics == on_cluster(ONE_CARD, PAIRS[0]).num_nics == 1


def test_groups_share_a_nodes_only_card_and_not_cards_of_their_own():
    assert nic_share(ONE_CARD, PAIRS) == 1 / 8
    assert nic_share(ONE_CARD, PAIRS[:2]) == 1 / 2
    assert nic_share(EIGHT_CARDS, PAIRS) == 1
    assert nic_share(ONE_CARD, [range(8), range(8, 16)]) == 1, "groups inside a node use no card"
    assert nic_share(ONE_CARD, []) == 1


def test_a_shared_card_is_slower_by_the_share_and_has_the_same_latency():
    alone, shared = on_cluster(ONE_CARD, PAIRS[0]), on_cluster(ONE_CARD, PAIRS[0], nic_share(ONE_CARD, PAIRS))
    one, other = comm.line("all_reduce", alone), comm.line("all_reduce", shared)
    assert (other.latency_s, other.s_per_byte) == pytest.approx((one.latency_s, 8 * one.s_per_byte))
    assert comm.group_time_s("send", 1e6, shared) > comm.group_time_s("send", 1e6, alone)


def test_inside_a_node_a_group_goes_by_the_inner_link():
    inside = comm.group_time_s("all_reduce", 1e9, on_cluster(EIGHT_CARDS, range(8)))
    assert inside == pytest.approx(comm.time_s("all_reduce", 1e9, 8, EIGHT_CARDS.node.intra))


@pytest.mark.parametrize(
    "ranks, share, words",
    [
        ((0, 16), 1.0, "has ranks 0 to 15, not 16"),
        ((0, -1), 1.0, "has ranks 0 to 15, not -1"),
        ((3, 3), 1.0, "rank 3 is named twice"),
        ((), 1.0, "1 rank or more, not 0"),
        ((0, 8), 0.0, "nic_share is more than 0 and at most 1, not 0.0"),
    ],
)
def test_a_wrong_group_is_told_in_one_sentence(ranks, share, words):
    with pytest.raises(ValueError, match=words):
        on_cluster(EIGHT_CARDS, ranks, share)
