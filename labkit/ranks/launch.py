"""launch: run a function on real ranks and have their results, or the reason why there are none.

Every call has fresh ranks, so no call depends on the one before it, and a hang is ended by ending the ranks.
Left out: several machines. The same functions run there under torchrun, deepspeed or Slurm.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.ranks import receiving, sending, session, watch
from labkit.ranks.backend import choose_backend
from labkit.ranks.ledger import read as read_ledger
from labkit.ranks.outcome import Cause, LaunchError, Outcome, RankFailed, Stopped
from labkit.ranks.output import Output
from labkit.ranks.rank import RANK, Setup

MAX_WORLD_SIZE = 64
PRINTS = ("live", "ordered", "quiet")


def launch(fn: Callable, world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks and return their results in rank order.

    The process group is initialised: `torch.distributed` works inside `fn`. Options are those of `run_ranks`.
    Raises RankFailed when a rank raised, died, or the ranks did not agree (also when all of them returned but
    their collectives differed); LaunchError when the call cannot be carried out.
    """
    outcome = run_ranks(fn, world_size, *args, **options)
    if outcome.cause is not None:
        raise RankFailed(outcome.cause)
    return list(outcome.results)


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    rank_args: Sequence[tuple] | None = None,
    deadline_s: float = 60.0,
    backend: str | None = None,
    prints: str = "live",
    on_report: Callable[[int, dict[str, Any]], None] | None = None,
    threads: int = 1,
    preload: Sequence[str] = (),
    trusted: bool = True,
) -> Outcome:
    """Run `fn(*args, *rank_args[rank])` on every rank; never raises for what a rank did.

    rank_args: one tuple per rank, for inputs that differ. deadline_s: seconds before the ranks are ended.
    backend: "nccl" or "gloo"; by default nccl when there is a GPU for every rank. prints: "live" with a rank
    tag, "ordered" by rank at the end, or "quiet". on_report(rank, values) gets each `report` of a rank.
    threads: torch threads per rank. preload: modules to import once, before ranks are forked. trusted=False:
    results are opened with care (tensors, numbers, plain containers), as code of unknown origin deserves.
    Raises LaunchError for a call that cannot be carried out.
    """
    _check_call(world_size, rank_args, prints)
    _check_options(rank_args, deadline_s, threads, preload, on_report)
    # The function is packed before any argument is looked at: what it carries cannot depend on them.
    code = sending.pack_function(fn)
    own = rank_args or [()] * world_size
    packed = [sending.pack_arguments((*args, *mine)) for mine in (own if rank_args else own[:1])]
    payloads = [pickle.dumps((code, arguments)) for arguments in packed]
    payloads *= world_size // len(payloads)
    backend, devices = choose_backend(world_size, backend)
    setups = [_setup(rank, world_size, backend, devices[rank], threads, deadline_s) for rank in range(world_size)]
    output = Output(world_size, prints)
    return _run(setups, payloads, tuple(preload), output, on_report or output.report, deadline_s, trusted)


def _run(setups, payloads, preload, output: Output, on_report, deadline_s: float, trusted: bool) -> Outcome:
    started = time.monotonic()
    try:
        crew = session.start(setups, preload, output.take, on_report)
    except OSError as error:
        raise LaunchError(f"no rank could be started: {error}") from None
    try:
        try:
            cause, before, after = _fly(crew, payloads, deadline_s)
        except KeyboardInterrupt:
            raise Stopped(watch.where_all_are(crew)) from None
        time_s = time.monotonic() - started
        if cause is None:
            session.finish(crew)
        ledgers = tuple(read_ledger(member.ledger).entries for member in crew.members)
    finally:
        try:
            session.close(crew)
        finally:
            output.end()
    results, numbers, cause = _opened(crew, cause, trusted)
    moved = tuple(b - a for a, b in zip(before, after, strict=True)) if before and after else None
    return Outcome(results, cause, ledgers, tuple(crew.reports), output.texts(), moved, numbers, time_s,
                   setups[0].backend)  # fmt: skip


def _fly(crew: session.Session, payloads: list[bytes], deadline_s: float):
    """From the first rank's start to the last one's result: the cause and the socket counts at both ends."""
    cause = watch.wait_ready(crew)
    if cause is not None:
        return cause, None, None
    before = session.traffic(crew)
    for member, payload in zip(crew.members, payloads, strict=True):
        session.send(member, "go", payload)
    cause = watch.wait_done(crew, deadline_s)
    return cause, before, session.traffic(crew) if before is not None and cause is None else None


def _opened(crew: session.Session, cause: Cause | None, trusted: bool):
    """Results and sequence numbers in rank order, and the cause, which may be that a result cannot be opened."""
    results, numbers = [], []
    for member in crew.members:
        result, number = (None, {})
        if member.final is not None and member.final[0] == "result":
            try:
                result, number = receiving.loads(member.final[1], trusted)
            except Exception as error:  # a class that only the rank could import, say
                sentence = f"rank {member.rank} returned something that cannot be opened here"
                cause = cause or Cause(
                    "unpicklable_result", f"{sentence} ({type(error).__name__}: {error})", member.rank
                )
        results.append(result)
        numbers.append(number)
    return tuple(results), tuple(numbers), cause


def _check_call(world_size: Any, rank_args: Any, prints: str) -> None:
    if os.environ.get(RANK) is not None:
        raise LaunchError(f"launch was called inside rank {os.environ[RANK]}; call it from the notebook")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise LaunchError(f"world_size is {world_size!r}; it is the number of ranks, a whole number such as 4")
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise LaunchError(
            f"world_size is {world_size}; on one machine it can be 1 to {MAX_WORLD_SIZE}, such as 4"
        )
    if rank_args is not None and len(rank_args) != world_size:
        raise LaunchError(f"rank_args has {len(rank_args)} entries for {world_size} ranks; give one tuple per rank")
    if prints not in PRINTS:
        raise LaunchError(f"prints is {prints!r}; it can be {', '.join(PRINTS)}")
    if sys.platform == "win32":
        raise LaunchError("ranks need a Unix system; on Windows, open this notebook inside WSL")


def _check_options(rank_args: Any, deadline_s: Any, threads: Any, preload: Any, on_report: Any) -> None:
    if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s < float("inf"):
        raise LaunchError(f"deadline_s is {deadline_s!r}; it is a number of seconds over 0, such as 60")
    if rank_args is not None and not all(isinstance(own, tuple) for own in rank_args):
        raise LaunchError("rank_args holds something else than tuples; give one tuple per rank, such as (x,)")
    if not isinstance(threads, int) or threads < 1:
        raise LaunchError(f"threads is {threads!r}; it is the number of torch threads per rank, 1 or more")
    if isinstance(preload, str):
        raise LaunchError(f"preload is {preload!r}; give a list of module names, such as [{preload!r}]")
    if on_report is not None and not callable(on_report):
        raise LaunchError(f"on_report is {on_report!r}; give a function of (rank, values)")


def _setup(rank: int, world_size: int, backend: str, device: str, threads: int, deadline_s: float) -> Setup:
    return Setup(
        rank=rank,
        world_size=world_size,
        backend=backend,
        device=device,
        threads=threads,
        timeout_s=max(deadline_s, watch.START_DEADLINE_S) + 30.0,  # the deadline is ours: it can say why
        environ=dict(os.environ),
        folder=_folder(),
        path=tuple(sys.path),
        store_path="",
    )


def _folder() -> str:
    """The notebook's folder; the root where it has been deleted meanwhile (a rank needs one to stand in)."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
