"""Verdicts on hand-written ledgers: each kind of disagreement is named with its rank and line, and programs
that are right are left alone. No processes here.
"""

import pytest

from labkit.ranks import layout, verdict
from tests.ranks.written import call, recv, send, written

RUNNING = ("running",) * 4


def agree(*ranks_calls):
    """Nothing to say at the end, nor of any common beginning."""
    assert verdict.at_end(written(*ranks_calls)) is None
    longest = max(map(len, ranks_calls))
    for stop in range(longest):
        assert verdict.definite(written(*(calls[:stop] for calls in ranks_calls))) is None


def test_a_wrong_shape_is_told_with_rank_and_lines():
    right = [call("barrier"), call("all_reduce", (4,), line=3)]
    wrong = [call("barrier"), call("all_reduce", (3,), line=5)]
    finding = verdict.definite(written(right, right, wrong, right))
    assert finding.code == "mismatch" and finding.rank == 2 and finding.place == "train.py:5"
    assert finding.sentence == (
        "all_reduce #1 differs: rank 2 passes shape (3,) (train.py, line 5), ranks 0, 1, 3 pass shape (4,) "
        "(train.py, line 3); every rank must pass the same shape"
    )


@pytest.mark.parametrize(
    "wrong, words",
    [
        (call("broadcast", root=0, dtype="float64"), "passes dtype float64"),
        (call("broadcast", root=1), "rank 1 names root 1 (train.py, line 1), ranks 0, 2 name root 0"),
        (call("all_gather"), "collective #0 differs: rank 1 calls all_gather"),
        (call("barrier"), "rank 1 calls barrier"),
    ],
)
def test_dtype_root_and_operation_are_told(wrong, words):
    right = call("broadcast", root=0)
    finding = verdict.definite(written([right], [wrong], [right]))
    assert finding.code == "mismatch" and finding.rank == 1 and words in finding.sentence


def test_a_wrong_reduce_operation_is_told():
    finding = verdict.definite(written([call("all_reduce")], [call("all_reduce", reduce_op="max")]))
    assert finding.rank == 1 and "rank 1 reduces with max" in finding.sentence
    assert "rank 0 reduces with sum" in finding.sentence


def test_of_two_equal_camps_the_lowest_ranks_counts_as_meant():
    a, b = [call("all_reduce", (4,))], [call("all_reduce", (5,))]
    finding = verdict.definite(written(a, b, b, a))
    assert finding.rank == 1 and "ranks 1, 2 pass shape (5,)" in finding.sentence


def test_swapped_calls_of_two_shapes_are_called_swapped():
    a, b = call("all_reduce", (4,), line=3), call("all_reduce", (5,), line=4)
    finding = verdict.definite(written([a, b], [b, a], [a, b]))
    assert finding.code == "mismatch" and finding.rank == 1 and "swapped order" in finding.sentence
    assert "shape (5,) float32, then shape (4,) float32 on rank 1 (train.py, line 4; " in finding.sentence


def test_only_what_both_have_issued_is_compared():
    ahead = [call("all_reduce"), call("all_gather"), call("barrier")]
    assert verdict.definite(written(ahead, ahead[:1], [])) is None


def test_a_difference_in_a_subgroup_names_the_group():
    group = (0, 2)
    finding = verdict.definite(
        written([call("all_reduce", group=group)], [], [call("all_reduce", (9,), group=group)], [])
    )
    assert finding.rank == 2 and "all_reduce #0 of ranks 0, 2 differs" in finding.sentence


def test_a_difference_older_than_the_ledger_is_still_found():
    rest = [call("all_reduce")] * (layout.CAPACITY + 10)
    finding = verdict.definite(written([call("all_reduce"), *rest], [call("all_reduce", (3,)), *rest]))
    assert finding.code == "mismatch" and "somewhere before #11" in finding.sentence


def named(order, lines=(1, 2), **more):
    return [call("all_reduce", line=line, tensor=name, **more) for name, line in zip(order, lines, strict=True)]


def test_swapped_all_reduces_of_one_shape_are_found_by_the_tensors_names():
    finding = verdict.definite(written(named("ab"), named("ba", (4, 5)), named("ab")))
    assert finding.code == "mismatch" and finding.rank == 1 and finding.place == "train.py:4"
    assert finding.sentence == (
        "swapped order: all_reduce #0 and #1 are b, then a on rank 1 (train.py, line 4; train.py, line 5), but a, "
        "then b on ranks 0, 2 (train.py, line 1; train.py, line 2); every rank must call them in the same order"
    )


