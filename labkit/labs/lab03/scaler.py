"""Judge of exercise 3.4, `DynamicLossScaler`: small gradients survive fp16, and an overflow on one rank skips all.

Each rank trains two parameters by SGD on gradients of its own, as under ZeRO, made in fp16 from the scaled loss. After
every step are asked: did it step, the scale, the parameters, and whether the optimizer was called. The rule is
torch.amp.GradScaler's, with a floor; a wrong sequence is recognised by what known mistakes would give. Evidence: a few
bytes a step are sent, no gradients.
Left out: clipping between unscale and step, hysteresis (DeepSpeed's), and a loss that overflows itself.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab03.own_work as own_work
import labkit.labs.lab03.scaler_told as told
from labkit.check import evidence, stubs
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00.attempts import Unusable
from labkit.labs.lab03.scaler_cases import LR, SIZES, WIDTH, Case, cases, due, parameters_due

NAME = "DynamicLossScaler"
SETTINGS = "scale, growth_factor, backoff_factor, growth_interval, min_scale"
READY_MADE = ("torch.amp", "torch.cuda.amp", "torch.distributed.fsdp", "deepspeed", "amp", "GradScaler", "fsdp")
# A flag, also as an object or padded; the gradients of a rank are 8 kB.
FLAG_BYTES = 512
TOLERANCE = 1e-3  # of a gradient: fp16 has 11 bits


def judge(cls: Callable, seed: int) -> Verdict:
    """Three ranks with an overflow on one, then a scale that starts too high, the floor, one rank alone."""
    seen = []
    rng = random.Random(seed)
    for case in cases(rng):
        start = [rng.randint(-64, 64) / 64 for _ in range(sum(SIZES))]
        rank_args = [(case.inputs[rank], case.touched[rank]) for rank in range(case.world_size)]
        observed = evidence.observe(
            call, case.world_size, args=(cls, case.settings, start), rank_args=rank_args, backend="gloo"
        )
        found = _ran(case, observed) or _types(case, observed)
        if found is not None:
            return found
        seen.append((case, start, observed))
    found = _ready_made(seen) or _sequences([(case, observed) for case, _, observed in seen])
    if found is not None:
        return found
    for question in (_parameters, _called, _sent):
        for case, start, observed in seen:
            found = question(case, start, observed)
            if found is not None:
                return found
    for case, _, observed in seen:
        found = honest(observed, case.tried)
        if found is not None:
            return found
    skipped = sum(not step.stepped for case, *_ in seen for step in due(case))
    return right(f"{skipped} overflows skipped on all ranks at once, the scale as the rule gives it after every step")


def call(cls: Callable, settings: dict, start: list[float], inputs: tuple, touched: tuple) -> Any:
    """Runs in a rank: per step (did it step, the scale, the parameters' first column, calls), and what was borrowed.

    calls: of optimizer.step(); one where no parameter has a gradient does nothing, and is not counted.
    """
    import torch

    found = _cannot_be_made(cls, settings)
    if found is not None:
        return found
    scaler = cls(**settings)
    columns = torch.tensor(start).split(list(SIZES))
    parameters = [torch.nn.Parameter(column[:, None].repeat(1, WIDTH)) for column in columns]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=LR)
    steps, calls = [], []
    optimizer.register_step_pre_hook(lambda *_: calls.append(any(p.grad is not None for p in parameters)))
    for values, both in zip(inputs, touched, strict=True):
        optimizer.zero_grad()
        parts = torch.tensor(values).split(list(SIZES))
        loss = sum(
            (p.half().float() * part[:, None]).sum()  # its gradient passes through fp16
            for p, part in list(zip(parameters, parts, strict=True))[: 2 if both else 1]
        )
        scaled = scaler.scale_loss(loss)
        if not isinstance(scaled, torch.Tensor):
            return _not_a_loss(scaled)
        scaled.backward()
        calls.clear()
        stepped = scaler.step(optimizer)
        if stepped is NotImplemented:
            return Unusable("half_attempted", f"{NAME}.step is still a stub: it returns NotImplemented.")
        now = torch.cat([p.detach()[:, 0] for p in parameters]).tolist()
        whole = all(bool((p.detach() == p.detach()[:, :1]).all() | p.detach().isnan().any()) for p in parameters)
        steps.append((_plain(stepped), _plain(getattr(scaler, "scale", None)), now if whole else [], sum(calls)))
    return steps, own_work.borrowed(cls, READY_MADE)


def _plain(value: Any) -> Any:
    """A bool or a float; a text for what is neither."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool):
        return value
    try:
        return bool(value) if type(value).__name__ in ("bool", "bool_") else float(value)
    except (TypeError, ValueError):
        return kind(value)


def _not_a_loss(scaled: Any) -> Unusable:
    if scaled is NotImplemented:
        return Unusable("half_attempted", f"{NAME}.scale_loss is still a stub: it returns NotImplemented.")
    sentence = f"scale_loss must return the scaled loss, a tensor to call backward() on, not {kind(scaled)}."
    return Unusable("not_a_loss", sentence)


def _cannot_be_made(cls: Callable, settings: dict) -> Any:
    if stubs.is_stub(cls):
        return NotImplemented
    open_ = stubs.stub_methods(cls) if isinstance(cls, type) else []
    if open_:
        return Unusable("half_attempted", f"{NAME}.{open_[0]} is still a stub: its part is yet to be written.")
    try:
        inspect.signature(cls).bind(**settings)
    except TypeError:
        return Unusable("wrong_signature", f"the check makes {NAME}({SETTINGS}), and yours takes other arguments.")
    except ValueError:
        pass
    for name in ("scale_loss", "step"):
        if not callable(getattr(cls, name, None)):
            return Unusable("no_method", f"{NAME} has no method {name}.")
    return None


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.stage != "attempted" or any(type(r) is Unusable for r in observed.results):
        return failed
    if failed.cause in ("raised", "unpicklable_result", "half_attempted", "not_attempted"):
        if "NoneType" in failed.sentence:
            sentence = "a parameter that took no part has no gradient (.grad is None): leave it out. "
            return wrong(
                "attempted", "none_gradient", sentence + failed.sentence, case.tried, failed.got, failed.expected
            )
        return failed
    if case.world_size > 1 and any(ledger for ledger in observed.outcome.ledgers):
        sentence = (
            "not every rank joins the collective in every step: a rank without overflow must ask the others too. "
        )
        return wrong("attempted", "not_all_join", sentence + failed.sentence, case.tried, failed.got, failed.expected)
    return failed


def _types(case: Case, observed: Observed) -> Verdict | None:
    for rank, (steps, _) in enumerate(observed.results):
        for at, (stepped, scale, *_) in enumerate(steps):
            where = f"rank {rank}, step {at}: "
            if type(stepped) is not bool:
                got = "None" if stepped == "None" else stepped
                sentence = "step() must return whether the optimizer stepped, True or False."
                return wrong("shape", "returns_nothing", sentence, case.tried, f"{where}{got}", "True or False")
            if type(scale) is not float:
                sentence = "the attribute `scale` holds the loss scale, a number."
                return wrong("shape", "no_scale", sentence, case.tried, f"{where}scale is {scale}", "a number")
    return None


def _sequences(seen: list[tuple[Case, Observed]]) -> Verdict | None:
    """What was skipped, and the scale after each step: by all cases at once, for one mistake must explain all."""
    first = None
    for case, observed in seen:
        for at, step in enumerate(due(case)):
            for rank, (steps, _) in enumerate(observed.results):
                stepped, scale, *_ = steps[at]
                if first is None and (stepped != step.stepped or not _close(scale, step.scale)):
                    first = case, rank, at, step, (stepped, scale)
    if first is None:
        return None
    case, rank, at, step, (stepped, scale) = first
    runs = [(case, [[each[:2] for each in steps] for steps, _ in observed.results]) for case, observed in seen]
    cause, sentence = told.wrong_sequence(runs, case, rank, at)
    got = f"step {at}, rank {rank}: {'stepped' if stepped else 'skipped'}, scale {scale:g}"
    who = f" (overflow on rank {', '.join(map(str, step.overflowed))})" if step.overflowed else ""
    expected = f"{'stepped' if step.stepped else 'skipped'}{who}, scale {step.scale:g}"
    return wrong("values", cause, sentence, case.tried, got, expected)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _parameters(case: Case, start: list[float], observed: Observed) -> Verdict | None:
    for rank, (steps, _) in enumerate(observed.results):
        before = start
        for at, (wanted, (_, _, got, _)) in enumerate(zip(parameters_due(case, start, rank), steps, strict=True)):
            if not got or not all(
                abs(a - b) <= TOLERANCE * 4 * LR * (at + 1) for a, b in zip(got, wanted, strict=True)
            ):
                cause, sentence = told.wrong_update(case, observed.records[rank], at, rank, before, got)
                place = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if not abs(a - b) < 1e-4), 0)
                told_got = f"step {at}, rank {rank}: parameter {got[place]:.6g}" if got else "rows that differ"
                return wrong("values", cause, sentence, case.tried, told_got, f"{wanted[place]:.6g}")
            before = got
    return None


