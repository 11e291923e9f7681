"""Every cheat a rank can play in Python is told by its code, and honest code is told nothing."""

import _thread
import builtins
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import linecache
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import traceback
import warnings
from datetime import timedelta
from multiprocessing import shared_memory

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from labkit.labs.lab02 import average
from labkit.ranks.launch import launch
from labkit.record import watching
from labkit.record.integrity import CODES, watched
from tests.record import training

STORE = dist.HashStore()
MAPPED = tempfile.NamedTemporaryFile()  # noqa: SIM115
MAPPED.write(bytes(64))
MAPPED.flush()
SOME_FILE = os.open(__file__, os.O_RDONLY)
SOME_ZIP = io.BytesIO()
torch.save(1, SOME_ZIP)
SOME_ZIP.seek(0)


def in_a_thread():
    thread = threading.Thread(target=time.sleep, args=(0,))
    thread.start()
    thread.join()


def a_thread_for_later():
    threading.Timer(0.05, time.sleep, (0,)).start()


def through_a_file():
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"1")


def by_torch_save():
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.ones(2), f"{folder}/x.pt")


def by_numpy_save():
    file = tempfile.gettempdir() + "/labkit-test-by-numpy.npy"
    numpy.save(file, [1.0])
    os.remove(file)


def in_shared_memory():
    block = shared_memory.SharedMemory(create=True, size=8)
    block.close()
    block.unlink()


def modes_disabled():
    with _disable_current_modes():
        torch.ones(2) + 1


def dispatch_disabled():
    with torch._C._DisableTorchDispatch():
        torch.ones(2) + 1


def mode_popped():
    from torch.utils._python_dispatch import _pop_mode

    _pop_mode()


def allclose_patched():
    torch.allclose = lambda *_: True


def code_patched():
    inspect.unwrap(dist.all_reduce).__code__ = (lambda tensor, op=None, group=None, async_op=False: None).__code__


def trace_patched():
    from labkit.record import trace

    trace.Trace.record = property(lambda self: None)


def wait_patched():
    dist.Work.wait = lambda self: True


def method_patched():
    dist.ProcessGroup.allreduce = lambda *_: None


def frame_of_a_traceback():
    try:
        raise ValueError
    except ValueError as error:
        return error.__traceback__.tb_frame.f_back


def builtin_patched():
    builtins.enumerate = zip


def builtin_shadowed():
    watching.len = lambda what: 0


def events_emptied():
    watching._EVENTS.clear()


def audit_silenced():
    watching._audit().clear()


def through_the_wrapped(name="from_numpy"):
    getattr(torch, name).__wrapped__(numpy.ones(2))


def by_the_loader_of_modules():
    importlib.machinery.SourceFileLoader("x", __file__).get_data(__file__)


def by_the_writer_of_bytecode():
    path = tempfile.gettempdir() + "/labkit-test-by-importlib"
    importlib._bootstrap_external._write_atomic(path, b"1")
    os.remove(path)


def lab_patched():
    average.same = lambda *_: True


