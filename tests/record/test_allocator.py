"""The GPU allocator's figures: what they are made of, by a stand-in for torch.cuda, and on a real GPU where one is."""

import pytest
import torch

from labkit.record.allocator import allocated
from labkit.record.trace import Trace

GB = 10**9
ALLOCATOR = {"memory_allocated": 3 * GB, "memory_reserved": 4 * GB, "max_memory_allocated": 5 * GB,
             "max_memory_reserved": 6 * GB}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU of 80 GB, of which 74.5 GB are free; gives the devices that were asked for."""
    asked = []

    def answer(value):
        return lambda device: asked.append(device) or value

    for name, value in ALLOCATOR.items():
        monkeypatch.setattr(torch.cuda, name, answer(value))
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer((int(74.5 * GB), 80 * GB)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return asked


def test_what_is_reserved_is_allocated_or_in_gaps_and_the_rest_in_use_is_the_context(gpu):
    found = allocated()
    assert (found.allocated, found.fragmentation, found.reserved) == (3 * GB, GB, 4 * GB)
    assert found.context == int(1.5 * GB) and found.free + found.reserved + found.context == found.total
    assert (found.peak_allocated, found.peak_reserved) == (5 * GB, 6 * GB)
    assert found.device == "cuda:1" and set(gpu) == {torch.device("cuda:1")}


def test_another_device_can_be_asked_for(gpu):
    assert allocated("cuda:0").device == "cuda:0" and set(gpu) == {torch.device("cuda:0")}


def test_the_sentence_has_the_figures(gpu):
    said = allocated().sentence()
    assert said == (
        "cuda:1: 3.00 GB allocated + 1.00 GB kept in gaps = 4.00 GB reserved; 1.50 GB context and others; "
        "80.00 GB in all"
    )


def test_without_a_gpu_it_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no GPU.*held\(record\)"):
        allocated()


def test_bytes_held_are_within_what_the_allocator_has_handed_out():
    if not torch.cuda.is_available():
        pytest.skip("waits for a GPU")
    before = allocated()
    with Trace() as t:
        kept = [torch.ones(1000 + i, device="cuda") for i in range(100)]
    after = allocated()
    grown = t.record.end_bytes - t.record.begin_bytes
    assert grown == sum(each.nbytes for each in kept)
    assert grown <= after.allocated - before.allocated <= grown + 512 * len(kept)
    assert after.context > 0 and after.fragmentation >= 0