def _called(case: Case, start: list[float], observed: Observed) -> Verdict | None:
    """Plain SGD does not move on a gradient of zeros; other optimizers would."""
    for rank, (steps, _) in enumerate(observed.results):
        for at, (wanted, (*_, calls)) in enumerate(zip(due(case), steps, strict=True)):
            if calls and not wanted.stepped:
                sentence = (
                    "optimizer.step() is called in a step that is to be skipped. Zeros for gradients do not skip it: "
                    "momentum and weight decay move the weights all the same."
                )
                got = f"step {at}, rank {rank}: optimizer.step() called, step() says skipped"
                return wrong("values", "steps_on_zeros", sentence, case.tried, got, "optimizer.step() not called")
    return None


def _ready_made(seen: list[tuple[Case, list[float], Observed]]) -> Verdict | None:
    for case, _, observed in seen:
        for _, borrowed in observed.results:
            if borrowed:
                return own_work.verdict(borrowed, case.tried)
    return None


def _sent(case: Case, start: list[float], observed: Observed) -> Verdict | None:
    for rank, record in enumerate(observed.records):
        if any("_amp_" in op.name for op in record.ops):
            return own_work.verdict("torch's own _amp_ operation", case.tried)
        each = record.sent_bytes / case.num_steps
        got = f"rank {rank} sends {each:,.0f} bytes a step"
        if each > FLAG_BYTES * max(1, case.world_size - 1):
            sentence = "far more than a flag is sent: whether gradients overflow is one number a rank."
            return wrong("evidence", "gradients_sent", sentence, case.tried, got, "a few bytes")
        if case.world_size > 1 and not record.communications:
            sentence = "the ranks agree, and nothing was sent: what told them?"
            found = wrong("evidence", "no_traffic", sentence, case.tried, "nothing sent", "a few bytes a step")
            return honest(observed, case.tried) or found
    return None
