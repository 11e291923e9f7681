"""Inputs of lab 00's checks: drawn from a seed, different on every rank, of odd shapes and several dtypes.

Left out: expected values; each judge makes its own from what it sent.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "int64", "float64", "int32", "bfloat16", "uint8")


def tensor(rng: random.Random, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of random values that use the whole precision of `dtype`: a detour through float32 shows."""
    import torch

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
    bits = torch.iinfo(kind).bits
    most = 2 ** min(bits - 1, 60)
    return torch.randint(1, most, shape, generator=generator, dtype=torch.int64).to(kind)


def shape(rng: random.Random) -> tuple[int, ...]:
    """An odd shape of one to three dims."""
    return tuple(rng.choice((3, 5, 7, 11)) for _ in range(rng.randint(1, 3)))


def describe(value: Any) -> str:
    """A tensor in words: "int64 tensor of shape (3, 5)"."""
    return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"


def same(got: Any, expected: Any) -> bool:
    """Whether two values are the same in type, shape and every element."""
    from labkit.check.compare import difference

    return difference(got, expected) is None


def through_float32(value: torch.Tensor) -> torch.Tensor:
    """What is left of a tensor after a trip through float32."""
    return value.float().to(value.dtype)


def head(value: torch.Tensor) -> str:
    """The first values of a tensor, short enough for a card."""
    first = value.flatten()[:4].tolist()
    told = ", ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in first)
    return f"[{told}{', ...' if value.numel() > 4 else ''}]"


def apart(got: torch.Tensor, expected: torch.Tensor) -> tuple[str, str]:
    """Two tensors in words, for a card: their first values, or where those are the same the first that differ."""
    from labkit.check.compare import difference

    found = difference(got, expected)
    if head(got) != head(expected) or found is None or not found.where:
        return head(got), head(expected)
    return f"{found.got} at {found.where}", f"{found.expected} at {found.where}"


def partly(got: torch.Tensor, truth: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether `got` is `truth` in some places and `own` in all others. Three tensors of one shape and dtype."""
    places = list(zip(*(each.flatten().tolist() for each in (got, truth, own)), strict=True))
    came = [value == wanted for value, wanted, mine in places if wanted != mine]
    return any(came) and not all(came) and all(value in (wanted, mine) for value, wanted, mine in places)


def other_kind(got: Any, expected: torch.Tensor) -> tuple[str, str]:
    """(cause, what was returned in words) for a value of another kind than the tensor that was expected."""
    import torch

    if not isinstance(got, torch.Tensor) or type(got) is not type(expected):
        name = type(got).__name__
        return "wrong_type", f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}, not a plain tensor"
    if got.device.type == "meta":
        return "wrong_type", "a tensor on the device meta, which holds no values"
    if got.dtype != expected.dtype:
        return "wrong_dtype", "a tensor of another dtype than it was given"
    return "wrong_shape", "a tensor of another shape than it was given"
