"""Ten steps on real text, serial and in parallel: losses, weights and input gradients to compare, and the last step's
record.

The model is a Llama small enough for a notebook, its parts the learner's or their stand-ins. Left out: what a part must
be (each exercise's module), and the models themselves (`parallel_llama`, `sequence_llama`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import labkit.labs.lab06.in_rank as in_rank
from labkit.labs.lab02 import asked

if TYPE_CHECKING:
    from labkit.record.events import RankRecord

SIZES = {"vocab": 256, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
BATCH, LENGTH = 4, 32  # windows of the text, and their bytes
LEARNING_RATE = 0.1  # of plain SGD
# Along which dim a weight is cut; the others are whole on every rank.
CUT = {"embed_tokens": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0,
       "down_proj": 1, "lm_head": 0}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The parts of a parallel Llama, by exercise: 6.1, 6.1b, 6.2, 6.2b, 6.3, 6.4, 6.4b. None: the stand-in."""

    column: Any = None
    row: Any = None
    f: Any = None
    g: Any = None
    attention: Any = None
    embedding: Any = None
    cross_entropy: Any = None

    def filled(self) -> Parts:
        """The same with stand-ins in place of None. Imports torch."""
        import labkit.labs.lab06.standins as standins

        own = {
            "column": standins.ColumnParallelLinear,
            "row": standins.RowParallelLinear,
            "f": standins.f,
            "g": standins.g,
            "attention": standins.ParallelAttention,
            "embedding": standins.VocabParallelEmbedding,
            "cross_entropy": standins.vocab_parallel_cross_entropy,
        }
        return Parts(**{name: getattr(self, name) or made for name, made in own.items()})


@dataclass(frozen=True)
class Call:
    """A collective or message of rank 0 in the last step. phase: "forward" or "backward". module: where it was made."""

    phase: str
    op: str
    num_bytes: int
    sent_bytes: int
    module: str


