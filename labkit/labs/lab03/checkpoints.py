"""Judge of exercise 3.3, `choose_checkpoints`: layers that fit a budget with the least recomputation, live.

The answer runs the layers, some of them under a checkpoint, and the judge calls backward. Output and gradients must be
those of a plain run, which the parent works out. Evidence, from the rank's record: the most bytes of activations held,
and the FLOPs beyond one forward and one backward, which tell what was recomputed. Which layers those are follows from
their sum; the order in which backward runs them again tells one checkpoint over several layers from one for each.
Left out: checkpoints within a layer; torch's early stop, which is switched off.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab02.models as models
import labkit.labs.lab03.blocks as blocks
import labkit.labs.lab03.own_work as own_work
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab03.checkpoints_cases import ALLOWED, HIDDEN, TOKENS, Case, Choice, cases, slips, strategies

NAME = "choose_checkpoints"
ARGUMENTS = "layers, x, costs, budget_bytes"
NUM_RANKS = 2
KEPT = ("activation", "buffer", "communication", "optimizer")  # whatever an answer calls what it keeps
_HIDDEN = (
    "it fits, and less is recomputed than whole layers that fit need: activations were put where the record does not "
    "look, or recomputed where it does not, or only a part of a layer was recomputed."
)
TOLERANCE = 1e-5  # of the largest element: the same products in the same order


def judge(fn: Callable, seed: int) -> Verdict:
    """Four lists of seven layers, two ranks with one each at a time."""
    drawn = cases(random.Random(seed))
    seen = []
    for at in range(0, len(drawn), NUM_RANKS):
        pair = drawn[at : at + NUM_RANKS]
        rank_args = [(case.blocks, case.costs, case.budget_bytes, case.seed) for case in pair]
        observed = evidence.observe(call, NUM_RANKS, args=(fn,), rank_args=rank_args)
        failed = attempts.ran(observed, NAME, pair[0].tried)
        if failed is not None:
            return failed
        for rank, case in enumerate(pair):
            found = _values(case, observed, rank)
            if found is not None:
                return found
        seen.append((pair, observed))
    live = [
        (case, *measured(observed.records[rank], case)) for pair, observed in seen for rank, case in enumerate(pair)
    ]
    found = _over_several(live, seen) or _fits_with_least(live)
    if found is not None and found.cause in ("hidden", "not_checkpointed"):
        found = next(filter(None, (honest(observed, pair[0].tried) for pair, observed in seen)), found)
    for pair, observed in seen:
        found = found or _own(pair[0], observed) or evidence.no_communication(observed, pair[0].tried)
        found = found or honest(observed, pair[0].tried)
    return found or _passed(live)


def _passed(live: Sequence[tuple[Case, int, int]]) -> Verdict:
    case, peak, again = live[0]
    return right(
        f"in each of {len(live)} lists the least recomputation that fits; in the first {sum(case.best)} of "
        f"{len(case.blocks)} layers, {again / 1e6:.1f} MFLOPs again, at most {peak / 1e3:,.0f} kB held of "
        f"{case.budget_bytes / 1e3:,.0f}"
    )


def call(fn: Callable, made: Sequence[blocks.Block], costs: list, budget_bytes: int, seed: int) -> Any:
    """Runs in a rank: (output, gradient of the input, those of the weights, what was borrowed, layers run again)."""
    import torch
    from torch.utils.checkpoint import set_checkpoint_early_stop

    layers, start, weigh = build(made, seed)
    ran = []  # layers, by number, as they run
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    with set_checkpoint_early_stop(False):
        x = start * 1  # made in the forward, as a layer before these would
        out = attempts.called(fn, ARGUMENTS, layers, x, costs, budget_bytes)
        if attempts.no_result(out):
            return out
        if not isinstance(out, torch.Tensor):
            return kind(out), None, [], "", []
        del x
        ran.clear()
        if out.requires_grad and out.shape == weigh.shape:
            (out * weigh).sum().backward()
    grads = [p.grad for layer in layers for p in layer.parameters()]
    return out.detach(), start.grad, grads, own_work.borrowed(fn), ran


def build(made: Sequence[blocks.Block], seed: int) -> tuple[list, Any, Any]:
    """(layers, input, weights of the loss), drawn from a seed alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [blocks.module(block) for block in made]
        start = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        return layers, start, torch.randn(TOKENS, HIDDEN)


def _plain(case: Case) -> tuple[Any, Any, list]:
    """Output and gradients without any checkpoint, worked out here."""
    import torch

    with models.one_thread(), torch.enable_grad():
        layers, start, weigh = build(case.blocks, case.seed)
        x = start
        for layer in layers:
            x = layer(x)
        (x * weigh).sum().backward()
        return x.detach(), start.grad, [p.grad for layer in layers for p in layer.parameters()]


