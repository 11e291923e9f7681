"""Lab 07: what the judges hold to be due, worked out in another way, and what stands in for an answer.

Their verdicts on known answers are tried by tests/classroom/test_prove.py.
"""

import functools
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.check.evidence import Observed
from labkit.classroom import prove
from labkit.labs.lab07 import design, messages, one_f_one_b, split, standins, steps, told
from labkit.ranks.launch import launch
from labkit.ranks.outcome import Cause, Whereabouts
from slides import cells


def all_splits(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_best_split_is_the_best_of_all(stages):
    rng = random.Random(stages)
    for _ in range(12):
        layers, embedding, head = rng.randint(stages, 9), rng.randint(0, 12) / 4, rng.randint(0, 20) / 4
        times = [split.slowest(each, embedding, head) for each in all_splits(layers, stages)]
        assert split.best(layers, stages, embedding, head) == min(times)


def test_questions_tell_every_known_mistake_of_7_1_from_the_right_answer():
    questions = split.ask(random.Random(0))
    assert questions[0] == split.EXAMPLE and split.is_best([4, 5, 5, 2], *split.EXAMPLE)
    for changed, cause, _ in split._MISTAKES:
        answers = [next(s for s in all_splits(q[0], q[1]) if split.is_best(s, q[0], q[1], *changed(*q[2:])))
                   for q in questions if q[0] <= 16]  # fmt: skip
        small = [q for q in questions if q[0] <= 16]
        assert not all(split.is_best(a, *q) for q, a in zip(small, answers, strict=True)), cause


def test_microbatches_in_flight_are_forwards_without_their_backward():
    assert one_f_one_b.in_flight("F0 F1 B0 F2 B1 B2".split()) == 2
    assert one_f_one_b.in_flight(["F0", "B0"] * 3) == 1
    assert one_f_one_b.in_flight([]) == 0


def test_the_serial_run_is_the_mean_over_microbatches_as_torch_has_it():
    case = steps.draw(random.Random(1), "gpipe", 2, 3)
    losses, parts = steps.serial(case)
    weights = [w.clone().requires_grad_() for own in case.weights for w in own]
    x = torch.cat(case.inputs)
    for weight in weights:
        x = torch.tanh(F.linear(x, weight))
    loss = F.mse_loss(x, torch.cat(case.targets))
    loss.backward()
    assert sum(losses) / 3 == pytest.approx(float(loss.detach()), rel=1e-5)
    due = [sum(part[rank][k] for part in parts) / 3 for rank in range(2) for k in range(2)]
    assert all(torch.allclose(a, w.grad, atol=1e-6) for a, w in zip(due, weights, strict=True))
    assert told.theory(case) == 1 / 4


def test_a_stage_notes_forwards_and_backwards_as_they_come():
    stage = steps.Stage([torch.eye(4)])
    x = torch.ones(2, 4, requires_grad=True)
    first, second = stage(x), stage(x)
    second.sum().backward()
    torch.autograd.grad(first.sum(), x)
    with torch.no_grad():
        stage(x)
    assert stage.notes == ["F0", "F1", "B1", "B0", "F2"]


@pytest.mark.parametrize("p, m", [(2, 1), (2, 6), (3, 5), (4, 9)])
def test_the_notebooks_1f1b_lets_go_of_what_it_sent_and_waits_for_nothing(p, m):
    case = steps.draw(random.Random(p), "one_f_one_b", p, m)
    observed = steps.observe(cells.function("07", "one_f_one_b"), case)
    assert observed.outcome.cause is None
    played = steps.replayed(observed)
    assert not played.deadlock and steps.idle_share(played) == pytest.approx(told.theory(case), abs=1e-3)
    for rank, record in enumerate(observed.records):
        sent = {storage for each in record.communications if each.sent_bytes for storage in each.reads}
        outputs, gradients = min(m, p - rank) if rank < p - 1 else 0, 2 if rank else 0
        assert one_f_one_b._most(case, record, sent) <= outputs + gradients


def asynchronous():
    """A right answer to 7.3 that calls isend and recv."""
    answers = prove.load(Path(__file__).parents[1] / "mistakes" / "lab07.py").RIGHT["7.3"]
    return next(each for each in answers if each.__name__ == "asynchronous")


def keeping_handles(name, answer, *given):
    """An answer whose handles of `name`, "isend" or "irecv", stay in a list, though each is waited for in time."""
    kept, plain = [], getattr(dist, name)

    def noted(*args, **more):
        kept.append(plain(*args, **more))
        return kept[-1]

    def received(tensor, source):
        dist.irecv(tensor, source).wait()

    blocking = dist.recv
    setattr(dist, name, noted)
    dist.recv = received
    try:
        return answer(*given)
    finally:
        setattr(dist, name, plain)
        dist.recv = blocking


@pytest.mark.parametrize("name, cause", [("isend", "sent_kept"), ("irecv", "kept")])
def test_handles_that_are_kept_are_told_though_they_were_waited_for(name, cause):
    case = steps.draw(random.Random(4), "one_f_one_b", 4, 14)
    observed = steps.observe(functools.partial(keeping_handles, name, asynchronous()), case)
    assert observed.outcome.cause is None
    found = one_f_one_b.few_received(case, observed) or one_f_one_b.few_sent(case, observed)
    assert found is not None and found.cause == cause
    assert f"a handle of {name} keeps its tensor even after wait()" in found.sentence


def test_as_many_sends_under_way_each_way_as_there_are_ranks_are_few():
    case = steps.draw(random.Random(5), "one_f_one_b", 4, 14)
    for most, due in ((4, True), (14, False)):
        observed = steps.observe(functools.partial(asynchronous(), most=most), case)
        assert observed.outcome.cause is None
        assert (one_f_one_b.few_sent(case, observed) is None) == due


def stand_ins(weights, inputs, targets, shape):
    found = []
    for fn in (standins.gpipe, standins.one_f_one_b):
        stage = steps.Stage(weights)
        loss = fn(stage, inputs, targets, shape)
        found.append((loss, [weight.grad for weight in stage.weights], stage.notes))
    tied = torch.nn.Parameter(torch.zeros(3))
    tied.grad = torch.ones(3)
    standins.sum_by_labkit(tied)
    return found, tied.grad


def test_what_stands_in_for_an_answer_is_right():
    case = steps.draw(random.Random(2), "gpipe", 2, 4)
    preload = ("labkit.labs.lab07.standins", "labkit.model.pipeline")
    by_rank = launch(stand_ins, 2, rank_args=case.rank_args, prints="quiet", preload=preload)
    losses, parts = steps.serial(case)
    for rank, (found, tied) in enumerate(by_rank):
        assert tied.tolist() == [2, 2, 2]
        for (loss, gradients, notes), most in zip(found, (4, 2 - rank), strict=True):
            due = [sum(part[rank][k] for part in parts) / 4 for k in range(2)]
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, due, strict=True))
            assert one_f_one_b.in_flight(notes) == most
            assert loss is None if rank == 0 else loss == pytest.approx(sum(losses) / 4)
    assert design._bad((4, 8), design._read((4, 8), standins.zb_h1_text(4, 8))[0]) is None
    assert sum(standins.even_stages(*split.EXAMPLE)) == split.EXAMPLE[0]


