"""A device with memory of its own, played on a CPU: its tensors are apart from the host's, and every copy is counted.

A `DeviceTensor` holds its numbers in a CPU tensor that only this module touches. An op on tensors of the device makes
tensors of the device; with a host tensor among them it raises, as CUDA does; `.to("cpu")`, `.cpu()` and `copy_` move
bytes, and a `Book` writes down each move, each op, and how many bytes the device holds. A move to another dtype
converts before it travels, as CUDA does: bytes are those of the dtype that arrives. To torch it is the device "meta",
the one without a library behind it; `torch.zeros(..., device=parameter.device)` in `on_device` is of it too. Left out:
streams, pinned memory, and whoever unwraps a tensor by force.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from sys import _getframe  # by name: `watching` puts a telltale in sys meanwhile
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the device did.

    kind: "op", "down" (a copy to the host), "up" (a copy from it) or "mark". name: of the op or of the mark.
    num_bytes: moved; of an op, read and written. flops: of an op, by torch's registry. held_bytes: by the device
    afterwards. storage: of a copy, the number of the device's storage, in the order in which they were made.
    """

    kind: str
    name: str
    num_bytes: int
    flops: int
    held_bytes: int
    storage: int = -1


class Book:
    """What a device did, in order, and what it holds."""

    def __init__(self):
        self.entries: list[Entry] = []
        self.held: dict[int, int] = {}  # number of a storage -> bytes
        self.held_bytes = 0
        self._numbers: dict[int, int] = {}  # address of a storage -> its number
        self._alive: dict[int, weakref.ref] = {}
        self._count = 0

    def write(self, kind: str, name: str, num_bytes: int = 0, flops: int = 0, storage: int = -1) -> None:
        self.entries.append(Entry(kind, name, num_bytes, flops, self.held_bytes, storage))

    def mark(self, name: str) -> None:
        self.write("mark", name)

    def number_of(self, inner: torch.Tensor) -> int:
        """Number of a storage of the device, entered when it is new."""
        storage = inner.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            number, self._count = self._count, self._count + 1
            self._numbers[address], self.held[number] = number, storage.nbytes()
            self.held_bytes += storage.nbytes()

            def freed(_):
                self._numbers.pop(address, None)
                self._alive.pop(number, None)
                self.held_bytes -= self.held.pop(number, 0)

            self._alive[number] = weakref.ref(storage, freed)
        return self._numbers[address]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether an ordinary tensor is a piece of the device's memory."""
        return tensor.untyped_storage()._cdata in self._numbers


class DeviceTensor(torch.Tensor):
    """A tensor of the device. Made by `to_device`, and by ops on others."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, book: Book):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.__dict__.update(_labkit_inner=inner, _labkit_book=book)
        book.number_of(inner)
        return made

    @property
    def _inner(self) -> torch.Tensor:
        _ours()
        return self.__dict__["_labkit_inner"]

    @property
    def _book(self) -> Book:
        _ours()
        return self.__dict__["_labkit_book"]

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        """As with a GPU's tensor: it has the other's memory from then on."""
        if not _is_mine(value):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but `.data = ` was given one of the host: "
                "send it first, by to(parameter.device)"
            )
        torch.Tensor.data.__set__(self, value)
        self.__dict__["_labkit_inner"] = value._inner.detach()

    def __repr__(self, *, tensor_contents=None):
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def register_post_accumulate_grad_hook(self, hook):
        return super().register_post_accumulate_grad_hook(_within(hook, self._book))

    def register_hook(self, hook):
        return super().register_hook(_within(hook, self._book))

    def item(self):
        return self.to("cpu").item()

    def tolist(self):
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten.copy_.default and not (_is_mine(args[0]) and _is_mine(args[1])):
            return _copy(args[0], args[1])
        target = kwargs.get("device")
        if func is _aten._to_copy.default and target is not None and torch.device(target).type != "meta":
            return _down(args[0], kwargs.get("dtype"))
        return _compute(func, args, kwargs)


def _ours() -> None:
    """Raises for whoever looks into a tensor of the device from elsewhere: on a GPU there is no such way."""
    if _getframe(2).f_code.co_filename != __file__:
        raise RuntimeError("a tensor of the device cannot be looked into: copy it to the host, by to() or copy_()")


def to_device(tensor: torch.Tensor, book: Book) -> DeviceTensor:
    """A copy of a host tensor on the device."""
    made = DeviceTensor(tensor.detach().clone(), book)
    book.write("up", "to", made.nbytes, 0, book.number_of(made._inner))
    return made


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, for whoever looks on from outside: nothing is written into the book."""
    return (tensor._inner if _is_mine(tensor) else tensor).detach().clone()


