"""The one place that starts DeepSpeed, so that nothing compiles and nothing is clipped unasked.

Seen with DeepSpeed 0.19.8: `init_distributed` builds a shared-memory op for 38-114 s even over gloo unless its
switch is off; its Adams compile for 90 s and more, torch's does not; gradient clipping that is not set means
1.0, not off; a killed compile leaves a lock on which the next run waits for ever. Left out: the `deepspeed`
launcher. Under it, or under `torchrun`, the same call works.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STALE_LOCK_S = 600.0
TELL_S = 30.0  # between two lines of a compile that goes on
AIO_OPS = ("pin_memory", "async_io")  # what offload to files needs, the first by way of the second
OWNER = "labkit-owner"  # beside torch's lock: the process that holds it


class DeepSpeedMissing(ImportError):
    """DeepSpeed cannot be imported; the message says how to get it, or what its import said."""


def import_deepspeed():
    """The deepspeed module, with its shared-memory op switched off and its folder for compiled ops set.

    Raises DeepSpeedMissing.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_extensions_folder()))
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise DeepSpeedMissing(f"DeepSpeed is installed but cannot be imported: {error}") from error
        raise DeepSpeedMissing("DeepSpeed is not installed: pip install deepspeed==0.19.8") from None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


def start_deepspeed(
    model: torch.nn.Module,
    config: dict[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    learning_rate: float = 1e-3,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """Wrap `model` in a DeepSpeed engine by `config`: (engine, its optimizer).

    optimizer: torch's own; by default AdamW with `learning_rate` over the model's parameters, unless the config
    names one. options go to `deepspeed.initialize` (mpu=, training_data=, ...). The process group must be there
    (in a rank of `launch` it is). Set in the config unless it says otherwise: gradient_clipping 0.0 (off),
    zero_allow_untested_optimizer, and that offloading keeps torch's optimizer.
    Raises DeepSpeedMissing, RuntimeError without a process group, and whatever DeepSpeed says to the config.
    """
    deepspeed = import_deepspeed()
    if not dist.is_initialized():
        raise RuntimeError("start_deepspeed runs in a rank: launch(fn, world_size) starts some")
    _set_environment()
    config = complete(config)
    if optimizer is None and "optimizer" not in config:
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    with _told_of_compiling():
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False, **options
        )
    return engine, optimizer


def connect():
    """The deepspeed module, talking over the process group that is there; PipelineModule needs that before an engine.

    Raises DeepSpeedMissing, and RuntimeError without a process group.
    """
    deepspeed = import_deepspeed()
    if not dist.is_initialized():
        raise RuntimeError("connect runs in a rank: launch(fn, world_size) starts some")
    _set_environment()
    backend = dist.get_backend()
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    return deepspeed


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config with what DeepSpeed would otherwise assume."""
    config = copy.deepcopy(config)
    config.setdefault("gradient_clipping", 0.0)
    config.setdefault("zero_allow_untested_optimizer", True)
    zero = config.get("zero_optimization", {})
    if "offload_optimizer" in zero or "offload_param" in zero:
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    named = config.get("optimizer", {})
    if named.get("type", "").lower() in ("adam", "adamw"):
        named.setdefault("params", {}).setdefault("torch_adam", True)
    return config


def _set_environment() -> None:
    """What DeepSpeed reads of its launcher, where no launcher has set it. Nothing listens at this address."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    for name, value in (
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", world_size),
        ("LOCAL_WORLD_SIZE", world_size),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ):
        os.environ.setdefault(name, value)


def _extensions_folder() -> Path:
    return Path(os.environ.get("LABKIT_HOME", "~/.labkit")).expanduser() / "torch_extensions"


@dataclass(frozen=True)
class AsyncIO:
    """Whether offload to files can run. state: "missing" (no libaio), "to build" or "built". sentence: the same, for a
    reader, with what to do."""

    state: str
    sentence: str


def async_io() -> AsyncIO:
    """Looks only, and compiles nothing but the few lines by which DeepSpeed looks for libaio. Raises DeepSpeedMissing.

    DeepSpeed reads and writes files by its op async_io, which needs libaio and is compiled at first use.
    """
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    with _silent_linker():
        compatible = AsyncIOBuilder().is_compatible(verbose=False)
    if not compatible:
        sentence = "libaio and its headers are not here (Debian: apt install libaio-dev), so DeepSpeed cannot offload "
        return AsyncIO("missing", sentence + "to files on this machine.")
    open_ = [name for name in AIO_OPS if not (folder / name / f"{name}.so").is_file()]
    if open_:
        sentence = f"libaio is here, but {' and '.join(open_)} would have to be compiled first (over 500 s on two "
        sentence += "cores, once): python -c 'from labkit.model import deepspeed; deepspeed.build_async_io()'"
        return AsyncIO("to build", sentence)
    return AsyncIO("built", f"async_io is built, in {folder}.")


@contextmanager
def _silent_linker():
    """Meanwhile what other programs write to stderr goes nowhere: DeepSpeed looks for libaio by linking against it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def build_async_io() -> None:
    """Compile what offload to files needs, with a line of progress every half a minute. Raises what the compiler says,
    and DeepSpeedMissing."""
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with _told_of_compiling():
        AsyncIOBuilder().load(verbose=False)


@contextmanager
def _told_of_compiling():
    """Say so when DeepSpeed compiles an op after all, and clear the lock of a compile that was killed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    original = OpBuilder.jit_load

    def jit_load(builder, verbose=True):
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / builder.name
        clear_stale_lock(folder)
        built = (folder / f"{builder.name}.so").is_file()
        if not built:
            print(f"DeepSpeed compiles {builder.name} in {folder}: one to ten minutes, once.", flush=True)
        start = time.monotonic()
        with _holding(folder), _telling_of(f"{builder.name} is being compiled"):
            module = original(builder, verbose)
        if not built:
            print(f"DeepSpeed compiled {builder.name} in {time.monotonic() - start:.0f} s.", flush=True)
        return module

    OpBuilder.jit_load = jit_load
    try:
        yield
    finally:
        OpBuilder.jit_load = original


@contextmanager
def _telling_of(what: str, every_s: float = TELL_S):
    """A line now and then while the block goes on."""
    over, start = threading.Event(), time.monotonic()

    def tell():
        while not over.wait(every_s):
            print(f"{what}: {time.monotonic() - start:.0f} s so far ...", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


@contextmanager
def _holding(folder: Path):
    """Note which process compiles in this folder, unless one that lives is noted already."""
    owner = folder / OWNER
    mine = not _lives(_read_pid(owner))
    if mine:
        folder.mkdir(parents=True, exist_ok=True)
        owner.write_text(str(os.getpid()))
    try:
        yield
    finally:
        if mine:
            owner.unlink(missing_ok=True)


def _read_pid(owner: Path) -> int | None:
    try:
        return int(owner.read_text())
    except (OSError, ValueError):
        return None


def _lives(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def clear_stale_lock(folder: Path, older_than_s: float = STALE_LOCK_S) -> bool:
    """Remove the lock of a compile that no longer runs; on it the next one would wait for ever.

    It no longer runs where the process noted beside it has ended, or, with none noted, after older_than_s.
    """
    lock, pid = folder / "lock", _read_pid(folder / OWNER)
    try:
        age_s = time.time() - lock.stat().st_mtime
        if _lives(pid) or (pid is None and age_s < older_than_s):
            return False
        lock.unlink()
    except OSError:
        return False
    print(f"Removed {lock}, left behind by a compile that was ended.", flush=True)
    return True
