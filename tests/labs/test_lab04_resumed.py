"""Training that was saved on 4 ranks goes on on 2 and 3, equal to a run that was never interrupted."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from labkit import RankFailed, launch
from labkit.classroom import prove
from labkit.labs import lab04
from labkit.labs.lab04 import resumed
from labkit.model.llama import loss_of
from labkit.model.text import batches
from slides import cells

pytestmark = pytest.mark.timeout(300)


def solution(name):
    return cells.function("04", name)


def train(optimizer_class, checkpoint_class, folder, until, every, fatal):
    """Runs in a rank: losses by step, going on from the newest checkpoint; saves after each `every` steps."""
    model, checkpoint = resumed.model(), checkpoint_class(folder)
    done, optimizer = resumed.begin(optimizer_class, checkpoint, model)
    n, losses, size = dist.get_world_size(), {}, sum(p.numel() for p in model.parameters())
    rows = batches(resumed.ROWS // n, resumed.LENGTH, 0, dist.get_rank(), n, steps=until)
    for step, (tokens, targets) in enumerate(rows, 1):
        if step <= done:
            continue
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if step % every == 0:
            if step == fatal and dist.get_rank() == 1:
                resumed.die_in_mid_write(size)
            shards = resumed.state_of(optimizer)
            checkpoint.save(step, shards, dict.fromkeys(shards, size))
    return losses


def means(ranks):
    return {step: sum(losses[step] for losses in ranks) / len(ranks) for step in ranks[0]}


WAYS = [
    ("ZeroOptimizer", "ShardedCheckpoint"),
    (resumed.Sliced, lab04.TorchCheckpoint),
    (lab04.TorchZero, "ShardedCheckpoint"),
]


@pytest.mark.parametrize(("optimizer", "checkpoint"), WAYS)
def test_saved_on_4_ranks_a_run_goes_on_on_2_and_3_as_if_never_interrupted(tmp_path, optimizer, checkpoint):
    classes = [solution(each) if isinstance(each, str) else each for each in (optimizer, checkpoint)]
    found = {}
    for n, until in ((4, 4), (2, 6), (3, 8)):
        found |= means(launch(train, n, *classes, str(tmp_path), until, 2, None, prints="quiet"))
    assert [found[step] for step in range(1, 9)] == pytest.approx(resumed.by_one(8), rel=1e-5)


def test_a_kill_in_mid_save_loses_nothing_that_was_whole(tmp_path):
    classes = solution("ZeroOptimizer"), solution("ShardedCheckpoint")
    with pytest.raises(RankFailed) as failure:
        launch(train, 4, *classes, str(tmp_path), 4, 2, 4, prints="quiet")
    assert failure.value.cause.code == "died" and failure.value.cause.rank == 1
    on_two = means(launch(train, 2, *classes, str(tmp_path), 4, 2, None, prints="quiet"))
    assert list(on_two) == [3, 4]  # from step 2, which was whole
    on_three = means(launch(train, 3, *classes, str(tmp_path), 6, 2, None, prints="quiet"))
    assert list(on_three) == [5, 6]
    due = resumed.by_one(6)
    assert [*on_two.values(), *on_three.values()] == pytest.approx(due[2:], rel=1e-5)


def test_torchs_checkpoint_with_our_face_cuts_anew_and_says_when_there_is_none(tmp_path):
    def save(folder):
        sizes = {"a": 11, "b": 2}
        whole = {"a": torch.arange(11.0), "b": torch.tensor([3, 4])}
        from labkit.labs.lab04.checkpoint_cases import part_of

        checkpoint = lab04.TorchCheckpoint(folder)
        with contextlib.suppress(FileNotFoundError):
            checkpoint.load()
            raise AssertionError("there was nothing to load")
        parts = {name: part_of(each, dist.get_rank(), dist.get_world_size()) for name, each in whole.items()}
        for step in (9, 10):
            checkpoint.save(step, parts, sizes)

    launch(save, 4, str(tmp_path), prints="quiet")
    found = launch(lambda folder: lab04.TorchCheckpoint(folder).load(), 3, str(tmp_path), prints="quiet")
    assert [step for step, _ in found] == [10, 10, 10]
    assert torch.cat([shards["a"] for _, shards in found]).tolist() == [*map(float, range(11)), 0.0]
    assert torch.cat([shards["b"] for _, shards in found]).tolist() == [3, 4, 0]


@pytest.mark.parametrize("name", ["Reversed", "ParameterOfThePart"])
def test_any_order_of_the_flat_parameters_and_any_parameter_over_the_shard_go_on(repo, tmp_path, name):
    answers = prove.load(repo / "tests" / "mistakes" / "lab04.py").RIGHT["4.1"]
    cls = next(answer for answer in answers if answer.__name__ == name)
    checkpoint, found = solution("ShardedCheckpoint"), {}
    for n, until in ((4, 2), (3, 4)):
        found |= means(launch(train, n, cls, checkpoint, str(tmp_path), until, 2, None, prints="quiet"))
    assert [found[step] for step in range(1, 5)] == pytest.approx(resumed.by_one(4), rel=1e-5)
