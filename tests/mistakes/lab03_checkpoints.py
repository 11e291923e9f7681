"""Answers to exercise 3.3, `choose_checkpoints`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab03.checkpoints`.
"""

import itertools
import os
import sys
import tempfile

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def run(layers, x, chosen):
    for layer, again in zip(layers, chosen, strict=True):
        x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    return x


def peak(costs, chosen):
    held = most = 0
    for (kept, inputs, _), again in zip(costs, chosen, strict=True):
        most = max(most, held + kept)
        held += inputs if again else kept
    return most


def flops(costs, chosen):
    return sum(cost[2] for cost, again in zip(costs, chosen, strict=True) if again)


def best(costs, budget, peak=peak, price=flops):
    every = itertools.product((False, True), repeat=len(costs))
    return min((each for each in every if peak(costs, each) <= budget), key=lambda each: price(costs, each))


def greedy(costs, budget, order):
    chosen = [False] * len(costs)
    for at in order:
        if peak(costs, chosen) <= budget:
            break
        chosen[at] = True
    return chosen


def right_one(layers, x, costs, budget_bytes):
    return run(layers, x, best(costs, budget_bytes))


def claims_it(layers, x, costs, budget_bytes):
    best(costs, budget_bytes)
    for layer in layers:
        x = layer(x)
    return x


def everything(layers, x, costs, budget_bytes):
    return run(layers, x, [True] * len(layers))


def every_other(layers, x, costs, budget_bytes):
    return run(layers, x, [at % 2 == 0 for at in range(len(layers))])


def from_the_first_on(layers, x, costs, budget_bytes):
    return run(layers, x, greedy(costs, budget_bytes, range(len(layers))))


def from_the_last_on(layers, x, costs, budget_bytes):
    return run(layers, x, greedy(costs, budget_bytes, reversed(range(len(layers)))))


def largest_first(layers, x, costs, budget_bytes):
    order = sorted(range(len(costs)), key=lambda at: -costs[at][0])
    return run(layers, x, greedy(costs, budget_bytes, order))


def cheapest_first(layers, x, costs, budget_bytes):
    order = sorted(range(len(costs)), key=lambda at: costs[at][2])
    return run(layers, x, greedy(costs, budget_bytes, order))


def most_bytes_per_flop_first(layers, x, costs, budget_bytes):
    order = sorted(range(len(costs)), key=lambda at: -(costs[at][0] - costs[at][1]) / costs[at][2])
    return run(layers, x, greedy(costs, budget_bytes, order))


def the_fewest(layers, x, costs, budget_bytes):
    return run(layers, x, best(costs, budget_bytes, price=lambda costs, chosen: sum(chosen)))


def fits_at_the_end_of_forward(layers, x, costs, budget_bytes):
    def held(costs, chosen):
        return sum(cost[1] if again else cost[0] for cost, again in zip(costs, chosen, strict=True))

    return run(layers, x, best(costs, budget_bytes, held))


def room_for_the_largest_on_top(layers, x, costs, budget_bytes):
    def careful(costs, chosen):
        held = sum(cost[1] if again else cost[0] for cost, again in zip(costs, chosen, strict=True))
        more = [cost[0] - cost[1] for cost, again in zip(costs, chosen, strict=True) if again]
        return held + max(more, default=0)

    return run(layers, x, best(costs, budget_bytes, careful))


def the_last_one_too(layers, x, costs, budget_bytes):
    return run(layers, x, (*best(costs, budget_bytes)[:-1], True))


def one_more(layers, x, costs, budget_bytes):
    """The dearest of those that need not be: any other may make it the choice of who takes the cheapest first."""
    chosen = list(best(costs, budget_bytes))
    spared = [at for at, again in enumerate(chosen[:-1]) if not again]
    chosen[max(spared, key=lambda at: costs[at][2])] = True
    return run(layers, x, chosen)


def one_less(layers, x, costs, budget_bytes):
    chosen = list(best(costs, budget_bytes))
    chosen[chosen.index(True)] = False
    return run(layers, x, chosen)


def under_no_grad(layers, x, costs, budget_bytes):
    for layer, again in zip(layers, best(costs, budget_bytes), strict=True):
        if again:
            with torch.no_grad():
                x = layer(x)
        else:
            x = layer(x)
    return x


def detached(layers, x, costs, budget_bytes):
    for layer, again in zip(layers, best(costs, budget_bytes), strict=True):
        x = layer(x).detach().requires_grad_() if again else layer(x)
    return x


def gives_the_choice(layers, x, costs, budget_bytes):
    return [at for at, again in enumerate(best(costs, budget_bytes)) if again]