@dataclass(frozen=True)
class Trained:
    """losses: by step. weights: whole, after the last step, by the serial model's names. input_gradients: by step, of
    the embedding's output (b, s, h). records: of the last step, by rank; () of a serial run.
    """

    losses: tuple[float, ...]
    weights: dict[str, Any]
    input_gradients: tuple[Any, ...]
    records: tuple[RankRecord, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        return calls_of(self.records[0]) if self.records else ()

    def __str__(self) -> str:
        return f"loss by step: {', '.join(f'{loss:.4f}' for loss in self.losses)}"


def calls_of(record: RankRecord) -> tuple[Call, ...]:
    """Communications of a recorded step that has lab 06's three marks: begin, end of forward, end of backward."""
    _, middle, end = in_rank.marks(record)[:3]
    owners = dict(record.modules)
    found = []
    for event in record.communications:
        module = next((owners[each] for each in (*event.writes, *event.reads) if each in owners), "")
        phase = "forward" if event.index < middle else "backward" if event.index < end else "after"
        found.append(Call(phase, event.op, event.num_bytes, event.sent_bytes, module))
    return tuple(found)


def whole_model() -> Any:
    """The serial model, from seed 0."""
    import torch

    from labkit.model.llama import Llama, Shape

    torch.manual_seed(0)
    return Llama(Shape(**SIZES))


def serial(steps: int = 10) -> Trained:
    """Train lab 06's Llama by plain SGD on one device. ValueError for steps that are no whole number from 1 up."""
    from labkit.labs.lab02.models import one_thread
    from labkit.model.llama import loss_of

    asked.whole("steps", steps, 10)
    model, losses, gradients = whole_model(), [], []
    inputs: list[Any] = []
    model.embed_tokens.register_forward_hook(lambda module, given, out: inputs.append(out) or out.retain_grad())
    with one_thread():
        for tokens, targets in text_batches(steps):
            loss = loss_of(model(tokens), targets)
            loss.backward()
            descend(model)
            losses.append(loss.item())
            gradients.append(inputs.pop().grad)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Trained(tuple(losses), weights, tuple(gradients))


def text_batches(steps: int) -> Any:
    """(tokens, targets) of each step, the same on all ranks."""
    from labkit.model.text import batches

    return batches(BATCH, LENGTH, steps=steps)


def descend(model: Any) -> None:
    """A step of plain SGD; gradients go."""
    import torch

    with torch.no_grad():
        for p in model.parameters():
            p -= LEARNING_RATE * p.grad
            p.grad = None


def train(parts: Parts | None = None, tp: int = 2, steps: int = 10) -> Trained:
    """Train it in tensor parallel on `tp` ranks (2 or 4), from these parts.

    Raises ValueError for another tp, RankFailed as `launch`.
    """
    checked(tp, steps, "tp")
    return launched(_train_in_rank, tp, steps, parts or Parts())


def checked(ranks: int, steps: int, name: str) -> None:
    """Raises ValueError for ranks or steps that cannot be."""
    asked.whole("steps", steps, 10)
    if ranks not in (2, 4):
        raise ValueError(f"{name} is 2 or 4 here, for the model has {SIZES['heads']} heads; not {ranks!r}")


def launched(fn: Callable, ranks: int, steps: int, *args: Any) -> Trained:
    """Runs `fn(steps, *args)`, which gives what `steps_of` gives, on ranks."""
    losses, weights, gradients, records = zip(*launched_parts(fn, ranks, steps, *args), strict=True)
    return Trained(losses[0], whole_weights(weights), gradients[0], records)


def train_sequence(cls: Any = None, tp: int = 2, steps: int = 10, keep: bool = True) -> Trained:
    """Train it in sequence parallel on `tp` ranks (2 or 4), MLPs by the class of 6.5, attention by torch's DTensor.

    cls: by default the stand-in. Raises as `train`.
    """
    checked(tp, steps, "tp")
    return _of_positions(launched_parts(_sequence_in_rank, tp, steps, cls, keep), ring=False)


def train_ring(fn: Any = None, cp: int = 2, steps: int = 10) -> Trained:
    """Train it in context parallel on `cp` ranks (2 or 4), keys and values sent round by the function of 6.6.

    fn: by default the stand-in, which gathers them. Raises as `train`.
    """
    checked(cp, steps, "cp")
    return _of_positions(launched_parts(_ring_in_rank, cp, steps, fn), ring=True)


def launched_parts(fn: Callable, ranks: int, steps: int, *args: Any) -> list[tuple]:
    """What `fn(steps, *args)` gives on each rank."""
    from labkit.ranks.launch import launch

    return launch(fn, ranks, steps, *args, prints="quiet", preload=("labkit.record.trace", "labkit.record.held"))


def _of_positions(found: list[tuple], ring: bool) -> Trained:
    """Losses of ranks are parts of a sum, input gradients those of their positions."""
    import labkit.labs.lab06.sequence_llama as sequence_llama

    losses, weights, gradients, records = zip(*found, strict=True)
    together = tuple(sequence_llama.whole_of(list(of_ranks), ring) for of_ranks in zip(*gradients, strict=True))
    named = [{_llamas_name(name): weight for name, weight in each.items()} for each in weights]
    return Trained(tuple(map(sum, zip(*losses, strict=True))), whole_weights(named), together, records)


def _llamas_name(name: str) -> str:
    """The serial model's name of a parameter of 6.5's class."""
    for theirs, ours in (("mlp.norm_weight", "post_attention_layernorm.weight"), ("mlp.gate", "mlp.gate_proj.weight"),
                         ("mlp.up", "mlp.up_proj.weight"), ("mlp.down", "mlp.down_proj.weight")):  # fmt: skip
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def whole_weights(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Blocks put together; of copies the first. Ranks that share a KV head have copies of its rows."""
    import torch

    whole = {}
    due = {name: p.shape for name, p in whole_model().named_parameters()}
    for name in of_ranks[0]:
        dim = next((dim for part, dim in CUT.items() if f"{part}.weight" in name), None)
        blocks = [each[name] for each in of_ranks]
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            blocks = blocks[:: max(1, len(blocks) // SIZES["kv_heads"])]
        is_whole = dim is None or blocks[0].shape == due[name]
        whole[name] = blocks[0] if is_whole else torch.cat(blocks, dim)
    return whole


def _train_in_rank(steps: int, parts: Parts) -> tuple:
    import torch.distributed as dist

    import labkit.labs.lab06.parallel_llama as parallel_llama

    tp = dist.get_world_size()
    kv_group = in_rank.group_of(tp // SIZES["kv_heads"]) if tp > SIZES["kv_heads"] else None
    model = parallel_llama.ParallelLlama(whole_model(), dist.group.WORLD, kv_group, parts.filled())
    return steps_of(model, model, steps)


def _sequence_in_rank(steps: int, cls: Any, keep: bool) -> tuple:
    import torch.distributed as dist

    import labkit.labs.lab06.sequence_llama as sequence_llama
    import labkit.labs.lab06.standins as standins

    tp = dist.get_world_size()
    kv_group = in_rank.group_of(tp // SIZES["kv_heads"]) if tp > SIZES["kv_heads"] else None
    made = cls or standins.SequenceParallelMLP
    model = sequence_llama.SequenceLlama(whole_model(), dist.group.WORLD, kv_group, made, keep)
    return steps_of(model, model, steps)


def _ring_in_rank(steps: int, fn: Any) -> tuple:
    import torch.distributed as dist

    import labkit.labs.lab06.sequence_llama as sequence_llama
    import labkit.labs.lab06.standins as standins

    model = sequence_llama.RingLlama(whole_model(), dist.group.WORLD, fn or standins.ring_attention)
    return steps_of(model, model, steps)


def steps_of(model: Any, forward: Callable[[Any, Any], tuple[Any, Any]], steps: int, finish: Any = None) -> tuple:
    """Runs in a rank: (losses, weights, input gradients, the last step's record).

    forward: (tokens, targets) -> (loss, a tensor whose gradient is asked for). finish: after backward, before the
    update.
    """
    from labkit.record.trace import Trace

    losses, gradients, record = [], [], None

    def step(tokens: Any, targets: Any) -> None:
        in_rank.mark()
        loss, first = forward(tokens, targets)
        first.retain_grad()
        in_rank.mark()
        loss.backward()
        in_rank.mark()
        if finish is not None:
            finish()
        losses.append(loss.item())
        gradients.append(first.grad)

    for number, (tokens, targets) in enumerate(text_batches(steps)):
        if number < steps - 1:
            step(tokens, targets)
        else:
            with Trace() as trace:
                step(tokens, targets)
            record = trace.record
        descend(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return tuple(losses), weights, tuple(gradients), record


def differences(trained: Trained, other: Trained) -> dict[str, float]:
    """Largest differences, relative to the largest value: of losses, of weights, of input gradients."""

    def off(mine: Any, theirs: Any) -> float:
        return float((mine - theirs).abs().max() / theirs.abs().max())

    pairs = zip(trained.losses, other.losses, strict=True)
    inputs = zip(trained.input_gradients, other.input_gradients, strict=True)
    return {
        "losses": max(abs(mine - theirs) / theirs for mine, theirs in pairs),
        "weights": max(off(trained.weights[name], weight) for name, weight in other.weights.items()),
        "input gradients": max(off(mine, theirs) for mine, theirs in inputs),
    }
