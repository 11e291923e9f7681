"""A model from transformers' config.json, for the model types whose layers `shapes` describes.

What a config may leave out is taken as transformers takes it; sizes without which nothing can be counted must be
there. Left out: other model types, and settings that change no size (rope scaling, sliding windows, precision).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.cost.named import named
from labkit.cost.shapes import Shape

TYPES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def model(name: str) -> Shape:
    """A named model, or that of a config.json: its path, or its folder's. ValueError, one line, for what cannot be."""
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file():
        return read(path)
    if name.endswith(".json"):
        raise ValueError(f"there is no file {name}; give the path of a config.json, or a name like llama-3.1-8b")
    return named(name)


def read(path: str | Path) -> Shape:
    """The shape that a config.json describes. ValueError says in one line what is wrong with the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config.json is an object with keys like model_type, not {type(config).__name__}")
    try:
        return shape_of(config, str(path))
    except ValueError as error:
        told = str(error)
        raise ValueError(told if told.startswith(str(path)) else f"{path}: {told}") from None


def shape_of(config: dict[str, Any], where: str = "config.json") -> Shape:
    """The shape that transformers would build from these settings. ValueError as `read`."""
    kind = config.get("model_type")
    if kind not in TYPES:
        raise ValueError(f"{where}: model_type {kind!r} is not one of {', '.join(TYPES)}")
    name = str(config.get("_name_or_path") or Path(where).parent.name or kind)
    return _gpt2(config, where, name) if kind == "gpt2" else _llama(config, where, name, kind)


def _gpt2(config: dict[str, Any], where: str, name: str) -> Shape:
    hidden, heads = _size(config, "n_embd", where), _size(config, "n_head", where)
    positions = _size(config, "n_positions", where)
    return Shape(
        name,
        _size(config, "n_layer", where),
        hidden,
        heads,
        heads,
        _head_dim(hidden, heads, where),
        _size(config, "n_inner", where, 4 * hidden),
        _size(config, "vocab_size", where),
        positions,
        False,
        True,
        tied=_flag(config, "tie_word_embeddings", where, True),
        max_seq=positions,
        source=where,
    )


def _llama(config: dict[str, Any], where: str, name: str, kind: str) -> Shape:
    hidden, heads = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    experts, active, ffn = _experts(config, where, kind)
    # Llama 1's files have no num_key_value_heads; the other types' defaults differ, so theirs must be there.
    kv_heads = _size(config, "num_key_value_heads", where, heads if kind == "llama" else None)
    bias = _flag(config, "attention_bias", where, False) if kind in ("llama", "qwen3", "qwen3_moe") else False
    head_dim = _size(config, "head_dim", where, 0)
    return Shape(
        name,
        _size(config, "num_hidden_layers", where),
        hidden,
        heads,
        kv_heads,
        head_dim or (128 if kind == "qwen3" else _head_dim(hidden, heads, where)),
        ffn,
        _size(config, "vocab_size", where),
        qkv_biases=bias or kind == "qwen2",
        out_bias=bias,
        mlp_biases=_flag(config, "mlp_bias", where, False) if kind == "llama" else False,
        qk_norm=kind.startswith("qwen3"),
        tied=_flag(config, "tie_word_embeddings", where, False),
        experts=experts,
        active_experts=active,
        max_seq=_size(config, "max_position_embeddings", where, 0),
        source=where,
    )


def _experts(config: dict[str, Any], where: str, kind: str) -> tuple[int, int, int]:
    """(experts, experts of one token, feed-forward size)."""
    if kind == "qwen3_moe":
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(f"{where}: layers that differ (mlp_only_layers, decoder_sparse_step) are not counted here")
        keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        return tuple(_size(config, key, where) for key in keys)
    ffn = _size(config, "intermediate_size", where)
    if kind == "mixtral":
        return _size(config, "num_local_experts", where), _size(config, "num_experts_per_tok", where), ffn
    return 0, 0, ffn


def _size(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number of 1 or more; `default` where the key is absent or null."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{where} has no {key}, which a {config.get('model_type')} needs")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key} must be a whole number of 1 or more, not {value!r}")
    return value


def _flag(config: dict[str, Any], key: str, where: str, default: bool) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be true or false, not {value!r}")
    return default if value is None else value


def _head_dim(hidden: int, heads: int, where: str) -> int:
    if hidden % heads:
        raise ValueError(f"{where}: {heads} heads do not divide the hidden size {hidden}")
    return hidden // heads
