"""Lab 04's exercises 4.1 to 4.3: what their judges are tried on, serial AdamW, known mistakes, and bytes held.

That each judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on all of them by
tests/classroom/test_prove.py.
"""

import random
import sys

import cloudpickle
import pytest
import torch

from labkit.check import evidence as checking
from labkit.classroom import prove
from labkit.labs.lab04 import evidence, gradients, models, parameters, serial, state, told, training

SEED = 5


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def answers(repo):
    """Right answers to 4.1."""
    mistakes = prove.load(repo / "tests" / "mistakes" / "lab04.py")
    return {answer.__name__: answer for answer in mistakes.RIGHT["4.1"]}


@pytest.fixture(scope="module")
def small():
    return state.cases(random.Random(SEED))[0]


def test_every_judge_tries_2_3_and_4_ranks_and_numbers_that_do_not_divide():
    for judge in (state, gradients, parameters):
        cases = judge.cases(random.Random(SEED))
        assert sorted(case.world_size for case in cases) == [2, 3, 4]
        assert {case.plan.dtype for case in cases} == {"float32", "bfloat16"}
        for case in cases[:2]:
            assert sum(models.sizes(case.plan)) % case.world_size
        assert any(case.plan.frozen for case in cases) and max(max(case.micro) for case in cases) > 1


def test_ranks_have_batches_of_their_own_and_branches_that_not_all_of_them_use(small):
    first = [small.batches[rank][0][0] for rank in range(small.world_size)]
    assert not torch.equal(first[0][0][0], first[1][0][0])
    for branch in range(small.plan.branches):
        using = [branch in use.tolist() for (_, use), _ in first]
        assert any(using) and not all(using)


def test_where_ranks_are_alike_each_step_uses_every_branch_and_each_backward_the_same_on_all():
    case = gradients.cases(random.Random(SEED))[0]
    for step in range(case.steps):
        used = [[use.tolist() for (_, use), _ in case.batches[rank][step]] for rank in range(case.world_size)]
        assert all(each == used[0] for each in used)
        assert sorted(sum(used[0], [])) == list(range(case.plan.branches))


def test_serial_is_torchs_adamw_on_the_mean_gradient(small):
    module = models.build(small.plan, small.seed)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **small.hyper.kwargs)
    due = serial.serial(small)
    for step in range(small.steps):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(small.world_size):
            for inputs, targets in small.batches[rank][step]:
                (models.loss_of(module(*inputs), targets) / small.world_size).backward()
        optimizer.step()
        for name, p in module.named_parameters():
            torch.testing.assert_close(due.params[step][name], p.detach(), rtol=1e-5, atol=1e-6)


def test_an_empty_input_gives_the_parameters_themselves(small):
    module = models.build(small.plan, small.seed)
    shapes, inputs = {name: p.shape for name, p in module.named_parameters()}, (torch.ones(1, 1), torch.tensor([]))
    for name, got in training._parameters(module, shapes, inputs).items():
        assert torch.equal(got, dict(module.named_parameters())[name])


@pytest.mark.parametrize("mistake", sorted(serial.MISTAKES))
def test_a_known_mistake_gives_other_parameters_and_is_told(mistake, small):
    case = small
    if mistake == "no_master":
        case = state.cases(random.Random(SEED))[1]
    if mistake == "counted_twice":
        case = gradients.cases(random.Random(SEED))[0]
    due, made = serial.serial(case), serial.serial(case, mistake)
    assert not all(told.close(got, right, due.start) for got, right in zip(made.params, due.params, strict=True))
    verdict = told.values(case, _observed(case, made.params, due), due)
    assert verdict.cause == mistake or serial.MISTAKES[mistake] == verdict.sentence, verdict


def _observed(case, params, due):
    """As if every rank had these parameters, and the right losses as long as those are."""
    results = tuple(
        {"params": params, "left": [[]] * case.steps, "losses": [step[rank] for step in due.losses]}
        for rank in range(case.world_size)
    )
    return checking.Observed(case.world_size, results, (), (), None)


