"""RAM that code takes for itself, and a disk that looks full; what lives, by where its bytes are."""

import ctypes
import errno
import mmap
import os
import shutil
import tracemalloc

import numpy as np
import pytest
import torch

from labkit.check import living
from labkit.check.ram import Peak, full_disk, large_objects, resident
from labkit.ranks.launch import launch

MB = 10**6


def test_tensors_count_while_they_live():
    with Peak() as peak:
        for _ in range(3):
            torch.zeros(MB // 4)
    assert MB <= peak.num_bytes < 1.2 * MB


def test_two_at_once_count_twice_and_views_do_not():
    with Peak() as peak:
        one = torch.zeros(MB // 4)
        two = one[: MB // 8] + 1  # half as large
        one.view(2, -1)
    assert 1.5 * MB <= peak.num_bytes < 1.7 * MB and two.nbytes == MB // 2


def test_arrays_of_numpy_count_too():
    def two_at_once():
        one = np.zeros(MB, np.uint8)
        return int((one + np.uint8(1))[0])

    with Peak() as peak:
        two_at_once()
    assert 2 * MB <= peak.num_bytes < 2.3 * MB


def test_what_is_mapped_from_a_file_is_not_counted(tmp_path):
    with Peak() as peak:
        flat = torch.from_file(str(tmp_path / "flat"), shared=True, size=MB, dtype=torch.float32)
        flat[:10] = 1
        np.memmap(tmp_path / "other", np.float32, "w+", shape=(MB,))[:10] = 1
    assert peak.num_bytes < MB // 10


def test_large_objects_are_those_made_since_tracing_began():
    tracemalloc.start()
    try:
        kept = [np.ones(MB, np.uint8), bytes(MB)]
        assert 2 * MB <= large_objects() < 2.3 * MB
        del kept
        assert large_objects() < MB // 10
    finally:
        tracemalloc.stop()


def test_the_kernel_counts_what_is_in_no_object_of_pythons_and_no_page_of_a_file(tmp_path):
    if resident() is None:
        pytest.skip("no /proc/self/status here")
    (tmp_path / "file").write_bytes(bytes(16 * MB))
    before = resident()
    with open(tmp_path / "file", "r+b") as file:
        of_file = mmap.mmap(file.fileno(), 16 * MB)
    own = mmap.mmap(-1, 16 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for pages in (of_file, own):
        for at in range(0, 16 * MB, 4096):
            pages[at] = 1
    more = {kind: after - before[kind] for kind, after in resident().items()}
    assert 15.5 * MB < more["RssAnon"] < 18 * MB
    of_file.close(), own.close()


def kept_by_the_allocator():
    """In a rank: growth of RssAnon by tensors that are freed into a heap which glibc would keep."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return None
    libc.mallopt(-3, 32 * MB)  # M_MMAP_THRESHOLD: what is smaller lies in the heap
    libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: which is not given back
    before = resident()
    tensors = [torch.ones(4 * MB) for _ in range(4)]
    full = resident()
    after_them = torch.ones(100)  # so that the heap's end is not free
    tensors.clear()
    return full["RssAnon"] - before["RssAnon"], resident()["RssAnon"] - before["RssAnon"], len(after_them)


def test_what_was_freed_is_not_resident_whatever_the_allocator_keeps():
    if resident() is None:
        pytest.skip("no /proc/self/status here")
    (found,) = launch(kept_by_the_allocator, 1, prints="quiet")
    if found is None:
        pytest.skip("another allocator than glibc's")
    assert found[0] > 60 * MB and found[1] < 4 * MB


def test_a_full_disk_refuses_files_and_tells_what_is_free(tmp_path):
    with full_disk(65536):
        assert shutil.disk_usage(tmp_path).free == 65536
        found = os.statvfs(tmp_path)
        assert found.f_bavail * found.f_frsize <= 65536
        with open(tmp_path / "some", "wb") as file:
            file.write(bytes(1000))
            if hasattr(os, "posix_fallocate"):
                with pytest.raises(OSError) as raised:
                    os.posix_fallocate(file.fileno(), 0, MB)
                assert raised.value.errno == errno.ENOSPC
        with pytest.raises(OSError):
            np.memmap(tmp_path / "large", np.uint8, "w+", shape=(MB,))
    assert shutil.disk_usage(tmp_path).free != 65536
    (tmp_path / "large").write_bytes(bytes(MB))  # as before


def test_a_tensor_of_a_mapped_file_is_known_by_its_address(tmp_path):
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("no /proc/self/maps here")
    flat = torch.from_file(str(tmp_path / "flat"), shared=True, size=1024, dtype=torch.float32)
    own = torch.zeros(1024)
    ranges = living.mapped(str(tmp_path))
    assert [any(a <= living.address(t) < b for a, b in ranges) for t in (flat, own)] == [True, False]
    assert living.mapped(str(tmp_path / "elsewhere")) == []


def test_every_tensor_that_lives_is_found_wherever_it_is_kept():
    def closure():
        hidden = torch.zeros(7)
        return lambda: hidden

    before, keeps = set(living.storages()), closure()
    new = [tensor for key, tensor in living.storages().items() if key not in before]
    assert any(tensor is keeps() for tensor in new)
    assert living.has_class(("torch.optim",), "NoSuchClass") == ""
