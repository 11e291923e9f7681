"""The rules of the replay, each on records by hand with values by hand."""

import itertools
import os
import pickle
import random
import subprocess
import sys

import pytest

from labkit.check import programs, rounds
from labkit.record import measures
from labkit.record.perfetto import trace_json
from labkit.record.prices import counting_rounds
from labkit.record.replay import replay
from tests.house.source import ROOT
from tests.record.played import at_once, by_hand, collective, compute, record, records, recv, send, spans, wait


def play(*programs, sends="rendezvous", **prices):
    return replay(records(*programs), by_hand(**prices), sends)


def test_ops_follow_one_another_and_views_take_no_time():
    played = play([compute(2), compute(9, view=True), compute(3)])
    assert spans(played, 0, "compute") == [(0, 2), (2, 5)]
    assert (played.time_s, played.idle_share, played.findings, played.deadlock) == (5, 0, (), "")


def test_a_collective_starts_when_its_last_member_issues_it():
    played = play([compute(1), at_once(collective((0, 1), 2))], [compute(3), at_once(collective((0, 1), 2))])
    assert spans(played, 0, "communication") == spans(played, 1, "communication") == [(3, 6)]
    assert measures.exposed_s(played) == (5, 3)
    assert played.idle_share == pytest.approx(1 - 4 / 12)


@pytest.mark.parametrize("after, exposed, time_s", [(5, 0, 6), (1, 2, 4)])
def test_computing_hides_a_communication_up_to_the_wait_for_it(after, exposed, time_s):
    program = [compute(1), collective((0,), 2), compute(after), wait(1)]
    played = play(program)
    assert (played.exposed_s(0), played.time_s) == (exposed, time_s)


def test_collectives_of_one_group_queue_and_those_of_different_groups_do_not():
    one = [collective((0,), 2), collective((0,), 2), wait(0), wait(1)]
    two = [collective((0,), 2, group="a"), collective((0,), 2, group="b"), wait(0), wait(1)]
    assert (play(one).time_s, play(two).time_s) == (6, 3)


def test_messages_queue_on_one_send_port_and_on_one_receive_port():
    star = [send(1), send(2), send(3), wait(0), wait(1), wait(2)]
    out = play(star, *[[at_once(recv(0))]] * 3)
    assert [spans(out, rank, "communication") for rank in (1, 2, 3)] == [[(0, 1)], [(1, 2)], [(2, 3)]]
    into = play([recv(1), recv(2), recv(3), wait(0), wait(1), wait(2)], *[[at_once(send(0))]] * 3)
    assert into.time_s == 3


def test_a_rank_sends_and_receives_at_the_same_time():
    n = 5
    ring = [[send((rank + 1) % n, 4), at_once(recv((rank - 1) % n, 4)), wait(0)] for rank in range(n)]
    assert play(*ring).time_s == 5


def test_a_port_that_is_free_takes_the_next_message_that_can_use_it():
    # 0 -> 1 holds 1's port; 2 -> 1 was ready before 2 -> 3, but 2 -> 3 can go.
    played = play(
        [at_once(send(1, 9))],
        [recv(0, 9), recv(2), wait(0), wait(1)],
        [compute(1), send(1), send(3), wait(1), wait(2)],
        [at_once(recv(2))],
    )
    assert spans(played, 3, "communication") == [(1, 2)]
    assert spans(played, 1, "communication") == [(0, 10), (10, 11)]


@pytest.mark.parametrize("sends, sender, receiver", [("rendezvous", 7, 7), ("eager", 2, 5)])
def test_a_rendezvous_send_waits_for_its_recv_and_an_eager_one_does_not(sends, sender, receiver):
    played = play([at_once(send(1, 1)), compute(1)], [compute(5), at_once(recv(0, 1)), compute(1)], sends=sends)
    assert [spans(played, rank, "compute")[-1][0] for rank in (0, 1)] == [sender, receiver]


def test_an_eager_recv_that_is_early_waits_for_the_bytes():
    played = play([compute(3), at_once(send(1, 1))], [at_once(recv(0, 1))], sends="eager")
    assert spans(played, 1, "wait") == [(0, 5)]


