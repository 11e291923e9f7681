"""What a collective costs: against schedules written out message by message, figures worked by hand, and laws."""

import math
from collections import Counter

import pytest

from labkit.cost import comm, hardware, traffic
from labkit.cost.algorithms import ALGORITHMS
from labkit.cost.groups import Group, on_cluster, on_link
from labkit.cost.parts import Link
from tests.cost import rounds

WIRE = Link("wire", 2e-6, 1e9)
SIZES = (0, 1, 1000, 2**20, 10**9)

WRITTEN_OUT = {
    ("all_reduce", "ring"): lambda n: rounds.ring_pass(n) + rounds.ring_pass(n),
    ("all_gather", "ring"): rounds.ring_pass,
    ("reduce_scatter", "ring"): rounds.ring_pass,
    ("broadcast", "binomial"): rounds.binomial,
    ("reduce", "binomial"): lambda n: rounds.backwards(rounds.binomial(n)),
    ("all_reduce", "binomial"): lambda n: rounds.backwards(rounds.binomial(n)) + rounds.binomial(n),
    ("broadcast", "direct"): lambda n: rounds.star(n, 1.0),
    ("reduce", "direct"): lambda n: rounds.backwards(rounds.star(n, 1.0)),
    ("scatter", "direct"): lambda n: rounds.star(n, 1 / n),
    ("gather", "direct"): lambda n: rounds.backwards(rounds.star(n, 1 / n)),
    ("all_to_all", "direct"): rounds.exchange,
}
POWERS_OF_TWO = {
    ("reduce_scatter", "recursive"): rounds.halving,
    ("all_gather", "recursive"): lambda n: rounds.backwards(rounds.halving(n)),
    ("all_reduce", "recursive"): lambda n: rounds.halving(n) + rounds.backwards(rounds.halving(n)),
    ("scatter", "binomial"): rounds.binomial_scatter,
    ("gather", "binomial"): lambda n: rounds.backwards(rounds.binomial_scatter(n)),
}
CASES = [(key, n) for key in WRITTEN_OUT for n in (2, 3, 4, 7, 8)] + [(key, n) for key in POWERS_OF_TWO for n in (2, 8)]


def everything(group):
    return [(op, algorithm) for op in ALGORITHMS for algorithm in comm.choices(op, group)]


@pytest.mark.parametrize("key, n", CASES)
def test_time_and_bytes_are_those_of_the_messages_written_out(key, n):
    op, algorithm = key
    schedule = {**WRITTEN_OUT, **POWERS_OF_TWO}[key](n)
    for num_bytes in SIZES:
        expected = rounds.time_s(schedule, num_bytes, WIRE)
        assert comm.time_s(op, num_bytes, n, WIRE, algorithm) == pytest.approx(expected, rel=1e-12)
    busiest = comm.leaving_bytes(op, 1.0, on_link(n, WIRE), algorithm)
    assert busiest == pytest.approx(rounds.leaving(schedule, 1), rel=1e-12)


