"""DeepSpeed's AutoTP on a Llama from transformers, recorded: what it cuts, and what a layer of it sends.

AutoTP finds linear layers by their names and cuts them; each row-parallel one sums its output by an all_reduce. Left
out: its presets and ZeRO beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import labkit.labs.lab06.training as training
from labkit.check.table import table


@dataclass(frozen=True)
class AutoTP:
    """A step of DeepSpeed's AutoTP on rank 0. shapes: (name, whole shape, the rank's) of a layer's weights, embedding
    and head. calls: of the last step. losses: by step, and serial_losses of the same model whole.
    """

    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    calls: tuple[training.Call, ...]
    losses: tuple[float, ...]
    serial_losses: tuple[float, ...]


def autotp(tp: int = 2, steps: int = 3) -> AutoTP:
    """Train a transformers Llama of lab 06's sizes by DeepSpeed with {"tensor_parallel": {"autotp_size": tp}}.

    Raises ValueError for another tp than 2 (its 2 KV heads), ModuleNotFoundError without transformers,
    DeepSpeedMissing, RankFailed.
    """
    from labkit.ranks.launch import launch

    training.checked(tp, steps, "tp")
    if tp > training.SIZES["kv_heads"]:
        raise ValueError(f"the model has {training.SIZES['kv_heads']} KV heads; tp=2 would do, not {tp}")
    preload = ("deepspeed", "transformers", "labkit.record.trace")
    found = launch(_in_rank, tp, tp, steps, prints="quiet", preload=preload, deadline_s=240.0)
    shapes, record, losses, serial = found[0]
    return AutoTP(shapes, training.calls_of(record), losses, serial)


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = training.SIZES
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["ffn"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def _in_rank(tp: int, steps: int) -> tuple:
    import torch

    import labkit.labs.lab06.in_rank as in_rank
    from labkit.model.deepspeed import start_deepspeed
    from labkit.model.llama import loss_of
    from labkit.ranks.rank import device
    from labkit.record.trace import Trace

    serial = tuple(_plain_losses(steps))
    model = _model().to(device())
    whole = {name: tuple(p.shape) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE)
    config = {"train_micro_batch_size_per_gpu": training.BATCH, "tensor_parallel": {"autotp_size": tp}}
    engine, _ = start_deepspeed(model, config, optimizer=optimizer)
    own = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    losses, record = [], None

    def step(tokens: Any, targets: Any) -> None:
        in_rank.mark()
        loss = loss_of(engine(tokens).logits, targets)
        in_rank.mark()
        engine.backward(loss)
        in_rank.mark()
        engine.step()
        losses.append(loss.item())

    for number, (tokens, targets) in enumerate(training.text_batches(steps)):
        tokens, targets = tokens.to(device()), targets.to(device())
        if number < steps - 1:
            step(tokens, targets)
            continue
        with Trace() as trace:
            step(tokens, targets)
        record = trace.record
    engine.destroy()
    shapes = [(name, whole[name], own[name]) for name in whole if "layers.0." in name or "layers." not in name]
    return tuple(shapes), record, tuple(losses), serial


def _plain_losses(steps: int) -> list[float]:
    from labkit.model.llama import loss_of

    model, losses = _model(), []
    for tokens, targets in training.text_batches(steps):
        loss = loss_of(model(tokens).logits, targets)
        loss.backward()
        training.descend(model)
        losses.append(loss.item())
    return losses


def told(found: AutoTP) -> str:
    """Shapes, calls and losses as tables."""
    size = training.BATCH * training.LENGTH * training.SIZES["hidden"] * 4
    shapes = [(name, str(whole), str(own), "cut" if whole != own else "whole") for name, whole, own in found.shapes]
    rows = []
    for phase in ("forward", "backward", "after"):
        calls = [call for call in found.calls if call.phase == phase]
        for op in dict.fromkeys(call.op for call in calls):
            of = [call.num_bytes for call in calls if call.op == op]
            rows.append((phase, op, str(len(of)), str(of.count(size)), f"{sum(of):,}"))
    pairs = zip(found.losses, found.serial_losses, strict=True)
    losses = ", ".join(f"{mine:.4f} ({whole:.4f})" for mine, whole in pairs)
    return "\n\n".join([
        table(("weight", "whole", "on rank 0", ""), shapes),
        table(("", "call", "times", "of these x's size", "bytes"), rows),
        f"losses (whole model): {losses}",
    ])  # fmt: skip