def module_to_device(module: torch.nn.Module, book: Book) -> torch.nn.Module:
    """The module, its parameters and buffers put on the device; tied ones stay tied. Gives the same module back."""
    moved: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = torch.nn.Parameter(to_device(parameter, book), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = to_device(buffer, book)
    return module


@contextmanager
def on_device(book: Book) -> Iterator[None]:
    """What is made with a `device=` taken from a tensor of the device is of the device meanwhile."""
    with _Factories(book):
        yield


def _within(hook: Any, book: Book) -> Any:
    """A hook that runs as the code around backward does, where function modes are on: within backward they are off."""

    def within(tensor: torch.Tensor) -> Any:
        with _Factories(book):
            return hook(tensor)

    return within


def _is_mine(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def _unwrap(value: Any) -> Any:
    return value._inner if _is_mine(value) else value


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """An op on the device."""
    flat = tree_flatten((args, kwargs))[0]
    mine = [each for each in flat if _is_mine(each)]
    book = mine[0]._book
    if any(isinstance(each, torch.Tensor) and not _is_mine(each) and each.dim() > 0 for each in flat):
        name = str(func).split(".")[1]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} was given one on the device and one on cpu"
        )
    inner_args, inner_kwargs = tree_map(_unwrap, (args, kwargs))
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    flops = _flops(func, inner_args, inner_kwargs, out)
    known = {id(each._inner): each for each in mine}
    out = tree_map(lambda each: _wrapped(each, book, known), out)
    if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # no view
        made = [each for each in tree_flatten(out)[0] if _is_mine(each)]
        book.write("op", str(func), sum(each.nbytes for each in (*mine, *made)), flops)
    return out


def _flops(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=out) if formula else 0


def _wrapped(value: Any, book: Book, known: dict) -> Any:
    if not isinstance(value, torch.Tensor) or _is_mine(value):
        return value
    return known[id(value)] if id(value) in known else DeviceTensor(value, book)


def _down(tensor: DeviceTensor, dtype: torch.dtype | None) -> torch.Tensor:
    book, inner = tensor._book, tensor._inner
    out = inner.to(dtype=dtype or inner.dtype, copy=True)
    book.write("down", "to", out.nbytes, 0, book.number_of(inner))
    return out


def _copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    kind, mine = ("up", to) if _is_mine(to) else ("down", source)
    _unwrap(to).copy_(_unwrap(source))
    mine._book.write(kind, "copy_", to.numel() * to.element_size(), 0, mine._book.number_of(mine._inner))
    return to


class _Factories(TorchFunctionMode):
    """`torch.zeros(..., device="meta")` and `tensor.to("meta")` make tensors of the device."""

    def __init__(self, book: Book):
        super().__init__()
        self.book = book

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and _is_mine(args[0]):
            return _attention(self.book, *args, **kwargs)
        first = tree_flatten((args[:1], kwargs.get("input")))[0]
        if any(map(_is_mine, first)) or not any(map(_is_place, _places(func, args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = tree_map(_on_host, (args, kwargs))
        made = func(*args, **kwargs)
        return tree_map(lambda each: to_device(each, self.book) if isinstance(each, torch.Tensor) else each, made)


def _places(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Arguments that may say where a result is to lie: devices, and for `to` also a tensor that lies there."""
    given = [*args[1:], kwargs.get("device"), kwargs.get("other")]
    return given if func is torch.Tensor.to else [each for each in given if not isinstance(each, torch.Tensor)]


def _is_place(value: Any) -> bool:
    return _is_mine(value) or (isinstance(value, str | torch.device) and str(value) == "meta")


def _on_host(value: Any) -> Any:
    """The same place, played: a tensor of the device gives no more than its dtype."""
    if not _is_place(value):
        return value
    return torch.empty(0, dtype=value.dtype) if _is_mine(value) else torch.device("cpu")


def _attention(book: Book, q: Any, k: Any, v: Any, is_causal: bool = False) -> torch.Tensor:
    """Scores kept: torch's own would make its mask on "meta", where no numbers are."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype).triu(1)
        scores = scores + DeviceTensor(mask, book)
    return scores.softmax(-1) @ v