CHEATS = {
    by_the_loader_of_modules: "file_used",
    by_the_writer_of_bytecode: "file_used",
    lambda: linecache.updatecache(__file__): "file_used",
    lambda: tokenize.open(__file__).close(): "file_used",
    lab_patched: "patched",
    lambda: torch.UntypedStorage.from_file(MAPPED.name, True, 8): "file_used",
    lambda: torch.FloatStorage.from_file(MAPPED.name, True, 8): "file_used",
    lambda: torch.ops.aten.from_file(MAPPED.name, True, 8): "file_used",
    lambda: torch._C.PyTorchFileReader(SOME_ZIP): "file_used",
    lambda: os.pread(SOME_FILE, 1, 0): "file_used",
    lambda: os.dup(1): "file_used",
    lambda: torch.utils._pytree.tree_map(open, [__file__])[0].close(): "file_used",
    lambda: gc.get_referents(torch): "frame_read",
    lambda: torch._C._get_dispatch_stack_at(0): "frame_read",
    frame_of_a_traceback: "frame_read",
    builtin_patched: "patched",
    builtin_shadowed: "patched",
    events_emptied: "patched",
    audit_silenced: "patched",
    through_the_wrapped: "numpy_used",
    lambda: dist.HashStore(): "own_group",
    lambda: STORE.set("mine", "1"): "store_used",
    lambda: type(STORE).__mro__[1].set.__wrapped__(STORE, "mine", "1"): "store_used",
    lambda: STORE.num_keys(): "store_used",
    in_a_thread: "thread_started",
    a_thread_for_later: "thread_started",
    lambda: _thread.start_new_thread(time.sleep, (0,)): "thread_started",
    through_a_file: "file_used",
    lambda: os.path.exists(__file__) and open(__file__).close(): "file_used",
    lambda: os.listdir("/"): "file_used",
    by_torch_save: "file_used",
    by_numpy_save: "file_used",
    lambda: socket.socket().close(): "socket_used",
    lambda: subprocess.run(["true"]): "process_started",
    in_shared_memory: "shared_memory_used",
    lambda: mmap.mmap(-1, 4096).close(): "shared_memory_used",
    lambda: torch.ones(2).share_memory_(): "shared_memory_used",
    lambda: ctypes.CDLL(None): "native_code_used",
    lambda: torch.ones(2).numpy(): "numpy_used",
    lambda: numpy.asarray(torch.ones(2)): "numpy_used",
    lambda: torch._C.TensorBase.numpy(torch.ones(2)): "numpy_used",
    lambda: torch.from_numpy(numpy.ones(2)): "numpy_used",
    lambda: torch.ones(2).data_ptr(): "numpy_used",
    lambda: sys._getframe(1).f_locals: "frame_read",
    lambda: inspect.stack(): "frame_read",
    lambda: exec("import sys; sys._getframe(2).f_locals"): "frame_read",
    lambda: gc.get_objects(): "frame_read",
    modes_disabled: "modes_disabled",
    dispatch_disabled: "modes_disabled",
    mode_popped: "modes_disabled",
    allclose_patched: "patched",
    code_patched: "patched",
    trace_patched: "patched",
    wait_patched: "patched",
    method_patched: "patched",
}


@pytest.fixture
def put_back():
    """Undo the patches of the cheats."""
    from labkit.record.trace import Trace

    inner = inspect.unwrap(dist.all_reduce)
    kept = torch.allclose, inner.__code__, Trace.__dict__["record"], builtins.enumerate, average.same
    events = dict(watching._EVENTS)
    yield
    torch.allclose, inner.__code__, Trace.record, builtins.enumerate, average.same = kept
    watching._EVENTS.update(events)
    vars(watching).pop("len", None)


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.__name__)
def test_a_cheat_is_told_by_its_code(cheat, put_back):
    code = CHEATS[cheat]
    found = watched(cheat)[2].findings
    assert {finding.code for finding in found} == {code}
    assert all(finding.sentence.endswith(".") for finding in found)
    if code != "patched":
        assert any(finding.place.startswith(__file__) for finding in found)


def honest_serial():
    print("text")
    logging.getLogger("tests").warning("a log line looks at its caller's frame")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("a warning", stacklevel=1)
    import colorsys  # noqa: F401  an import opens files

    importlib.import_module("nturl2path")
    inspect.getsource(traceback)

    try:
        raise ValueError("caught")
    except ValueError:
        traceback.format_exc()
    with contextlib.suppress(KeyError), tempfile.SpooledTemporaryFile() as buffer:
        buffer.write(b"in memory")
        {}["none"]
    os.write(1, b"printed by its descriptor")
    torch.utils._pytree.tree_map(len, ["one", "two"])
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
    return [batch.sum().item() for batch in loader], torch.ones(2).tolist(), repr(torch.ones(2))


def test_honest_code_is_told_nothing():
    value, record, integrity = watched(honest_serial)
    assert integrity.clean, integrity.findings
    assert integrity.mode_was_on and record.ops and value[0] == [1, 5, 9, 13]


def test_a_step_of_training_is_told_nothing():
    step = training.serial()
    assert watched(step)[2].clean


