"""Data behind the pictures of lab 00 that use the learner's own function.

Each gives what `labkit.view.plot` draws, and a title. While a function is still a stub the data is that of a
plain reference and the title says "not yet yours". A wrong answer is drawn as it is; where it cannot be drawn,
because it raised, hung or returned something else, the title says what came back. Left out: drawing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

STUB = "not yet yours"
_MOST_CELLS = 64  # a row of more numbers than this is not drawn
_TITLE_WIDTH = 64


def messages(fn: Callable, world_size: int, *args: Any) -> tuple[tuple[float, float, int, int], ...]:
    """Messages of `fn(tensor, *args)` on ranks, in rounds: (start, end, source, destination).

    () when fn is a stub. Raises RankFailed when the ranks fail.
    """
    from labkit.ranks.outcome import RankFailed

    sent, cause, _ = _watched(fn, world_size, args)
    if cause is not None:
        raise RankFailed(cause)
    return sent


def broadcast_picture(fn: Callable, fallback: Callable, world_size: int = 8, root: int = 0) -> tuple[tuple, str]:
    """Messages of `fn(tensor, root)`, or of `fallback` while fn is a stub; and a title with the rounds.

    The title also names the ranks that the root's tensor never reached, and says why ranks failed.
    """
    from labkit.ranks.outcome import LaunchError

    try:
        sent, cause, is_stub = _watched(fn, world_size, (root,))
    except LaunchError as error:
        return messages(fallback, world_size, root), _title(fn, f"{error}; shown: {_name(fallback)}")
    if is_stub:
        sent = messages(fallback, world_size, root)
        return sent, f"{STUB}: {_name(fallback)}: {_rounds(sent)}"
    unreached = _unreached(sent, world_size, root)
    said = [_rounds(sent)]
    said += [f"{_numbered('rank', unreached)} never reached"] * bool(unreached)
    said += [cause.sentence] if cause is not None else []
    return sent, _title(fn, "; ".join(said))


def rows_picture(fn: Callable, num_rows: int, world_size: int) -> tuple[list, str]:
    """What `fn(num_rows, rank, world_size)` gave each rank, or torch's own shards while fn is a stub.

    For shards that the lesson cannot use the title says why; see `usable_shards`.
    """
    try:
        answers = [fn(num_rows, rank, world_size) for rank in range(world_size)]
    except Exception as error:
        told = f"raised {type(error).__name__}: {error}"
        return balanced(num_rows, world_size), _title(fn, f"{told}; shown: torch.tensor_split")
    if all(answer is NotImplemented for answer in answers):
        return balanced(num_rows, world_size), f"{STUB}: torch.tensor_split"
    unread = [rank for rank, answer in enumerate(answers) if not _are_rows(answer)]
    if unread:
        told = f"{_numbered('rank', unread)} returned {_kind(answers[unread[0]])}"
        return balanced(num_rows, world_size), _title(fn, f"{told}; shown: torch.tensor_split")
    shown = [answer if _stray(answer, num_rows) == 0 else _inside(answer, num_rows) for answer in answers]
    trouble = _trouble(answers, num_rows)
    if trouble:
        return shown, f"{_title(fn, trouble)}\nthe lesson goes on with balanced ones"
    return shown, f"{_name(fn)}: {num_rows} rows on {world_size} ranks"


def usable_shards(shards: Sequence[Sequence[int]], num_rows: int) -> list[range]:
    """The shards themselves where they are balanced blocks that hold every row once; else `balanced` ones.

    So that what the lesson shows of a mean of means does not depend on a wrong answer.
    """
    return balanced(num_rows, len(shards)) if _trouble(shards, num_rows) else list(shards)


def balanced(num_rows: int, world_size: int) -> list[range]:
    """The blocks of rows that torch.tensor_split makes."""
    import torch

    parts = [part.tolist() for part in torch.arange(num_rows).tensor_split(world_size)]
    return [range(p[0], p[-1] + 1) if p else range(0) for p in parts]


def ring_picture(fn: Callable, world_size: int = 5) -> tuple[list, list, str]:
    """(before, after, title) of `fn(tensor)` on real ranks; after is what is due where there is nothing to draw."""
    before = [[10 * rank, 10 * rank + 1] for rank in range(world_size)]
    after, told = _ran(fn, [(row,) for row in before])
    if told:
        return before, [before[rank - 1] for rank in range(world_size)], told + _due(told)
    return before, after, _title(fn, _nothing(after, range(world_size)))


def gather_picture(fn: Callable, rows: Sequence[int] = (1, 3, 0, 2), root: int = 1) -> tuple[list, list, str]:
    """(before, after, title) of `fn(tensor, root)` on real ranks, of which rank r has rows[r] rows."""
    before = [[10 * rank + row for row in range(count)] for rank, count in enumerate(rows)]
    after, told = _ran(fn, [(row, root) for row in before])
    if told:
        whole = [value for row in before for value in row]
        due = [whole if rank == root else None for rank in range(len(rows))]
        return before, due, f"{told}{_due(told)} at rank {root}"
    return before, after, _title(fn, _nothing(after, [root])) if after[root] is None else f"{_name(fn)} to rank {root}"


def compared(mine: Any, torchs: Any) -> Any:
    """Whether two tensors are equal; in words where `mine` is a stub's result or no tensor."""
    import torch

    if mine is NotImplemented:
        return STUB
    if not isinstance(mine, torch.Tensor):
        return f"{_kind(mine)} came back"
    return mine.dtype == torchs.dtype and torch.equal(mine, torchs)