def test_what_only_owners_know_is_told_as_a_missing_gather(small):
    due = serial.serial(small)
    results = []
    for rank in range(small.world_size):
        flat = {name: each.clone().flatten() for name, each in due.start.items()}
        for name, each in flat.items():
            each.tensor_split(small.world_size)[rank].copy_(due.params[0][name].flatten().tensor_split(3)[rank])
        params = {name: each.view(due.start[name].shape) for name, each in flat.items()}
        losses = [step[rank] for step in due.losses]
        results.append({"params": [params], "left": [[]], "losses": losses})
    observed = checking.Observed(small.world_size, tuple(results), (), (), None)
    verdict = told.values(small, observed, due)
    assert (verdict.stage, verdict.cause) == ("agree", "not_gathered")


def test_sizes_are_padded_parameter_by_parameter():
    sizes = evidence.Sizes((5, 1, 8), 4)
    assert (sizes.total, sizes.padded, sizes.shard) == (14, 8 + 4 + 8, 5)


@pytest.mark.parametrize("name", ["ZeroOptimizer", "PerParameter"])
def test_bytes_held_between_steps_are_8_psi_over_n_with_padding_and_one_counter(name, answers):
    case = models.draw(random.Random(SEED), "a plain model", models.Plan(5, 9, 2), (1, 1), 3)
    observed = state.observe(answers[name], case)
    sizes = evidence.sizes_of(case)
    shard, counters, padding = -(-sizes.total // 3), 1, -sizes.total % 3
    if name == "PerParameter":
        shard, counters, padding = sizes.shard, len(sizes.elements), sizes.padded - sizes.total
    for by_step in evidence.held_between(case, observed):
        assert by_step == [8 * shard + 4 * counters + 4 * padding] * 2
    assert evidence.state_is_sharded(case, observed) is None
    _, steps = training.cuts(observed.records[0], case.micro)
    sent = evidence.elements_sent(evidence.carriers(observed.records[0], steps[0].begin, steps[0].cleared))
    assert sent == 2 * (2 * shard)


class Hoarder:
    """Updates nothing, and keeps: a tensor on itself, one in a closure, and numbers in a list and in bytes."""

    def __init__(self, parameters, lr, betas, eps, weight_decay):
        self.tensor, hidden = torch.zeros(1000), torch.zeros(500)
        self.closure = lambda: hidden
        self.numbers, self.text = [0.5 + i for i in range(10_000)], bytes(range(250)) * 400

    def step(self):
        pass

    def zero_grad(self):
        pass


def test_what_hangs_anywhere_is_counted_in_tensors_and_in_python_objects():
    case = models.draw(random.Random(SEED), "a plain model", models.Plan(5, 43, 2, depth=10), (1,), 2)
    observed = state.observe(Hoarder, case)
    assert observed.outcome.cause is None, observed.outcome.cause
    for by_step, result in zip(evidence.held_between(case, observed), observed.results, strict=True):
        assert by_step == [4 * 1500]
        assert 10_000 * (24 + 8) + 100_000 < result["python"] < 10_000 * (24 + 8) + 200_000 and result["traced"]


@pytest.mark.parametrize(
    ("over", "cause"),
    [
        (8 * 3000 * 3 // 4, "full_state"),
        (8 * 3000, "full_state"),
        (4 * 3000 // 4, "master_kept"),
        (4 * 3000 * 3 // 4, "one_moment_whole"),
        (4 * 3000, "copy_kept"),
        (1700, "state_not_sharded"),
    ],
)
def test_what_is_held_too_much_is_told_by_its_size(over, cause):
    sizes = evidence.Sizes((3000,), 4)
    now = [8 * 750 + over] * 4
    assert evidence._too_much(now, over, sizes, 8, 64)[0] == cause


def test_more_on_one_rank_and_less_on_another_is_unbalanced():
    sizes = evidence.Sizes((3000,), 4)
    now = [8 * 750 + 3500, 8 * 750 - 3500, 8 * 750, 8 * 750]
    assert evidence._too_much(now, 3500, sizes, 8, 64)[0] == "unbalanced"