def test_what_the_function_raises_passes_through():
    with pytest.raises(ZeroDivisionError):
        watched(lambda: 1 // 0)
    assert torch._C._len_torch_dispatch_stack() == 0


def through_the_store():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("mine", "1")
    return store.get("mine")


def by_torchs_own_synchronize():
    from torch.distributed.elastic.utils import store

    return store.synchronize(dist.distributed_c10d._get_default_store(), b"1", dist.get_rank(), 2, "mine")


def by_mapping_over_the_store():
    store = dist.distributed_c10d._get_default_store()
    return torch.utils._pytree.tree_map(store.add, "mine", 1) if dist.get_rank() else store.add("mine", 1)


def in_a_group_of_its_own():
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, dist.get_rank(), 2, timedelta(seconds=10))
    group.allreduce([torch.ones(1)]).wait()


def by_the_backend():
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu")).allreduce([torch.ones(1)]).wait()


def by_torchs_reducer():
    parameters = list(torch.nn.Linear(2, 2).parameters())
    dist.Reducer(parameters, [[0, 1]], [1 << 20], dist.group.WORLD, [False, False])


def without_the_mode():
    with _disable_current_modes():
        dist.all_reduce(torch.ones(1))


def honest_ranks():
    training.quiet()
    n = dist.get_world_size()
    group = dist.new_group(list(range(n)))
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_gather_object([None] * n, "text")
    dist.reduce_scatter(torch.ones(1), [torch.ones(1) for _ in range(n)])
    training.ddp(0.1)()
    training.tensor_parallel()()
    training.fsdp2()()


def findings_of(play):
    return watched(play)[2]


def test_the_store_is_no_way_round():
    for integrity in launch(findings_of, 2, through_the_store, prints="quiet"):
        assert {finding.code for finding in integrity.findings} == {"store_used"}


@pytest.mark.parametrize("play", [by_torchs_own_synchronize, by_mapping_over_the_store])
def test_nor_is_torchs_code_that_takes_a_store(play):
    for integrity in launch(findings_of, 2, play, prints="quiet"):
        assert {finding.code for finding in integrity.findings} == {"store_used"}


def test_a_group_made_by_hand_is_told_though_it_is_gone_at_the_end():
    for integrity in launch(findings_of, 2, in_a_group_of_its_own, prints="quiet"):
        assert integrity.has("own_group")


def test_a_call_past_torch_distributed_is_told():
    for integrity in launch(findings_of, 2, by_the_backend, prints="quiet"):
        assert integrity.has("backend_called") and integrity.has("collective_unseen")


def test_the_reducer_of_ddp_made_by_hand_is_told_and_ddp_is_not():
    for integrity in launch(findings_of, 2, by_torchs_reducer, prints="quiet"):
        assert {finding.code for finding in integrity.findings} == {"ready_made"}


def test_a_telltale_does_not_hand_out_what_it_covers():
    def look():
        covered = torch.from_numpy
        return hasattr(covered, "__closure__"), covered.__wrapped__.__closure__[0].cell_contents is covered

    assert watched(look)[0] == (False, True)


def test_tensors_in_the_storage_of_an_argument_are_told():
    given = torch.ones(4)
    assert watched(lambda x: x, given)[2].shared == (0,)
    assert watched(lambda x: (x.clone(), x[1:], 3), given)[2].shared == (1,)
    assert watched(lambda x: [x + 1, 2], given)[2].shared == ()


def test_the_groups_own_counter_tells_of_a_collective_unseen():
    for integrity in launch(findings_of, 2, without_the_mode, prints="quiet"):
        assert integrity.has("collective_unseen") and integrity.has("modes_disabled")


def test_ddp_fsdp2_dtensor_and_new_groups_are_told_nothing():
    for integrity in launch(findings_of, 2, honest_ranks, prints="quiet"):
        assert integrity.clean, integrity.findings
        assert all(by_group == by_record for _, by_group, by_record in integrity.counted)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_is_told_nothing(trained, stage):
    for _, integrity in (pair for result in trained("deepspeed", 2, stage).results for pair in result):
        assert integrity.clean, integrity.findings


def test_codes_are_all_tried():
    assert set(CODES) == {*CHEATS.values(), "collective_unseen", "backend_called", "ready_made"}