def _values(case: Case, observed: Observed, rank: int) -> Verdict | None:
    out, grad, grads, *_ = observed.results[rank]
    if type(out) is str:
        sentence = "the answer runs the layers, and returns what the last one gives."
        cause = "returns_nothing" if out == "None" else "not_a_tensor"
        return wrong("shape", cause, sentence, case.tried, out, "the output, a tensor")
    wanted = _plain(case)
    if out.shape != wanted[0].shape or _apart(out, wanted[0]):
        sentence = "the output is not that of all layers, one after the other."
        return wrong("values", "wrong_output", sentence, case.tried, _head(out), _head(wanted[0]))
    if grad is None or any(each is None for each in grads):
        sentence = "some weights, or the input, have no gradient: a checkpointed layer must recompute with its graph."
        return wrong("values", "no_gradient", sentence, case.tried, "None", "a gradient for each")
    for each, due in zip([grad, *grads], [wanted[1], *wanted[2]], strict=True):
        if _apart(each, due):
            sentence = "the output is right, a gradient is not: is what was recomputed what was computed first?"
            return wrong("values", "wrong_gradient", sentence, case.tried, _head(each), _head(due))
    return None


def _apart(one: Any, other: Any) -> bool:
    off = float((one.double() - other.double()).abs().max())
    return not off <= TOLERANCE * float(other.abs().max())


def _head(tensor: Any) -> str:
    return ", ".join(f"{value:.6g}" for value in tensor.flatten()[:3].tolist()) + ", ..."


def measured(record: Any, case: Case) -> tuple[int, int]:
    """(most bytes of activations held, FLOPs beyond a forward and a backward) of a rank."""
    from labkit.record.held import held

    lines = held(record).by_kind
    peak = max(map(sum, zip(*(lines[name] for name in KEPT), strict=True)))
    return peak, record.flops - 3 * sum(block.forward_flops for block in case.blocks)


def _over_several(live: Sequence[tuple[Case, int, int]], seen: Sequence[tuple]) -> Verdict | None:
    """Over the budget, and in backward a layer ran again right before the one behind it: both in one checkpoint."""
    ran = [observed.results[rank][4] for pair, observed in seen for rank in range(len(pair))]
    for (case, peak, _), again in zip(live, ran, strict=True):
        both = next((one for one, after in itertools.pairwise(again) if after == one + 1), None)
        if peak > case.budget_bytes + ALLOWED and both is not None:
            sentence = (
                f"layers {both} and {both + 1} stand in one checkpoint: it keeps one input, but in backward all of its "
                "layers have their bytes again at once. A checkpoint for each layer."
            )
            got = f"layers run again in backward: {', '.join(map(str, again))}; at most {peak:,} bytes held"
            expected = f"the last one first, at most {case.budget_bytes:,} bytes (and the loss)"
            return wrong("evidence", "over_several", sentence, case.tried, got, expected)
    return None


def _fits_with_least(live: Sequence[tuple[Case, int, int]]) -> Verdict | None:
    bad = next((each for each in live if each[1] > each[0].budget_bytes + ALLOWED), None)
    bad = bad or next((each for each in live if each[2] != each[0].least_flops), None)
    if bad is None:
        return None
    case, peak, again = bad
    got = f"{again / 1e6:.2f} MFLOPs recomputed, at most {peak:,} bytes held"
    expected = f"{case.least_flops / 1e6:.2f} MFLOPs, at most {case.budget_bytes:,} bytes (and the loss)"
    if peak <= case.budget_bytes + ALLOWED and again < case.least_flops:
        return wrong("evidence", "hidden", _HIDDEN, case.tried, got, expected)
    chosen = [recognised(each, flops) for each, _, flops in live]
    for cause, strategy, sentence in (*strategies(), *slips()):
        if all(
            choice == strategy(each.blocks, each.budget_bytes) for choice, (each, *_) in zip(chosen, live, strict=True)
        ):
            return wrong("evidence", cause, sentence, case.tried, got, expected)
    mine = recognised(case, again)
    cause, sentence = _other(case, peak, mine)
    got += f" (layers {_numbers(mine)})" if mine else ""
    return wrong("evidence", cause, sentence, case.tried, got, f"{expected} (layers {_numbers(case.best)})")


def recognised(case: Case, flops: int) -> Choice | None:
    """Which layers were recomputed, if whole ones were: those whose forwards cost so much together."""
    return next((way.chosen for way in blocks.ways(case.blocks) if way.flops == flops), None)


def _numbers(choice: Choice) -> str:
    return ", ".join(str(at) for at, again in enumerate(choice) if again) or "none"


def _other(case: Case, peak: int, mine: Choice | None) -> tuple[str, str]:
    """(cause, sentence) where no simple strategy explains what was done."""
    if peak > case.budget_bytes + ALLOWED:
        if mine is not None and blocks.peak_bytes(case.blocks, mine) <= case.budget_bytes:
            return (
                "also_kept",
                "the choice would fit, but more is held than it keeps: something still refers to outputs.",
            )
        return "over_budget", "more is held at once than the budget: at which layer's turn, in backward, is it most?"
    if mine is None:
        return "recomputed_twice", "what is recomputed is no set of whole layers, once each."
    if mine[-1] and not case.best[-1]:
        return "last_layer", "the last layer is recomputed at once, when all others are still held: that frees nothing."
    return "not_least", "it fits, but another choice fits with fewer FLOPs: try all of them."


def _own(case: Case, observed: Observed) -> Verdict | None:
    borrowed = next((each[3] for each in observed.results if each[3]), "")
    return own_work.verdict(borrowed, case.tried) if borrowed else None