def test_a_swap_is_found_on_two_ranks_that_branch():
    assert verdict.definite(written(named("ab", (3, 4)), named("ba", (6, 7)))).rank == 1


def test_a_swap_through_aliases_on_the_same_lines_is_found():
    ranks = [["a,first", "b,second"], ["b,first", "a,second"]]
    assert verdict.definite(written(*(named(order) for order in ranks))).rank == 1


def test_a_list_in_reversed_order_is_found_on_one_line_of_two_ranks():
    for length in (2, 3, 9, 20):
        forth = [f"grads[{i}],t" for i in range(length)]
        finding = verdict.definite(written(named(forth, [7] * length), named(forth[::-1], [7] * length)))
        assert finding.code == "mismatch" and finding.rank == 1
    assert "#8 and #11 are grads[11], then grads[8] on rank 1" in finding.sentence


def test_a_swap_around_another_call_is_found():
    other = call("all_reduce", (9,), line=9)
    a, b = named("ab")
    assert verdict.definite(written([a, other, b], [b, other, a], [a, other, b])).rank == 1


def test_a_swap_without_names_is_found_by_the_lines_of_a_minority():
    x, y = call("all_reduce", line=3), call("all_reduce", line=9)
    assert verdict.definite(written([x, y], [x, y], [y, x])).rank == 2


def test_a_swap_repeated_in_a_training_loop_is_found():
    a, b = named("ab", (3, 4))
    c, d = named("ba", (6, 7))
    assert verdict.definite(written([a, b] * 3, [c, d] * 3)).rank == 1


def test_a_swap_among_async_calls_is_found_before_they_are_done():
    a, b = named("ab", state="issued")
    assert verdict.definite(written([a, b], [a, b], [b, a])).rank == 2


def test_taking_turns_is_no_swap():
    mine, zeros = call("all_reduce", line=5, tensor="x"), call("all_reduce", line=7, tensor="zeros")
    for world_size in (2, 3, 4):
        agree(*([mine if turn == rank else zeros for turn in range(world_size)] for rank in range(world_size)))
    one_line = [dict(mine, line=5, path=5), dict(zeros, line=5, path=5)]
    agree(one_line, one_line[::-1])
    unnamed = [dict(mine, tensor=""), dict(zeros, tensor="")]
    agree(unnamed, unnamed[::-1])


def test_turns_with_roots_are_no_swap():
    def turns(rank):
        mine, got = (3, "mine"), (5, "got")
        return [
            call("broadcast", root=root, line=line, tensor=name)
            for root in (0, 1)
            for line, name in [mine if root == rank else got]
        ]

    agree(turns(0), turns(1))


def test_branches_with_lines_and_names_of_their_own_are_no_swap():
    agree(named("ab", (3, 4)), named("cd", (6, 7)), named("ab", (3, 4)))
    agree(named("ab", (3, 4)), named("aa", (6, 7)))
    agree(named("ab", (3, 4)), named("ab", (4, 3)))


def test_barriers_have_no_order():
    x, y = call("barrier", line=3), call("barrier", line=9)
    agree([x, y], [x, y], [y, x])


def test_legal_differences_of_shape_are_left_alone():
    agree([call("all_to_all", (6,))], [call("all_to_all", (2,))])
    agree([call("reduce_scatter", (6,), uneven=True)], [call("reduce_scatter", (5,), uneven=True)])
    agree([call("barrier")], [call("barrier", line=8)])


def test_ranks_in_different_groups_never_differ():
    a, b = call("all_reduce", (3,), group=(0, 1)), call("all_gather", (5,), dtype="int64", group=(2, 3))
    agree([a], [a], [b], [b])


def test_a_refused_call_takes_no_number():
    refused = call("all_reduce", (1,), state="refused")
    agree([refused, call("all_reduce")], [call("all_reduce")])


def test_a_message_of_another_size_or_dtype_is_told():
    finding = verdict.definite(written([send(1, (4,), line=3)], [recv(0, (3,), line=6)]))
    assert finding.code == "mismatch" and finding.rank == 1 and finding.place == "train.py:6"
    assert "rank 0 sends shape (4,) float32 (train.py, line 3), rank 1 receives shape (3,) float32" in finding.sentence
    assert verdict.definite(written([send(1)], [recv(0, dtype="int32")])).rank == 1
    agree([send(1, (4,))], [recv(0, (2, 2))])


