"""What a replay pays: on clusters by name, against the cost room's formulas and figures by hand."""

import dataclasses

import pytest

from labkit.cost import comm, hardware
from labkit.cost.groups import on_cluster
from labkit.cost.laptop import Laptop, cluster_of
from labkit.record.prices import prices
from tests.record.played import collective, compute


def test_an_op_is_bound_by_arithmetic_or_by_memory():
    on = prices(hardware.cluster("T4"))
    op = dataclasses.replace(compute(0), flops=81_000_000, read_bytes=320_000, written_bytes=320_000)
    assert on.op(0, op) == pytest.approx(81e6 / 8.1e12)
    assert on.op(0, dataclasses.replace(op, flops=0)) == pytest.approx(640e3 / 320e9)
    assert prices(hardware.cluster("T4"), dtype="fp16").op(0, op) == pytest.approx(640e3 / 320e9)
    with pytest.raises(ValueError, match="no arithmetic in bf16"):
        prices(hardware.cluster("T4"), dtype="bf16")


def test_asking_for_memory_is_free():
    on = prices(hardware.cluster("T4"))
    for name in ("aten.empty.memory_format", "aten.new_empty", "aten.empty_like"):
        op = dataclasses.replace(compute(0), name=name, written_bytes=10**9)
        assert on.op(0, op) == 0 < on.op(0, dataclasses.replace(op, name="aten.zeros_like"))


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"])
def test_a_collective_within_a_node_is_paid_by_the_textbook(op):
    latency_s, transfer_s = prices(hardware.cluster("DGX A100")).collective(collective(range(4), 10**6, op))
    link = hardware.link("NVLink 3")
    assert latency_s + transfer_s == pytest.approx(comm.time_s(op, 10**6, 4, link))
    assert latency_s == pytest.approx(comm.time_s(op, 0, 4, link))


def test_a_sparse_all_reduce_gathers_what_every_rank_has():
    on = prices(hardware.cluster("DGX A100"))
    sparse = dataclasses.replace(collective(range(4), 10**6), call="allreduce_sparse")
    assert on.collective(sparse) == on.collective(collective(range(4), 4 * 10**6, "all_gather"))


def test_an_algorithm_can_be_chosen():
    on = prices(hardware.cluster("DGX A100"), algorithms={"broadcast": "binomial"})
    event = collective(range(8), 10**6, "broadcast")
    assert sum(on.collective(event)) == pytest.approx(
        comm.time_s("broadcast", 10**6, 8, hardware.link("NVLink 3"), "binomial")
    )


def test_a_group_of_one_and_a_barrier_move_no_bytes():
    on = prices(hardware.cluster("DGX A100"))
    assert on.collective(collective((3,), 10**6)) == (0, 0)
    latency_s, transfer_s = on.collective(collective(range(8), 0, "barrier"))
    assert latency_s > 0 == transfer_s


def test_a_message_is_paid_by_the_link_it_crosses():
    on = prices(hardware.cluster("DGX A100", num_nodes=2))
    for pair, link in (((0, 7), "NVLink 3"), ((7, 8), "HDR")):
        wire = hardware.link(f"InfiniBand {link}" if link == "HDR" else link)
        latency_s, transfer_s = on.message(*pair, 10**6)
        assert latency_s >= wire.alpha_s and transfer_s == pytest.approx(10**6 / wire.bandwidth)


def test_cards_are_shared_out_among_a_nodes_devices_and_have_two_directions():
    own = prices(hardware.cluster("DGX A100", num_nodes=2)).nics
    assert own((0, 1), (0, 1)) == ()
    assert own((1,), (9,)) == ("node 0 card 1 out", "node 1 card 1 in")
    assert len(own(tuple(range(16)), tuple(range(16)))) == 32
    half = prices(hardware.cluster("DGX-1", num_nodes=2)).nics  # 8 devices, 4 cards
    assert half((0,), (8,)) == half((1,), (9,)) != half((2,), (10,))
    one = prices(hardware.cluster("8xT4", num_nodes=2)).nics
    assert one((0,), (8,)) == one((7,), (15,)) == ("node 0 card 0 out", "node 1 card 0 in")


def test_ranks_of_a_laptop_share_its_cores_and_devices_do_not():
    mine = Laptop(4, 2.0, 5e9, 8e9, 2**33, 60e-6, 1.5e9, 0.0, "2026-01-31", "here")
    on = prices(cluster_of(mine))
    assert [on.host(rank) for rank in range(4)] == [0] * 4
    assert [on.stretch(busy) for busy in (1, 2, 3, 4)] == [0.5, 0.5, 0.75, 1.0]
    assert prices(hardware.cluster("T4", per_node=4)).host(3) is None


def test_a_laptops_latency_is_work_that_shares_its_cores():
    mine = Laptop(4, 2.0, 5e9, 8e9, 2**33, 60e-6, 1.5e9, 0.0, "2026-01-31", "here", 0.4)
    on, apart = prices(cluster_of(mine)), comm.line("all_reduce", on_cluster(cluster_of(mine), range(4)))
    assert on.collective(collective(range(4), 10**6)) == (0.0, pytest.approx(apart.time_s(10**6)))
    assert on.message(0, 1, 1500) == (0.0, pytest.approx(60e-6 + 1e-6))
    assert (on.busy_share, on.at_rest) == (0.4, 0.5), "4 x 0.4 of a core is less than 2 cores, half of what 4 ranks ask"
