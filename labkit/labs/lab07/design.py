"""Judge of exercise 7.5, `beat_1f1b`: a schedule of one's own, as text, whose bubble is smaller than 1F1B's.

The text is read, validated and played in virtual time with F, I and W taking equally long; then the schedule is really
run on ranks, where gradients must equal serial and the replay of the record must idle less than 1F1B, too. Copies of
the model are taken as DualPipe has them (two, through all ranks): else data parallel ranks, which have no bubble at
all, would do. Left out: which schedule it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import labkit.labs.lab03.own_work as own_work
import labkit.labs.lab07.steps as steps
from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.attempts import Unusable
from labkit.labs.lab07.pictures import on_link
from labkit.model.pipeline import run
from labkit.model.stages import sum_shared
from labkit.ranks.launch import launch
from labkit.record.trace import Trace
from labkit.schedule.actions import Schedule, in_flight
from labkit.schedule.grid import parse
from labkit.schedule.theory import idle_share
from labkit.schedule.timing import play
from labkit.schedule.validate import validate

NAME = "beat_1f1b"
LEAST = 1e-9  # share of time by which a bubble must be smaller in virtual time, where sums are exact
ROOM_RUN = 0.005  # share of time for what a run computes besides: a loss, a tanh
ROOM = 1.5  # times what 1F1B's first rank keeps
MOST_STAGES = 8  # a rank
MOST_COPIES = 2  # of the model: DualPipe's
ROWS, WIDTH = 16, 96
Question = tuple[int, int]  # ranks, microbatches


def judge(fn: Callable, seed: int) -> Verdict:
    """Texts for two and for four ranks; the last of them is run."""
    rng = random.Random(seed)
    questions = [(4, 8), (2, 2 * rng.randint(2, 5)), (4, 4 * rng.randint(2, 3))]
    observed = evidence.observe(_texts, 1, args=(fn, questions), deadline_s=60.0)
    found = attempts.ran(observed, NAME, "on one rank")
    if found is not None:
        return found
    schedules = []
    for question, text in zip(questions, observed.results[0], strict=True):
        schedule, found = _read(question, text)
        found = found or _bad(question, schedule)
        if found is not None:
            return found
        schedules.append(schedule)
    found = evidence.no_communication(observed) or honest(observed)
    return found or _run(questions[0], schedules[0])


def _texts(fn: Callable, questions: list[Question]) -> Any:
    """Runs in a rank."""
    found = own_work.borrowed(fn, steps.READY_MADE)
    if found:
        return Unusable("ready_made", own_work.verdict(found, "").sentence)
    texts = []
    for question in questions:
        out = attempts.called(fn, "ranks, microbatches", *question)
        if attempts.no_result(out):
            return out
        texts.append(out)
    return texts


def _call(question: Question) -> str:
    return f"{NAME}({question[0]}, {question[1]})"


def _read(question: Question, text: Any) -> tuple[Schedule | None, Verdict | None]:
    if not isinstance(text, str):
        sentence = "the answer is a text: a line that names the schedule, then one line a rank."
        if text is None:
            sentence = f"nothing comes back: is there a return? {sentence[0].upper()}{sentence[1:]}"
        elif isinstance(text, (list, tuple)) and all(isinstance(line, str) for line in text):
            sentence = f'{sentence} "\\n".join(...) makes one of several lines.'
        return None, wrong("shape", "wrong_type", sentence, _call(question), text, "a text")
    try:
        schedule = parse(text)
    except ValueError as error:
        return None, wrong("shape", "unreadable", f"{error}.", _call(question), text.split("\n")[0], "a schedule")
    if (schedule.ranks, schedule.microbatches) != question:
        got = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
        sentence = "this is a schedule for another number of ranks or microbatches."
        return None, wrong("shape", "other_sizes", sentence, _call(question), got, "what was asked for")
    if len(schedule.placement) > MOST_STAGES * schedule.ranks:
        sentence = f"more than {MOST_STAGES} stages a rank: a model has only so many layers."
        return None, wrong("shape", "too_many_stages", sentence, _call(question), len(schedule.placement))
    return schedule, _copied(question, schedule)


def _copied(question: Question, schedule: Schedule) -> Verdict | None:
    """Cause "data_parallel": copies of the model on fewer ranks, or more than two. Two on all ranks are DualPipe."""
    if schedule.copies > MOST_COPIES:
        sentence = f"{schedule.copies} copies of the model: more than two cost more memory than a pipeline saves."
        return wrong("shape", "data_parallel", sentence, _call(question), schedule.copies, f"at most {MOST_COPIES}")
    for copy in range(schedule.copies if schedule.copies > 1 else 0):
        ranks = sorted(set(schedule.placement[copy * schedule.num_stages :][: schedule.num_stages]))
        if len(ranks) < schedule.ranks:
            told = f"copy {copy} of the model is on {len(ranks)} of {schedule.ranks} ranks"
            sentence = f"{told}, which is data parallel: its stages are to go through all ranks."
            return wrong("shape", "data_parallel", sentence, _call(question), f"on {ranks}", "on all ranks")
    held = [len({stage % schedule.num_stages for stage in schedule.stages_of(rank)}) for rank in range(schedule.ranks)]
    if schedule.copies > 1 and max(held) * schedule.ranks > MOST_COPIES * schedule.num_stages:
        got = f"rank {held.index(max(held))}: {max(held)} of {schedule.num_stages} stages"
        sentence = f"a rank keeps more than {MOST_COPIES}/{schedule.ranks} of the model, which is data parallel."
        return wrong("shape", "data_parallel", sentence, _call(question), got, "as much on all ranks")
    return None


def _bad(question: Question, schedule: Schedule) -> Verdict | None:
    """Not valid, too many in flight, or no better than 1F1B."""
    fault = validate(schedule)
    if fault is not None:
        return wrong("values", fault.code, f"{fault.sentence}.", _call(question))
    p, m = question
    # A stage is 1/num_stages of the model; 1F1B's are 1/p.
    limit = int(ROOM * schedule.num_stages)
    kept = [max(counts, default=0) for counts in in_flight(schedule)]
    if max(kept) > limit:
        sentence = validate(schedule, limit).sentence
        got = f"rank {kept.index(max(kept))}: {max(kept)} of a 1/{schedule.num_stages} of the model"
        told = f"{sentence}, which is {ROOM} times what 1F1B's first rank keeps."
        return wrong("evidence", "in_flight", told, _call(question), got, f"at most {limit}")
    share, due = play(schedule).idle_share, idle_share(p, m)
    if share > due - LEAST:
        sentence = f"with F, I and W equally long ranks idle {share:.1%} of the time, and with 1F1B {due:.1%}."
        return wrong("evidence", "no_better", sentence, _call(question), f"{share:.1%} idle", f"less than {due:.1%}")
    return None


def _run(question: Question, schedule: Schedule) -> Verdict:
    """The schedule on real ranks: gradients against serial, and the record replayed."""
    how = {"prints": "quiet", "preload": ("labkit.model.pipeline",), "deadline_s": 60.0}
    by_rank = launch(train, schedule.ranks, schedule, **how)
    due = serial(schedule)
    for rank, (gradients, _) in enumerate(by_rank):
        for name, gradient in gradients.items():
            if not torch.allclose(gradient, due[name], rtol=1e-4, atol=1e-5 * float(due[name].abs().max())):
                sentence = f"run on ranks, the gradients of stage {name} on rank {rank} are not those of a serial run."
                return wrong("serial", "wrong_gradients", sentence, _call(question))
    played = on_link([record for _, record in by_rank])
    one_f_one_b = idle_share(*question)
    if played.deadlock or played.idle_share > max(one_f_one_b - ROOM_RUN, play(schedule).idle_share + ROOM_RUN):
        sentence = "run on ranks and replayed on a free link it is no better than 1F1B."
        got = played.deadlock or f"{played.idle_share:.1%} idle"
        return wrong("evidence", "no_better", sentence, _call(question), got, f"less than {one_f_one_b:.1%}")
    return right(
        f"{schedule.name}: run on {schedule.ranks} ranks, gradients equal serial; replayed it idles "
        f"{played.idle_share:.1%} of the time, 1F1B {one_f_one_b:.1%}"
    )


def _weights(stage: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(stage)
    return [torch.randn(WIDTH, WIDTH, generator=generator) * 1.5 / WIDTH**0.5]


def _pairs(microbatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(-1)
    return [(torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator))
            for _ in range(microbatches)]  # fmt: skip


def train(schedule: Schedule) -> tuple[dict[str, torch.Tensor], Any]:
    """Runs in a rank: (gradient by the number of its stage in the model, copies summed; record)."""
    n, rank = schedule.num_stages, dist.get_rank()
    modules = {stage: steps.Stage(_weights(stage % n)) for stage in schedule.stages_of(rank)}
    shared: dict[int, torch.nn.Parameter] = {}
    for stage, module in modules.items():  # two copies on one rank are one
        module.weights[0] = shared.setdefault(stage % n, module.weights[0])
    pairs = _pairs(schedule.microbatches)
    with Trace() as t:
        run(schedule, modules, pairs, F.mse_loss, (ROWS, WIDTH))
    holders: dict[str, set[int]] = {}
    for stage, where in enumerate(schedule.placement):
        holders.setdefault(str(stage % n), set()).add(where)
    parameters = {str(stage): parameter for stage, parameter in shared.items()}
    sum_shared(parameters, {name: tuple(sorted(ranks)) for name, ranks in holders.items()})
    return {name: parameter.grad for name, parameter in parameters.items()}, t.record


def serial(schedule: Schedule) -> dict[str, torch.Tensor]:
    """The same gradients in one process."""
    stages = [steps.Stage(_weights(stage)) for stage in range(schedule.num_stages)]
    with torch.enable_grad():
        for x, target in _pairs(schedule.microbatches):
            for stage in stages:
                x = stage(x)
            (F.mse_loss(x, target) / schedule.microbatches).backward()
    return {str(number): stage.weights[0].grad for number, stage in enumerate(stages)}