def test_messages_match_by_peer_tag_and_order():
    agree(
        [send(1, (4,)), send(1, (5,), tag=7), send(2, (6,)), recv(1, (7,))],
        [recv(0, (5,), tag=7), recv(0, (4,)), send(0, (7,))],
        [recv(0, (6,))],
    )


def test_a_recv_from_any_source_takes_what_comes():
    any_source = recv(None, (4,), any_source=True, state="waiting")
    ledgers = written([any_source], [send(0)], [])
    assert verdict.at_end(ledgers) is None and verdict.stuck(ledgers, ("running",) * 3) is None


@pytest.mark.parametrize(
    "calls, rank, words",
    [
        (([send(1, line=3)], []), 0, "rank 0 issued send #0 to rank 1 (train.py, line 3); rank 1 never received it"),
        (([], [recv(0, line=6)]), 1, "rank 1 issued recv #0 from rank 0 (train.py, line 6); rank 0 never sent it"),
        (([send(1), send(1, line=4)], [recv(0)]), 0, "send #1 to rank 1 (train.py, line 4)"),
        (([send(1, tag=2)], [recv(0, tag=3)]), 0, "send #0 to rank 1 with tag 2"),
        (([], [recv(None, any_source=True)]), 1, "recv #0 from any rank"),
    ],
)
def test_a_message_without_its_other_half_is_told_at_the_end(calls, rank, words):
    finding = verdict.at_end(written(*calls))
    assert finding.code == "unmatched" and finding.rank == rank and words in finding.sentence
    assert verdict.definite(written(*calls)) is None


def test_a_skipped_collective_is_told_at_the_end_even_when_never_waited_for():
    issued = [call("barrier"), call("all_reduce", line=3, state="issued")]
    finding = verdict.at_end(written(issued, issued[:1], issued))
    assert finding.code == "returned_early" and finding.rank == 1
    assert "rank 1 returned; ranks 0, 2 have issued all_reduce #1 (train.py, line 3)" in finding.sentence


def test_a_rank_that_returned_early_is_told_while_the_others_wait():
    done = [call("all_reduce")] * 4
    waits = [*done, call("all_reduce", line=3, state="waiting")]
    finding = verdict.stuck(written(waits, waits, done, waits), ("running", "running", "returned", "running"))
    assert finding.code == "returned_early" and finding.rank == 2
    assert finding.sentence == (
        "rank 2 returned; ranks 0, 1, 3 wait in all_reduce #4 (train.py, line 3); every rank must call it"
    )


def test_neighbours_with_a_broken_connection_still_show_who_returned():
    failed = [call("all_reduce", line=3, state="failed")]
    finding = verdict.stuck(written(failed, [], failed), ("raised", "returned", "raised"))
    assert finding.code == "returned_early" and finding.rank == 1
    sent = [send(1, line=3, state="refused")]
    finding = verdict.stuck(written(sent, []), ("raised", "returned"))
    assert finding.rank == 1 and "rank 1 never posted the recv" in finding.sentence


def test_a_rank_that_returned_and_is_no_member_is_no_stall():
    waits = call("all_reduce", group=(0, 1), state="waiting")
    assert verdict.stuck(written([waits], [], []), ("running", "running", "returned")) is None


def test_a_recv_from_a_rank_that_returned_is_told():
    waits = recv(1, line=3, state="waiting")
    finding = verdict.stuck(written([waits], []), ("running", "returned"))
    assert finding.code == "returned_early" and finding.rank == 1
    assert finding.sentence == (
        "rank 1 returned; rank 0 waits in recv #0 from rank 1 (train.py, line 3); rank 1 never sent it"
    )


def test_both_send_first_is_a_deadlock():
    finding = verdict.stuck(
        written([send(1, line=3, state="waiting")], [send(0, line=5, state="waiting")]), ("running", "running")
    )
    assert finding.code == "deadlock" and finding.rank is None and finding.place == "train.py:3"
    assert finding.sentence == (
        "ranks 0 and 1 both send first (train.py, line 3; train.py, line 5): a send returns only once its peer has "
        "posted the recv; let one of them receive first"
    )


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_ring_of_sends_is_a_deadlock(world_size):
    ring = written(*([send((rank + 1) % world_size, state="waiting")] for rank in range(world_size)))
    finding = verdict.stuck(ring, RUNNING[:world_size])
    assert finding.code == "deadlock" and "all send first" in finding.sentence