def _watched(fn: Callable, world_size: int, args: tuple) -> tuple[tuple, Any, bool]:
    """(messages that passed, why the ranks failed or None, whether fn is a stub)."""
    from labkit.check import evidence

    seen = evidence.observe(_on_a_number, world_size, args=(fn, args))
    cause = seen.outcome.cause
    if cause is None and all(seen.results):
        return (), None, True
    return evidence.timeline(seen).messages, cause, False


def _ran(fn: Callable, rank_args: list[tuple]) -> tuple[list, str]:
    """(what each rank returned, as lists or None; why it cannot be drawn, or "")."""
    from labkit.ranks.launch import run_ranks
    from labkit.ranks.outcome import LaunchError

    try:
        outcome = run_ranks(_as_list, len(rank_args), fn, rank_args=rank_args, deadline_s=20.0)
    except LaunchError as error:
        return [], _title(fn, str(error))
    if outcome.cause is not None:
        return [], _title(fn, outcome.cause.sentence)
    after = list(outcome.results)
    if all(out is NotImplemented for out in after):
        return [], STUB
    for rank, out in enumerate(after):
        if not (out is None or isinstance(out, list)):
            told = out if isinstance(out, str) else _kind(out)
            return [], _title(fn, f"rank {rank} returned {told}")
    return after, ""


def _unreached(sent: Sequence[tuple], world_size: int, root: int) -> list[int]:
    """Ranks that no chain of messages from the root ends at."""
    knows = {root: 0.0}
    for start, end, source, destination in sorted(sent, key=lambda message: message[1]):
        if knows.get(source, float("inf")) <= start:
            knows.setdefault(destination, end)
    return [rank for rank in range(world_size) if rank not in knows]


def _trouble(shards: Sequence[Sequence[int]], num_rows: int) -> str:
    """Why the lesson cannot use these shards, in words for a title; "" when it can."""
    held = [sum(shard.count(row) for shard in shards) for row in range(num_rows)]
    missing = [row for row, count in enumerate(held) if count == 0]
    doubled = [row for row, count in enumerate(held) if count > 1]
    stray = sum(_stray(shard, num_rows) for shard in shards)
    said = [f"{_numbered('row', missing)} on no rank"] * bool(missing)
    said += [f"{_numbered('row', doubled)} twice or more"] * bool(doubled)
    said += [f"{stray:,} row{'s' * (stray != 1)} that the data does not have"] * bool(stray)
    if not said and any(type(shard) is not range or (len(shard) > 1 and shard.step != 1) for shard in shards):
        return "not blocks of rows"
    sizes = [len(shard) for shard in shards]
    if not said and max(sizes) - min(sizes) > 1:
        return f"shards of {max(sizes)} and {min(sizes)} rows"
    return ", ".join(said)


def _are_rows(answer: Any) -> bool:
    return isinstance(answer, range) or (
        isinstance(answer, (list, tuple)) and all(type(row) is int for row in answer) and len(answer) <= _MOST_CELLS
    )


def _stray(shard: Sequence[int], num_rows: int) -> int:
    """How many of the shard's rows are not rows of the data."""
    return len(shard) - sum(shard.count(row) for row in range(num_rows))


def _inside(shard: Sequence[int], num_rows: int) -> list[int]:
    return [row for row in range(num_rows) if row in shard]


def _rounds(sent: Sequence[tuple]) -> str:
    rounds = max((end for _, end, *_ in sent), default=0)
    return f"{rounds:g} round{'s' * (rounds != 1)}" if sent else "no message"


def _numbered(what: str, numbers: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 3" or "ranks 4-7"; runs of three and more are drawn together."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    told = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{what}{'s' * (len(numbers) != 1)} {', '.join(told)}"


def _due(told: str) -> str:
    return ": what is due" if told == STUB else "\nshown: what is due"


def _nothing(after: Sequence, ranks: Sequence[int]) -> str:
    empty = [rank for rank in ranks if after[rank] is None]
    return f"{_numbered('rank', empty)} returned None" if empty else ""


def _title(fn: Callable, said: str) -> str:
    return "\n".join(textwrap.wrap(f"{_name(fn)}: {said}" if said else _name(fn), _TITLE_WIDTH))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", "the function")


def _kind(value: Any) -> str:
    return str(value) if value is None or value is NotImplemented else f"a value of type {type(value).__name__}"


def _on_a_number(fn: Callable, args: tuple) -> bool:
    """Runs in a rank: whether fn is a stub there. What else it returns is not part of the picture."""
    import torch
    import torch.distributed as dist

    return fn(torch.full((1,), float(dist.get_rank()), device=_device()), *args) is NotImplemented


def _as_list(fn: Callable, row: list, *args: Any) -> Any:
    """Runs in a rank: a list of numbers, None, NotImplemented, or in words what else came back."""
    import torch

    out = fn(torch.tensor(row, dtype=torch.int64, device=_device()), *args)
    if out is None or out is NotImplemented:
        return out
    if not isinstance(out, torch.Tensor):
        return _kind(out)
    return out.flatten().tolist() if out.numel() <= _MOST_CELLS else f"{out.numel():,} numbers"


def _device() -> Any:
    """The rank's GPU under NCCL. Else the CPU: gloo cannot send from a GPU's memory."""
    import torch.distributed as dist

    from labkit.ranks.rank import device

    return device() if "nccl" in dist.get_backend_config() else "cpu"
