"""A schedule while it is drawn: a grid of cells, a row a rank, a column a unit of time; what it amounts to so far.

A cell is empty or has a token such as "0F3"; a B takes two, the second of which says "-". Only the order within a row
counts (`labkit.schedule.grid`). Left out: widgets (`editor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.schedule import grid, theory
from labkit.schedule.actions import Action, Result, Schedule, most_kept, needs
from labkit.schedule.timing import Span
from labkit.schedule.validate import validate

EMPTY, SECOND = ".", "-"
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Draft:
    """placement[stage]: the rank that has it. rows[rank][column]: a token, EMPTY or SECOND."""

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: Rows

    @property
    def text(self) -> str:
        """As `labkit.schedule.grid` writes it, with the cells where they were drawn."""
        ranks, m = len(self.rows), self.microbatches
        head = f"schedule {self.name}: {ranks} rank{'s' * (ranks > 1)}, {m} microbatch{'es' * (m > 1)}, "
        lines = [f"{head}stages on ranks {' '.join(map(str, self.placement))}"]
        for rank, row in enumerate(self.rows):
            lines.append(f"rank {rank}: {' '.join(f'{cell:3}' for cell in row)}".rstrip())
        return "\n".join(lines) + "\n"

    @property
    def schedule(self) -> Schedule:
        """The order of what was drawn. ValueError for what is no schedule at all."""
        return grid.parse(self.text)


def read(text: str) -> Draft:
    """The draft of a text, cells where they stand in it. ValueError, as `grid.parse`, for what cannot be read."""
    schedule = grid.parse(text)
    if schedule.copies > 1:
        raise ValueError("the editor draws one copy of the model")
    found = {}
    for line in text.splitlines():
        head, colon, cells = line.split("#")[0].partition(":")
        if colon and head.split()[0] == "rank":
            found[int(head.split()[1])] = [cell.upper() for cell in cells.split()]
    width = max([1, *map(len, found.values())])
    rows = tuple((*found[rank], *[EMPTY] * (width - len(found[rank]))) for rank in range(schedule.ranks))
    return Draft(schedule.name, schedule.microbatches, schedule.placement, rows)


def put(draft: Draft, rank: int, column: int, kind: str, stage: int) -> Draft:
    """Draw the next microbatch of a kind into a cell, in place of what is there; the row grows where it must.

    Next: the first whose F, I or W the rank does not do yet. ValueError when it does all of them, or when the stage is
    not on that rank.
    """
    if draft.placement[stage] != rank:
        raise ValueError(f"stage {stage} is on rank {draft.placement[stage]}, not on rank {rank}")
    draft = erase(draft, rank, column)
    made = {result for action in draft.schedule.actions[rank] for result in action.results}
    left = [i for i in range(draft.microbatches) if made.isdisjoint(Action(kind, stage, i).results)]
    if not left:
        raise ValueError(f"rank {rank} has {kind} of stage {stage} for every microbatch already")
    row = list(draft.rows[rank])
    row += [EMPTY] * (column + 1 - len(row))
    row[column] = str(Action(kind, stage, left[0]))
    if kind == "B":
        if column + 1 < len(row) and row[column + 1] == EMPTY:
            row[column + 1] = SECOND
        else:
            row.insert(column + 1, SECOND)
    return _with_row(draft, rank, row)


def erase(draft: Draft, rank: int, column: int) -> Draft:
    """Empty a cell, and the other half of its B."""
    row = list(draft.rows[rank])
    if column >= len(row):
        return draft
    if row[column] == SECOND and column:
        column -= 1
    if column + 1 < len(row) and row[column + 1] == SECOND:
        row[column + 1] = EMPTY
    row[column] = EMPTY
    return _with_row(draft, rank, row)


def settled(draft: Draft) -> Draft:
    """The same order, each cell in the column of the time at which it is played; what never begins comes last."""
    schedule = draft.schedule
    spans = played_so_far(schedule)
    rows = []
    for rank, own in enumerate(schedule.actions):
        mine = [span for span in spans if span.rank == rank]
        row: list[str] = []
        for span in mine:
            row += [EMPTY] * (span.start_s - len(row)) + [str(span.action), SECOND][: span.end_s - span.start_s]
        for action in own[len(mine) :]:
            row += [str(action), SECOND][: len(action.results)]
        rows.append(row)
    width = max([1, *map(len, rows)])
    return replace(draft, rows=tuple((*row, *[EMPTY] * (width - len(row))) for row in rows))


def played_so_far(schedule: Schedule) -> tuple[Span, ...]:
    """Spans of all that can be done, with F = I = W = 1, though the schedule may not be complete, or never end.

    By rank, then in order; `timing.play` plays valid schedules, and gives the same for them.
    """
    done: dict[Result, int] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(schedule.actions):
            while len(spans[rank]) < len(own) and all(need in done for need in needs(schedule, own[len(spans[rank])])):
                action = own[len(spans[rank])]
                clock = spans[rank][-1].end_s if spans[rank] else 0
                start = max([clock, *(done[need] for need in needs(schedule, action))])
                end = start + len(action.results)
                for result in action.results:
                    done.setdefault(result, end)
                spans[rank].append(Span(rank, action, start, end))
                moved = True
    return tuple(span for own in spans for span in own)


@dataclass(frozen=True)
class Look:
    """valid: nothing is wrong. sentence: what is, or what it amounts to. spans: played as far as it goes; time: their
    end. idle_share: of that time."""

    valid: bool
    sentence: str
    spans: tuple[Span, ...]
    time: int
    idle_share: float


def look(draft: Draft) -> Look:
    """What a draft amounts to: the validator's sentence, and the idle share beside that of 1F1B."""
    schedule = draft.schedule
    spans = played_so_far(schedule)
    time = max((span.end_s for span in spans), default=0)
    busy = sum(span.end_s - span.start_s for span in spans)
    idle = 1 - busy / (schedule.ranks * time) if time else 0.0
    fault = validate(schedule)
    if fault is not None:
        told = _stops(schedule, spans) if fault.code == "missing" else ""
        todo = 3 * len(schedule.placement) * schedule.microbatches
        have = sum(len(action.results) for own in schedule.actions for action in own)
        sentence = f"{told or fault.sentence} ({have} of {todo} blocks are drawn; idle so far {idle:.1%})"
        return Look(False, sentence, spans, time, idle)
    other = theory.idle_share(schedule.ranks, schedule.microbatches)
    most = ", ".join(f"{each:.3g}" for each in most_kept(schedule))
    sentence = f"valid: idle {idle:.1%}, 1F1B {other:.1%}; ranks keep at most {most} microbatches in flight"
    return Look(True, sentence, spans, time, idle)


