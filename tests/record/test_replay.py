"""Real recorded runs, replayed on clusters of the tests' own, against theory worked out here.

What a step costs is worked out from the model's sizes and a link's figures, not from the record.
"""

import functools
import math
import pickle

import pytest

from labkit.cost import comm
from labkit.cost.hardware import cluster
from labkit.ranks.launch import launch
from labkit.record import measures
from labkit.record.perfetto import trace_json
from labkit.record.prices import prices
from labkit.record.replay import replay
from tests.record import played
from tests.record.played import SLOW, WIRE, on_link

PRELOAD = ("tests.record.played", "labkit.record.trace")
WAYS = ("hooks", "fake", "blocking", "naive", "one bucket", "bucketed")


@functools.cache
def recorded(fn, num_ranks, *arguments):
    return launch(fn, num_ranks, *arguments, prints="quiet", preload=PRELOAD, deadline_s=120)


@functools.cache
def trained(num_ranks):
    """Records of every way of data parallelism, by its name."""
    by_rank = recorded(played.data_parallel, num_ranks, WAYS)
    return {way: [records[i] for records in by_rank] for i, way in enumerate(WAYS)}


STAGES = [(p, m) for p in (2, 3, 4) for m in (2, 4, 8)]
FORWARD_S = played.LAYERS * 2 * played.BATCH * played.WIDTH**2 / SLOW.peak()
BACKWARD_S = 2 * FORWARD_S


@pytest.mark.parametrize("p, m", STAGES)
def test_gpipe_on_a_free_link_idles_as_in_theory(p, m):
    found = replay(recorded(played.gpipe, p, m), prices(on_link(p)))
    assert min(FORWARD_S, BACKWARD_S) >= 1e-3
    assert found.idle_share == pytest.approx((p - 1) / (m + p - 1), abs=0.002)
    assert found.deadlock == "" and found.findings == ()


def communication_term(p, m, message_s):
    """What a link adds to the idle share of GPipe by hand, whose sends and receives block.

    The first microbatch passes p-1 links each way. Each further one comes a period later: computing, and what the
    busiest stage sends and receives, which is one message with two stages and two in the middle of more.
    """
    work = FORWARD_S + BACKWARD_S
    time_s = p * work + 2 * (p - 1) * message_s + (m - 1) * (work + 2 * min(2, p - 1) * message_s)
    return 1 - m * work / time_s - (p - 1) / (m + p - 1)


@pytest.mark.parametrize("p, m", STAGES)
def test_gpipe_on_a_real_link_idles_as_in_theory_plus_its_communication(p, m):
    found = replay(recorded(played.gpipe, p, m), prices(on_link(p, WIRE)))
    term = communication_term(p, m, WIRE.alpha_s + played.BATCH * played.WIDTH * 4 / WIRE.bandwidth)
    print(f"p {p}, m {m}: idle {found.idle_share:.4f}, theory {(p - 1) / (m + p - 1):.4f}, communication {term:.4f}")
    assert term > 0.006, "the link is felt"
    assert found.idle_share == pytest.approx((p - 1) / (m + p - 1) + term, abs=0.002)


def chain(link, num_ranks):
    """The chain formula for one all_reduce per weight, from the model's sizes."""
    product_s = 2 * played.ROWS * played.SIDE**2 / SLOW.peak()
    forward_s, n = played.WEIGHTS * product_s, played.WEIGHTS
    ready_s = [forward_s + 2 * product_s * (i + 1) for i in range(n)]
    bucket_s = comm.time_s("all_reduce", played.SIDE**2 * 4, num_ranks, link)
    return measures.chain_time_s(ready_s, [bucket_s] * n, ready_s[-1]), bucket_s, 2 * product_s, forward_s


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("bandwidth", [1e9, 0.1e9])  # a bucket takes less than a layer's backward, and more
def test_overlapped_hooks_take_as_long_as_the_chain_formula_says(num_ranks, bandwidth):
    link = played.Link("wire", 20e-6, bandwidth)
    found = replay(trained(num_ranks)["hooks"], prices(on_link(num_ranks, link)))
    expected, bucket_s, layer_s, forward_s = chain(link, num_ranks)
    assert (bucket_s < layer_s) == (bandwidth == 1e9), "both cases of the formula"
    n = played.WEIGHTS
    closed = forward_s + (n * layer_s + bucket_s if bucket_s < layer_s else layer_s + n * bucket_s)
    assert expected == pytest.approx(closed)
    assert found.time_s == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("way", ["blocking", "fake"])
