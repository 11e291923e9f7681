"""Data behind lab 02's pictures: buckets cut anew agree with steps that were really recorded; stand-ins are torch's."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from labkit.cost import comm
from labkit.cost.groups import on_cluster
from labkit.cost.hardware import cluster
from labkit.labs import lab02
from labkit.labs.lab02 import pictures, recorded, recut
from labkit.labs.lab02.recorded import Step, lanes, record_step, time_steps
from labkit.ranks.launch import launch
from labkit.record.measures import chain_time_s, exposed_s
from labkit.record.prices import prices
from labkit.record.replay import replay

T4S, SLOW = cluster("T4", per_node=4), cluster("T4", per_node=4, intra="10 GbE")
SIZES = (2**18, 2**21, 2**30)


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def by_hand(bucket_bytes):
    """wrap and finish of buckets made by hooks, each copied into one tensor, sent in order."""

    def wrap(module):
        groups, room = [], 0
        for p in reversed(list(module.parameters())):
            if not groups or p.nbytes > room:
                groups, room = [*groups, []], bucket_bytes
            groups[-1].append(p)
            room -= p.nbytes
        module.flying, there = [], set()

        def came(p):
            there.add(p)
            while len(module.flying) < len(groups) and there.issuperset(groups[len(module.flying)]):
                group = groups[len(module.flying)]
                flat = torch.cat([each.grad.flatten() for each in group])
                module.flying.append((group, flat, dist.all_reduce(flat, async_op=True)))
            if len(module.flying) == len(groups):
                there.clear()

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(came)
        return module

    def finish(module):
        for group, flat, work in module.flying:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad = part.view_as(p)
        module.flying = []

    return wrap, finish


@pytest.fixture(scope="module")
def naive():
    return record_step(lambda model: model, average)


@pytest.fixture(scope="module", params=SIZES, ids=["256 KiB", "2 MiB", "one"])
def bucketed(request):
    return request.param, record_step(*by_hand(request.param))


@pytest.mark.parametrize("on", [T4S, SLOW], ids=lambda on: on.node.intra.name)
def test_buckets_cut_anew_agree_with_a_replay_of_a_step_recorded_with_them(naive, bucketed, on):
    size, step = bucketed
    device, group = on.node.device, on_cluster(on)
    cut = recut.recut(recut.backward_of(naive, device), size, device, group)
    played = replay(step.records, prices(on))
    assert [bucket.num_bytes for bucket in cut.buckets] == [c.num_bytes for c in step.records[0].collectives]
    assert cut.time_s == pytest.approx(played.time_s, rel=1e-6)
    assert cut.exposed_s == pytest.approx(exposed_s(played)[0], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("on", [T4S, SLOW], ids=lambda on: on.node.intra.name)
def test_one_by_one_is_the_replay_of_the_naive_step(naive, on):
    cut = recut.one_by_one(recut.backward_of(naive, on.node.device), on.node.device, on_cluster(on))
    played = replay(naive.records, prices(on))
    assert cut.time_s == pytest.approx(played.time_s, rel=1e-6)
    assert cut.exposed_s == pytest.approx(exposed_s(played)[0], rel=1e-6)


def test_without_copies_a_cut_is_the_chain_formula(naive):
    device, group = T4S.node.device, on_cluster(T4S)
    backward = recut.backward_of(naive, device)
    for size in SIZES:
        cut = recut.recut(backward, size, device, group, copies=False)
        bucket_s = [comm.group_time_s("all_reduce", bucket.num_bytes, group) for bucket in cut.buckets]
        due = chain_time_s([bucket.ready_s for bucket in cut.buckets], bucket_s, backward.compute_s)
        assert cut.time_s == pytest.approx(due) == pytest.approx(recut.by_formula(naive, T4S, size))
        assert sum(bucket.num_bytes for bucket in cut.buckets) == naive.num_bytes
    exposed = recut.by_formula(naive, T4S) - backward.compute_s
    assert exposed == pytest.approx(sum(comm.group_time_s("all_reduce", b, group) for b in backward.num_bytes))


@pytest.mark.parametrize(
    ("clock", "said"),
    [((2.0, 3.0), {"Slower"}), ((0.5, 0.5), {"Faster"}), ((2.0, 0.5), {"Slower", "Faster"}), ((1.0, 1.0), set())],
)
def test_what_can_explain_the_clock_depends_on_whether_it_was_slower_or_faster(clock, said):
    told = recut.against_the_clock(["one", "two"], (1.0, 1.0), (1.0, 1.5), clock)
    assert {word for word in ("Slower", "Faster") if word in told} == said
    assert f"one: formula {1 / clock[0] - 1:+.0%}, replay {1 / clock[0] - 1:+.0%}" in told


def test_gradients_are_there_from_the_last_layer_to_the_first(naive):
    backward = recut.backward_of(naive, T4S.node.device)
    assert backward.num_bytes == tuple(p.nbytes for p in recorded.model().parameters())
    layer = len(backward.num_bytes) // 4
    assert backward.forward_s < min(backward.ready_s) and max(backward.ready_s) == backward.compute_s
    assert max(backward.ready_s[-layer:]) < min(backward.ready_s[1:layer])


def test_only_a_step_that_averages_after_backward_can_be_cut_anew(naive, bucketed):
    size, step = bucketed
    if size == SIZES[-1]:  # one bucket: it is complete when backward is over
        same = recut.backward_of(step, T4S.node.device)
        assert same == recut.backward_of(naive, T4S.node.device)
        return
    with pytest.raises(ValueError, match="averages after backward"):
        recut.backward_of(step, T4S.node.device)


def test_buckets_are_filled_from_the_end_and_a_large_parameter_is_alone():
    assert recut.filled([4, 4, 9, 3, 5], 8) == [[4, 3], [2], [1, 0]]
    assert recut.filled([1, 1, 1], 0) == [[2], [1], [0]]


def test_lanes_tell_forward_backward_waiting_and_communication_apart(naive):
    (name, computing), (_, network) = lanes(naive, replay(naive.records, prices(T4S)), "rank 0")
    kinds = [kind for _, _, kind in sorted(computing)]
    assert name == "rank 0: computes" and kinds == sorted(kinds, key=["forward", "backward", "waiting"].index) or (
        kinds.index("backward") < kinds.index("waiting") and "forward" not in kinds[kinds.index("backward") :]
    )
    assert len(network) == len(naive.gradients) and {kind for *_, kind in network} == {"communication"}


def test_ways_train_alike_and_are_timed_by_turns(naive):
    torchs = lambda model: lab02.TorchDDP(model, 2**21), lambda wrapped: wrapped.finish()  # noqa: E731
    step = record_step(*torchs)
    assert isinstance(step, Step) and step.losses == pytest.approx(naive.losses, abs=1e-6)
    assert step.records[0].sent_bytes == naive.records[0].sent_bytes
    times = time_steps([(lambda model: model, average), torchs], world_size=2, repeats=1)
    assert len(times) == 2 and min(times) > 0


def gradients(fn):
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(3, 2)
    model(torch.randn(5, 3)).pow(2).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    fn(model)
    return before, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_stand_in_of_2_1_gives_the_mean(world_size):
    found = launch(gradients, world_size, pictures.torchs_average)
    for number in range(2):
        due = torch.stack([before[number] for before, _ in found]).mean(0)
        for _, after in found:
            torch.testing.assert_close(after[number], due)


def stub(*args):
    return NotImplemented


def mean_of_means(model, microbatches):
    from labkit.model.llama import loss_of

    for tokens, targets in microbatches:
        (loss_of(model(tokens), targets) / len(microbatches)).backward()
    average(model)


def sum_over_count(model, microbatches):
    count = torch.zeros(())
    for tokens, targets in microbatches:
        logits = model(tokens).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
        count += (targets != -100).sum()
    dist.all_reduce(count)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= count
    return 0.0


def test_a_mean_of_means_is_off_and_a_sum_over_a_count_is_not():
    pieces = lab02.pictures.pieces()
    counts = [[int((targets != -100).sum()) for _, targets in of_rank] for of_rank in pieces]
    assert counts == [list(row) for row in pictures.COUNTS]
    off, sent, title = lab02.accumulate_picture(mean_of_means, pieces)
    assert off > 5 and sent == pytest.approx(1) and title == "mean_of_means"
    off, sent, _ = lab02.accumulate_picture(sum_over_count, pieces)
    assert off < 1e-3 and 1 < sent < 1.0001
    assert lab02.accumulate_picture(stub, pieces) == (0.0, 1.0, "stub, not yet yours: what is due")


def test_an_epoch_is_drawn_from_ones_own_steps_or_from_torchs_sampler():
    def dealt(num_samples, batch_size, rank, world_size, epoch):
        return [([rank], 0.25), ([4] if rank == 0 else [], float(rank == 0))]

    rows, when, title, last = lab02.epoch_picture(dealt, 5, 1, 4)
    assert when == [[0, 1], [0], [0], [0]]
    assert rows == [[0, 4], [1], [2], [3]] and title == "dealt, epoch 0: every sample once"
    assert last.startswith("rank 0: 1 with weight 1; rank 1: 0 with weight 0;")
    rows, when, title, last = lab02.epoch_picture(stub, 18, 2, 4)
    assert when == [[0, 0, 1, 1, 2]] * 4
    assert [len(row) for row in rows] == [5] * 4 and "not yet yours" in title and "2 samples twice" in title


@pytest.mark.parametrize(
    "answer", [lambda *a: 1 // 0, lambda *a: [], lambda *a: [([99], 1.0)], lambda *a: None, lambda *a: [[1, 2]]]
)
def test_an_epoch_that_cannot_be_drawn_is_torchs_and_says_so(answer):
    rows, when, title, last = lab02.epoch_picture(answer, 18, 2, 4)
    assert list(map(len, when)) == list(map(len, rows))
    assert [len(row) for row in rows] == [5] * 4 and "cannot be drawn" in title and "not yet yours" not in title


def test_a_step_is_plain_data(naive):
    assert dataclasses.is_dataclass(naive) and naive.num_bytes == sum(p.nbytes for p in recorded.model().parameters())
