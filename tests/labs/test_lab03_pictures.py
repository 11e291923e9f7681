"""What lab 03's pictures and tables show: steps, allocators, messages, scales, claims; each number is right."""

import pytest
import torch

from labkit.cost import hardware, shapes
from labkit.cost import memory as cost_memory
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.labs import lab03
from labkit.labs.lab03 import blocks, claims, fits, gaps, oom, pictures
from tests.problems import problem

MIB = 2**20


@pytest.fixture(scope="module")
def plain():
    return lab03.record_step(4, 128)


def test_a_recorded_step_begins_with_its_states(plain):
    count = plain.parameters
    assert plain.held.begin["parameter"] == 4 * count
    tensors = plain.held.begin["optimizer"] - 8 * count  # step counters, 4 bytes a tensor
    assert 0 < tensors < 400
    assert max(plain.held.by_kind["gradient"]) == 4 * count
    assert plain.held.begin["activation"] == 0 == plain.held.end["gradient"]


def test_the_formula_beside_the_record_is_within_a_percent(plain):
    shape = shapes.Shape("small", 4, 128, 4, 2, 32, 344, 256)
    whole = cost_memory.memory(shape, Layout(seq=128, micro_batch=4, precision="fp32", activations="eager"))
    for part in ("parameters", "gradients", "optimizer", "activations"):
        assert plain.parts[part] == pytest.approx(getattr(whole, part), rel=0.01), part


def test_checkpoints_lower_the_peak_and_cost_flops(plain):
    again, last = lab03.record_step(4, 128, checkpoint="all"), lab03.record_step(4, 128, checkpoint="last")
    head = 2 * 4 * 128 * 128 * 256
    forward = plain.flops / 3 - head
    assert forward * 0.7 < again.flops - plain.flops < forward  # torch stops early: the last matrix is not repeated
    assert (last.flops - plain.flops) * 4 == again.flops - plain.flops
    assert again.held.peak_bytes < 0.65 * plain.held.peak_bytes < 0.65 * last.held.peak_bytes * 1.03


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0, "length": 8}, "batch is a whole number"),
        ({"batch": 1, "length": 8, "optimizer": "adam9"}, "optimizer is one of sgd, momentum, adamw"),
        ({"batch": 1, "length": 8, "checkpoint": "some"}, "checkpoint is one of none, all, last"),
    ],
)
def test_what_cannot_be_recorded_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        lab03.record_step(**given)


def test_the_experiment_prints_bytes_by_kind(capsys):
    lab03.step(1, 16, "sgd")
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("parameter"))
    assert len(set(row.split()[1:])) == 1 and "after forward" in out


def test_steps_are_timed_by_turns():
    times = lab03.time_steps(("none", "all"), steps=1, batch=1, length=16)
    assert len(times) == 2 and min(times) > 0


def test_a_mean_over_tokens_makes_gradients_of_logits_small():
    values = pictures.logit_gradient(1000, 64, rows=3)
    assert values.shape == (3000,)
    # softmax minus one at the target: in each row the magnitudes of all others sum to the target's
    assert values.view(3, -1).max(1).values * 2 == pytest.approx(values.view(3, -1).sum(1), rel=1e-4)


def test_lost_is_what_a_cast_makes_zero_or_infinite():
    values = torch.tensor([2.0**-26, 2.0**-24, 1.0, 70000.0])
    assert pictures.lost(values) == (0.25, 0.25)
    assert pictures.lost(values, 4.0) == (0.0, 0.25)
    assert pictures.lost(values, 1.0, "bfloat16") == (0.0, 0.0)


@pytest.mark.parametrize(("power", "skipped"), [(32, 14), (18, 0), (20, 2)])
def test_a_scale_that_starts_too_high_is_halved_until_an_eighth_of_it_fits(power, skipped):
    scales, found = pictures.too_high(pictures.TorchScaler, power, steps=16)
    assert found == skipped and scales[-1] == 2.0 ** (power - skipped)


def test_the_checkpoint_picture_is_recorded_and_fits_what_was_chosen():
    rows = pictures.checkpoint_picture(pictures.everything_again)
    assert [name for name, *_ in rows] == ["no checkpoints", "all layers", "yours"]
    made = pictures.LAYERS
    ways = blocks.ways(made)
    assert rows[0][1:] == (0.0, pytest.approx(ways[0].peak_bytes / 1e3, abs=0.1))
    assert rows[1][1:] == (ways[-1].flops / 1e6, pytest.approx(ways[-1].peak_bytes / 1e3, abs=0.1))
    assert rows[2][1:] == rows[1][1:]


