"""Judge of exercise 5.1, `OffloadedAdam`: AdamW on the host, a parameter at a time, while backward goes on.

Trained on a device that is played (`labkit.record.device`): it has memory of its own, so what lies there and what
crosses the wire is counted in bytes, on any machine. Values: after every step the weights are those of torch's AdamW,
from the gradients that the weights before it give. Evidence, from the device's book: no state there between steps; each
gradient crosses once, in its own dtype, and each new weight; both while backward still computes; at most one gradient
is left lying; the host holds the state in fp32. Left out: streams and pinned memory, which a CPU has not; gradients
over several backwards, and their norm, which is known too late for this.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.models as models
import labkit.labs.lab05.adam as adam
import labkit.labs.lab05.offloaded_evidence as how
import labkit.labs.lab05.offloaded_steps as steps
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import head

NAME = "OffloadedAdam"
# What a thread, or an overwritten record, leads to: the cause is then that.
_ASKS_FIRST = ("no_record", "after_backward", "update_after_backward", "left_for_step")
_SPECIAL = {
    "frozen": (
        "frozen_parameter",
        "it works while every parameter is trained. One with requires_grad False takes no hook, and has no state.",
    ),
    "unused": (
        "unused_parameter",
        "it works while every parameter takes part. Here some have no gradient in some steps: their weights, moments "
        "and count of steps stay as they are.",
    ),
    "tied": ("tied_weights", "it works while every layer has a weight of its own. Here two layers share one."),
}


@dataclass(frozen=True)
class Case:
    """One training run. what: what is special about it. batches: by step, (inputs, targets, branches used)."""

    what: str
    plan: models.Plan
    seed: int
    batches: tuple[tuple, ...]
    options: dict[str, Any]

    @property
    def tried(self) -> str:
        given = ", ".join(f"{name}={value:.4g}" for name, value in self.options.items() if name != "betas")
        return f"{len(self.batches)} steps, {given}; {models.describe(self.plan)}"


@dataclass(frozen=True)
class Serial:
    """What is due, given the weights that the answer had. grads, masters: name -> by step."""

    start: dict[str, Any]
    grads: dict[str, list[Any]]
    masters: dict[str, list[Any]]


def judge(cls: Callable, seed: int) -> Verdict:
    """fp32 first, then bf16, then what is special, all in one rank; then how it came about."""
    tried = cases(random.Random(seed))
    runs = [(case.what, case.plan, case.seed, case.batches, case.options) for case in tried]
    observed = evidence.observe(steps.train_all, 1, args=(cls, runs), deadline_s=40.0)
    found = _ran(tried, observed)
    if found is not None:
        return found
    figures = ""
    for case, result in zip(tried, observed.results[0], strict=True):
        serial = serial_of(case, result["weights"])
        found = _values(case, result["weights"], serial)
        if found is None:
            found, told = how.moved(case, result, serial)
            figures = told or figures
        if found is not None:
            return found.cause in _ASKS_FIRST and honest(observed, case.tried) or found
    return honest(observed, tried[0].tried) or right(figures)


def cases(rng: random.Random) -> list[Case]:
    """Widths of hundreds, so that activations of 4 rows weigh little beside gradients."""
    wide = [2 * rng.randint(60, 75) + 1 for _ in range(3)]
    small = [2 * rng.randint(5, 12) + 1 for _ in range(3)]
    a, b, c = wide
    square = models.Plan(widths=(a, b, c, a, b, c))
    narrow = models.Plan(widths=(a, b, c, a, b, c), dtype="bfloat16")
    d, e, f = small
    return [
        _case(rng, "plain", square, 3, rng.uniform(1e-3, 3e-3)),
        _case(rng, "bf16", narrow, 6, rng.uniform(2e-4, 4e-4)),
        _case(rng, "frozen", models.Plan(widths=(d, e, f, d), frozen=(1,)), 2, 1e-3),
        _case(rng, "tied", models.Plan(widths=(d, d, e, f, d, d), tied=True), 2, 1e-3),
        _case(rng, "unused", models.Plan(widths=(d, e, f), branches=4), 5, 1e-3),
    ]


def _case(rng: random.Random, what: str, plan: models.Plan, count: int, lr: float) -> Case:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    dtype = getattr(torch, plan.dtype)

    def batch(step: int) -> tuple:
        x = torch.randn(4, plan.widths[0], generator=generator).to(dtype)
        # Branch 0 takes part always, 1 every other time, 2 once, 3 never.
        use = [b for b in range(plan.branches) if b == 0 or (b == 1 and step % 2) or (b == 2 and step == 1)]
        return x, torch.randn(4, plan.widths[-1], generator=generator).to(dtype), torch.tensor(use, dtype=torch.int64)

    options = {
        "lr": lr,
        "betas": (rng.uniform(0.8, 0.92), rng.uniform(0.95, 0.99)),
        "eps": 10 ** rng.uniform(-5, -4),
        "weight_decay": rng.uniform(0.05, 0.3),
    }
    return Case(what, plan, rng.getrandbits(30), tuple(batch(step) for step in range(count)), options)


def serial_of(case: Case, weights: list[dict[str, Any]]) -> Serial:
    """Gradients at the answer's own weights before each step, so that one slip does not spoil all that follows."""
    with models.one_thread():
        module = models.build(case.plan, case.seed)
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        start = {name: each.detach().clone() for name, each in module.named_parameters()}
        grads: dict[str, list[Any]] = {name: [] for name in trained}
        for step, (inputs, targets, use) in enumerate(case.batches):
            if step:
                for name, each in module.named_parameters():
                    each.data.copy_(weights[step - 1][name])
            module.zero_grad()
            models.loss_of(module(inputs, use), targets).backward()
            for name, each in trained.items():
                grads[name].append(None if each.grad is None else each.grad.clone())
        masters = {name: adam.serial(start[name], grads[name], case.options) for name in trained}
    return Serial(start, grads, masters)


