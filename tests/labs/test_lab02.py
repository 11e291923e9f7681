"""Lab 02's exercises 2.1 and 2.2: what their judges ask, the figures they rest on, and BucketedDDP against torch's own.

That each judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on all of them by
tests/classroom/test_prove.py.
"""

import random
import sys

import cloudpickle
import pytest
import torch

from labkit.check import evidence
from labkit.classroom import prove
from labkit.labs.lab02 import TorchDDP, average_told, models
from labkit.labs.lab02 import bucketed_cases as cases
from labkit.labs.lab02 import bucketed_evidence as how
from labkit.labs.lab02 import bucketed_steps as steps
from labkit.record.measures import exposed_s, overlapped_share
from labkit.record.replay import prices, replay
from labkit.record.trace import Trace

SMALL = models.Plan(llama=(("hidden", 64), ("layers", 2), ("heads", 4), ("kv_heads", 2), ("ffn", 168)))


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def answers(repo):
    """Every known answer to 2.2, by its name."""
    mistakes = prove.load(repo / "tests" / "mistakes" / "lab02.py")
    known = [*mistakes.RIGHT["2.2"], *(fn for fn, _ in (*mistakes.WRONG["2.2"], *mistakes.CHEATS["2.2"]))]
    return {answer.__name__: answer for answer in known}