def test_blocking_and_fake_overlap_are_told_from_honest_by_the_work_between_issue_and_wait(way):
    records = trained(2)
    honest = (played.WEIGHTS - 1) / played.WEIGHTS
    assert [measures.overlapped_share(record) for record in records["hooks"]] == [honest] * 2
    assert [measures.overlapped_share(record) for record in records[way]] == [0.0] * 2
    on = prices(on_link(2, WIRE))
    dressed, plain, good = (replay(records[w], on) for w in (way, "naive", "hooks"))
    assert measures.exposed_s(dressed) == pytest.approx(measures.exposed_s(plain), rel=0.01)
    assert max(measures.exposed_s(good)) < 0.25 * max(measures.exposed_s(dressed))


def test_ddp_is_seen_to_overlap_though_its_waits_are_made_in_cpp():
    for record in trained(2)["bucketed"]:
        # At least one bucket of several has nothing left to hide behind.
        assert 0.5 <= measures.overlapped_share(record) < 1 and len(record.collectives) >= 4
    assert measures.overlapped_share(trained(2)["one bucket"][0]) == 0


def test_waits_before_the_last_issue_are_those_of_who_does_not_wait_to_the_end():
    early = {way: len(measures.early_waits(trained(2)[way][0])) for way in WAYS}
    assert early["hooks"] == 0 and early["fake"] == early["blocking"] == early["naive"] == played.WEIGHTS - 1


CLUSTERS = [
    ("DGX A100", {"per_node": 4}),
    ("RTX 4090", {"per_node": 4}),
    ("T4", {"per_node": 2, "num_nodes": 2, "nic": "10 GbE"}),
]


@pytest.mark.parametrize("name, more", CLUSTERS, ids=[name for name, _ in CLUSTERS])
def test_naive_one_bucket_and_bucketed_come_in_the_right_order(name, more):
    on = prices(cluster(name, **more))
    times = {way: replay(trained(4)[way], on) for way in ("naive", "one bucket", "bucketed")}
    exposed = {way: max(measures.exposed_s(found)) for way, found in times.items()}
    print(name, {way: f"{found.time_s * 1e3:.3f} ms, exposed {exposed[way] * 1e3:.3f}" for way, found in times.items()})
    assert times["bucketed"].time_s < times["one bucket"].time_s < times["naive"].time_s
    assert exposed["bucketed"] < exposed["one bucket"] < exposed["naive"]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_star_a_chain_and_a_tree_take_their_rounds(n):
    by_rank = recorded(played.broadcasts, n)
    found = [measures.rounds([records[i] for records in by_rank]) for i in range(3)]
    assert found == [n - 1, n - 1, math.ceil(math.log2(n))]


def test_what_is_left_in_flight_is_told_with_the_line_that_issued_it():
    found = replay(recorded(played.left_in_flight, 2), prices(on_link(2, WIRE)))
    assert len(found.never_waited) == 2
    assert "never waited for all_reduce #0 (played.py, line " in found.never_waited[0].sentence
    assert found.time_s > comm.time_s("all_reduce", 4000, 2, WIRE) * 0.999


def test_the_same_records_give_the_same_replay_to_the_byte_also_when_they_were_sent():
    records = trained(2)["bucketed"]
    copies = pickle.loads(pickle.dumps(records))
    on = cluster("T4", 2, per_node=1, nic="10 GbE")
    texts = {trace_json(replay(each, prices(on)), each) for each in (records, copies, list(records))}
    assert len(texts) == 1
