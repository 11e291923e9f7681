"""Lab 03's counting: states, saved tensors, layers and checkpoints, against torch, the cost model, and live runs."""

import functools
import itertools
import random

import pytest
import torch

from labkit import Trace
from labkit.cost import memory
from labkit.cost import states as cost_states
from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape
from labkit.labs.lab03 import (
    activations_told,
    blocks,
    checkpoints,
    checkpoints_cases,
    own_work,
    pictures,
    saved,
    scaler_cases,
    scaler_told,
    states,
)
from labkit.labs.lab03.blocks import Block
from tests.problems import problem

LLAMA = Shape("small", 2, 64, 4, 2, 16, 172, 97)


@pytest.mark.parametrize("precision", states.PRECISIONS)
def test_states_under_adam_are_zeros_convention(precision):
    each = cost_states.per_parameter("zero", precision)
    assert states.due((7, precision, "adamw")) == (7 * each.parameter, 7 * each.gradient, 7 * each.optimizer)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", lambda p: torch.optim.Adam(p)),
        ("adamw", lambda p: torch.optim.AdamW(p)),
    ],
)
def test_states_in_fp32_are_what_torchs_optimizers_keep(name, make):
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = make([weight])
    weight.sum().backward()
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    assert states.due((1000, "fp32", name)) == (weight.nbytes, weight.grad.nbytes, sum(t.nbytes for t in kept))


def test_every_known_mistake_about_states_differs_from_what_is_due_and_from_the_others():
    questions = [(1000, precision, optimizer) for precision in states.PRECISIONS for optimizer in states.OPTIMIZERS]
    answers = [tuple(tuple(map(float, made(*q))) for q in questions) for _, made, _ in states._mistakes()]
    right = tuple(tuple(map(float, states.due(q))) for q in questions)
    assert right not in answers and len(set(answers)) == len(answers)


def test_deepspeeds_documented_formula_is_not_its_code():
    given = problem("B05")["input"]
    documented = cost_states.deepspeed_zero2_before(given["P"], given["gpus"]) / 2**30
    in_code = cost_states.deepspeed_zero2(given["P"], given["gpus"], offload=False)[1] / 2**30
    assert (round(documented, 2), round(in_code, 2)) == (15.93, 11.28)
    totals = [cost_states.per_parameter(name, "bf16", 2).total for name in cost_states.CONVENTIONS]
    assert totals == [16, 18, 20]


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize(("kv_heads", "batch", "seq"), [(4, 1, 33), (2, 3, 20), (1, 2, 64)])
def test_the_table_counts_what_autograd_holds_to_the_byte(kv_heads, batch, seq, element_bytes):
    shape = Shape("small", 2, 64, 4, kv_heads, 16, 172, 97)
    live = saved.layer_bytes(shape, batch, seq, element_bytes)
    assert activations_told.due(shape, batch, seq, element_bytes, "eager") == live
    kept = saved.of_layer(saved.llama_keeps(shape, batch, seq, element_bytes))
    assert sum(each.num_bytes for each in kept) == live
    assert all(each.used_by for each in kept)


def test_the_papers_rule_is_that_of_the_cost_model():
    gpt = Shape("GPT", 2, 512, 8, 8, 64, 2048, 1000, gated=False, biases=True)
    for shape, flash in ((LLAMA, True), (gpt, False)):
        for precision, e in (("bf16", 2), ("fp32", 4)):
            if shape is gpt and e == 4:
                continue  # the paper's formula is for 2 bytes
            layout = Layout(seq=96, micro_batch=3, precision=precision, flash=flash)
            assert activations_told.due(shape, 3, 96, e, "megatron") == memory.total(memory.layer_saved(shape, layout))


def test_the_table_says_bytes_shapes_and_who_needs_them():
    text = saved.table(saved.of_layer(saved.llama_keeps(LLAMA, 2, 32, 2)))
    lines = text.splitlines()
    assert lines[0].split()[0] == "bytes" and lines[-1].split()[1] == "together"
    assert sum(int(line.split()[0].replace(",", "")) for line in lines[1:-1]) == int(
        lines[-1].split()[0].replace(",", "")
    )
    assert any("attention (logsumexp)" in line for line in lines) and any("Silu" in line for line in lines)


def test_a_width_that_has_no_type_is_refused():
    with pytest.raises(ValueError, match=r"element_bytes is 4 \(fp32\) or 2 \(bf16\), not 3"):
        saved.llama_keeps(LLAMA, 1, 8, 3)


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_a_blocks_costs_are_those_of_its_module(kind):
    block = Block(kind, 24, 16, 40)
    layer, x = blocks.module(block), torch.randn(24, 16, requires_grad=True)
    own = {p.untyped_storage()._cdata for p in layer.parameters()}
    held = {}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in own:
            held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Trace() as trace:
        layer(x)
    assert sum(t.untyped_storage().nbytes() for t in held.values()) == block.kept_bytes
    assert trace.record.flops == block.forward_flops
    assert block.costs == (block.kept_bytes, x.nbytes, block.forward_flops)


