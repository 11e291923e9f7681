"""Training steps on a rank for exercise 5.1, on a device with memory of its own (`labkit.record.device`).

What comes back are plain containers: the device's book, weights after every step, and what the host holds. Left out:
what is right (`offloaded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import labkit.labs.lab02.models as models
import labkit.labs.lab05.asked as asked
from labkit.labs.lab00.attempts import Unusable


def train_all(cls: Callable, runs: Sequence[tuple]) -> Any:
    """Runs in a rank: `train` for each (what, plan, seed, batches, options), telling first which it is.

    Gives their results; NotImplemented or an Unusable where there is nothing to judge.
    """
    from labkit.check import living
    from labkit.ranks.rank import report

    call = "OffloadedAdam(parameters, lr=..., betas=..., eps=..., weight_decay=...)"
    found = asked.unfinished(cls, call, [], **runs[0][-1])
    if found is not None:
        return found
    results = []
    for what, *run in runs:
        report(case=what)  # reaches the judge also when this one raises
        results.append(train(cls, *run))
        if type(results[-1]) is not dict:
            return results[-1]
    name = living.has_class(("deepspeed",), "Adam")
    sentence = f"{name} does the work here; write the hooks and copies yourself."
    return Unusable("ready_made", sentence) if name else results


def train(cls: Callable, plan: models.Plan, seed: int, batches: Sequence[tuple], options: dict[str, Any]) -> Any:
    """Train by `cls(parameters, **options)`, a step per batch (inputs, targets, branches used).

    Gives entries (the book's, as tuples), weights (by step, name -> host tensor), host (dtype -> elements of tensors
    that the answer keeps there). Marks in the book: "begin", then per step "forward", "backward", "gradient NAME STRAY"
    (as it appears, with so many other parameters that have one), "ended", "stepped" and "zeroed".
    """
    from labkit.check import living
    from labkit.record.device import Book, module_to_device, on_device, to_host

    book = Book()
    module = module_to_device(models.build(plan, seed), book)
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_telling(book, name, named))
    ours, weights = set(living.storages()), []
    with on_device(book):
        optimizer = cls(module.parameters(), **options)
        found = optimizer if optimizer is NotImplemented else asked.without(optimizer, cls)
        if found is not None:
            return found
        book.mark("begin")
        for batch in batches:
            found = _step(cls, optimizer, module, book, batch)
            if found is not None:
                return found
            weights.append({name: to_host(parameter) for name, parameter in named.items()})
    ours |= {tensor.untyped_storage()._cdata for step in weights for tensor in step.values()}
    entries = [astuple(entry) for entry in book.entries]
    return {"entries": entries, "weights": weights, "host": _host_elements(book, ours)}


def _telling(book: Any, name: str, named: dict[str, Any]) -> Callable:
    """A hook that was there before the answer's own, and so sees the gradient first."""

    def tell(_):
        stray = sum(other != name and each.grad is not None for other, each in named.items())
        book.mark(f"gradient {name} {stray}")

    return tell


def _step(cls: Callable, optimizer: Any, module: Any, book: Any, batch: tuple) -> Any:
    """One step; None, or why it cannot be judged."""
    from labkit.record.device import to_device

    inputs, targets, use = batch
    book.mark("forward")
    loss = models.loss_of(module(to_device(inputs, book), use), to_device(targets, book))
    book.mark("backward")
    loss.backward()
    del loss
    book.mark("ended")
    found = asked.stub_result(cls, "step", optimizer.step())
    book.mark("stepped")
    found = found or asked.stub_result(cls, "zero_grad", optimizer.zero_grad())
    book.mark("zeroed")
    return found


def _host_elements(book: Any, ours: set[int]) -> dict[str, int]:
    """Elements by dtype of the host's storages that were not there before."""
    from labkit.check import living

    total: dict[str, int] = {}
    for storage, tensor in living.storages(lambda each: not book.owns(each)).items():
        if storage not in ours:
            dtype = str(tensor.dtype).removeprefix("torch.")
            total[dtype] = total.get(dtype, 0) + tensor.untyped_storage().nbytes() // tensor.element_size()
    return total