def test_an_allocator_keeps_its_books():
    events = gaps.batches_of_changing_length()
    sizes = {}
    for expandable in (False, True):
        found = gaps.filled(events, expandable)
        alive = {}
        for (owner, size), allocated, reserved in zip(events, found.allocated, found.reserved, strict=True):
            alive[owner] = gaps.rounded(size)
            assert allocated == sum(alive.values()) <= reserved
        assert list(found.reserved) == sorted(found.reserved)  # nothing is given back
        for segment in found.segments:
            assert [b.start for b in segment] == [sum(c.size for c in segment[:at]) for at in range(len(segment))]
        held = [b for segment in found.segments for b in segment if b.owner is not None]
        assert {b.owner: b.size for b in held} == {owner: size for owner, size in alive.items() if size}
        assert found.gaps == found.reserved[-1] - found.allocated[-1] >= found.largest_gap
        sizes[expandable] = found.reserved[-1]
    assert sizes[True] < sizes[False]


def test_an_allocator_fills_the_smallest_gap_and_joins_neighbours():
    made = [(0, 4 * MIB), (1, 4 * MIB), (2, 4 * MIB), (3, 8 * MIB)]
    found = gaps.filled([*made, (0, 0), (1, 0), (4, 6 * MIB)])
    assert found.reserved[-1] == 20 * MIB  # 8 MiB of two neighbours hold 6
    assert [(b.size // MIB, b.owner) for b in found.segments[0]] == [(6, 4), (2, None), (4, 2), (8, 3)]
    apart = gaps.filled([*made, (0, 0), (2, 0), (4, 6 * MIB)])
    assert apart.reserved[-1] == 40 * MIB and apart.gaps == 22 * MIB  # 8 MiB are free, in two pieces
    with pytest.raises(ValueError, match="tensor 9 is not there"):
        gaps.filled([(9, 0)])


MESSAGE = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 39.39 GiB of which 120.00 MiB is "
    "free. Including non-PyTorch memory, this process has 39.26 GiB memory in use. Of the allocated memory {allocated} "
    "is allocated by PyTorch, and {gaps} is reserved by PyTorch but unallocated."
)


def test_a_third_in_gaps_is_fragmentation_and_25_mib_are_not():
    measured = problem("B11")["input"]["measured_GiB"]
    apart = measured["default"] - measured["expandable_segments"]
    text = MESSAGE.format(wanted="896.00 MiB", allocated=f"{measured['expandable_segments']} GiB", gaps=f"{apart} GiB")
    found = oom.read_oom(text)
    assert found.fragmented and found.share == pytest.approx(apart / measured["default"])
    assert "expandable_segments" in found.sentence
    outside = round((39.39 - 120 / 1024 - measured["default"]) * 2**30)
    assert found.outside == pytest.approx(outside, abs=2) and found.outside > oom.CROWDED * found.capacity
    assert f"{outside / 2**30:.2f} GiB outside torch" in found.sentence and "First see in nvidia-smi" in found.sentence
    real = oom.read_oom(MESSAGE.format(wanted="512.00 MiB", allocated="38.10 GiB", gaps="25.00 MiB"))
    assert not real.fragmented and "a real shortage" in real.sentence and real.gaps == 25 * MIB
    assert "1.15 GiB outside torch" in real.sentence and "nvidia-smi" not in real.sentence
    assert oom.read_oom(text.replace("capacity", "capacty")) == found
    with pytest.raises(ValueError, match="not torch's out-of-memory message: no figure for wanted"):
        oom.read_oom("CUDA error: out of memory")


def test_contexts_on_gpu_0_are_found():
    measured = problem("B09")["input"]["measured_MiB"]
    on_zero = [(0, 100 + rank, float(mib)) for rank, mib in enumerate(measured)]
    own = [(rank, 100 + rank, 25290.0) for rank in range(1, len(measured))]
    found = oom.strays([*on_zero, *own])
    assert found == tuple(on_zero[1:]) and sum(mib for *_, mib in found) == 7 * 871
    assert oom.strays(on_zero[:1] + own) == ()


def test_what_makes_a_model_fit_is_what_the_estimate_finds():
    told = fits.answers()
    for model, gpus in fits.ASKED:
        made = fits.found(model, gpus)
        assert len(made) == 3 and f"{model} on {gpus} H100" in told
        for change in made:
            assert change.result.fits
            assert f"`{change.options}`: {change.result.needed_bytes / 2**30:.1f} GiB a device" in told
    assert "fits as it is" in fits.answers((("llama-3.2-1b", 1),))


def test_claims_have_figures_from_the_cost_model():
    found = claims.claims(14)
    assert [each.verdict for each in found] == ["holds", "holds", "holds", "holds in part", "does not hold"]
    size = 16 * shapes.parameters(named("gpt3-175b"))
    assert f"{size / 1e12:.2f} TB" in found[0].figure
    assert f"{size / hardware.device('H100').memory_bytes:.0f} H100" in found[0].figure
    assert found[3].figure.startswith("states: 16 bytes a parameter, and 16 in fp32")
    assert "llama-3.2-1b" in found[1].figure and "with logits" in found[1].figure and "llama-3.2-1b" in found[2].figure
    table = claims.table(found)
    assert table.count("\n") == 6 and "**does not hold**" in table
    assert claims.claims(0)[-1].verdict == "holds"