@pytest.mark.parametrize("n, per_node", [(4, 2), (8, 4), (8, 2), (16, 8)])
@pytest.mark.parametrize("key", [*WRITTEN_OUT, *POWERS_OF_TWO])
def test_bytes_that_leave_a_node_are_those_of_the_messages_written_out(key, n, per_node):
    op, algorithm = key
    group = Group((per_node,) * (n // per_node), WIRE, WIRE)
    schedule = {**WRITTEN_OUT, **POWERS_OF_TWO}[key](n)
    assert comm.leaving_bytes(op, 1.0, group, algorithm) == pytest.approx(rounds.leaving(schedule, per_node))


@pytest.mark.parametrize("n", range(2, 40))
def test_the_double_tree_has_the_depth_and_the_busiest_rank_of_nccls(n):
    sent, depth = Counter(), 0
    for parents in rounds.trees(n):
        for rank, parent in enumerate(parents):
            steps, above = 0, rank
            while (above := parents[above]) is not None:
                steps += 1
            depth = max(depth, steps)
            if parent is not None:
                sent[rank] += 0.5  # half the tensor, on its way up
                sent[parent] += 0.5  # and on its way down
    assert comm.line("all_reduce", on_link(n, WIRE), "tree").latency_s == pytest.approx(2 * depth * WIRE.alpha_s)
    assert comm.leaving_bytes("all_reduce", 1.0, on_link(n, WIRE), "tree") == max(sent.values())


def test_figures_worked_by_hand():
    # 4 ranks, alpha 2 us, 1 GB/s, S = 1 MB, so S / bandwidth = 1000 us.
    expected_us = {
        ("all_reduce", "ring"): 6 * 2 + 1.5 * 1000,
        ("all_reduce", "tree"): 2 * 2 * 2 + 2 * 1000,
        ("all_reduce", "binomial"): 4 * (2 + 1000),
        ("all_reduce", "recursive"): 4 * 2 + 1.5 * 1000,
        ("all_gather", "ring"): 3 * 2 + 0.75 * 1000,
        ("all_to_all", "direct"): 3 * 2 + 0.75 * 1000,
        ("broadcast", "ring"): 3 * 2 + 1000,
        ("broadcast", "tree"): 2 * 2 + 1000,
        ("broadcast", "binomial"): 2 * (2 + 1000),
        ("broadcast", "recursive"): 4 * 2 + 1.5 * 1000,
        ("broadcast", "direct"): 3 * (2 + 1000),
        ("gather", "direct"): 3 * (2 + 250),
        ("gather", "binomial"): (2 + 250) + (2 + 500),
        ("barrier", "ring"): 6 * 2,
    }
    found = {key: comm.time_s(key[0], 1e6, 4, WIRE, key[1]) * 1e6 for key in expected_us}
    assert found == pytest.approx(expected_us)
    assert comm.time_s("send", 1e6, 2, WIRE) * 1e6 == pytest.approx(2 + 1000)


def test_two_nodes_of_two_worked_by_hand():
    # Inside: 1 us, 10 GB/s. Between: 5 us, two cards of 1 GB/s each. S = 1 MB: 100 us inside, 500 us by both cards.
    group = Group((2, 2), Link("in", 1e-6, 10e9), Link("out", 5e-6, 1e9), num_nics=2)
    ring = 4 * 1 + 2 * 5 + 1.5 * 500  # six steps, two of them between nodes; the slower wire sets the pace
    tree = 2 * 1 + 2 * 5 + 1.0 * 500
    levels = (1 + 0.5 * 100) + (2 * 5 + 1.0 * 500) + (1 + 0.5 * 100)
    star = (1 + 100) + 2 * (5 + 1000)  # one rank sends, by one card
    gather = (1 + 0.25 * 100) + (5 + 0.5 * 1000)
    assert comm.group_time_s("all_reduce", 1e6, group, "ring") * 1e6 == pytest.approx(ring)
    assert comm.group_time_s("all_reduce", 1e6, group, "tree") * 1e6 == pytest.approx(tree)
    assert comm.group_time_s("all_reduce", 1e6, group, "hierarchical") * 1e6 == pytest.approx(levels)
    assert comm.group_time_s("broadcast", 1e6, group, "direct") * 1e6 == pytest.approx(star)
    assert comm.group_time_s("gather", 1e6, group, "binomial") * 1e6 == pytest.approx(gather)


def test_a_hierarchical_all_reduce_on_two_nodes_sends_s_out_of_a_node_where_the_flat_ring_sends_one_and_a_half():
    group = Group((2, 2), WIRE, WIRE)
    assert comm.leaving_bytes("all_reduce", 1000, group, "hierarchical") == 1000
    assert comm.leaving_bytes("all_reduce", 1000, group, "ring") == 1500


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"])
def test_hierarchical_is_a_collective_per_level(op):
    inner, outer = Link("in", 1e-6, 10e9, 3e-6), Link("out", 5e-6, 1e9, 7e-6)
    whole = comm.group_time_s(op, 1e6, Group((4, 4, 4), inner, outer, 4.0), "hierarchical")
    inside = comm.time_s("all_gather", 1e6, 4, inner)
    levels = {
        "all_reduce": 2 * inside + comm.time_s("all_reduce", 1e6 / 4, 3, outer),
        "all_gather": inside + comm.time_s("all_gather", 1e6 / 4, 3, outer),
        "reduce_scatter": inside + comm.time_s("reduce_scatter", 1e6 / 4, 3, outer),
        "all_to_all": comm.time_s("all_to_all", 1e6, 4, inner) + comm.time_s("all_to_all", 1e6, 3, outer),
        "broadcast": comm.time_s("broadcast", 1e6, 4, inner) + comm.time_s("broadcast", 1e6, 3, outer),
        "gather": comm.time_s("gather", 1e6 / 3, 4, inner) + comm.time_s("gather", 1e6, 3, outer),
    }
    assert whole == pytest.approx(levels[op])


GROUPS = [
    on_link(2, WIRE),
    on_link(5, WIRE),
    on_link(8, WIRE),
    on_cluster(hardware.cluster("DGX H100", 4)),
    on_cluster(hardware.cluster("8xT4", 2)),
    on_cluster(hardware.cluster("DGX A100", 2), range(3, 13)),
    on_cluster(hardware.cluster("DGX A100", 2), range(3, 10)),
]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "+".join(map(str, group.counts)))
def test_time_never_falls_as_bytes_grow_and_starts_at_the_latency(group):
    for op, algorithm in everything(group):
        if op == "send" and group.size > 2:
            continue
        times = [comm.group_time_s(op, num_bytes, group, algorithm) for num_bytes in SIZES]
        assert times == sorted(times) and times[0] == comm.line(op, group, algorithm).latency_s > 0
        assert (times[-1] > times[0]) == (op != "barrier")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "+".join(map(str, group.counts)))
