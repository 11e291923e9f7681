"""Serial AdamW on the batches of all ranks, and what known mistakes would give in its place.

AdamW (https://arxiv.org/abs/1711.05101, algorithm 2, as torch.optim.AdamW has it): with t the number of the step,

    p <- p (1 - lr wd);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

g: the mean over ranks of each rank's gradient, its microbatches added up. Parameters that are not fp32 have an fp32
copy that is updated. Left out: anything parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import labkit.labs.lab04.models as models
from labkit.labs.lab02.models import one_thread
from labkit.labs.lab04.models import Case

Params = dict[str, Any]  # name -> tensor


@dataclass(frozen=True)
class Serial:
    """start: parameters. params: by step, after it. losses: by step, rank, microbatch."""

    start: Params
    params: list[Params]
    losses: list[list[list[float]]]


def serial(case: Case, mistake: str = "", rank: int = 0) -> Serial:
    """Train the case's model on the batches of all ranks, on one thread, as a rank has.

    mistake: one of the codes below, or "" for none. rank: whose view, where the mistake makes ranks differ.
    """
    with one_thread():
        return _trained(case, mistake, rank)


def _trained(case: Case, mistake: str, rank: int) -> Serial:
    module = models.build(case.plan, case.seed)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().clone() for name, p in trained.items()}
    state: dict[str, dict[str, Any]] = {name: {} for name in trained}
    left: list[Params] = [{} for _ in range(case.world_size)]  # what zero_grad() did not clear, by rank
    found = Serial(_copy(module), [], [])
    for step in range(case.steps):
        own, losses = [], []
        for each in range(case.world_size):
            by_micro, rank_losses = _backwards(module, trained, case.batches[each][step])
            own.append(_added(by_micro, mistake, left[each]))
            losses.append(rank_losses)
        left = own if mistake == "never_cleared" else left
        grads = _reduced(own, mistake, rank)
        for name, p in trained.items():
            masters[name] = _update(masters[name], grads[name], state[name], case.hyper, mistake)
            _store(p, masters, name, mistake)
        found.params.append(_copy(module))
        found.losses.append(losses)
    return found


def _copy(module: Any) -> Params:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _backwards(module: Any, trained: Params, batches: tuple) -> tuple[list[Params], list[float]]:
    """(gradients, losses) of each microbatch by itself."""
    by_micro, losses = [], []
    for inputs, targets in batches:
        module.zero_grad()
        loss = models.loss_of(module(*inputs), targets)
        loss.backward()
        by_micro.append({name: p.grad for name, p in trained.items()})
        losses.append(float(loss.detach()))
    return by_micro, losses


def _added(by_micro: list[Params], mistake: str, left: Params) -> Params:
    """A rank's gradient of a step, in fp32: None where no microbatch gave one."""
    added = {}
    for name in by_micro[0]:
        parts = [each[name] for each in by_micro if each[name] is not None]
        parts = {"last_micro": parts[-1:], "first_micro": parts[:1]}.get(mistake, parts)
        parts += [left[name]] if left.get(name) is not None else []
        if mistake == "counted_twice":
            parts = [part * (len(parts) - i) for i, part in enumerate(parts)]
        total = sum(part.float() for part in parts) if parts else None
        added[name] = total / len(by_micro) if mistake == "micro_mean" and parts else total
    return added


def _reduced(own: list[Params], mistake: str, rank: int) -> Params:
    """One gradient from those of all ranks; None where no rank has one."""
    reduced = {}
    for name in own[0]:
        present = [each[name] for each in own if each[name] is not None]
        if mistake == "own":
            present = [] if own[rank][name] is None else [own[rank][name]] * len(own)
        if mistake == "rank_zero":
            present = [] if own[0][name] is None else [own[0][name]] * len(own)
        by = {"sum": 1, "divided_twice": len(own) ** 2, "present": len(present)}.get(mistake, len(own))
        reduced[name] = sum(present) / by if present else None
    return reduced


