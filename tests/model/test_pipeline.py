"""Schedules on real ranks: gradients are the serial run's, and a recorded step idles as theory says.

By default a sample; all sizes with --soak. torch.distributed.pipelining's own schedules are held to the same figures.
"""

import functools

import pytest
import torch

from labkit.model.stages import LlamaStage, holders
from labkit.ranks.launch import launch, run_ranks
from labkit.record.held import held
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.schedule import theory
from labkit.schedule.classic import gpipe, interleaved, one_f_one_b
from labkit.schedule.timing import play
from labkit.schedule.validate import validate
from labkit.schedule.zero_bubble import zb_v
from tests.model import piped
from tests.record.played import on_link
from tests.schedule.made import GRID, expected_idle_share, made
from tests.schedule.test_faults import chance, shuffled

PRELOAD = ("labkit.model.pipeline", "labkit.model.stages", "labkit.record.trace", "torch.distributed.pipelining")
NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dual_pipe")
serial = functools.cache(piped.serial)


def on_ranks(fn, num_ranks, *arguments):
    return launch(fn, num_ranks, *arguments, prints="quiet", preload=PRELOAD, deadline_s=240)


def shuffles(p, m, soak):
    """Valid schedules whose actions were moved about."""
    found = []
    for name in NAMES:
        for seed in range(8 if soak else 1):
            schedule = shuffled(chance("run", name, p, m, seed), made(name, p, m))
            found += [schedule] if validate(schedule) is None else []
    assert len(found) >= 3
    return found


@pytest.mark.parametrize("p", [2, 4])
def test_gradients_of_every_schedule_equal_serial(p, soak):
    plain, tied, uneven = piped.shape(p), piped.shape(p, tied=True), piped.shape(p, over=1)
    names = NAMES if soak or p == 4 else NAMES[1::2]
    asked = [(made(name, p, m), tied) for name in names for m in ((2 * p, 16) if soak else (2 * p,))]
    asked += [(schedule, plain) for schedule in (shuffles(p, 2 * p, soak) if soak or p == 2 else ())]
    asked += [(one_f_one_b(p, 3), uneven), (zb_v(p, 3), uneven)]
    by_rank = on_ranks(piped.pipelined, p, *map(list, zip(*asked, strict=True)))
    for k, (schedule, shape) in enumerate(asked):
        loss, expected = serial(shape, schedule.microbatches)
        losses, gradients = zip(*(found[k] for found in by_rank), strict=True)
        assert sum(each for each in losses if each is not None) == pytest.approx(loss, abs=1e-5)
        assert set().union(*gradients) == set(expected), "every parameter is somewhere"
        for own in gradients:
            for name, gradient in own.items():
                largest = float(expected[name].abs().max())
                assert largest > 0 and torch.allclose(gradient, expected[name], rtol=0, atol=1e-5 * largest)


def test_a_rank_holds_its_stages_and_no_more():
    held = holders(piped.shape(4), one_f_one_b(4, 4))
    assert all(len(ranks) == 1 for ranks in held.values())
    assert held["embed_tokens.weight"] == (0,) and held["lm_head.weight"] == (3,)
    assert held["layers.3.mlp.up_proj.weight"] == (1,)
    tied = holders(piped.shape(4, tied=True), one_f_one_b(4, 4))
    assert tied["embed_tokens.weight"] == (0, 3) and "lm_head.weight" not in tied
    v = holders(piped.shape(4, tied=True), zb_v(4, 4))
    assert v["embed_tokens.weight"] == (0,), "both ends of a V are on one rank"
    two = holders(piped.shape(4), made("dual_pipe", 4, 8))
    assert two["layers.3.mlp.up_proj.weight"] == (1, 2) and two["lm_head.weight"] == (0, 3)
    names = [name for name, _ in LlamaStage(piped.whole(piped.shape(4, over=1)), 1, 4).named_parameters()]
    assert {name.split(".")[1] for name in names} == {"2", "3", "4"}