def forgets_to_return(layers, x, costs, budget_bytes):
    run(layers, x, best(costs, budget_bytes))


def leaves_out_the_chosen(layers, x, costs, budget_bytes):
    for layer, again in zip(layers, best(costs, budget_bytes), strict=True):
        x = x if again else layer(x)
    return x


def holds_wide_tensors(layers, x, costs, budget_bytes):
    """A hook's list still refers to them."""
    wide = []
    for layer in layers:
        layer.first.register_forward_hook(lambda module, given, out: wide.append(out.detach()))
        layer.wide = wide
    return run(layers, x, best(costs, budget_bytes))


def in_two_segments(layers, x, costs, budget_bytes):
    return checkpoint_sequential(torch.nn.Sequential(*layers), 2, x, use_reentrant=False)


def nested_twice(layers, x, costs, budget_bytes):
    """A checkpoint within a checkpoint recomputes twice."""
    chosen = best(costs, budget_bytes)
    for layer, again in zip(layers, chosen, strict=True):
        if again:
            x = checkpoint(lambda y, layer=layer: checkpoint(layer, y, use_reentrant=False), x, use_reentrant=False)
        else:
            x = layer(x)
    return x


def counts_no_inputs(layers, x, costs, budget_bytes):
    return run(layers, x, best([(kept, 0, more) for kept, _, more in costs], budget_bytes))


def stays_below_the_budget(layers, x, costs, budget_bytes):
    return run(layers, x, best(costs, budget_bytes - 1))


def neighbours_together(layers, x, costs, budget_bytes):
    """One checkpoint over chosen layers that follow each other."""
    every = zip(layers, best(costs, budget_bytes), strict=True)
    for again, group in itertools.groupby(every, key=lambda each: each[1]):
        part = torch.nn.Sequential(*(layer for layer, _ in group))
        x = checkpoint(part, x, use_reentrant=False) if again else part(x)
    return x


WRONG = [
    (claims_it, "not_checkpointed"),
    (everything, "all_checkpointed"),
    (every_other, "every_other"),
    (from_the_first_on, "from_the_front"),
    (from_the_last_on, "from_the_back"),
    (largest_first, "largest_first"),
    (cheapest_first, "cheapest_first"),
    (most_bytes_per_flop_first, "best_ratio_first"),
    (the_fewest, "fewest"),
    (fits_at_the_end_of_forward, "end_of_forward"),
    (room_for_the_largest_on_top, "too_careful"),
    (the_last_one_too, ("last_layer", "too_careful")),
    (one_more, "not_least"),
    (one_less, "over_budget"),
    (under_no_grad, "no_gradient"),
    (detached, "no_gradient"),
    (gives_the_choice, "not_a_tensor"),
    (forgets_to_return, "returns_nothing"),
    (leaves_out_the_chosen, "wrong_output"),
    (holds_wide_tensors, "also_kept"),
    (in_two_segments, ("over_several", "recomputed_twice")),
    (counts_no_inputs, "inputs_forgotten"),
    (stays_below_the_budget, "budget_not_used_up"),
    (neighbours_together, "over_several"),
    (nested_twice, "recomputed_twice"),
]


def with_the_reentrant_kind(layers, x, costs, budget_bytes):
    for layer, again in zip(layers, best(costs, budget_bytes), strict=True):
        x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
    return x


class Again(torch.autograd.Function):
    """Checkpointing by hand."""

    @staticmethod
    def forward(ctx, layer, x, *weights):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        wanted = (x, *ctx.layer.parameters())
        return (None, *torch.autograd.grad(out, wanted, grad))


def by_hand(layers, x, costs, budget_bytes):
    for layer, again in zip(layers, best(costs, budget_bytes), strict=True):
        x = Again.apply(layer, x, *layer.parameters()) if again else layer(x)
    return x


def depth_first(layers, x, costs, budget_bytes):
    """Goes through the choices one layer at a time, and drops those that cannot be better."""
    found = [float("inf"), None]

    def go(at, held, price, chosen):
        if price >= found[0]:
            return
        if at == len(costs):
            found[:] = price, chosen
            return
        kept, inputs, more = costs[at]
        if held + kept > budget_bytes:
            return
        go(at + 1, held + kept, price, (*chosen, False))
        go(at + 1, held + inputs, price + more, (*chosen, True))

    go(0, 0, 0, ())
    return run(layers, x, found[1])