def test_messages_match_in_the_order_of_their_calls_among_those_of_one_tag():
    sends = [send(1, 5, tag=7), send(1, 2, tag=3), send(1, 1, tag=7), wait(0), wait(1), wait(2)]
    recvs = [recv(0, tag=3), recv(0, tag=7), recv(0, tag=7), wait(0), wait(1), wait(2)]
    played = play(sends, recvs)
    assert {(m.send, m.recv) for m in played.messages} == {(0, 1), (1, 0), (2, 2)}
    assert {m.send: m.end_s - m.start_s for m in played.messages} == {0: 6, 1: 3, 2: 2}


def test_where_ranks_give_different_sizes_the_largest_is_paid_for():
    for sizes in itertools.permutations((1, 4, 2)):
        played = play(*[[at_once(collective((0, 1, 2), size, "all_to_all"))] for size in sizes])
        assert played.time_s == 5


def test_what_is_never_waited_for_is_a_finding_with_its_place_and_counts_to_the_end():
    played = play([compute(1), collective((0,), 6, place="train.py:7")])
    assert played.time_s == 8
    assert [finding.sentence for finding in played.never_waited] == [
        "rank 0 never waited for all_reduce #0 (train.py, line 7)"
    ]
    assert (played.never_waited[0].rank, played.never_waited[0].event) == (0, 1)


def test_what_never_meets_its_other_end_is_a_finding():
    for sends in ("rendezvous", "eager"):
        played = play([send(1, place="a.py:2")], [compute(1)], sends=sends)
        told = {finding.code: finding.sentence for finding in played.findings}
        assert told["unmatched"] == "rank 0 issued send #0 to rank 1 (a.py, line 2), but rank 1 never did"
        assert played.deadlock == "" and "never_waited" in told


def test_ranks_that_all_send_first_are_a_deadlock_under_rendezvous_only():
    both = [[at_once(send(1 - rank, place="a.py:2")), at_once(recv(1 - rank))] for rank in (0, 1)]
    assert play(*both, sends="eager").deadlock == ""
    assert play(*both).deadlock == (
        "rank 0 waits for rank 1 in send #0 to rank 1 (a.py, line 2); "
        "rank 1 waits for rank 0 in send #0 to rank 0 (a.py, line 2)"
    )


def test_a_collective_that_one_rank_skips_is_a_deadlock_that_names_it():
    program = [compute(2), at_once(collective((0, 1, 2))), at_once(collective((0, 1, 2), place="a.py:4"))]
    played = play(program, program, program[:2])
    assert played.deadlock == (
        "rank 0 waits for rank 2 in all_reduce #1 (a.py, line 4); "
        "rank 1 waits for rank 2 in all_reduce #1 (a.py, line 4); rank 2 is done"
    )
    assert played.time_s == 3


def test_other_deadlocks_are_told_in_the_same_terms():
    mixed = play([at_once(collective((0, 1), op="all_gather"))], [at_once(collective((0, 1), op="all_reduce"))])
    assert mixed.deadlock == ("rank 0 waits for rank 1 in all_gather #0; rank 1 waits for rank 0 in all_reduce #0")
    part = play([at_once(collective((0, 2), group="a"))], [compute(1)], [compute(1)])
    assert part.deadlock == "rank 0 waits for rank 2 in all_reduce #0 of ranks 0, 2; rank 2 is done"
    anyone = play([at_once(recv(None))], [compute(1)])
    assert anyone.deadlock == "rank 0 waits for any rank in recv #0 from any rank"


def card(senders, receivers):
    return tuple(f"out {rank % 2}" for rank in senders) + tuple(f"in {rank % 2}" for rank in receivers)


def test_transfers_that_cross_a_card_at_the_same_time_share_it_and_latencies_do_not():
    # Cards are those of odd and of even ranks: 0 -> 1 and 2 -> 3 share both of theirs.
    pair = [at_once(send(1, 4))], [at_once(recv(0))]
    played = play(*pair, [compute(2), at_once(send(3, 4))], [at_once(recv(2))], nics=card)
    # 1 s latency; alone from 1 to 3 (2 bytes), then half speed: 2 more take 4 s; the second has 2 left, alone.
    assert spans(played, 1, "communication") == [(0, 7)]
    assert spans(played, 3, "communication") == [(2, 9)]