def test_large_messages_are_bound_by_bandwidth_alone(group):
    for op, algorithm in everything(group):
        if op in ("send", "barrier"):
            continue
        line = comm.line(op, group, algorithm)
        assert comm.group_time_s(op, 1e18, group, algorithm) == pytest.approx(1e18 * line.s_per_byte, rel=1e-6)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"])
@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_bus_bandwidth_of_the_usual_algorithm_reaches_the_wires(op, n):
    num_bytes = 1e15
    assert comm.busbw(op, num_bytes, n, comm.time_s(op, num_bytes, n, WIRE)) == pytest.approx(WIRE.bandwidth, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["ring", "recursive", "hierarchical"])
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(algorithm):
    group = Group((4, 4), Link("in", 1e-6, 10e9), Link("out", 5e-6, 1e9), 2.0)
    for num_bytes in SIZES:
        halves = [comm.group_time_s(op, num_bytes, group, algorithm) for op in ("reduce_scatter", "all_gather")]
        assert comm.group_time_s("all_reduce", num_bytes, group, algorithm) == pytest.approx(sum(halves))


def test_one_rank_alone_is_free():
    link = Link("slow", 1.0, 1.0, 1.0)
    for op, algorithm in everything(on_link(1, link)):
        assert comm.time_s(op, 1e9, 1, link, algorithm) == 0
        assert comm.sent_bytes(op, 1e9, 1) == 0


def test_a_free_link_costs_nothing_but_the_call():
    for op, algorithm in everything(on_link(4, hardware.link("free"))):
        if op != "send":
            assert comm.time_s(op, 1e12, 4, hardware.link("free"), algorithm) == 0
    starting = Link("starts", 0.0, math.inf, 5e-6)
    assert comm.time_s("all_reduce", 1e12, 4, starting) == 5e-6
    assert comm.group_time_s("all_reduce", 1, Group((2, 2), starting, starting), "hierarchical") == 3 * 5e-6