def _ran(tried: list[Case], observed: Observed) -> Verdict | None:
    reached = [values["case"] for _, values in observed.outcome.reports if "case" in values]
    case = next((each for each in tried if each.what in reached[-1:]), tried[0])
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.stage != "attempted" or failed.cause in attempts.CAUSES:
        return failed
    if any(type(result) is attempts.Unusable for result in observed.results):
        return failed
    if "same device" in failed.sentence:
        sentence = "an op was given a tensor of the device and one of the host: copy one over first. "
        return wrong("attempted", "mixed_devices", sentence + failed.sentence, case.tried, failed.got, failed.expected)
    if case.what not in _SPECIAL:
        return failed
    cause, sentence = _SPECIAL[case.what]
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _values(case: Case, weights: list[dict[str, Any]], serial: Serial) -> Verdict | None:
    lr = case.options["lr"]
    frozen = [name for name in serial.start if name not in serial.masters]
    for step in range(len(case.batches)):
        for name in frozen:
            if not weights[step][name].equal(serial.start[name]):
                cause, sentence = _SPECIAL["frozen"]
                got = head(weights[step][name])
                return wrong("values", cause, sentence, case.tried, got, head(serial.start[name]))
        for name, due in serial.masters.items():
            got = weights[step][name]
            if not adam.close(got, due[step], lr):
                cause, sentence = _told(case, weights, serial, name)
                expected = head(due[step].to(got.dtype))
                return wrong("values", cause, sentence, case.tried, f"step {step}, {name}: {head(got)}", expected)
    return None


def _told(case: Case, weights: list[dict[str, Any]], serial: Serial, name: str) -> tuple[str, str]:
    got = [each[name] for each in weights]
    code = adam.mistaken(got, serial.start[name], serial.grads[name], case.options, len(serial.masters))
    if case.what in _SPECIAL and code in ("", "shared_count", "counts_rest", "never_updated", "late"):
        cause, sentence = _SPECIAL[case.what]
        return cause, sentence
    return code or "wrong_values", adam.SENTENCES[code]
