"""Programs whose code is known: their splits, states and moments by hand, and the layouts that they have not."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.cost import activations, eager, memory, moments, overheads, programs, shapes, tuning
from labkit.cost.estimate import as_json, assumptions, estimate
from labkit.cost.layout import PROGRAMS, Layout
from labkit.cost.moments import Moment, fullest
from labkit.cost.named import named
from labkit.cost.shapes import Shape
from labkit.model import fake

LLAMA = named("llama-3.1-8b")
P = shapes.parameters(LLAMA)
FITS = {
    "nanotron": Layout(dp=2, tp=2, pp=4, zero=1, microbatches=8, program="nanotron"),
    "torchtitan": Layout(dp=8, tp=2, pp=2, zero=3, microbatches=2, recompute="selective", program="torchtitan"),
    "torchtune": Layout(dp=4, zero=3, recompute="full", program="torchtune"),
    "fsdp_lora": Layout(dp=2, zero=3, recompute="full", program="fsdp_lora"),
    "fsdp_qlora": Layout(dp=2, zero=3, recompute="full", program="fsdp_qlora"),
}


def test_every_program_has_a_source_and_a_layout_here():
    assert set(FITS) == set(programs.SOURCES) == set(PROGRAMS) - {"common"}


@pytest.mark.parametrize("name", FITS)
def test_an_estimate_under_a_program_adds_up_and_names_its_source(name):
    result = estimate(LLAMA, FITS[name], "H100")
    found = as_json(result)
    parts = {key: size for key, size in found["memory_bytes"].items() if key != "total"}
    assert found["memory_bytes"]["total"] == sum(parts.values()) and min(parts.values()) >= 0
    assert found["overhead_bytes"]["in_flight"] == 0
    assert programs.SOURCES[name] in assumptions(result)[0]
    stages = [programs.held(LLAMA, FITS[name], stage).total for stage in range(FITS[name].pp)]
    assert result.memory.total == max(stages)


@pytest.mark.parametrize(
    "name, change, want",
    [
        ("nanotron", {"zero": 3}, "nanotron has no zero 3; zero 0 or 1 would do"),
        ("nanotron", {"recompute": "full"}, "nanotron has no recompute full; recompute none would do"),
        ("torchtitan", {"zero": 2}, "torchtitan has no zero 2; zero 3 would do"),
        ("torchtitan", {"precision": "fp16"}, "precision bf16 would do"),
        ("torchtune", {"dp": 2, "tp": 2}, "torchtune has no tp 2; tp 1 would do"),
        ("torchtune", {"recompute": "selective"}, "recompute none or full would do"),
        ("nanotron", {"flash": False}, "nanotron has no flash False; flash True would do"),
        ("nanotron", {"cp": 2}, "cp 1 would do"),
        ("torchtitan", {"zeropp": "all", "per_node": 4}, "zeropp none would do"),
        ("torchtune", {"zero": 1}, "torchtune has no zero 1; zero 3 would do"),
        ("fsdp_qlora", {"recompute": "none"}, "recompute full would do"),
    ],
)
def test_a_layout_that_a_program_has_not_is_one_line_with_what_it_has(name, change, want):
    with pytest.raises(ValueError, match=want) as error:
        estimate(LLAMA, replace(FITS[name], **change))
    assert "\n" not in str(error.value)


def test_an_unknown_program_is_told_which_there_are():
    with pytest.raises(ValueError, match="program must be one of common, nanotron, torchtitan"):
        Layout(program="megatron")
    with pytest.raises(ValueError, match="no program is called"):
        tuning.program("other")


def test_nanotron_goes_to_the_next_stage_once_a_stage_has_more_than_its_share():
    """The head costs as much as 4 layers here: halves are 10 layers, reached, not passed, by the tenth."""
    small = Shape("1B", 16, 2048, 32, 32, 64, 8192, 131072, tied=True)
    assert programs.nanotron_split(small, 2) == (11, 5)
    assert programs.nanotron_split(small, 4) == (6, 5, 5, 0)
    for pp in (1, 3, 5, 8):
        assert sum(programs.nanotron_split(LLAMA, pp)) == 32


def test_torchtitan_puts_what_is_over_between_first_and_last():
    assert programs.torchtitan_split(126, 8) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert programs.torchtitan_split(32, 1) == (32,) and programs.torchtitan_split(10, 4) == (2, 3, 3, 2)
    assert all(sum(programs.torchtitan_split(n, pp)) == n for n in (80, 126, 33) for pp in (1, 2, 7, 16))


@pytest.mark.parametrize("dp, zero, each", [(1, 0, 18), (4, 0, 20), (4, 1, 8 + 12 / 4)])
def test_nanotron_keeps_18_bytes_a_parameter_two_more_for_ddp_and_divides_12(dp, zero, each):
    found = programs.held(LLAMA, Layout(dp=dp, zero=zero, program="nanotron"))
    assert found.parameters + found.gradients + found.optimizer + found.bucket == pytest.approx(each * P)


def test_nanotron_holds_16_bit_gradients_once_activations_are_gone():
    found = programs.held(LLAMA, Layout(seq=64, program="nanotron"))
    assert found.gradients == 6 * P and found.activations == 0


def test_torchtitan_divides_16_bytes_and_keeps_the_root_and_two_layers_whole():
    found = programs.held(LLAMA, Layout(dp=8, zero=3, recompute="full", program="torchtitan"))
    root = 2 * LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    assert found.parameters + found.gradients + found.optimizer == pytest.approx(16 * P / 8, abs=16)
    assert found.gathered == 2 * root + 2 * 2 * shapes.layer_parameters(LLAMA)
    assert found.logits == 12 * 4096 * LLAMA.vocab + 2 * 4096 * LLAMA.hidden
    assert found.layers == 32 * 2 * 4096 * LLAMA.hidden


def test_with_a_pipeline_torchtitan_keeps_all_of_a_stage_whole():
    layout = Layout(dp=8, pp=4, zero=3, microbatches=4, recompute="full", program="torchtitan")
    found = programs.held(LLAMA, layout, 1)
    count = shapes.stage_parameters(LLAMA, 1, 4, 1)
    assert found.gathered == 2 * count and found.gradients == 4 * count + 4 * -(-count // 8)


def test_torchtunes_ladder_goes_down():
    layout = Layout(micro_batch=2, program="torchtune")
    full = replace(layout, recompute="full")
    small = named("llama-3.2-3b")
    steps = [
        tuning.torchtune(small, replace(layout, activations="eager"), chunked=False),
        tuning.torchtune(small, layout, chunked=False),
        tuning.torchtune(small, layout),
        tuning.torchtune(small, full),
    ]
    sizes = [each.total for each in steps]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    short = replace(full, micro_batch=1, seq=128)
    end, gone = (tuning.torchtune(small, short, in_backward=on) for on in (False, True))
    assert end.total == 8 * shapes.parameters(small) and gone.gradients == 0


GROWING = [(seq, batch) for seq in (512, 2048, 4096, 16384) for batch in (1, 2, 4, 16)]


def walked(shape, count, made_bytes, one, rest, working):
    """At the most in a layer's backward: gradients of what stands above it are there, inputs of all below."""
    layer, ends = shapes.layer_parameters(shape), shape.vocab * shape.hidden
    above = [count - (0 if shape.tied else ends) - layer * (number + 1) for number in range(shape.layers)]
    return max(made_bytes * there + rest + one * (number + 1) + working for number, there in enumerate(above))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-3b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_torchtunes_peak_is_at_least_what_any_layers_backward_holds(name, recompute):
    """And it grows with the batch, once what a batch takes is more than the gradients that come last."""
    shape, found = named(name), {}
    for seq, batch in GROWING:
        layout = Layout(micro_batch=batch, seq=seq, recompute=recompute, program="torchtune")
        again = memory.total(activations.layer_saved(shape, layout)) if recompute == "full" else 0
        working = again + moments.layer_gradients(shape, layout)
        count = shapes.parameters(shape)
        due = walked(shape, count, 2, moments.layer_kept(shape, layout), 6 * count, working)
        found[seq, batch] = tuning.torchtune(shape, layout).total
        assert found[seq, batch] >= due - 1
    for seq in (4096, 16384):
        assert found[seq, 2] < found[seq, 4] < found[seq, 16]
    if recompute == "full":
        assert found[4096, 2] > 8 * shapes.parameters(shape)


