"""Lab 04's exercise 4.5: what its judge saves, how it looks at a folder, and what it knows of wrong loads."""

import itertools
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from labkit import launch, run_ranks
from labkit.labs.lab04 import checkpoint_cases as cases
from labkit.labs.lab04 import checkpoint_crashes, checkpoint_ranks, checkpoint_told
from labkit.ranks.outcome import Cause
from labkit.record.integrity import Finding, Integrity


def contents():
    return cases.contents(random.Random(3))


# What is saved


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_parts_together_are_the_tensor_and_zeros(n):
    tensor = torch.arange(1, 14)
    parts = [cases.part_of(tensor, rank, n) for rank in range(n)]
    assert len({part.numel() for part in parts}) == 1
    whole = torch.cat(parts)
    assert whole[:13].equal(tensor) and not whole[13:].any() and whole.numel() - 13 < n


@pytest.mark.parametrize("seed", range(6))
def test_kept_padding_shows_in_the_size_of_a_part_on_two_ranks_and_on_three(seed):
    for content in cases.contents(random.Random(seed)):
        for tensor in content.tensors.values():
            saved = torch.cat([cases.part_of(tensor, rank, 4) for rank in range(4)])
            for n in (2, 3):
                if tensor.numel() > 1:
                    assert cases.part_of(saved, 0, n).numel() != cases.part_of(tensor, 0, n).numel()


def test_steps_sort_otherwise_as_text_and_contents_differ():
    found = contents()
    assert sorted(str(each.step) for each in found) != [str(each.step) for each in found]
    assert found[0].step == found[1].step and len({each.step for each in found}) == len(found) - 1
    for one, other in itertools.combinations(found, 2):
        assert one.sizes == other.sizes and not one.tensors["parameters"].equal(other.tensors["parameters"])
    assert {str(tensor.dtype) for tensor in found[0].tensors.values()} >= {"torch.float32", "torch.bfloat16"}


def test_shards_come_as_views_of_longer_storages():
    given = contents()[0].shards(1, 4)
    for name, view in checkpoint_ranks._views(given, 1).items():
        assert view.equal(given[name])
        assert view.untyped_storage().nbytes() == 4 * view.nbytes


# Looking at a folder


def test_a_digest_tells_equal_folders_from_others(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "a").mkdir(parents=True)
        (folder / "a" / "x").write_bytes(b"abc")
    assert cases.digest(str(one)) == cases.digest(str(other))
    (other / "a" / "x").write_bytes(b"abd")
    assert cases.digest(str(one)) != cases.digest(str(other))
    (other / "a" / "x").rename(other / "a" / "y")
    (other / "a" / "y").write_bytes(b"abc")
    assert cases.digest(str(one)) != cases.digest(str(other))


def test_a_file_that_was_written_into_is_found_and_a_replaced_one_is_not(tmp_path):
    saved = tmp_path / "states" / "whole 2"
    saved.mkdir(parents=True)
    for name in ("in_place", "replaced"):
        (saved / name).write_text("one, of the first save")
    before = cases.files(str(saved))
    (saved / "in_place").write_text("two, of the second save")
    (saved / "new").write_text("two, of the second save")
    os.utime(saved / "in_place", ns=(1, 1))
    os.replace(saved / "new", saved / "replaced")
    after = cases.files(str(saved))
    seen = SimpleNamespace(results=[{"before": [after, before], "after": [after, after]}])
    assert not checkpoint_crashes._overwritten(str(tmp_path), seen, 1)
    found = checkpoint_crashes._overwritten(str(tmp_path), seen, 2)
    assert [(event, name) for _, event, name in found] == [("written in place", "in_place")]
    assert len((tmp_path / "torn-2-0" / "in_place").read_text()) == len("two, of the second save") // 2