def test_the_two_directions_of_a_card_do_not_share():
    played = play([at_once(send(1, 4))], [at_once(recv(0))], [at_once(recv(3))], [at_once(send(2, 4))], nics=card)
    assert played.time_s == 5


def test_transfers_that_end_together_give_the_card_free_together():
    pairs = [[[at_once(send(r + 1, 2))], [at_once(recv(r))]] for r in range(0, 6, 2)]
    assert play(*itertools.chain(*pairs), nics=card).time_s == pytest.approx(1 + 3 * 2)


def test_ranks_that_share_cores_compute_faster_while_others_stand_still():
    stretch = {1: 0.5, 2: 0.5, 3: 0.75, 4: 1.0}.get
    played = play(*[[compute(s / 2), compute(s / 2)] for s in (1, 2, 3, 4)], host=lambda rank: 0, stretch=stretch)
    assert [spans(played, rank, "compute")[-1][1] for rank in range(4)] == pytest.approx([1, 1.75, 2.25, 2.75])
    assert spans(played, 3, "compute")[0] == pytest.approx((0, 1.75)), "1 unit at full speed, 1 at 4/3 of it"


def test_ranks_on_different_nodes_do_not_stretch_each_other():
    played = play([compute(4)], [compute(4)], host=lambda rank: rank, stretch=lambda busy: float(busy))
    together = play([compute(4)], [compute(4)], host=lambda rank: 0, stretch=lambda busy: float(busy))
    assert (played.time_s, together.time_s) == (4, 8)


def test_a_rank_that_waits_leaves_its_core_to_the_others():
    first = [at_once(collective((0, 1))), compute(2)]
    second = [compute(2), at_once(collective((0, 1))), compute(2)]
    played = play(first, second, host=lambda rank: 0, stretch=lambda busy: busy / 2)
    assert spans(played, 1, "compute") == [(0, 1), (2, 4)] and spans(played, 0, "compute") == [(2, 4)]


def test_a_transfer_keeps_a_core_of_each_of_its_ranks_busy_and_a_latency_none():
    program = [collective((0, 1), 2), compute(4), wait(0)]
    played = play(program, program, host=lambda rank: 0, stretch=lambda busy: max(1.0, busy / 2))
    # 1 s of latency; 2 s of transfer at half speed, as computing; the last second of computing at full speed.
    assert spans(played, 0, "communication") == spans(played, 1, "communication") == [(0, 5)]
    assert spans(played, 0, "compute") == spans(played, 1, "compute") == [(0, 6)]
    cores_for_all = play(program, program, host=lambda rank: 0, stretch=lambda busy: max(1.0, busy / 4))
    assert spans(cores_for_all, 0, "communication") == [(0, 3)] and cores_for_all.time_s == 4


def test_a_transfer_that_keeps_half_a_core_busy_costs_computing_half_as_much():
    program = [collective((0, 1), 2), compute(4), wait(0)]
    given = {"host": lambda rank: 0, "stretch": lambda busy: max(1.0, busy / 2), "busy_share": 0.5}
    played = play(program, program, **given)
    # 1 s of latency; then work for 3 cores on 2 for 3 s, which end the transfer; 1 s of computing is left.
    assert spans(played, 0, "communication") == [(0, 4)] and played.time_s == 5
    # The price of the transfer was taken while everything took twice as long: it goes twice as fast.
    assert spans(play(program, program, **given, at_rest=2.0), 0, "communication") == [(0, 2.5)]


def test_transfers_on_shared_cores_hold_each_other_up():
    pairs = [[[at_once(send(r + 1, 2))], [at_once(recv(r))]] for r in range(0, 4, 2)]
    played = play(*itertools.chain(*pairs), host=lambda rank: 0, stretch=lambda busy: max(1.0, busy / 2))
    assert played.time_s == 1 + 2 * 2


