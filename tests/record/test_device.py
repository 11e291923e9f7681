"""The played device: apart from the host, as CUDA is; every copy counted in the bytes that arrive; what it holds."""

import pytest
import torch

from labkit.model.llama import Llama, Shape, loss_of
from labkit.model.text import batches
from labkit.record.device import Book, DeviceTensor, module_to_device, on_device, to_device, to_host
from labkit.record.trace import Trace


@pytest.fixture
def book():
    return Book()


def copies(book):
    return [(entry.kind, entry.num_bytes) for entry in book.entries if entry.kind in ("down", "up")]


def test_an_op_on_both_places_raises_as_cuda_does(book):
    with pytest.raises(RuntimeError, match="same device"):
        to_device(torch.ones(3), book) + torch.ones(3)
    assert to_host(to_device(torch.ones(3), book) + torch.tensor(1.0)).tolist() == [2.0] * 3  # a scalar may


def test_a_copy_counts_the_bytes_of_the_dtype_that_arrives(book):
    narrow = to_device(torch.ones(10, dtype=torch.bfloat16), book)
    book.entries.clear()
    narrow.to("cpu")
    narrow.cpu()
    narrow.to("cpu", torch.float32)
    narrow.copy_(torch.ones(10))
    torch.empty(10).copy_(narrow)
    assert copies(book) == [("down", 20), ("down", 20), ("down", 40), ("up", 20), ("down", 40)]


def test_on_the_device_it_holds_what_lives_there_and_no_more(book):
    one = to_device(torch.ones(100), book)
    assert book.held_bytes == 400
    two = one * 2
    view = two[:10]
    assert book.held_bytes == 800
    del two
    assert book.held_bytes == 800  # the view keeps it
    del view, one
    assert book.held_bytes == 0


def test_what_is_made_where_a_tensor_of_it_lies_is_of_the_device(book):
    here = to_device(torch.ones(3), book)
    assert isinstance(torch.zeros_like(here), DeviceTensor)
    with on_device(book):
        assert isinstance(torch.zeros(3, device=here.device), DeviceTensor)
        assert isinstance(torch.ones(3).to(here.device), DeviceTensor)
        assert isinstance(torch.ones(3).to(here), DeviceTensor)
        assert type(torch.zeros(3)) is torch.Tensor
        assert type(torch.zeros(3).copy_(here)) is torch.Tensor


def test_it_cannot_be_looked_into_from_elsewhere(book):
    with pytest.raises(RuntimeError, match="copy it to the host"):
        _ = to_device(torch.ones(3), book)._inner


def test_a_hook_in_backward_makes_tensors_of_the_device_too(book):
    weight, kinds = torch.nn.Parameter(to_device(torch.ones(3), book)), []
    weight.register_post_accumulate_grad_hook(lambda p: kinds.append(type(torch.zeros(2, device=p.device))))
    with on_device(book):
        (weight * weight).sum().backward()
    assert kinds == [DeviceTensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_has_the_losses_and_gradients_that_it_has_on_the_cpu(book, dtype):
    shape = Shape(hidden=32, layers=2, heads=2, kv_heads=1, ffn=48)
    torch.manual_seed(0)
    plain = Llama(shape).to(dtype)
    torch.manual_seed(0)
    played = module_to_device(Llama(shape).to(dtype), book)
    tokens, targets = next(batches(2, 16))
    expected = loss_of(plain(tokens), targets)
    expected.backward()
    with on_device(book):
        loss = loss_of(played(to_device(tokens, book)), to_device(targets, book))
        loss.backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(to_host(loss.detach()), expected.detach(), **tolerance)
    for got, due in zip(played.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(to_host(got.grad), due.grad, **tolerance)
    weights = sum(p.nbytes for p in plain.parameters())
    del loss
    assert book.held_bytes == 2 * weights  # and gradients


def test_tied_weights_stay_tied(book):
    module = module_to_device(Llama(Shape(hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, tied=True)), book)
    assert module.lm_head.weight is module.embed_tokens.weight


def test_the_record_sees_the_ops_behind_it(book):
    with Trace() as trace:
        one = to_device(torch.ones(8, 8), book)
        one @ one
    assert trace.record.flops == 2 * 8**3
    assert [entry.flops for entry in book.entries if entry.kind == "op"] == [2 * 8**3]


def test_data_can_be_assigned_as_on_a_gpu_and_the_old_memory_is_let_go_of():
    book = Book()
    parameter = torch.nn.Parameter(to_device(torch.ones(8), book))
    with on_device(book):
        parameter.data = torch.full((8,), 3.0).to(parameter.device)
    assert to_host(parameter).tolist() == [3.0] * 8 and book.held_bytes == 32
    (parameter * 2).sum().backward()
    assert to_host(parameter.grad).tolist() == [2.0] * 8


def test_data_of_the_host_is_refused_with_what_to_do():
    parameter = torch.nn.Parameter(to_device(torch.ones(8), Book()))
    with pytest.raises(RuntimeError, match="send it first"):
        parameter.data = torch.zeros(8)