@pytest.mark.parametrize(
    "shape", [LLAMA, named("llama-3.2-3b"), replace(LLAMA, layers=2, vocab=128)], ids=["8b", "3b", "two layers"]
)
@pytest.mark.parametrize("dp", [1, 4])
def test_nanotrons_peak_is_at_least_what_any_layers_backward_holds(shape, dp):
    for seq, batch in GROWING:
        layout = Layout(dp=dp, micro_batch=batch, seq=seq, program="nanotron")
        one = memory.total(activations.layer_saved(shape, layout))
        count = shapes.parameters(shape)
        states = (18 + (2 if dp > 1 else 0)) * count
        due = walked(shape, count, 2, one, states, moments.layer_gradients(shape, layout))
        assert programs.nanotron(shape, layout).total >= due - 1


@pytest.mark.parametrize("stage", range(4))
def test_before_its_first_layer_a_stage_has_all_other_gradients(stage):
    count = shapes.stage_parameters(LLAMA, 2, 4, stage)
    head = LLAMA.vocab // 2 * LLAMA.hidden + LLAMA.hidden if stage == 3 else 0
    layers = 7 * shapes.rank_layer_parameters(LLAMA, 2)
    assert moments.made_before(LLAMA, count, 0, stage == 0, stage == 3, 2) == layers + head
    tied = replace(LLAMA, tied=True)
    whole = shapes.parameters(tied)
    ends = shapes.stage_parameters(tied, 2, 4, 0)
    assert moments.made_before(tied, ends, 0, True, False, 2) == layers
    assert moments.made_before(tied, whole, 0) == whole - shapes.layer_parameters(LLAMA)