def test_files_of_the_old_one_that_are_gone_or_changed_are_named(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        for name in ("a", "b", "c"):
            (folder / name).write_text("as it was")
    assert checkpoint_crashes._lost(str(before), str(after)) == []
    (after / "a").unlink()
    (after / "b").write_text("other")
    (after / "d").write_text("more")
    assert sorted(checkpoint_crashes._lost(str(before), str(after))) == ["a", "b"]


def saves_by_hand(folder, states):
    """Runs in a rank: states of a save that removes the old file, writes a new one, and overwrites the mark."""
    found = []
    checkpoint_ranks._watch(folder, states, 0, found).append(True)
    os.remove(os.path.join(folder, "old"))
    with open(os.path.join(folder, "new"), "w") as file:
        file.write("new")
    with open(os.path.join(folder, "mark"), "w") as file:
        file.write("new")
    with open(os.path.join(folder, "mark")) as file:
        file.read()
    return found


def test_a_state_is_kept_before_each_change_and_for_a_file_that_is_emptied(tmp_path):
    folder, states = tmp_path / "saved", tmp_path / "states"
    folder.mkdir()
    (folder / "old").write_text("old")
    (folder / "mark").write_text("old")
    (found,) = launch(saves_by_hand, 1, str(folder), str(states), prints="quiet")
    assert [(event, name) for _, event, name in found] == [
        ("os.remove", "old"), ("open", "new"), ("open", "mark"), ("emptied", "mark")
    ]  # fmt: skip
    held = [
        {name: (states / kept / name).read_text() for name in os.listdir(states / kept)} for kept, _, _ in found
    ]
    assert held[0] == {"old": "old", "mark": "old"}
    assert held[1] == {"mark": "old"}
    assert held[2] == {"mark": "old", "new": "new"}
    assert held[3] == {"mark": "", "new": "new"}


class Plain:
    """Writes its part, and no more."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, step, shards, sizes):
        os.makedirs(self.folder, exist_ok=True)
        torch.save(shards["parameters"].clone(), os.path.join(self.folder, str(step)))


@pytest.mark.parametrize("kill", [True, False])
def test_a_rank_dies_in_mid_write_or_meets_a_full_disk(tmp_path, kill):
    content, limit = contents()[0], 8192
    given = (content.step, content.shards(0, 4), content.sizes)
    outcome = run_ranks(
        checkpoint_ranks.save_limited, 1, Plain, str(tmp_path), 0, given, limit, kill, prints="quiet"
    )
    assert outcome.cause.code == ("died" if kill else "raised")
    assert (tmp_path / str(content.step)).stat().st_size == limit


# What a wrong load tells


def loads(content, n):
    return [(content.step, content.shards(rank, n)) for rank in range(n)]


def changed(found, name, tensor, rank=1):
    step, shards = found[rank]
    return [*found[:rank], (step, shards | {name: tensor}), *found[rank + 1 :]]


FIRST, AGAIN, SECOND, THIRD = contents()
SAVED = torch.cat([cases.part_of(SECOND.tensors["exp_avg"], rank, 4) for rank in range(4)])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_was_saved_is_right_on_any_number_of_ranks(n):
    assert checkpoint_told.wrong_load(SECOND, [FIRST], loads(SECOND, n), n) is None


@pytest.mark.parametrize(
    ("cause", "found"),
    [
        ("wrong_type", ["a dict of 4", "a dict of 4"]),
        ("half_attempted", ["NotImplemented", "NotImplemented"]),
        ("wrong_type", [("a float32 tensor of shape ()", {})] * 2),
        ("text_order", loads(FIRST, 2)),
        ("wrong_step", [(77, shards) for _, shards in loads(SECOND, 2)]),
        ("wrong_names", [(10, {"parameters": shards["parameters"]}) for _, shards in loads(SECOND, 2)]),
        ("dtype_lost", changed(loads(SECOND, 2), "rounded", SECOND.shards(1, 2)["rounded"].float())),
        ("not_resharded", changed(loads(SECOND, 2), "exp_avg", SECOND.shards(1, 4)["exp_avg"])),
        ("whole_tensor", changed(loads(SECOND, 2), "exp_avg", SECOND.tensors["exp_avg"])),
        ("whole_tensor", changed(loads(SECOND, 2), "exp_avg", SAVED)),
        ("padding", changed(loads(SECOND, 2), "exp_avg", cases.part_of(SAVED, 1, 2))),
        ("other_ranks_part", changed(loads(SECOND, 2), "exp_avg", SECOND.shards(0, 2)["exp_avg"])),
        ("mixed", changed(loads(SECOND, 2), "exp_avg", FIRST.shards(1, 2)["exp_avg"])),
        ("padding", changed(loads(SECOND, 2), "seen", torch.tensor([5]))),
        ("wrong_values", changed(loads(SECOND, 2), "exp_avg", SECOND.shards(1, 2)["exp_avg"] + 1)),
    ],
)
def test_a_wrong_load_is_known(cause, found):
    assert checkpoint_told.wrong_load(SECOND, [FIRST], found, 2)[1] == cause


def test_two_saves_of_one_step_are_told_apart():
    assert checkpoint_told.wrong_load(AGAIN, [FIRST, AGAIN, SECOND], loads(AGAIN, 2), 2) is None
    assert checkpoint_told.wrong_load(AGAIN, [FIRST, AGAIN], loads(FIRST, 2), 2)[1] == "not_saved_again"
    half = torch.cat([AGAIN.shards(1, 2)["exp_avg"][:100], FIRST.shards(1, 2)["exp_avg"][100:]])
    found = checkpoint_told.wrong_load(AGAIN, [FIRST], changed(loads(AGAIN, 2), "exp_avg", half), 2)
    assert found[1] == "mixed" and f"one save of step {AGAIN.step}" in found[2]


def test_a_rank_that_loads_an_older_step_where_another_loads_the_newest_did_not_wait():
    some = [loads(SECOND, 2)[0], loads(FIRST, 2)[1]]
    _, cause, sentence, *_ = checkpoint_told.wrong_load(SECOND, [FIRST], some, 2)
    assert checkpoint_told.at_once(SECOND, some, cause, sentence)[0] == "returns_early"
    assert checkpoint_told.at_once(SECOND, loads(FIRST, 2), cause, sentence) == (cause, sentence)
    assert checkpoint_told.at_once(SECOND, some, "padding", "the padding.") == ("padding", "the padding.")


@pytest.mark.parametrize(
    ("cause", "whole", "ready_made"),
    [("gathered", True, False), ("gathered", False, False), ("gathered", True, True), ("ready_made", False, True)],
)
def test_who_sends_shards_is_told_from_who_lets_torch_do_it(cause, whole, ready_made):
    told, sentence = checkpoint_told.travelling(29_000, whole, ready_made)
    assert told == cause
    assert ("29,000" in sentence) is (cause == "gathered" and not whole)


def test_a_gap_while_something_is_removed_is_told_with_its_file_or_without():
    for event, file, said in (
        ("os.remove", "2.pt", "while 2.pt is removed"),
        ("os.rmdir", "", "while the old one is removed"),
        ("os.rename", "latest", "os.rename of latest"),
    ):
        cause, sentence = checkpoint_told.after_state(event, file)
        assert cause == "gap" and said in sentence


def stopped(*reports, rank=0):
    """Observed, of loads on 2 ranks of which one failed."""
    outcome = SimpleNamespace(cause=Cause("raised", f"rank {rank} raised OSError.", rank), reports=reports)
    return SimpleNamespace(outcome=outcome, results=(None, None), world_size=2)


def test_a_load_that_failed_before_it_told_anything_is_not_right():
    found = checkpoint_crashes._after("", list(contents()), stopped(), [], 2)
    assert not found.passed and (found.stage, found.cause) == ("attempted", "raised")


def test_what_a_failed_run_was_about_is_what_the_rank_at_fault_told_last():
    reports = ((0, {"item": "full"}), (1, {"item": "killed"}), (0, {"item": "state 0"}), (1, {"item": "full"}))
    assert checkpoint_crashes.item(stopped(*reports, rank=0)) == "state 0"
    assert checkpoint_crashes.item(stopped(*reports, rank=1)) == "full"
    assert checkpoint_crashes.item(stopped(*reports, rank=None)) == "full"


def test_an_older_step_is_told_from_one_that_text_takes_for_newer():
    assert checkpoint_told.wrong_load(THIRD, [FIRST, SECOND], loads(SECOND, 2), 2)[1] == "older_step"


def test_halves_of_two_checkpoints_are_mixed():
    one, other = (content.shards(1, 2)["exp_avg"] for content in (SECOND, FIRST))
    half = torch.cat([one[:100], other[100:]])
    assert checkpoint_told.wrong_load(SECOND, [FIRST], changed(loads(SECOND, 2), "exp_avg", half), 2)[1] == "mixed"


@pytest.mark.parametrize(
    ("cause", "every"),
    [
        ("whole_storage", [400, 410, 405, 402]),
        ("written_twice", [205, 200, 210, 202]),
        ("one_writes", [420, 100, 100, 100]),
    ],
)
def test_too_many_bytes_are_told_apart(cause, every):
    assert checkpoint_told.too_much_written(every[0], 100, 0, every)[0] == cause


# Files are allowed, nothing else is


def test_findings_of_files_are_left_out_and_others_are_not():
    from labkit.check.honesty import honest
    from labkit.check.observed import Observed

    file, store = Finding("file_used", "a file."), Finding("store_used", "the store.")

    def seen(*findings):
        integrity = Integrity(tuple(findings), True, 1, 1, (), ())
        heard = (*([f.code, f.sentence, f.place] for f in findings), len(findings))
        outcome = SimpleNamespace(socket_bytes=None, ledgers=((),), backend="gloo", sequence_numbers=({},))
        record = SimpleNamespace(communications=())
        return Observed(1, (None,), (record,), (integrity,), outcome, (heard,))

    assert honest(seen(file)).cause == "file_used"
    assert honest(checkpoint_crashes.without_files(seen(file))) is None
    assert honest(checkpoint_crashes.without_files(seen(file, store))).cause == "store_used"
    hidden = seen(file, store)
    hidden = replace(hidden, integrity=(replace(hidden.integrity[0], findings=(file,)),))
    assert honest(checkpoint_crashes.without_files(hidden)).cause == "store_used"  # what was told is not forgotten