def test_both_receive_first_is_a_deadlock():
    finding = verdict.stuck(written([recv(1, state="waiting")], [recv(0, state="waiting")]), ("running", "running"))
    assert "ranks 0 and 1 both receive first" in finding.sentence


def test_swapped_collectives_of_two_groups_are_a_deadlock():
    a, b = (0, 1, 2), (0, 1, 3)
    ledgers = written(
        [call("all_reduce", group=a, line=3, state="waiting")],
        [call("all_reduce", group=b, line=6, state="waiting")],
        [call("all_reduce", group=a, line=3, state="waiting")],
        [call("all_reduce", group=b, line=6, state="waiting")],
    )
    finding = verdict.stuck(ledgers, RUNNING)
    assert finding.code == "deadlock"
    assert finding.sentence == (
        "deadlock: rank 0 waits in all_reduce #0 of ranks 0, 1, 2 (train.py, line 3) for rank 1; "
        "rank 1 waits in all_reduce #0 of ranks 0, 1, 3 (train.py, line 6) for rank 0"
    )


def test_a_recv_against_a_collective_is_a_deadlock():
    ledgers = written([recv(1, state="waiting")], [call("all_reduce", state="waiting")])
    finding = verdict.stuck(ledgers, ("running", "running"))
    assert finding.code == "deadlock" and "rank 1 waits in all_reduce #0" in finding.sentence


def test_tags_that_do_not_meet_are_a_mismatch():
    ledgers = written([send(1, tag=1, state="waiting")], [recv(0, tag=2, state="waiting")])
    finding = verdict.stuck(ledgers, ("running", "running"))
    assert finding.code == "mismatch" and "tag 1" in finding.sentence and "tag 2" in finding.sentence


def test_a_rank_that_computes_is_never_stuck():
    for computing in ([], [call("all_reduce", group=(1,), state="issued")]):
        assert verdict.stuck(written([recv(1, state="waiting")], computing), ("running", "running")) is None
    chain = written([send(1, state="waiting")], [send(2, state="waiting")], [])
    assert verdict.stuck(chain, ("running",) * 3) is None


def test_a_message_on_its_way_holds_nobody_up():
    ledgers = written([send(1, state="waiting")], [recv(0, state="waiting")])
    assert verdict.stuck(ledgers, ("running", "running")) is None
    both = [send(1, state="issued"), recv(1, state="waiting")], [recv(0, state="issued"), send(0, state="waiting")]
    assert verdict.stuck(written(*both), ("running", "running")) is None


def test_a_rank_that_waits_on_a_cycle_from_outside_does_not_hide_it():
    ledgers = written([recv(1, state="waiting")], [send(2, state="waiting")], [send(1, state="waiting")])
    assert "ranks 1 and 2 both send first" in verdict.stuck(ledgers, ("running",) * 3).sentence


def test_any_source_waits_only_when_every_sender_is_stuck():
    any_source = recv(None, any_source=True, state="waiting")
    stuck = written([any_source], [recv(0, state="waiting")], [recv(0, state="waiting")])
    assert verdict.stuck(stuck, ("running",) * 3).code == "deadlock"
    assert verdict.stuck(written([any_source], [recv(0, state="waiting")], []), ("running",) * 3) is None
    assert verdict.stuck(written([any_source], []), ("running", "returned")).code == "returned_early"


def test_whereabouts_name_the_call_and_the_line():
    waits = [call("all_reduce"), call("all_reduce", line=3, state="waiting")]
    died = [call("all_reduce", line=8, state="issued")]
    seen = verdict.whereabouts(written(waits, died, waits[:1], [call("all_reduce", state="failed")]),
                               ("running", "died", "returned", "raised"))  # fmt: skip
    assert [str(w) for w in seen] == [
        "rank 0: waiting in all_reduce #1 (train.py, line 3)",
        "rank 1: died in all_reduce #0 (train.py, line 8)",
        "rank 2: returned",
        "rank 3: raised in all_reduce #0 (train.py, line 1)",
    ]
