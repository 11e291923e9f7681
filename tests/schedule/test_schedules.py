"""Every schedule is valid, idles as theory says, and keeps as much in flight as its paper says."""

import itertools

import pytest

from labkit.schedule import classic, dual, theory, zero_bubble
from labkit.schedule.actions import Action, in_flight
from labkit.schedule.timing import play
from labkit.schedule.validate import validate
from tests.schedule.made import GRID, SIZES, expected_idle_share, made


@pytest.mark.parametrize("name, p, m", GRID)
def test_every_schedule_is_valid_and_idles_as_in_theory(name, p, m):
    schedule = made(name, p, m)
    assert validate(schedule) is None
    assert play(schedule).idle_share == pytest.approx(expected_idle_share(name, p, m), abs=1e-12)


@pytest.mark.parametrize("p", [2, 3, 5, 6, 8])
def test_zero_bubble_idles_as_in_theory_from_p_microbatches_up_and_longer_below(p):
    for m in range(1, 2 * p + 1):
        for make, v in ((zero_bubble.zb_h1, 1), (zero_bubble.zb_v, 2)):
            share, due = play(make(p, m)).idle_share, theory.zero_bubble_idle_share(p, m, v)
            if m >= p:
                assert share == pytest.approx(due, abs=1e-12), (make, m)
            else:
                assert share > due + 0.01, (make, m)


@pytest.mark.parametrize("p, m", [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 3, 5, 12)])
def test_1f1b_keeps_exactly_min_m_and_p_less_rank_in_flight(p, m):
    schedule = classic.one_f_one_b(p, m)
    assert [max(counts) for counts in in_flight(schedule)] == [min(m, p - rank) for rank in range(p)]
    assert [max(count for _, count in play(schedule).in_flight(rank)) for rank in range(p)] == [
        min(m, p - rank) for rank in range(p)
    ]
    assert validate(schedule, [min(m, p - rank) for rank in range(p)]) is None


@pytest.mark.parametrize("p, m", SIZES)
def test_others_keep_what_their_papers_say_in_flight(p, m):
    most = {name: [max(counts) for counts in in_flight(made(name, p, m))] for name, *sizes in GRID if sizes == [p, m]}
    assert most["gpipe"] == [m] * p
    assert max(most["zb_h1"]) == min(m, p) == max(most["1f1b"])
    assert max(most["zb_v"]) <= 2 * p
    warm_up = [min(2 * m, (p - rank - 1) * 2 + p) for rank in range(p)]
    assert most["interleaved"] == [min(2 * m, count + 1) for count in warm_up]
    if "dual_pipe" in most:
        assert most["dual_pipe"] == [p + 1] * p  # DeepSeek-V3, table 2


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("p, m", [(2, 2), (2, 8), (3, 6), (4, 8)])
def test_more_chunks_a_rank_cut_the_bubble_in_as_many(p, m, chunks):
    found = play(classic.interleaved(p, m, chunks))
    assert validate(found.schedule) is None
    assert found.idle_share == pytest.approx(theory.idle_share(p, m, chunks), abs=1e-12)
    ideal = 3 * m * chunks
    assert found.idle_s(0) / ideal == pytest.approx(theory.overhead(p, m, chunks))


def test_interleaved_on_one_chunk_is_1f1b():
    assert classic.interleaved(4, 8, 1).actions == classic.one_f_one_b(4, 8).actions


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (3, 7)])
def test_idle_seconds_are_those_of_the_papers_also_with_unequal_f_i_and_w(p, m):
    for f, i, w in itertools.product((3, 4, 6), (3, 4, 6), (2, 3, 5)):
        split = play(zero_bubble.zb_h1(p, m), f, i, w)
        idle = {split.idle_s(rank) for rank in range(p)}
        if w <= f and w <= i:
            assert idle == {theory.zb_h1_idle_s(p, f, i, w)}
        else:  # a W is longer than the gap that it fills
            assert min(idle) >= theory.zb_h1_idle_s(p, f, i, w)
        for make in (classic.gpipe, classic.one_f_one_b):
            whole = play(make(p, m), f, i, w)
            assert {whole.idle_s(rank) for rank in range(p)} == {theory.one_f_one_b_idle_s(p, f, i, w)}


@pytest.mark.parametrize("p, m", [(4, 8), (8, 16), (8, 20)])
def test_dual_pipe_v_is_dual_pipe_on_twice_the_ranks_folded(p, m):
    whole, folded = dual.dual_pipe(p, m), dual.dual_pipe_v(p // 2, m // 2)
    for rank in range(p // 2):
        unfolded = [
            Action(a.kind, a.stage, a.microbatch + (m // 2 if a.stage >= p // 2 else 0)) for a in folded.actions[rank]
        ]
        assert [(a.kind, a.microbatch) for a in whole.actions[rank]] == [(a.kind, a.microbatch) for a in unfolded]
    assert play(whole).idle_s(0) == play(folded).idle_s(0)


def test_the_published_formulas_of_dual_pipe_are_those_of_the_table():
    assert theory.dual_pipe_idle_s(8, 1, 1, 1) == 3 * (3 + 2 - 3)  # F&B = 3, B = 2, W = 1
    assert theory.dual_pipe_v_idle_s(4, 1, 1, 1) / (theory.dual_pipe_v_idle_s(4, 1, 1, 1) + 48) == 6 / 54
    assert theory.dual_pipe_idle_s(8, 1, 1, 1, overlapped=2) == 3


def test_both_shares_say_the_same():
    for p, m, v in itertools.product((2, 4, 8), (4, 8), (1, 2)):
        over = theory.overhead(p, m, v)
        assert theory.idle_share(p, m, v) == pytest.approx(over / (1 + over))
    assert theory.zb_h2_idle_s(4, 2, 2, 2) == 0 < theory.zb_h1_idle_s(4, 2, 2, 2)


@pytest.mark.parametrize(
    "make, sizes, words",
    [
        (classic.gpipe, (0, 4), "ranks is 0"),
        (classic.one_f_one_b, (2, 0), "microbatches is 0"),
        (classic.interleaved, (4, 6), "6 is no multiple of 4 ranks"),
        (classic.interleaved, (4, 8, 0), "chunks is 0"),
        (zero_bubble.zb_h1, (2.0, 4), "ranks is 2.0"),
        (zero_bubble.zb_v, (2, True), "microbatches is True"),
        (dual.dual_pipe, (3, 8), "not 3 ranks and 8 microbatches"),
        (dual.dual_pipe, (4, 6), "not 4 ranks and 6 microbatches"),
        (dual.dual_pipe_v, (4, 6), "at least 8 microbatches on 4 ranks, not 6"),
    ],
)
def test_sizes_that_a_schedule_has_not_are_refused(make, sizes, words):
    with pytest.raises(ValueError, match=words):
        make(*sizes)


@pytest.mark.parametrize("p", [1, 3, 5])
def test_odd_sizes_are_valid_too(p):
    for m in range(1, 2 * p + 3):
        for make in (classic.gpipe, classic.one_f_one_b, zero_bubble.zb_h1, zero_bubble.zb_v):
            schedule = make(p, m)
            assert validate(schedule, max(m, 2 * p)) is None, (schedule.name, p, m)
