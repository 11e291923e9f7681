"""Steps on the played device and their replay; judges' helpers of 5.1 and 5.2; files, RAM and verdicts."""

import random
from dataclasses import replace

import pytest
import torch

from labkit.check.observed import Observed
from labkit.cost import hardware
from labkit.labs import lab05
from labkit.labs.lab05 import adam, asked, disk, offloaded, offloaded_evidence, played, runs, stations
from labkit.record.integrity import Finding, Integrity

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def steps():
    return {
        "device": lab05.train(lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=False)),
        "host": lab05.train(lambda weights: lab05.TorchOnHost(weights, lr=1e-3)),
    }


def test_the_device_holds_three_times_its_weights_with_torchs_adamw_and_once_offloaded(steps):
    for name, times in (("device", 3), ("host", 1)):
        step = steps[name]
        assert step.held[-1] == pytest.approx(times * step.parameter_bytes, rel=1e-3)
        assert max(step.held) > step.held[-1]


def test_gradients_go_down_once_and_weights_up_once(steps):
    assert (steps["device"].moved("down"), steps["device"].moved("up")) == (0, 0)
    step = steps["host"]
    assert step.moved("down") == step.moved("up") == step.parameter_bytes


def test_the_replay_takes_what_its_lanes_take_by_hand(steps):
    t4, dram = hardware.device("T4"), 80e9
    on_t4 = lab05.replayed(steps["host"], t4, dram)
    assert on_t4.deadlock == "" and on_t4.findings == ()
    lanes = {name: sum(end - start for start, end, _ in spans) for name, spans in lab05.lanes(steps["host"], on_t4)}
    size = steps["host"].parameter_bytes
    tensors = sum(entry.kind == "down" for entry in steps["host"].entries)
    for way in ("down", "up"):
        due = size / t4.host.bandwidth + tensors * t4.host.alpha_s
        assert lanes[f"PCIe, {way}"] == pytest.approx(due)
    assert lanes["host: Adam"] == pytest.approx(stations.TOUCHED * size / 2 / dram)
    ops = [entry for entry in steps["host"].entries if entry.kind == "op"]
    assert lanes["GPU"] == pytest.approx(sum(t4.time_s(op.flops, op.num_bytes, "fp16") for op in ops))
    assert on_t4.time_s >= max(lanes.values())


def test_lanes_tell_forward_backward_and_the_step(steps):
    on_t4 = lab05.replayed(steps["device"], hardware.device("T4"), 80e9)
    ((name, spans),) = lab05.lanes(steps["device"], on_t4)
    kinds = [kind for *_, kind in spans]
    assert name == "GPU" and list(dict.fromkeys(kinds)) == ["forward", "backward", "optimizer"]
    assert kinds == sorted(kinds, key=["forward", "backward", "optimizer"].index)


def test_torchs_references_have_the_losses_of_adamw_on_masters(steps):
    torch.manual_seed(0)
    from labkit.model.llama import Llama, Shape, loss_of
    from labkit.model.text import batches

    model = Llama(Shape(**played.SHAPE)).bfloat16()
    losses = [
        loss_of(model(tokens), targets).item() for tokens, targets in batches(played.BATCH, played.LENGTH, steps=1)
    ]
    assert steps["host"].losses[0] == pytest.approx(losses[0], rel=1e-2)


# Adam and its mistakes