def test_cuda_streams_run_at_the_same_time_unless_one_reads_what_the_other_writes():
    apart = play([compute(3, writes=[1], stream=0), compute(4, reads=[2], writes=[3], stream=9)])
    assert (apart.time_s, apart.busy_s(0), apart.exposed_s(0)) == (4, 4, 0)
    joined = play([compute(3, writes=[1], stream=0), compute(4, reads=[1], writes=[3], stream=9)])
    assert joined.time_s == 7
    overwritten = play([compute(3, reads=[1], stream=0), compute(4, writes=[1], stream=9)])
    assert overwritten.time_s == 7


def test_a_communication_on_its_own_cuda_stream_holds_up_only_who_needs_it():
    # A prefetch: gathered on stream 9 and waited for there, used by the last op.
    gather = [collective((0,), 4, "all_gather", stream=9, writes=[5]), wait(None, True)]
    played = play([compute(2), *gather, compute(1), compute(3, reads=[5])])
    assert spans(played, 0, "communication") == [(0, 5)]
    assert spans(played, 0, "compute") == [(0, 2), (2, 3), (5, 8)]


def test_a_wait_holds_up_the_stream_of_what_comes_next():
    program = [collective((0,), 4, stream=9), compute(1, stream=9), wait(0), compute(1, stream=0)]
    assert spans(play(program), 0, "compute") == [(0, 1), (5, 6)]


def test_a_record_of_several_streams_has_one_on_a_processor():
    program = [compute(3, stream=0), compute(4, stream=9)]
    assert play(program, host=lambda rank: 0, stretch=lambda busy: 1.0).time_s == 7


def test_records_must_be_of_all_ranks_in_order():
    one = record(1, 2, compute(1))
    for wrong in ([], [one], [one, record(0, 2, compute(1))]):
        with pytest.raises(ValueError, match="one record per rank"):
            replay(wrong, by_hand())
    with pytest.raises(ValueError, match="rendezvous or eager"):
        play([compute(1)], sends="buffered")


def random_messages(seed, n, length):
    """Blocking sends and receives; some programs hang."""
    draw = random.Random(seed)
    written = [[] for _ in range(n)]
    for _ in range(length):
        source, destination = draw.sample(range(n), 2)
        ends = [(source, send(destination)), (destination, recv(source))]
        for rank, end in ends:
            at = len(written[rank]) - (draw.random() < 0.15)
            written[rank].insert(max(at, 0), at_once(end))
    return records(*written)


def test_rounds_agree_with_the_simulation_from_ledgers():
    hanging = 0
    for seed in range(300):
        recs = random_messages(seed, 2 + seed % 4, 3 + seed % 9)
        other = rounds.simulate(programs.of(recs, ()))
        played = replay(recs, counting_rounds())
        assert played.time_s == other.rounds
        told = {f"rank {rank} waits" for rank, _ in other.stuck}
        assert {" ".join(part.split()[:3]) for part in played.deadlock.split("; ") if "waits" in part} == told
        hanging += bool(told)
    assert 30 < hanging < 270, "both kinds are there"


def test_a_replay_is_the_same_to_the_byte_in_any_process(tmp_path):
    recs = random_messages(2, 5, 12)
    recs = [record(r.rank, 5, *r.events, at_once(collective(range(5), 9)), compute(1)) for r in recs]
    (tmp_path / "records").write_bytes(pickle.dumps(recs))
    code = (
        "import pickle, sys; from labkit.record.replay import replay; from labkit.record.perfetto import trace_json;"
        "from labkit.record.prices import prices; from labkit.cost.hardware import cluster;"
        "recs = pickle.load(open(sys.argv[1], 'rb')); on = cluster('T4', 5, per_node=1, nic='10 GbE');"
        "sys.stdout.write(trace_json(replay(recs, prices(on), 'eager')))"
    )
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path / "records")]
        found.add(subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, timeout=120).stdout)
    assert len(found) == 1 and b'"ph":"X"' in found.pop()
    once, again = (replay(recs, by_hand(nics=card), "eager") for _ in range(2))
    assert once == again and trace_json(once) == trace_json(again) and not once.deadlock