def trained(cls, plan, seed, batches, bucket_bytes):
    """Runs in a rank: losses of training, whatever does the averaging; torch's own may."""
    module = models.build(plan, seed)
    wrapped, losses = cls(module, bucket_bytes), []
    optimizer = torch.optim.SGD(module.parameters(), lr=plan.lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        losses.append(steps._one_step(cls, wrapped, inputs, targets))
        optimizer.step()
        steps._mark()
    return losses


def by_rank(cls, case):
    """(losses by rank, steps by rank) of a case."""
    seen = evidence.observe(trained, case.world_size, args=(cls,), rank_args=case.rank_args, deadline_s=100.0)
    assert seen.outcome.cause is None, seen.outcome.cause
    return seen.results, [steps.steps_of(record) for record in seen.records]


def reduced(step):
    """Bytes that a step all_reduces."""
    return sum(each.num_bytes for each in step.record.collectives if each.op == "all_reduce")


def hidden(by_rank, case):
    """(exposed communication of the last step over the naive way's, share of all_reduces that overlap backward)."""
    alone = [steps.backward_alone(found[-1]) for found in by_rank]
    exposed = max(exposed_s(replay(alone, prices(how.cluster()))))
    return exposed / how.naive_s(how.gradients_of(case)), min(overlapped_share(record) for record in alone)


def on_text(plan, world_size, num_steps, bucket_bytes):
    """A case of real text, 2 x 32 tokens a rank."""
    from labkit.model.text import batches

    by_rank = tuple(
        tuple(((x,), y) for x, y in batches(2, 32, 1, rank, world_size, num_steps)) for rank in range(world_size)
    )
    return cases.Case("text", plan, bucket_bytes, tuple(range(world_size)), by_rank)


# Against torch's own


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_20_steps_of_bucketed_training_have_the_losses_and_bytes_of_torchs_ddp(world_size, answers):
    case = on_text(SMALL, world_size, 20, 64 * 1024)
    losses, mine = by_rank(answers["FlatBuckets"], case)
    torchs, theirs = by_rank(TorchDDP, case)
    for rank in range(world_size):
        assert losses[rank] == pytest.approx(torchs[rank], rel=1e-6)
        assert [reduced(step) for step in mine[rank]] == [reduced(step) for step in theirs[rank]]
    mean = [sum(of_step) / world_size for of_step in zip(*losses, strict=True)]
    assert sum(mean[-3:]) / 3 < 0.8 * mean[0]


def test_no_more_communication_is_exposed_than_1_3_times_torchs_on_the_named_cluster(answers):
    """Both take a bucket apart as it comes, while the next is still under way: so the copies count here."""
    case = cases.llama(random.Random(0), steps=3)
    _, mine = by_rank(answers["WaitsOneByOne"], case)
    _, theirs = by_rank(TorchDDP, case)
    ours, torchs = (replay([found[-1].record for found in each], prices(how.cluster())) for each in (mine, theirs))
    assert max(exposed_s(ours)) <= 1.3 * max(exposed_s(torchs))
    assert ours.time_s <= 1.02 * torchs.time_s
    exposed, share = hidden(mine, case)
    assert exposed < 0.4 * how.MOST_EXPOSED and share > 0.8
    assert hidden(theirs, case)[0] < 0.4 * how.MOST_EXPOSED


@pytest.mark.parametrize(("name", "least"), [("OneBucket", 0.35), ("BlockingInHooks", 0.6), ("WaitsAtOnce", 0.6)])
def test_what_hides_nothing_is_far_beyond_the_limit(name, least, answers):
    case = cases.llama(random.Random(0), steps=1)
    exposed, share = hidden(by_rank(answers[name], case)[1], case)
    assert exposed > least > 1.3 * how.MOST_EXPOSED and share == 0


def test_the_naive_way_recorded_and_replayed_takes_what_the_formula_says(answers):
    case = cases.llama(random.Random(0), steps=1)
    exposed, share = hidden(by_rank(answers["Naive"], case)[1], case)
    assert exposed == pytest.approx(1.0, rel=1e-9) and share == 0


# What is asked


@pytest.mark.parametrize("seed", range(20))
def test_ranks_begin_apart_and_every_case_is_what_it_is_called(seed):
    by_name = {case.what: case for case in cases.cases(random.Random(seed))}
    assert list(by_name) == ["plain", "order", "frozen", "tied", "unused", "mixed", "llama"]
    for case in by_name.values():
        assert len(set(case.seeds)) == case.world_size > 1
        assert any(size > case.bucket_bytes for size in how.gradients_of(case).sizes) or case.what != "plain"
    assert {case.world_size for case in by_name.values()} == {2, 3, 4}
    plain = by_name["plain"]
    first, second = (cases.drawn(plain, rank) for rank in (0, 1))
    assert all(not torch.equal(first[name], second[name]) for name in first)
    frozen = cases.module_of(by_name["frozen"])
    assert [p.requires_grad for p in frozen.parameters()].count(False) == 2 and len(list(frozen.buffers())) == 3
    tied = cases.module_of(by_name["tied"])
    assert len(list(tied.parameters())) < len(list(tied.named_parameters(remove_duplicate=False)))
    assert {p.dtype for p in cases.module_of(by_name["mixed"]).parameters()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("seed", range(20))
def test_every_branch_but_the_first_takes_part_on_some_ranks_and_not_on_others(seed):
    used = models.branches_used(random.Random(seed), 4, 3)
    counts = [sum(branch in of_rank for of_rank in used) for branch in range(4)]
    assert counts[0] == 0 and all(1 <= count <= 2 for count in counts[1:])


def test_serial_training_is_torchs_on_the_batches_of_all_ranks_together():
    case = next(case for case in cases.cases(random.Random(3)) if case.what == "frozen")
    found, module = cases.serial(case), cases.module_of(case)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=case.plan.lr)
    for step in range(case.steps):
        of_ranks = [batches[step] for batches in case.batches]
        x = torch.cat([inputs[0] for inputs, _ in of_ranks])
        targets = torch.cat([each for _, each in of_ranks])
        optimizer.zero_grad()
        loss = models.loss_of(module(x, torch.tensor([], dtype=torch.int64)), targets)
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == pytest.approx(sum(found.losses[step]) / case.world_size, rel=1e-5)
    for name, each in module.state_dict().items():
        torch.testing.assert_close(each, found.end[name], rtol=1e-4, atol=1e-6)


def test_computing_on_one_thread_leaves_torchs_threads_as_they_were():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), models.one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


# Evidence


@pytest.mark.parametrize("seed", range(50))
def test_buckets_filled_one_after_another_in_any_order_are_not_too_many(seed, answers):
    rng = random.Random(seed)
    sizes = [4 * rng.randint(1, 100) for _ in range(rng.randint(1, 60))]
    cap = 4 * rng.randint(20, 150)
    rng.shuffle(sizes)
    count, room = 0, 0
    for size in sizes:
        if not count or size > room:
            count, room = count + 1, cap
        room -= size
    assert count <= how.Gradients(tuple(sizes)).most(cap)


def test_one_all_reduce_per_gradient_is_too_many_for_the_named_model():
    case = cases.llama(random.Random(0), steps=1)
    due = how.gradients_of(case)
    assert due.num_bytes == 4 * 779_392 and len(due.sizes) == 39
    assert due.most(case.bucket_bytes) == 25 and max(due.sizes) < case.bucket_bytes