def stopped(cause, said, *reports):
    whole = SimpleNamespace(cause=Cause(cause, said), reports=reports)
    return Observed(2, (None, None), (None, None), (None, None), whole)


@pytest.mark.parametrize(
    "cause, said, reports, due, word",
    [  # reports: of ranks whose stage was given a tensor that requires no grad
        ("deadlock", "ranks 0 and 1 both send first: a send returns only", (), "deadlock", "one sends while"),
        ("deadlock", "ranks 0 and 1 both receive first: nobody has sent; let one", (), "deadlock", "first backward?"),
        ("deadlock", "ranks 0 and 2 both receive first: nobody has sent; let one send first", (), "deadlock", ""),
        ("raised", "list index out of range", (), "raised", ""),
        ("raised", "Expected parameter `tensor` of", ((1, {"without_graph": 0}),), "no_requires_grad", "no graph"),
        ("raised", "Expected parameter `tensor` of", ((0, {"without_graph": 0}),), "no_leaf", "only a leaf"),
        ("raised", "element 0 does not require grad and does not have a grad_fn", (), "graph_cut", "without a graph"),
        ("raised", "'NoneType' object has no attribute 'size'", (), "no_target", "targets are None"),
        ("raised", "'NoneType' object is not subscriptable", ((1, {"without_graph": 0}),), "raised", ""),
    ],
)
def test_what_is_said_of_a_run_that_failed_is_true_of_it(cause, said, reports, due, word):
    case = steps.draw(random.Random(3), "gpipe", 2, 3)
    found = told.ran(case, stopped(cause, said, *reports), "gpipe")
    assert found.cause == due and word in found.sentence and said in found.sentence
    assert word or found.sentence == said


def test_a_handle_that_nobody_waits_for_is_told_when_ranks_stand_still():
    def entry(op, state="issued", blocking=False):
        return SimpleNamespace(op=op, state=state, blocking=blocking, place="cell.py:3")

    def left(code, *ledgers):
        where = tuple(Whereabouts(rank, "returned" if rank else "waiting") for rank in range(2))
        whole = SimpleNamespace(cause=Cause(code, "", 0, where), ledgers=ledgers)
        return messages.left_behind(SimpleNamespace(outcome=whole))

    done = [entry("recv", "done"), entry("send", "waiting"), entry("recv", blocking=True), entry("all_reduce")]
    assert left("deadline", done, done) == left("deadline", [entry("send")], done) == ""
    assert "rank 1 has not waited for its isend (cell.py, line 3)" in left("deadline", [entry("send")], [entry("send")])
    assert "rank 0 has not waited for its irecv" in left("not_waited", [entry("recv")], [entry("send")])
    assert left("not_waited", done, [entry("send")]) == ""


def test_two_microbatches_in_flight_in_one_storage_are_noticed_and_no_others():
    buffer = torch.ones(6, 4)
    stage = steps.Stage([torch.eye(4)])
    for i in range(3):  # rows of one tensor
        stage(buffer[2 * i : 2 * i + 2].requires_grad_())
    assert stage.shared is None
    one = steps.Stage([torch.eye(4)])
    one(buffer[:2].requires_grad_()).sum().backward()
    with torch.no_grad():
        one(buffer[:2])
    one(buffer[:2].requires_grad_())
    assert one.shared is None
    one(buffer[:2].requires_grad_())
    assert one.shared == (2, 3)


def test_gradients_that_are_a_multiple_of_the_right_ones_are_told_by_how_much():
    due = [[torch.randn(3, 3), torch.randn(3, 3)] for _ in range(2)]
    factors = told._factors([[each / 4 for each in due[0]], due[1]], due)
    assert factors == pytest.approx([0.25, 1])
    assert told._factors([[due[0][0], due[0][1] * 2], due[1]], due) == []
    assert told._factors([[0 * each for each in own] for own in due], due) == []


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers():
    for given in ([4, 5], (4, 5), np.array([4, 5]), list(np.array([4, 5])), torch.tensor([4, 5])):
        assert split._plain(given) == [4, 5] and {type(each) for each in split._plain(given)} == {int}
    assert split._plain([4.0, True]) == [4.0, True] and split._plain(None) == "None"