def _update(p: Any, grad: Any, state: dict[str, Any], hyper: models.Hyper, mistake: str) -> Any:
    """One parameter's new fp32 values by AdamW, or with one mistake in it."""
    import torch

    if grad is None:
        grad = torch.zeros_like(p)
    lr, (b1, b2), eps, decay = hyper.lr, hyper.betas, hyper.eps, hyper.weight_decay
    b1, b2 = {"betas_swapped": (b2, b1), "default_betas": (0.9, 0.999)}.get(mistake, (b1, b2))
    eps, lr = (1e-8 if mistake == "default_eps" else eps), (1e-3 if mistake == "default_lr" else lr)
    decay = {"default_decay": 0.01, "no_decay": 0.0}.get(mistake, decay)
    if mistake == "coupled":
        grad = grad + decay * p
    t = state["t"] = 1 if mistake in ("step_stuck", "state_lost") else state.get("t", 0) + 1
    m, v = (state.get(each, torch.zeros_like(p)) for each in ("m", "v"))
    if mistake == "state_lost":
        m, v = torch.zeros_like(p), torch.zeros_like(p)
    m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad.square()
    state.update(m=m, v=v)
    t += mistake == "step_late"
    c1, c2 = 1 - b1**t, 1 - b2**t
    if mistake == "no_bias_correction":
        c1 = c2 = 1.0
    root = (v / c2 + eps).sqrt() if mistake == "eps_inside" else (v / c2).sqrt() + eps
    if mistake == "eps_scaled":
        root = (v.sqrt() + eps) / c2**0.5
    factor = {"coupled": 1.0, "decay_without_lr": 1 - decay}.get(mistake, 1 - lr * decay)
    if mistake == "decay_after":
        return (p - lr * (m / c1) / root) * factor
    return p * factor - lr * (m / c1) / root


def _store(p: Any, masters: Params, name: str, mistake: str) -> None:
    """The parameter from its fp32 values; without a master its rounded values are what the next step begins from."""
    p.data = masters[name].to(p.dtype)
    if mistake == "no_master":
        masters[name] = p.data.float()


# What a wrong answer may have done, and what it is told. Where two fit, the first is told.
MISTAKES = {
    "no_master": "updates are rounded to the parameters' dtype in each step: keep an fp32 copy of the part.",
    "sum": "gradients are the sum over ranks and not the mean: a reduction adds and no more, so divide by the ranks.",
    "divided_twice": "gradients are divided by the number of ranks twice: once makes a mean of the sum.",
    "rank_zero": "only rank 0's gradient counts: every rank's batch must, by a reduction.",
    "present": "a gradient is divided by how many ranks have one; one without counts as zero, so divide by all.",
    "last_micro": "only the last backward before step() counts: gradients of several backwards add up.",
    "first_micro": "only the first backward before step() counts: gradients of several backwards add up.",
    "counted_twice": "a second backward reduces the first one's gradient again: clear `.grad` once it is reduced.",
    "micro_mean": "gradients are divided by the number of backwards: they add up, as `.grad` does.",
    "never_cleared": "gradients of earlier steps are still in: zero_grad() clears what was reduced as well.",
    "coupled": "weight decay goes into the gradient, which is Adam with L2: AdamW takes lr * weight_decay * p off p.",
    "no_decay": "there is no weight decay: AdamW first multiplies p by 1 - lr * weight_decay.",
    "decay_without_lr": "weight decay lacks the learning rate: AdamW multiplies p by 1 - lr * weight_decay.",
    "decay_after": "weight decay comes after the update: AdamW first multiplies p by 1 - lr * weight_decay.",
    "no_bias_correction": "m and v are used as they are, and begin at 0: divide by 1 - beta1**t and 1 - beta2**t.",
    "eps_inside": "eps stands inside the square root: AdamW divides by sqrt(v) + eps.",
    "eps_scaled": "eps is added before v is corrected: AdamW divides by sqrt(v / (1 - beta2**t)) + eps.",
    "state_lost": "m and v begin at zero in every step: keep them from step to step.",
    "step_stuck": "the step counter does not advance: every step is corrected as if it were the first.",
    "step_late": "the step counter is one ahead: the first step has t = 1.",
    "betas_swapped": "the two betas are swapped: the first one is m's, the second v's.",
    "default_betas": "betas are 0.9 and 0.999 whatever was given: use the argument.",
    "default_eps": "eps is 1e-8 whatever was given: use the argument.",
    "default_lr": "the learning rate is 1e-3 whatever was given: use the argument.",
    "default_decay": "weight_decay is 0.01 whatever was given: use the argument.",
}
