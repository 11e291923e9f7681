"""A schedule as text, for an editor: a line that names it, then one line a rank, a column for each unit of time.

    schedule 1F1B: 2 ranks, 3 microbatches, stages on ranks 0 1
    rank 0: 0F0 0F1 .   .   0B0 -   0F2 0B1 -   .   0B2 -
    rank 1: .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -   .   .

A token is stage, kind, microbatch, as torch.distributed.pipelining writes it. "." is an idle unit and "-" the second
half of a B; only the order of a line's actions counts, so both may be left out. Left out: what is wrong with a
schedule that can be read (`validate`).
"""

from __future__ import annotations

import re

from labkit.schedule.actions import Action, Schedule
from labkit.schedule.timing import play
from labkit.schedule.validate import validate

FILLERS = (".", "-")
HEAD = re.compile(
    r"schedule (?P<name>[^:]*): (?P<ranks>\d+) ranks?, (?P<microbatches>\d+) microbatch(es)?, "
    r"stages on ranks?(?P<placement>( \d+)+)(, (?P<copies>\d+) copies)?"
)
SAMPLE = "schedule mine: 2 ranks, 4 microbatches, stages on ranks 0 1"
TOKEN = re.compile(r"(\d+)([A-Z])(\d+)")
MOST = 10_000  # ranks, microbatches, stages: more is a slip of the finger


def text(schedule: Schedule) -> str:
    """The schedule as text; with idle units where it is valid, without them where it is not. Its name goes without
    colons and in one line."""
    copies = f", {schedule.copies} copies" if schedule.copies > 1 else ""
    name = " ".join(schedule.name.replace(":", " ").split())  # a colon ends it, a line is a rank's
    head = (
        f"schedule {name}: {schedule.ranks} rank{'s' * (schedule.ranks > 1)}, {schedule.microbatches} "
        f"microbatch{'es' * (schedule.microbatches > 1)}, stages on ranks {' '.join(map(str, schedule.placement))}"
    )
    cells = _cells(schedule)
    width = max((len(cell) for row in cells for cell in row), default=1)
    label = len(f"rank {schedule.ranks - 1}:")
    lines = [
        f"{f'rank {rank}:':{label}} {' '.join(f'{cell:{width}}' for cell in row)}".rstrip()
        for rank, row in enumerate(cells)
    ]
    return "\n".join([head + copies, *lines]) + "\n"


def _cells(schedule: Schedule) -> list[list[str]]:
    if validate(schedule) is not None:
        return [[str(action) for action in own] for own in schedule.actions]
    timing = play(schedule)
    rows = [["."] * timing.time_s for _ in schedule.actions]
    for span in timing.spans:
        rows[span.rank][span.start_s : span.end_s] = [str(span.action), "-"][: span.end_s - span.start_s]
    return rows


def parse(text: str) -> Schedule:
    """The schedule that a text describes. Empty lines and what follows a # do not count.

    Raises ValueError that names the line, and the token in it, counted from 1.
    """
    lines = [(number, _uncommented(line)) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ValueError(f"there is no schedule here; the first line is such as {SAMPLE!r}")
    (number, first), *rest = lines
    found = HEAD.fullmatch(re.sub(r"\s+", " ", first))
    if found is None:
        raise ValueError(f"line {number}: {first!r} does not name a schedule, as {SAMPLE!r} does")
    placement = tuple(map(_number, found["placement"].split()))
    ranks, microbatches, copies = (_number(found[key] or "1") for key in ("ranks", "microbatches", "copies"))
    if max(ranks, microbatches, copies, len(placement)) > MOST:
        raise ValueError(f"line {number}: more than {MOST:,} ranks, stages or microbatches")
    if not min(ranks, microbatches, copies):
        raise ValueError(f"line {number}: ranks, microbatches and copies are 1 or more")
    lists = _lists(rest, ranks, len(placement), microbatches)
    try:
        return Schedule(found["name"].strip(), ranks, microbatches, placement, lists, copies)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _uncommented(line: str) -> str:
    """A line without what follows a #, which may stand in a schedule's name, too."""
    named = HEAD.fullmatch(re.sub(r"\s+", " ", line.strip()))
    return line.strip() if named else line.split("#")[0].strip()


def _number(digits: str) -> int:
    """Above MOST where there are too many digits for int()."""
    return int(digits) if len(digits) < 20 else 10**20


def _lists(lines: list[tuple[int, str]], ranks: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    lists: dict[int, tuple[Action, ...]] = {}
    for number, line in lines:
        found = re.match(r"rank\s+(\d+)\s*:", line)
        if found is None:
            raise ValueError(f"line {number}: {line.split()[0]!r} begins no rank's line, as 'rank 0:' does")
        rank = _number(found[1])
        if rank >= ranks:
            raise ValueError(f"line {number}: rank {rank} is not there; ranks are 0 to {ranks - 1}")
        if rank in lists:
            raise ValueError(f"line {number}: rank {rank} has a line already")
        tokens = enumerate(line[found.end() :].split(), 1)
        read = (_action(number, at, token, stages, microbatches) for at, token in tokens if token not in FILLERS)
        lists[rank] = tuple(read)
    for rank in range(ranks):
        if rank not in lists:
            raise ValueError(f"after line {lines[-1][0] if lines else 1}: rank {rank} has no line")
    return tuple(lists[rank] for rank in range(ranks))


def _action(line: int, at: int, token: str, stages: int, microbatches: int) -> Action:
    where = f"line {line}, token {at} ({token[:20]!r})"
    found = TOKEN.fullmatch(token.upper())
    if found is None or found[2] not in "FBIW":
        raise ValueError(f"{where}: an action is stage, F, B, I or W, and microbatch, such as 0F3; '.' is an idle unit")
    stage, microbatch = _number(found[1]), _number(found[3])
    if stage >= stages:
        raise ValueError(f"{where}: there is no stage {stage}; stages are 0 to {stages - 1}")
    if microbatch >= microbatches:
        raise ValueError(f"{where}: there is no microbatch {microbatch}; microbatches are 0 to {microbatches - 1}")
    return Action(found[2], stage, microbatch)