def some(dtype=torch.float32, count=5):
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(50, generator=generator) / 8).to(dtype)
    return start, [torch.randn(50, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_right_weights_are_close_and_every_mistakes_are_told_apart(dtype):
    start, grads = some(dtype)
    due = [master.to(dtype) for master in adam.serial(start, grads, OPTIONS)]
    assert all(adam.close(g, d, OPTIONS["lr"]) for g, d in zip(due, adam.serial(start, grads, OPTIONS), strict=True))
    wide = OPTIONS | {"lr": 0.02}
    for code in adam._MISTAKES:
        if code in ("zeros_for_none", "master_lost", "moments_narrow"):
            continue  # show with a gradient that is missing, or in bf16 alone
        got = [each.to(dtype) for each in adam._with(code, start, grads, wide)]
        told = adam.mistaken(got, start, grads, wide, 4)
        assert told == code or {told, code} <= {"always_first_step", "moments_lost", "eps_before", "eps_inside"}, code


def test_a_mistake_that_nobody_knows_has_a_sentence_too():
    start, grads = some()
    got = [start + 0.1 * step for step in range(1, 6)]
    assert adam.mistaken(got, start, grads, OPTIONS, 4) == "" and adam.SENTENCES[""]


def test_zeros_for_none_is_told():
    start, grads = some()
    grads[2] = None
    got = adam._with("zeros_for_none", start, grads, OPTIONS)
    assert adam.mistaken([each.float() for each in got], start, grads, OPTIONS, 4) == "zeros_for_none"


def test_a_count_that_every_hook_raises_is_told():
    start, grads = some()
    got = adam._with("counted", start, grads, OPTIONS, [2 + 4 * step for step in range(5)])
    assert adam.mistaken([each.float() for each in got], start, grads, OPTIONS, 4) == "shared_count"


# Evidence


def entries(*rows):
    """(kind, name, num_bytes, flops, held_bytes, storage) rows of a book."""
    return [(kind, name, num_bytes, flops, held, -1) for kind, name, num_bytes, flops, held in rows]


def test_a_books_step_is_cut_at_its_marks():
    book = entries(
        ("mark", "begin", 0, 0, 100), ("up", "to", 8, 0, 108), ("mark", "backward", 0, 0, 130), ("op", "mm", 0, 9, 140),
        ("mark", "gradient a 1", 0, 0, 140), ("down", "to", 20, 0, 140), ("up", "copy_", 20, 0, 120),
        ("op", "mm", 0, 9, 130), ("mark", "gradient b 0", 0, 0, 130), ("down", "to", 30, 0, 130),
        ("mark", "ended", 0, 0, 110), ("up", "copy_", 30, 0, 110), ("mark", "stepped", 0, 0, 110),
        ("mark", "zeroed", 0, 0, 100),
    )  # fmt: skip
    begin, (step,) = offloaded_evidence.steps_of(book)
    assert begin == 100
    assert (step.down, step.up, step.early_down, step.early_up) == (50, 50, 20, 20)
    assert (step.stray, step.ended, step.zeroed) == (1, 110, 100)


def test_an_empty_book_is_no_evidence():
    case = offloaded.cases(random.Random(0))[0]
    serial = offloaded.Serial({}, {}, {})
    found, _ = offloaded_evidence.moved(case, {"entries": [], "host": {}}, serial)
    assert found.cause == "no_record"


def test_cases_hold_what_they_are_named_for():
    found = {case.what: case for case in offloaded.cases(random.Random(1))}
    assert found["bf16"].plan.dtype == "bfloat16" and found["frozen"].plan.frozen and found["tied"].plan.tied
    used = [set(use.tolist()) for *_, use in found["unused"].batches]
    assert all(0 in each and 3 not in each for each in used) and sum(1 in each for each in used) > 1


# Files


def test_findings_that_belong_to_the_exercise_are_left_out_and_others_not():
    told = Finding("file_used", "a file", "x:1"), Finding("thread_started", "a thread", "x:2")
    integrity = Integrity(told, True, 1, 1, ())
    witness = ([["file_used", "a file", "x:1"], ["thread_started", "a thread", "x:2"], 2],)
    observed = Observed(1, (None,), (None,), (integrity,), None, tuple(map(tuple, witness)))
    found = asked.honest_but(observed, ("file_used",))
    assert found.cause == "thread_started"
    forged = replace(observed, witnesses=((*witness[0][:2], 1),))
    assert asked.honest_but(forged, ("file_used", "thread_started")).cause == "no_record"


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (("", ""), "full_disk_unnoticed"),
        (("OSError", "[Errno 27] File too large"), "full_disk_unclear"),
        (("RuntimeError", "/x/full needs 480000 bytes"), "full_disk_unclear"),
        (("OSError", "/x/full needs 12 bytes"), "full_disk_unclear"),
        (("OSError", "/elsewhere needs 480000 bytes"), "full_disk_unclear"),
        (("OSError", "/x/full needs 720,004 bytes, 64 are free"), None),
    ],
)
def test_what_is_said_of_a_full_disk_must_name_folder_and_bytes(raised, cause):
    found = disk._full(disk._case(random.Random(0)), raised, "/x/full")
    assert (found and found.cause) == cause


def test_labkits_own_reference_is_no_answer():
    found = asked.unfinished(lab05.TorchOnHost, "", [])
    assert found.cause == "ready_made"

    class Mine(lab05.TorchOnHost):
        pass

    assert asked.unfinished(Mine, "", []).cause == "ready_made"


# Live runs


def test_deepspeeds_losses_are_the_same_with_and_without_offload():
    pytest.importorskip("deepspeed")
    found = lab05.with_deepspeed(steps=3)
    assert [run.name for run in found] == [name for name, _ in runs.OFFLOADS]
    for run in found[1:]:
        assert run.losses == pytest.approx(found[0].losses, rel=1e-5)


def test_deepspeeds_losses_are_the_same_in_files(tmp_path):
    pytest.importorskip("deepspeed")
    from labkit.model.deepspeed import async_io

    ready = async_io()
    if ready.state != "built":
        pytest.skip(f"waits for async_io: {ready.sentence}")
    plain, in_files = lab05.to_files(str(tmp_path), steps=3)
    assert in_files.folder_bytes > 8 * 1e6 and plain.folder_bytes == 0
    assert in_files.losses == pytest.approx(plain.losses, rel=1e-5)


def test_ram_of_an_optimizer_on_disk_is_that_of_files(tmp_path):
    own = lab05.ram_of(lambda weights: torch.optim.AdamW(weights, foreach=False), 2**22)
    if own is None:
        pytest.skip("no /proc/self/status here")
    mapped = lab05.ram_of(_on_disk(str(tmp_path)), 2**22)
    state = 2 * 4 * 2**22  # two moments in fp32
    assert own.anonymous > 0.9 * state and mapped.files > 0.9 * state
    assert mapped.anonymous < own.anonymous


def _on_disk(folder):
    return lambda weights: lab05.TorchOnDisk(weights, folder)


def test_without_a_gpu_the_table_says_what_it_would_measure():
    assert "No GPU" in lab05.copies_table([])
    told = lab05.copies_table([runs.Copies(2**20, 1e9, 2e9, 3e9, 4e9)])
    assert "1 MiB" in told and "4.0" in told
