"""The backend is chosen without torch: nccl with a GPU for every rank, else gloo."""

import pytest

from labkit.ranks import backend
from labkit.ranks.backend import choose_backend
from labkit.ranks.outcome import LaunchError


def test_backend_is_nccl_only_with_a_gpu_for_every_rank(monkeypatch):
    monkeypatch.setattr(backend, "gpu_count", lambda: 2)
    assert choose_backend(2, None) == ("cpu:gloo,cuda:nccl", ["cuda:0", "cuda:1"])
    assert choose_backend(4, None) == ("gloo", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])
    with pytest.raises(LaunchError, match="nccl needs a GPU for every rank; there are 2 for 4"):
        choose_backend(4, "nccl")


def test_a_cpu_build_of_torch_uses_no_gpu(monkeypatch):
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setattr(backend, "torch_cuda", lambda: None)
    assert choose_backend(2, None) == ("gloo", ["cpu", "cpu"])


def test_visible_devices_limit_the_count(monkeypatch):
    monkeypatch.setattr("glob.glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(8)])
    monkeypatch.setattr(backend, "torch_cuda", lambda: "12.8")
    assert backend.gpu_count() == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert backend.gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert backend.gpu_count() == 0


@pytest.mark.parametrize(
    "text, cuda",
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n", "13.0"),
        ("cuda = '12.6'\n", "12.6"),
        ("", None),
    ],
)
def test_torch_tells_its_cuda(text, cuda):
    assert backend.cuda_named_in(text) == cuda