def _stops(schedule: Schedule, spans: Sequence[Span]) -> str:
    """Of what is drawn, where a rank cannot go on, and for what; "" when all of it can be done."""
    at = {str(action): rank for rank, own in enumerate(schedule.actions) for action in own}
    at |= {token.replace("B", "I"): rank for token, rank in at.items()}
    done = {result for span in spans for result in span.action.results}
    found = {}
    for rank, own in enumerate(schedule.actions):
        played = sum(span.rank == rank for span in spans)
        if played < len(own):
            kind, stage, microbatch = next(need for need in needs(schedule, own[played]) if need not in done)
            token = f"{stage}{kind}{microbatch}"
            where = at.get(token)
            words = f"it needs {token}, which is not drawn yet"
            if where is not None:
                later = f"it needs {token}, which comes later"
                words = later if where == rank else f"it waits for {token} of rank {where}"
            # Ranks that wait for another's are the last to be told: the other one is the cause.
            order = (where is not None and where != rank, rank)
            found[order] = f"rank {rank} stops before {own[played]} (action {played + 1}): {words}"
    return found[min(found)] if found else ""


def _with_row(draft: Draft, rank: int, row: Sequence[str]) -> Draft:
    width = max(len(row), *map(len, draft.rows))
    rows = [list(each) for each in draft.rows]
    rows[rank] = list(row)
    return replace(draft, rows=tuple((*each, *[EMPTY] * (width - len(each))) for each in rows))