def by_a_table(layers, x, costs, budget_bytes):
    """Dynamic programming: after each layer, the least FLOPs for every number of bytes held."""
    states = {0: (0, ())}
    for kept, inputs, more in costs:
        following = {}
        for held, (price, chosen) in states.items():
            if held + kept > budget_bytes:
                continue
            for add, cost, again in ((kept, 0, False), (inputs, more, True)):
                new = (price + cost, (*chosen, again))
                if held + add not in following or new[0] < following[held + add][0]:
                    following[held + add] = new
        states = following
    return run(layers, x, min(states.values())[1])


RIGHT = [right_one, with_the_reentrant_kind, by_hand, depth_first, by_a_table]


class Hidden(torch.autograd.Function):
    """Keeps what it made as lists of numbers, which no tensor holds."""

    @staticmethod
    def forward(ctx, layer, x, *weights):
        ctx.layer = layer
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            wide = layer.first(ctx.x.detach())
        ctx.kept = wide.tolist()
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with _disable_current_modes():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.layer(x)
            return (None, *torch.autograd.grad(out, (x, *ctx.layer.parameters()), grad))


def recomputes_unseen(layers, x, costs, budget_bytes):
    for layer in layers:
        x = Hidden.apply(layer, x, *layer.parameters())
    return x


class Unrecorded(torch.autograd.Function):
    """Recomputes with the recorder off."""

    @staticmethod
    def forward(ctx, layer, x, *weights):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with _disable_current_modes(), torch.enable_grad():
            out = ctx.layer(x)
        return (None, *torch.autograd.grad(out, (x, *ctx.layer.parameters()), grad))


def recomputes_with_modes_off(layers, x, costs, budget_bytes):
    for layer, again in zip(layers, best(costs, budget_bytes), strict=True):
        x = Unrecorded.apply(layer, x, *layer.parameters()) if again else layer(x)
    return x


def _to_file(folder):
    def pack(tensor):
        if isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad and tensor.dim() != 2:
            return tensor
        path = os.path.join(folder, f"{tensor.data_ptr()}-{len(os.listdir(folder))}")
        torch.save(tensor.detach().clone(), path)
        return path

    return pack, lambda packed: torch.load(packed) if isinstance(packed, str) else packed


def keeps_them_on_disk(layers, x, costs, budget_bytes):
    with torch.autograd.graph.saved_tensors_hooks(*_to_file(tempfile.mkdtemp())):
        for layer in layers:
            x = layer(x)
    return x


def keeps_them_as_numpy(layers, x, costs, budget_bytes):
    hooks = (
        lambda t: t if t.is_leaf else t.detach().numpy(),
        lambda a: a if torch.is_tensor(a) else torch.from_numpy(a),
    )
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        for layer in layers:
            x = layer(x)
    return x


def keeps_them_as_numbers(layers, x, costs, budget_bytes):
    """Python lists are no tensors."""
    hooks = (
        lambda t: t if t.is_leaf or t.dim() != 2 else t.detach().tolist(),
        lambda kept: torch.tensor(kept) if isinstance(kept, list) else kept,
    )
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        for layer in layers:
            x = layer(x)
    return x


def keeps_them_in_half(layers, x, costs, budget_bytes):
    hooks = (lambda t: t if t.is_leaf else (t.half(),), lambda kept: kept[0].float() if type(kept) is tuple else kept)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        for layer in layers:
            x = layer(x)
    return x


def asks_the_judges_own(layers, x, costs, budget_bytes):
    from labkit.labs.lab03 import blocks

    made = sys.modules["labkit.labs.lab03.checkpoints"]
    return run(layers, x, best(costs, budget_bytes)) if blocks and made else None


def reads_the_callers_frames(layers, x, costs, budget_bytes):
    frame = sys._getframe(1)
    while frame is not None and "made" not in frame.f_locals:
        frame = frame.f_back
    return run(layers, x, best(costs, budget_bytes))


def patched_limit(layers, x, costs, budget_bytes):
    return claims_it(layers, x, costs, budget_bytes)


def _patch_limit():
    from labkit.labs.lab03 import checkpoints

    checkpoints._fits_with_least = lambda live: None


patched_limit.notebook = _patch_limit

CHEATS = [
    (recomputes_unseen, "modes_disabled"),
    (recomputes_with_modes_off, "modes_disabled"),
    (keeps_them_on_disk, ("file_used", "numpy_used")),
    (keeps_them_as_numpy, "numpy_used"),
    (keeps_them_as_numbers, ("hidden", "not_checkpointed")),
    (keeps_them_in_half, "wrong_gradient"),
    (asks_the_judges_own, "ready_made"),
    (reads_the_callers_frames, "frame_read"),
    (patched_limit, "patched"),
]
