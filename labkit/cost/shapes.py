"""What a transformer is made of, and how many parameters that is: in whole, per layer, and on one rank.

A decoder is token embeddings (and learned positions, if any), equal layers, a last norm and a head. GPT's layers have
LayerNorm, biases and a GELU between two matrices; Llama's have RMSNorm, rotary positions and SwiGLU. Left out:
encoders, vision towers, adapters, layers that differ from one another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. hidden is h, ffn is f (of one expert), heads is a, kv_heads those of keys and values.

    positions: learned positions, 0 for rotary ones. gated: SwiGLU, three matrices instead of two. biases: GPT's, on
    every matrix and norm. qkv_biases, out_bias, mlp_biases: on these alone. experts: per layer, 0 for none;
    active_experts: that a token passes through. max_seq: the longest sequence it was made for, 0 where nothing says so.
    ValueError for sizes that cannot be.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0
    gated: bool = True
    biases: bool = False
    qkv_biases: bool = False
    out_bias: bool = False
    mlp_biases: bool = False
    qk_norm: bool = False
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    max_seq: int = 0
    source: str = ""

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            size = getattr(self, field)
            if not (isinstance(size, int) and size > 0):
                raise ValueError(f"{self.name}: {field} must be a whole number of 1 or more, not {size!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} kv heads do not divide {self.heads} heads")
        if bool(self.experts) != bool(self.active_experts) or self.active_experts > self.experts:
            raise ValueError(f"{self.name}: {self.active_experts} of {self.experts} experts cannot be active")

    @property
    def query_width(self) -> int:
        """a d: h in most models, not in all (Mistral Nemo, Qwen3)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def dropout(self) -> bool:
        """GPT's layers have dropout, and with it masks to keep; Llama's have none."""
        return self.biases


def beyond_plain_llama(shape: Shape) -> tuple[str, ...]:
    """What a model has that a plain Llama has not, in words; nothing for one."""
    odd = {
        "experts": bool(shape.experts),
        "biases": shape.biases or shape.qkv_biases or shape.out_bias or shape.mlp_biases,
        "learned positions": bool(shape.positions),
        "an MLP that is not gated": not shape.gated,
        "norms of queries and keys": shape.qk_norm,
        "heads that are not hidden / heads wide": shape.query_width != shape.hidden,
    }
    return tuple(what for what, is_so in odd.items() if is_so)


def parameters(shape: Shape) -> int:
    """All trainable parameters; a tied head counts once, buffers (rotary frequencies) never."""
    head = 0 if shape.tied else shape.vocab * shape.hidden
    return embedding_parameters(shape) + shape.layers * layer_parameters(shape) + norm_parameters(shape) + head


def active_parameters(shape: Shape) -> int:
    """Those that one token passes through: of the experts only its own, everything else whole."""
    idle = (shape.experts - shape.active_experts) * mlp_parameters(shape) if shape.experts else 0
    return parameters(shape) - shape.layers * idle


def embedding_parameters(shape: Shape) -> int:
    """Token embeddings, and learned positions."""
    return (shape.vocab + shape.positions) * shape.hidden


def layer_parameters(shape: Shape) -> int:
    """One layer: attention, MLP or experts with their router, two norms. GPT: 12 h^2 + 13 h."""
    return rank_layer_parameters(shape, 1)


def norm_parameters(shape: Shape) -> int:
    return (2 if shape.biases else 1) * shape.hidden


def mlp_parameters(shape: Shape, tp: int = 1) -> int:
    """One MLP, or one expert, on one of tp ranks: the bias of the last matrix is whole on each of them."""
    first = 2 if shape.gated else 1
    biases = (first * shape.ffn // tp + shape.hidden) if shape.biases or shape.mlp_biases else 0
    return (first + 1) * shape.hidden * shape.ffn // tp + biases


def attention_parameters(shape: Shape, tp: int = 1) -> int:
    """Query, key, value and output matrices on one of tp ranks; with fewer kv heads than ranks each keeps one whole."""
    query, kv = shape.query_width // tp, rank_kv_heads(shape, tp) * shape.head_dim
    matrices = shape.hidden * (2 * query + 2 * kv)
    biases = (query + 2 * kv) if shape.biases or shape.qkv_biases else 0
    out = shape.hidden if shape.biases or shape.out_bias else 0
    return matrices + biases + out + (2 * shape.head_dim if shape.qk_norm else 0)


def rank_kv_heads(shape: Shape, tp: int) -> int:
    """Key-value heads on each of tp ranks: copies of one where there are fewer heads than ranks."""
    return max(1, shape.kv_heads // tp)


def rank_layer_parameters(shape: Shape, tp: int) -> int:
    """One layer on one of tp ranks (Megatron-LM, arXiv:1909.08053, section 3): matrices are split, norms are copied.

    Experts are split like any MLP; the router is copied.
    """
    mlps = max(1, shape.experts) * mlp_parameters(shape, tp) + shape.experts * shape.hidden
    return attention_parameters(shape, tp) + mlps + 2 * norm_parameters(shape)


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each of pp pipeline stages, as even as can be; what is over goes to the middle, then last, then first.

    The first stage has the embeddings and most microbatches in flight, the last one the head: Llama 3 405B puts its
    126 layers on 16 stages in this way (arXiv:2407.21783, section 3.3.2). ValueError for more stages than layers.
    """
    if not 1 <= pp <= layers:
        raise ValueError(f"{layers} layers make 1 to {layers} pipeline stages, not {pp}")
    base, over = divmod(layers, pp)
    first_served = [*range(1, pp - 1), *([pp - 1] if pp > 1 else []), 0][:over]
    return tuple(base + (stage in first_served) for stage in range(pp))


def stage_parameters(shape: Shape, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Parameters on one rank of one pipeline stage.

    The first stage has the embeddings, the last one norm and head; a tied head is a second copy when it stands on
    another stage. The vocabulary is padded to a multiple of tp, positions are copied to each rank.
    """
    rows = -(-shape.vocab // tp)
    first, last = stage == 0, stage == pp - 1
    count = stage_layers(shape.layers, pp)[stage] * rank_layer_parameters(shape, tp)
    if first:
        count += (rows + shape.positions) * shape.hidden
    if last:
        count += norm_parameters(shape)
        count += 0 if shape.tied and first else rows * shape.hidden
    return count


def stage_experts(shape: Shape, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Of `stage_parameters`, those of experts (without their router): what expert parallelism divides."""
    return stage_layers(shape.layers, pp)[stage] * shape.experts * mlp_parameters(shape, tp)