def test_ways_are_all_choices_with_their_peak_and_flops():
    made = pictures.LAYERS
    ways = blocks.ways(made)
    assert [way.chosen for way in ways] == list(itertools.product((False, True), repeat=len(made)))
    for way in ways:
        assert way.peak_bytes == blocks.peak_bytes(made, way.chosen)
        assert way.flops == blocks.recomputed_flops(made, way.chosen)
    best = blocks.best(made, pictures.LAYERS_BUDGET)
    fit = [each for each in ways if each.peak_bytes <= pictures.LAYERS_BUDGET]
    assert blocks.recomputed_flops(made, best) == min(each.flops for each in fit)
    assert blocks.best(made, 1) is None


def test_a_choices_peak_is_what_a_record_holds():
    made = pictures.LAYERS
    beside = 3 * made[-1].input_bytes  # the output, the loss's weights, their product
    for chosen in ((False,) * 6, (True,) * 6, blocks.best(made, pictures.LAYERS_BUDGET)):

        def run(layers, x, costs, budget, chosen=chosen):
            for layer, again in zip(layers, chosen, strict=True):
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return x

        peak, flops = pictures.ran_layers(run, made, 0)
        assert 0 <= peak - beside - blocks.peak_bytes(made, chosen) <= 64
        assert flops == blocks.recomputed_flops(made, chosen)


@pytest.mark.parametrize("seed", range(4))
def test_no_simple_strategy_or_slip_is_right_and_each_differs(seed):
    drawn = checkpoints_cases.cases(random.Random(seed))
    found = {}
    ways = [*checkpoints_cases.strategies(), *checkpoints_cases.slips()]
    for number, (cause, fn, _) in enumerate(ways):
        found[cause, number] = tuple(fn(case.blocks, case.budget_bytes) for case in drawn)
    assert tuple(case.best for case in drawn) not in found.values()
    assert len(set(found.values())) == len(found)
    assert any(checkpoints_cases.joined_bytes(case) > case.budget_bytes for case in drawn)
    for case in drawn:
        peaks = [way.peak_bytes for way in blocks.ways(case.blocks)]
        gap = checkpoints_cases.GAP
        assert not [p for p in peaks if case.budget_bytes < p <= case.budget_bytes + gap]
        assert checkpoints.recognised(case, case.least_flops) == case.best


def test_the_scalers_rule_is_torchs():
    case = scaler_cases.cases(random.Random(5))[3]
    assert case.world_size == 1
    settings = (case.scale, case.growth_factor, case.backoff_factor, case.growth_interval)
    scaler = torch.amp.GradScaler("cpu", *settings)
    weight = torch.nn.Parameter(torch.zeros(sum(scaler_cases.SIZES)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step, due in enumerate(scaler_cases.due(case)):
        optimizer.zero_grad()
        values = torch.tensor(case.inputs[0][step])
        used = values if case.touched[0][step] else values[: scaler_cases.SIZES[0]]
        scaler.scale((weight.half().float()[: len(used)] * used).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), not bool((weight == before).all())) == (due.scale, due.stepped)


def test_each_mistake_of_a_scaler_goes_another_way_than_the_rule():
    drawn = scaler_cases.cases(random.Random(7))
    right = [[(step.stepped, step.scale) for step in scaler_cases.due(case)] for case in drawn]
    played = {}
    for number, (cause, rule, _) in enumerate(scaler_told._rules()):
        runs = [scaler_told.play(case, rule) for case in drawn]
        assert any(mine != due for ranks, due in zip(runs, right, strict=True) for mine in ranks), cause
        played[cause, number] = repr(runs)
    assert len(set(played.values())) == len(played)
    assert all(
        mine == due
        for case, due in zip(drawn, right, strict=True)
        for mine in scaler_told.play(case, scaler_told.Rule())
    )


def test_parts_of_torch_are_named_however_they_are_reached():
    def by_attributes():
        return torch.amp.GradScaler("cpu")

    def by_another_name():
        import torch as t

        return lambda: t.cuda.amp.GradScaler()

    def by_import():
        from torch import amp as scaling

        return scaling.GradScaler()

    def by_binding_the_package():
        import torch.amp

        return torch

    def own(self):
        import torch.nn.functional as nn_functional

        return self.amp.cost(torch.ones(1)).labs, nn_functional.relu

    for fn in (by_attributes, by_another_name, by_import, by_binding_the_package):
        assert own_work.borrowed(fn, ("torch.amp", "torch.cuda.amp")) in ("torch.amp", "torch.cuda.amp")
    assert own_work.borrowed(own, ("torch.amp", "torch.cuda.amp")) == ""


def test_borrowed_parts_are_named():
    def own(x):
        return x + 1

    def from_cost(x):
        from labkit.cost import memory

        return memory

    def by_global(x):
        return cost_states.per_parameter(x)

    def of_a_closure(x):
        return own(x) + taken(x)

    class Own:
        def go(self):
            return own(self)

    class Derived(pictures.TorchScaler):
        pass

    taken = cost_states.per_parameter
    assert own_work.borrowed(own) == own_work.borrowed(Own) == own_work.borrowed(functools.partial(own, 1)) == ""
    assert own_work.borrowed(functools.partial(functools.partial(taken), 3)) == "labkit.cost.states.per_parameter"
    assert own_work.borrowed(of_a_closure) == "labkit.cost.states.per_parameter"
    assert own_work.borrowed(Derived) == "labkit.labs.lab03.pictures.TorchScaler"
    assert own_work.borrowed(from_cost) == "labkit.cost"
    assert own_work.borrowed(by_global) == "labkit.cost.states"
