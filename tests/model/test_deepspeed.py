"""How DeepSpeed is started: nothing compiles, nothing is clipped unasked, its absence is said in a line."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from labkit.model import deepspeed as ours
from labkit.model.deepspeed import DeepSpeedMissing, clear_stale_lock, complete, import_deepspeed, start_deepspeed
from labkit.ranks.launch import launch, run_ranks
from tests.record import training


def losses_of(name, *arguments):
    training.quiet()
    step = getattr(training, name)(*arguments)
    return [step() for _ in range(3)]


def test_stages_train_as_ddp_does_and_nothing_compiles():
    pytest.importorskip("deepspeed")
    expected = launch(losses_of, 2, "ddp", prints="quiet")
    for stage in (1, 3):
        outcome = run_ranks(losses_of, 2, "deepspeed", stage, prints="quiet", preload=("deepspeed",), deadline_s=120)
        assert outcome.cause is None, outcome.cause
        torch.testing.assert_close(torch.tensor(outcome.results), torch.tensor(expected), rtol=1e-4, atol=1e-4)
        assert not any("compile" in text for text in outcome.output)


def test_a_config_gets_what_deepspeed_would_assume_wrongly():
    given = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config = complete(given)
    assert config["gradient_clipping"] == 0.0 and config["zero_allow_untested_optimizer"]
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["optimizer"]["params"] == {"torch_adam": True}
    assert given == {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2,
                     "offload_optimizer": {"device": "cpu"}}}  # fmt: skip
    assert complete({"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


def test_its_absence_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(DeepSpeedMissing, match="pip install deepspeed"):
        import_deepspeed()


def test_outside_a_rank_it_says_where_it_belongs():
    pytest.importorskip("deepspeed")
    with pytest.raises(RuntimeError, match="launch"):
        start_deepspeed(torch.nn.Linear(1, 1), {"train_micro_batch_size_per_gpu": 1})


def test_the_lock_of_a_dead_compile_is_removed_and_that_of_a_living_one_stays(tmp_path, capsys):
    lock = tmp_path / "lock"
    assert not clear_stale_lock(tmp_path)
    lock.touch()
    assert not clear_stale_lock(tmp_path) and lock.exists()
    os.utime(lock, (time.time() - 3600,) * 2)
    assert clear_stale_lock(tmp_path) and not lock.exists()
    assert "lock" in capsys.readouterr().out


def _ended_process():
    done = subprocess.Popen([sys.executable, "-c", "pass"])
    done.wait()
    return done.pid


def test_the_lock_of_a_compile_that_was_killed_a_moment_ago_is_removed(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / ours.OWNER).write_text(str(_ended_process()))
    assert clear_stale_lock(tmp_path) and not (tmp_path / "lock").exists()


def test_the_lock_of_a_compile_that_goes_on_stays_however_old(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    (tmp_path / ours.OWNER).write_text(str(os.getpid()))
    assert not clear_stale_lock(tmp_path) and lock.exists()


def test_a_compile_is_told_of_and_does_not_wait_for_a_dead_ones_lock(tmp_path, monkeypatch, capsys):
    pytest.importorskip("deepspeed")
    from deepspeed.ops.op_builder.builder import OpBuilder

    folder = tmp_path / "some_op"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / ours.OWNER).write_text(str(_ended_process()))
    seen = []

    def load(builder, verbose=True):
        seen.append(((folder / "lock").exists(), (folder / ours.OWNER).read_text()))
        return "module"

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(OpBuilder, "jit_load", load)
    with ours._told_of_compiling():
        assert OpBuilder.jit_load(SimpleNamespace(name="some_op")) == "module"
    assert seen == [(False, str(os.getpid()))] and not (folder / ours.OWNER).exists()
    out = capsys.readouterr().out
    assert "Removed" in out and "compiles some_op" in out and "compiled some_op" in out
    assert OpBuilder.jit_load is load


def test_a_long_compile_says_that_it_goes_on(capsys):
    with ours._telling_of("some_op is being compiled", every_s=0.01):
        while "some_op is being compiled" not in (told := capsys.readouterr().out):
            time.sleep(0.005)
    assert "s so far" in told


@pytest.mark.parametrize("state", ["missing", "to build", "built"])
def test_offload_to_files_is_looked_for_without_compiling(tmp_path, monkeypatch, state):
    pytest.importorskip("deepspeed")
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda builder, verbose=False: state != "missing")
    monkeypatch.setattr(OpBuilder, "jit_load", lambda *args: pytest.fail("it compiles"))
    for name in ours.AIO_OPS if state == "built" else ():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    found = ours.async_io()
    assert found.state == state
    word = {"missing": "libaio-dev", "to build": "build_async_io", "built": str(tmp_path)}[state]
    assert word in found.sentence