@pytest.mark.parametrize("p", [2, 4])
def test_what_a_rank_holds_is_of_the_microbatches_in_flight_and_of_no_others(p):
    """Activations exactly; what is sent and received on top does not grow with the microbatches."""
    sizes = (p - 1, p, 8, 16)
    by_rank = on_ranks(piped.recorded, p, [one_f_one_b(p, m) for m in sizes])
    for rank, records in enumerate(by_rank):
        found = [held(record) for record in records]
        one = piped.ROWS * piped.WIDTH * 4  # between the two layers; losses on top are 4 bytes each
        assert [max(each.by_kind["activation"]) // one for each in found] == [min(m, p - rank) for m in sizes]
        whole = [(each.peak_bytes - sum(each.begin.values())) // one for each in found]
        assert whole[2] == whole[3] <= whole[1] + 2


def sample(soak):
    if soak:
        return [each for each in GRID if each[0] in NAMES]
    return [(name, 2, 4) for name in NAMES] + [(name, 4, 8) for name in NAMES]


@pytest.mark.parametrize("p", [2, 4])
def test_a_recorded_step_idles_as_in_theory(p, soak):
    asked = [(name, ranks, m) for name, ranks, m in sample(soak) if ranks == p]
    by_rank = on_ranks(piped.recorded, p, [made(*each) for each in asked])
    for k, (name, _, m) in enumerate(asked):
        found = replay([records[k] for records in by_rank], prices(on_link(p)))
        assert found.deadlock == "" and found.findings == ()
        print(f"{name}, p {p}, m {m}: idle {found.idle_share:.4f}, theory {expected_idle_share(name, p, m):.4f}")
        assert found.idle_share == pytest.approx(expected_idle_share(name, p, m), abs=0.002)


SINGLE = ("ScheduleGPipe", "Schedule1F1B")
TORCH = {
    **{name: ("single", lambda p, m: theory.idle_share(p, m)) for name in SINGLE},
    "ScheduleInterleaved1F1B": ("looped", lambda p, m: theory.idle_share(p, m, 2)),
    "ScheduleInterleavedZeroBubble": ("looped", lambda p, m: theory.zero_bubble_idle_share(p, m, 2)),
    "ScheduleZBVZeroBubble": ("v", lambda p, m: theory.zero_bubble_idle_share(p, m, 2)),
    # Its pairs of forward and backward hand on together: DeepSeek's formula as it stands.
    "ScheduleDualPipeV": ("v", lambda p, m: share(theory.dual_pipe_v_idle_s(p, 1, 1, 1), 6 * m)),
}


def share(idle, work):
    return idle / (idle + work)


@pytest.mark.parametrize("p", [2, 4])
def test_torchs_own_schedules_idle_as_in_theory(p, soak):
    sizes = {2: (4, 8, 16), 4: (8, 16)} if soak else {2: (), 4: (8,)}
    asked = [(name, style, m) for name, (style, _) in TORCH.items() for m in sizes[p]]
    if not asked:
        pytest.skip("one sample by default")
    by_rank = on_ranks(piped.recorded_by_torch, p, asked)
    for k, (name, _, m) in enumerate(asked):
        found = replay([records[k] for records in by_rank], prices(on_link(p)))
        expected = TORCH[name][1](p, m)
        print(f"{name}, p {p}, m {m}: idle {found.idle_share:.4f}, theory {expected:.4f}")
        assert found.deadlock == "" and found.idle_share == pytest.approx(expected, abs=0.002)


def test_a_recorded_step_takes_as_long_as_the_schedule_played():
    schedule = interleaved(2, 4)
    records = on_ranks(piped.recorded, 2, [schedule])
    found = replay([each[0] for each in records], prices(on_link(2)))
    unit_s = piped.LAYERS * 2 * piped.ROWS * piped.WIDTH**2 / 5e9
    assert found.time_s == pytest.approx(play(schedule, unit_s, unit_s, unit_s).time_s, rel=0.002)


def wrong(schedule, stages, microbatches):
    from labkit.model.pipeline import run

    modules = {stage: piped.equal_stage() for stage in stages}
    pairs = [(torch.ones(1, piped.WIDTH),) * 2] * microbatches
    run(schedule, modules, pairs, piped.weighted, (1, piped.WIDTH))


@pytest.mark.parametrize(
    "schedule, stages, microbatches, words",
    [
        (gpipe(2, 2), (0,), 2, "is for 2 ranks, and the group has 1"),
        (gpipe(1, 2), (1,), 2, r"rank 0 has stages (0,), not (1,)"),
        (gpipe(1, 2), (0,), 3, "3 microbatches for a schedule of 2"),
        (gpipe(1, 2).with_actions(0, gpipe(1, 2).actions[0][:-1]), (0,), 2, "schedule GPipe: 0B1 is missing"),
    ],
)
def test_what_cannot_be_run_is_refused(schedule, stages, microbatches, words):
    outcome = run_ranks(wrong, 1, schedule, stages, microbatches, prints="quiet", preload=PRELOAD)
    assert outcome.cause.code == "raised" and words in outcome.cause.sentence