def test_bytes_sent_are_those_that_every_rank_is_counted_for():
    n, num_bytes = 5, 1000
    parts = traffic.parts_of(num_bytes, 1, n)
    counted = {
        "all_reduce": [traffic.ring_all_reduce(parts, r) for r in range(n)],
        "all_gather": [traffic.ring_all_gather(parts, r) for r in range(n)],
        "reduce_scatter": [traffic.ring_reduce_scatter(parts, r) for r in range(n)],
        "all_to_all": [traffic.direct_all_to_all(parts, parts, r) for r in range(n)],
        "broadcast": [traffic.chain_broadcast(num_bytes, n, r, 3) for r in range(n)],
        "reduce": [traffic.chain_reduce(num_bytes, n, r, 3) for r in range(n)],
        "gather": [traffic.direct_gather(parts[r], num_bytes, r, 3) for r in range(n)],
        "scatter": [traffic.direct_scatter(parts[r], num_bytes, r, 3) for r in range(n)],
    }
    for op, pairs in counted.items():
        assert comm.sent_bytes(op, num_bytes, n) == pytest.approx(max(sent for sent, _ in pairs)), op
        assert sum(sent for sent, _ in pairs) == sum(received for _, received in pairs), op


def test_the_fastest_changes_at_the_crossover():
    # 8 ranks: ring 14 alpha + 1.75 S/B, tree 6 alpha + 2 S/B; equal where 0.25 S/B = 8 alpha: S = 32 * 2 us * 1 GB/s.
    group = on_link(8, WIRE)
    size = comm.crossover_bytes("all_reduce", group, "ring", "tree")
    assert size == pytest.approx(64_000) == comm.crossover_bytes("all_reduce", group, "tree", "ring")
    assert comm.fastest("all_reduce", size / 2, group, ("ring", "tree")) == "tree"
    assert comm.fastest("all_reduce", size * 2, group, ("ring", "tree")) == "ring"
    assert comm.fastest("all_reduce", size, group) == "recursive"


def test_there_is_no_crossover_where_one_algorithm_is_always_faster():
    group = on_link(8, WIRE)
    assert comm.crossover_bytes("all_reduce", group, "ring", "recursive") is None
    assert comm.crossover_bytes("all_reduce", group, "ring", "ring") is None


@pytest.mark.parametrize(
    "op, algorithm, n", [("all_reduce", "ring", 4), ("broadcast", "binomial", 8), ("send", None, 2)]
)
def test_a_link_is_read_off_the_line_that_it_makes(op, algorithm, n):
    line = comm.line(op, on_link(n, WIRE), algorithm)
    found = comm.link_of("found", op, n, line.latency_s, line.s_per_byte, algorithm)
    assert (found.alpha_s, found.bandwidth) == pytest.approx((WIRE.alpha_s, WIRE.bandwidth))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: comm.time_s("allreduce", 1, 2, WIRE), "no collective is called 'allreduce'; known: all_reduce,"),
        (lambda: comm.time_s("all_gather", 1, 2, WIRE, "tree"), "all_gather has no algorithm 'tree'; it has ring,"),
        (lambda: comm.time_s("all_reduce", 1, 0, WIRE), "1 rank or more, not 0"),
        (lambda: comm.time_s("all_reduce", 1, 2.5, WIRE), "1 rank or more, not 2.5"),
        (lambda: comm.time_s("all_reduce", -1, 2, WIRE), "num_bytes must be 0 or more, not -1"),
        (lambda: comm.time_s("all_reduce", math.nan, 2, WIRE), "num_bytes must be 0 or more, not nan"),
        (lambda: comm.time_s("all_reduce", 1, 6, WIRE, "recursive"), "a power of two of ranks"),
        (lambda: comm.time_s("all_reduce", 1, 4, WIRE, "hierarchical"), "2 nodes or more with equally many ranks"),
        (lambda: comm.time_s("send", 1, 3, WIRE), "send goes from one rank to one other; the group has 3"),
        (lambda: comm.bus_factor("barrier", 4), "a barrier moves no bytes"),
        (lambda: comm.algbw(1, 0.0), "time_s must be more than 0, not 0.0"),
        (lambda: comm.link_of("x", "all_reduce", 1, 1e-6, 1e-9), "all_reduce among 1 moves nothing"),
        (lambda: comm.link_of("x", "all_reduce", 2, 1e-6, 0.0), "s_per_byte more than 0"),
    ],
)
def test_a_wrong_input_is_told_in_one_sentence(wrong, words):
    with pytest.raises(ValueError) as caught:
        wrong()
    assert words in str(caught.value) and "\n" not in str(caught.value)