class MarksItself(steps.Alone):
    """Sets marks of its own, as a learner who profiles does."""

    def __call__(self, *inputs):
        with torch.profiler.record_function("labkit"):
            return super().__call__(*inputs)

    def finish(self):
        self.show = torch.ones(8, 8) @ torch.ones(8, 8)


def test_steps_are_cut_at_the_judges_marks_and_work_of_the_answers_own_is_free():
    case = next(case for case in cases.cases(random.Random(0)) if case.what == "plain")
    with Trace() as trace:
        seen = steps.train(MarksItself, case.plan, 1, case.batches[0], 100)
    found = steps.steps_of(trace.record)
    assert len(found) == len(seen["losses"]) == case.steps
    for step in found:
        events = step.record.events
        assert [event.index for event in events] == list(range(len(events)))
        assert 0 < step.backward < step.finish < step.optimizer < len(events)
        shown = [op for op in step.record.ops if op.index > step.finish and op.flops]
        assert [op.flops for op in shown] == [2 * 8**3]
        alone = steps.backward_alone(step)
        assert step.record.flops - alone.flops == 2 * 8**3
        assert sum(op.flops for op in alone.ops[step.backward : step.finish]) > 0


def test_the_time_and_flops_of_a_step_without_communication_come_from_a_lone_rank():
    case = cases.llama(random.Random(0), steps=1)
    record = how._plain(case)
    assert not record.collectives
    params, tokens = 779_392 - 256 * 128, cases.TOKENS[0] * cases.TOKENS[1]
    # Products with weights: 2 forward and 4 backward per parameter and token. What attention does comes on top where
    # torch knows its FLOPs; norms' weights have none.
    assert 0.99 * 6 * params * tokens < record.flops < 1.4 * 6 * params * tokens


# Known mistakes


def averaged(own, got):
    mean = {name: sum(grads[name] for grads in own) / len(own) for name in own[0]}
    return average_told.Averaged(own, got(mean), mean)


OWN = [{"a": torch.tensor([1.0, 2.0, 7.0]) * 3**rank, "b": torch.tensor([5.0]) * 2**rank} for rank in range(3)]


@pytest.mark.parametrize(
    ("cause", "got"),
    [
        ("still_own", lambda mean: OWN),
        ("not_divided", lambda mean: [{name: 3 * each for name, each in mean.items()}] * 3),
        ("divided_twice", lambda mean: [{name: each / 3 for name, each in mean.items()}] * 3),
        ("divided_by_others", lambda mean: [{name: 3 * each / 2 for name, each in mean.items()}] * 3),
        ("fixed_number", lambda mean: [{name: 3 * each / 8 for name, each in mean.items()}] * 3),
        ("own_divided", lambda mean: [{name: each / 3 for name, each in grads.items()} for grads in OWN]),
        ("rank_zeros_gradient", lambda mean: [OWN[0]] * 3),
        ("rank_zero_only", lambda mean: [mean, OWN[1], {"a": mean["a"] * 2, "b": mean["b"]}]),
        ("some_left", lambda mean: [{**mean, "b": grads["b"]} for grads in OWN]),
        ("remainder", lambda mean: [{**mean, "a": torch.cat([mean["a"][:2], g["a"][2:]])} for g in OWN]),
        ("dtype_lost", lambda mean: [{**mean, "a": (mean["a"] * 1.01).bfloat16().float()}] * 3),
    ],
)
def test_a_wrong_mean_is_known_by_its_numbers(cause, got):
    assert average_told.wrong_gradients(averaged(OWN, got))[0] == cause


def test_a_mean_within_rounding_is_right_and_nan_and_other_shapes_are_not():
    mean = averaged(OWN, lambda mean: [mean] * 3).mean
    assert averaged(OWN, lambda mean: [{name: each * (1 + 1e-6) for name, each in mean.items()}] * 3).wrong == []
    assert not average_told.close(mean["a"] * float("nan"), mean["a"])
    assert not average_told.close(mean["a"][None], mean["a"])
    assert average_told.close(torch.zeros(3), None) and average_told.close(None, None)
    assert not average_told.close(None, torch.zeros(3)) and not average_told.close(torch.ones(3), None)
