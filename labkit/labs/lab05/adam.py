"""AdamW as torch has it, on masters in fp32 for given gradients; and what known mistakes of it would give.

Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; bias corrections as in Kingma and Ba, arXiv:1412.6980. The
mistakes are for telling a wrong answer what it did. Left out: where numbers lie and when they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = ("lr", "betas", "eps", "weight_decay")


def serial(start: Any, grads: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """fp32 masters after every step, by torch.optim.AdamW. grads: by step, None where it took no part."""
    import torch

    master = torch.nn.Parameter(start.detach().float().clone())
    optimizer = torch.optim.AdamW([master], foreach=False, **options)
    found = []
    for grad in grads:
        master.grad = None if grad is None else grad.float()
        optimizer.step()
        found.append(master.detach().clone())
    return found


def close(got: Any, due: Any, lr: float) -> bool:
    """Whether weights are a master's: to a thousandth of a step, and half the last digit of the dtype."""
    import torch

    digit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(got.dtype, 4e-6)
    if got.shape != due.shape or not bool(got.isfinite().all()):
        return False
    off = (got.double() - due.double()).abs()
    return bool((off <= 1e-3 * lr + 1.001 * digit * due.double().abs()).all())


def mistaken(got: Sequence[Any], start: Any, grads: Sequence[Any], options: dict[str, Any], most: int) -> str:
    """Code of the mistake that gives these weights in every step; "" where none does. most: parameters there are."""
    lr = options["lr"]
    for code in _MISTAKES:
        before = [start, *got] if code == "master_lost" else ()
        if all(close(g, d, lr) for g, d in zip(got, _with(code, start, grads, options, before=before), strict=True)):
            return code
    due = [start, *serial(start, grads, options)]
    if all(close(g, d, lr) for g, d in zip(got, due, strict=False)):
        return "late" if any(grad is not None for grad in grads) else ""
    if any(grad is None for grad in grads):
        due = _with("counted", start, grads, options, range(1, len(grads) + 1))
        if all(close(g, d, lr) for g, d in zip(got, due, strict=True)):
            return "counts_rest"
    for first in range(1, most + 1):
        for stride in {most, most - 1}:
            counts = [first + stride * step for step in range(len(grads))]
            due = _with("counted", start, grads, options, counts)
            if all(close(g, d, lr) for g, d in zip(got, due, strict=True)):
                return "shared_count"
    return ""


_MISTAKES = {
    "never_updated": "the weights never change: the new ones do not get from the host to the model.",
    "no_bias_correction": "moments begin at zero, and here they are used as they are: divide them by 1 - beta^t.",
    "always_first_step": "the bias correction is that of the first step in every step: count the steps.",
    "coupled_decay": "weight decay went into the gradient, as in Adam with L2; AdamW takes it off the weight directly.",
    "no_decay": "the weights do not decay: AdamW multiplies them by 1 - lr * weight_decay.",
    "decay_without_lr": "the weights decay by weight_decay; AdamW multiplies it by lr first.",
    "eps_inside": "eps stands under the root; it is added after it.",
    "eps_before": "eps was added before v was corrected for its bias; it is added to the root of the corrected one.",
    "betas_swapped": "the betas are the wrong way round: the first is the gradient's, the second that of its square.",
    "uphill": "the step goes uphill: it is subtracted.",
    "moments_lost": "the moments begin anew in every step: keep them.",
    "master_lost": "the weights are taken from the model anew in every step, rounded to its dtype: small steps get "
    "lost. Keep a master copy in fp32 with the moments.",
    "moments_narrow": "moments lose precision between steps: keep them in fp32, whatever the model's dtype.",
    "zeros_for_none": "a parameter that took no part in a step has .grad None: its weight and state stay as they are.",
    "plain_sgd": "this is a step of lr times the gradient, without moments.",
}
SENTENCES = _MISTAKES | {
    "late": "the weights are right one step later: after step() the new ones must be in the model.",
    "shared_count": "one count of steps goes up with every parameter: each parameter has its own, or step() counts.",
    "counts_rest": "the count of steps goes up also where a parameter has no gradient: each has its own, which counts "
    "only its updates.",
    "": "after a step the weights are not those of AdamW.",
}


def resumed(code: str, start: Any, grads: Sequence[Any], options: dict, at: int, weight: Any) -> list[Any]:
    """Weights after every step when a second process, which begins at step `at` with `weight`, has lost something.

    "count_lost": it counts steps from 0; "master_lost_again": it has the master from the rounded weight; "both_lost".
    """
    count, counts = 0, []
    for step, grad in enumerate(grads):
        count = 0 if step == at and code != "master_lost_again" else count
        count += grad is not None
        counts.append(count)
    return _with("counted", start, grads, options, counts, None if code == "count_lost" else (at, weight))


def _with(
    code: str,
    start: Any,
    grads: Sequence[Any],
    options: dict,
    counts: Sequence[int] = (),
    reread: tuple[int, Any] | None = None,
    before: Sequence[Any] = (),
) -> list[Any]:
    """Weights after every step with one mistake, in float64. reread: (step, weight): before it, this is the master.

    before: the model's own weights before each step, which the mistake "master_lost" begins with.
    """
    (b1, b2), lr, eps, decay = options["betas"], options["lr"], options["eps"], options["weight_decay"]
    b1, b2 = (b2, b1) if code == "betas_swapped" else (b1, b2)
    w = start.double()
    m, v, t, found = w * 0, w * 0, 0, []
    for step, grad in enumerate(grads):
        w = reread[1].double() if reread and step == reread[0] else w
        if code == "never_updated" or (grad is None and code != "zeros_for_none"):
            found.append(w)
            continue
        t = counts[step] if counts else 1 if code in ("always_first_step", "moments_lost") else t + 1
        g = w * 0 if grad is None else grad.double()
        w = before[step].double() if code == "master_lost" else w
        g = g + decay * w if code == "coupled_decay" else g
        w = w * (1 - _decay(code, lr, decay))
        m, v = (m * 0, v * 0) if code == "moments_lost" else (m, v)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w - lr * _direction(code, g, m, v, (1 - b1**t, 1 - b2**t), eps)
        if code == "moments_narrow":
            m, v = m.to(start.dtype).double(), v.to(start.dtype).double()
        found.append(w)
    return found


def _decay(code: str, lr: float, decay: float) -> float:
    return {"coupled_decay": 0.0, "no_decay": 0.0, "decay_without_lr": decay}.get(code, lr * decay)


def _direction(code: str, g: Any, m: Any, v: Any, corrections: tuple[float, float], eps: float) -> Any:
    if code == "plain_sgd":
        return g
    one, two = (1.0, 1.0) if code == "no_bias_correction" else corrections
    if code == "eps_inside":
        return m / one / (v / two + eps).sqrt()
    if code == "eps_before":
        return m / one / ((v.sqrt() + eps) / two**0.5)
    return (-1 if code == "uphill" else 1) * m / one / ((v / two).sqrt() + eps)