def test_offload_takes_torchtunes_states_to_the_host():
    found = programs.held(LLAMA, replace(FITS["torchtune"], offload="parameters"))
    assert found.parameters + found.gradients + found.optimizer == 0 and found.host == 8 * -(-P // 4)


def test_four_bits_save_three_quarters_of_the_layers_weights_but_for_their_scales():
    lora, qlora = (programs.held(LLAMA, FITS[name]).parameters for name in ("fsdp_lora", "fsdp_qlora"))
    matrices = 32 * shapes.layer_parameters(LLAMA)
    assert lora - qlora == pytest.approx(1.5 * matrices / 2 - matrices / 64, abs=2)


def test_adapters_send_their_own_gradients_and_gather_four_bits():
    lora, qlora = (estimate(LLAMA, FITS[name]).communication["dp"] for name in ("fsdp_lora", "fsdp_qlora"))
    adapters = 2 * tuning.adapter_parameters(LLAMA)
    assert lora["reduce_scatter"] == qlora["reduce_scatter"] == adapters / 2
    assert lora["all_gather"] - qlora["all_gather"] == 1.5 * 32 * shapes.layer_parameters(LLAMA)
    h, kv, f = LLAMA.hidden, LLAMA.kv_width, LLAMA.ffn
    assert adapters == 2 * 64 * 32 * (2 * 2 * h + 2 * (h + kv) + 3 * (h + f))
    assert tuning.adapter_traffic(LLAMA, replace(FITS["fsdp_lora"], dp=1)) == {}


ODD = {
    "gpt2": "biases, learned positions, an MLP",
    "mixtral-8x7b": "experts",
    "qwen3-8b": "norms of queries and keys",
    "qwen2.5-7b": "biases",
    "out_bias": "biases",
    "mlp_biases": "biases",
    "head_dim": "heads that are not hidden / heads wide",
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("program", [*FITS, "eager", "fake"])
def test_what_is_known_for_plain_llamas_is_refused_for_all_others(name, program):
    changed = {"out_bias": True, "mlp_biases": True, "head_dim": 64}
    shape = replace(LLAMA, name=name, **{name: changed[name]}) if name in changed else named(name)
    with pytest.raises(ValueError, match=f"{name}.* has {ODD[name]}") as error:
        if program == "eager":
            eager.backward_peak(shape, Layout(seq=512, precision="fp32", activations="eager"))
        elif program == "fake":
            fake.llama_shape(shape)
        else:
            programs.held(shape, replace(FITS[program], dp=1, tp=1, pp=1, microbatches=1, seq=512))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fsdp_lora", "fsdp_qlora"])
def test_a_tied_head_is_held_gathered_and_sent_once(name):
    tied = replace(LLAMA, tied=True)
    one, other = (programs.held(shape, FITS[name]) for shape in (LLAMA, tied))
    ends = 2 * LLAMA.vocab * LLAMA.hidden
    assert one.parameters - other.parameters == ends / 2 and one.gathered - other.gathered == ends
    moved = [tuning.adapter_traffic(shape, FITS[name])["dp"]["all_gather"] for shape in (LLAMA, tied)]
    assert moved[0] - moved[1] == 2 * ends / 2


def test_the_fullest_moment_is_taken_whole():
    low, high = Moment(parameters=5, logits=1), Moment(parameters=4, working=9.6)
    found = fullest(2, low, high, host=3)
    assert (found.stage, found.parameters, found.logits, found.recomputed, found.host) == (2, 4, 0, 10, 3)


class Live(TorchDispatchMode):
    """Bytes of storages that operations made and that are still there; `peak` of them."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own dispatch comes first, and what that calls comes here
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        key = storage.data_ptr()
        if key and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        self.now -= self.sizes.pop(key, 0)


def test_torchs_cross_entropy_holds_12_bytes_a_logit_at_its_peak():
    rows, vocab = 64, 4096
    logits = torch.randn(rows, vocab, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    with Live() as live:
        torch.nn.functional.cross_entropy(logits.float(), targets).backward()
    assert live.peak == pytest.approx(moments.LOGIT_BYTES * rows * vocab, rel=0.01)


def test_loss_parallel_holds_16(fake_mesh):
    rows, vocab = 64, 8192
    local = torch.randn(rows, vocab // 2, dtype=torch.bfloat16, requires_grad=True)
    logits = DTensor.from_local(local, fake_mesh, [Shard(1)], run_check=False)
    with Live() as live, loss_parallel():
        torch.nn.functional.cross_entropy(logits.float(), torch.randint(vocab, (rows,))).backward()
    assert live.peak == pytest.approx((moments.LOGIT_BYTES + 4) * rows * vocab / 2, rel=0.01)
    layout = Layout(dp=2, tp=2, zero=3, recompute="full", program="torchtitan")
    assert programs.held(LLAMA, layout).logits == 16 * 4096 * LLAMA.vocab / 2 + 2 * 4096 * LLAMA.hidden


@pytest.fixture
def fake_mesh():
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "layout, want",
    [
        ({}, 0),
        ({"dp": 8}, 1),
        ({"dp": 2, "tp": 4}, 3),
        ({"dp": 2, "tp": 2, "pp": 2}, 4),
        ({"cp": 2, "dp": 2}, 3),
    ],
)
def test_every_axis_has_a_communicator_and_several_have_one_more(layout, want):
    found = Layout(**layout)
    assert overheads.communicators(found) == want
    held = memory.memory(LLAMA, replace(found, microbatches=found.pp))
    assert overheads.overheads(LLAMA, found, held).nccl == want * 32 * (4 * 2**20 + 4915200 + 524288)


def test_what_is_in_flight_is_copies_of_the_logits_or_gradients_of_a_layer():
    tokens = 4096
    held = memory.memory(LLAMA, Layout())
    assert overheads.in_flight(LLAMA, Layout(), held) == 8 * tokens * LLAMA.vocab
    few = replace(LLAMA, vocab=128)
    held = memory.memory(few, Layout())
    wide = 2 * 4 * tokens * LLAMA.ffn
    assert overheads.in_flight(few, Layout(), held) == wide - held.logits
    eager = Layout(activations="eager")
    assert overheads.in_flight(LLAMA, eager, memory.memory(LLAMA, eager)) == 0


@pytest.mark.parametrize("tp, sequence_parallel, times", [(1, True, 0), (1, False, 0), (8, True, 2), (8, False, 1)])
def test_in_a_layers_backward_tp_has_its_input_gathered_where_it_was_divided(tp, sequence_parallel, times):
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    whole, wide = 2 * 4096 * LLAMA.hidden, 2 * 4 * 4096 * LLAMA.ffn / tp
    assert moments.layer_gradients(LLAMA, layout) == wide + times * whole
    found = programs.held(LLAMA, replace(layout, program="nanotron"))
    assert found.gathered == (whole if tp > 1 and sequence_parallel else 0)


def test_gaps_are_a_share_of_all_that_the_allocator_hands_out():
    held = memory.memory(LLAMA, Layout(dp=8))
    over = overheads.overheads(LLAMA, Layout(dp=8), held)
    assert over.gaps == round(overheads.GAPS * (held.total + over.in_flight))
    assert over.total == over.in_flight + over.gaps + over.nccl + over.context


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("axes", [{"dp": 8}, {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2}])
def test_what_torchtitan_does_not_keep_is_computed_again(recompute, axes):
    """Per layer: queries, values, gate and the last matrix are kept, and attention; the others are repeated."""
    found = estimate(LLAMA, Layout(zero=3, recompute=recompute, program="torchtitan", **axes))
    h, kv, f = LLAMA.hidden, LLAMA.kv_width, LLAMA.ffn
    scores = 2 * 4097 * h // 2 * 2  # 4 s a d for each token, about half of it masked
    again = {"none": 0, "selective": 2 * h * (kv + h + f), "full": 2 * h * (2 * h + 2 * kv + 3 * f) + scores}
    assert found.hardware_flops - found.model_flops == found.layout.tokens * 32 * again[recompute]
    assert any("every second product" in each for each in assumptions(found)) == (recompute == "selective")
    kept = [programs.held(LLAMA, replace(found.layout, recompute=how)).layers for how in ("none", recompute)]
    assert (kept[1] < kept[0]) == (found.hardware_flops > found.model_flops)


def test_selective_recomputation_of_torchtitan_keeps_the_input_and_five_outputs():
    layout = Layout(recompute="selective", zero=3, program="torchtitan")
    at = activations.sizes(LLAMA, layout)
    assert (
        moments.layer_kept(LLAMA, layout)
        == 2 * 4096 * (4 * 4096 + 1024 + 14336)
        == 2 * (at.hidden + 2 * at.queries + at.keys + at.ffn + at.hidden)
    )
