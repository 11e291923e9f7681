"""Sends and receives in virtual time: rounds of known patterns, and what hangs."""

from math import ceil, log2

import pytest

from labkit.check.rounds import Post, Wait, simulate


def program(*calls):
    """Blocking calls: ("send", 1), ("recv", 0)."""
    steps = []
    for kind, peer in calls:
        steps += [Post(kind, peer), Wait((len(steps),))]
    return steps


def binomial(world_size, root=0):
    """The textbook tree: in round k the first 2^k ranks (counted from the root) each feed one more."""
    steps = [[] for _ in range(world_size)]
    have = 1
    while have < world_size:
        for rank in range(min(have, world_size - have)):
            source, destination = (rank + root) % world_size, (rank + have + root) % world_size
            steps[source].append(("send", destination))
            steps[destination].append(("recv", source))
        have *= 2
    return [program(*calls) for calls in steps]


@pytest.mark.parametrize("world_size", range(2, 18))
def test_a_binomial_tree_takes_log2_rounds(world_size):
    assert simulate(binomial(world_size, root=1)).rounds == ceil(log2(world_size))


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_binomial_tree_whose_sends_are_waited_for_at_the_end_takes_log2_rounds(world_size):
    """Sends of one rank leave in the order of its calls, whichever rank they go to."""
    for root in range(world_size):
        programs = []
        for calls in binomial(world_size, root):
            posts = [step for step in calls if isinstance(step, Post)]
            received = [i for i, post in enumerate(posts) if post.kind == "recv"]
            steps, sent = [], []
            for i, post in enumerate(posts):
                steps.append(post)
                if i in received:
                    steps.append(Wait((len(steps) - 1,)))
                else:
                    sent.append(len(steps) - 1)
            programs.append([*steps, *(Wait((p,)) for p in sent)])
        assert simulate(programs).rounds == ceil(log2(world_size)), root


@pytest.mark.parametrize("world_size", range(2, 10))
def test_a_star_takes_one_round_per_receiver(world_size):
    star = [program(*[("send", r) for r in range(1, world_size)])] + [program(("recv", 0))] * (world_size - 1)
    assert simulate(star).rounds == world_size - 1
    posts = [Post("send", r) for r in range(1, world_size)]
    nonblocking = [[*posts, Wait(tuple(range(world_size - 1)))]] + [program(("recv", 0))] * (world_size - 1)
    assert simulate(nonblocking).rounds == world_size - 1  # there is one send port, waited for or not


def test_a_chain_takes_one_round_per_hop():
    chain = [program(("send", 1))]
    chain += [program(("recv", r - 1), ("send", r + 1)) for r in (1, 2, 3)]
    assert simulate([*chain, program(("recv", 3))]).rounds == 4


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_ring_in_which_all_send_first_is_stuck_and_names_who(world_size):
    ring = [program(("send", (r + 1) % world_size), ("recv", (r - 1) % world_size)) for r in range(world_size)]
    found = simulate(ring)
    assert found.stuck == tuple((r, 0) for r in range(world_size))
    assert found.messages == ()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_ring_that_starts_its_send_and_receives_takes_one_round(world_size):
    ring = [
        [Post("send", (r + 1) % world_size), Post("recv", (r - 1) % world_size), Wait((0,)), Wait((1,))]
        for r in range(world_size)
    ]
    found = simulate(ring)
    assert (found.rounds, found.stuck, found.unmatched) == (1, (), ())


def test_waiting_at_once_for_a_nonblocking_send_is_a_blocking_send():
    ring = [[Post("send", 1 - r), Wait((0,)), Post("recv", 1 - r), Wait((2,))] for r in (0, 1)]
    assert simulate(ring).stuck == ((0, 0), (1, 0))


def test_an_odd_ring_by_parity_takes_three_rounds():
    calls = [("send", 1), ("recv", 2)], [("recv", 0), ("send", 2)], [("send", 0), ("recv", 1)]
    assert simulate([program(*c) for c in calls]).rounds == 3


def test_a_send_without_its_recv_is_unmatched_even_if_nobody_waits():
    found = simulate([[Post("send", 1)], []])
    assert found.unmatched == ((0, 0),) and found.stuck == ()


def test_tags_and_order_decide_which_recv_belongs_to_which_send():
    sender = [Post("send", 1, key=5), Post("send", 1, key=6), Wait((0, 1))]
    crossed = [Post("recv", 0, key=6), Wait((0,)), Post("recv", 0, key=5), Wait((2,))]
    assert simulate([sender, crossed]).stuck == ()
    assert simulate([program(("send", 1)), [Post("recv", 0, key=1), Wait((0,))]]).stuck == ((0, 0), (1, 0))


def test_a_recv_from_any_source_takes_whoever_is_there():
    anyone = [Post("recv", None), Wait((0,)), Post("recv", None), Wait((2,))]
    found = simulate([anyone, program(("send", 0)), program(("send", 0))])
    assert (found.rounds, found.stuck) == (2, ())
    assert {m[2] for m in found.messages} == {1, 2}


def test_one_message_in_and_one_out_go_in_the_same_round_but_not_two_in():
    both_in = [program(("send", 2)), program(("send", 2)), [Post("recv", 0), Post("recv", 1), Wait((0, 1))]]
    assert simulate(both_in).rounds == 2
    through = [program(("send", 1)), [Post("recv", 0), Post("send", 2), Wait((0, 1))], program(("recv", 1))]
    assert simulate(through).rounds == 1


def test_a_collective_takes_no_time_but_waits_for_all_its_members():
    barrier = Post("barrier", key=("world", 0), members=(0, 1, 2))
    ranks = [
        [*program(("send", 1)), barrier, Wait((2,))],
        [*program(("recv", 0)), barrier, Wait((2,))],
        [barrier, Wait((0,)), Post("send", 0), Wait((2,))],
    ]
    found = simulate(ranks)
    assert found.stuck == ((2, 2),) and found.rounds == 1
    ranks[1] = program(("recv", 0))
    assert {r for r, _ in simulate(ranks).stuck} == {0, 2}


def test_nothing_at_all_takes_no_round():
    assert simulate([[], []]).rounds == 0
