"""On real gloo ranks: whatever issues a collective, the ledger has it once; programs that are right are left alone;
hangs and wrong programs give the verdict with its line. Ranks are plain forks, killed at a limit.
"""

import contextlib
import inspect
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.ranks import verdict
from tests.ranks.forked import run_forked

WORLDS = [2, 3, 4]


def right(fn, world_size):
    """Runs a program that is right: every rank returns, no verdict objects. Gives (results, ledgers)."""
    results, ledgers = run_forked(fn, world_size)
    states = [ledger.state for ledger in ledgers]
    running = ["running" if state == "starting" else state for state in states]
    assert set(states) == {"returned"}, (results, verdict.whereabouts(ledgers, running))
    assert verdict.at_end(ledgers) is None
    return results, ledgers


def ops(ledger):
    return [entry.op for entry in ledger.entries]


def line(fn, mark):
    """"file:line" of the line of `fn` that carries the comment `mark`."""
    lines, first = inspect.getsourcelines(fn)
    (found,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return f"{inspect.getsourcefile(fn)}:{found}"


def every_collective(rank):
    n = dist.get_world_size()
    t, o = torch.ones(2 * n), torch.empty(2)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    dist.broadcast(t, n - 1)
    dist.reduce(t, 1, op=dist.ReduceOp.PRODUCT)
    dist.all_gather([torch.empty(2) for _ in range(n)], o)
    dist.all_gather_into_tensor(torch.empty(2 * n), o)
    dist.reduce_scatter(o, list(t.chunk(n)))
    dist.reduce_scatter_tensor(o, t)
    dist.all_to_all_single(torch.empty(2 * n), t)
    dist.gather(o, [torch.empty(2) for _ in range(n)] if rank == 0 else None, dst=0)
    dist.scatter(o, list(t.chunk(n)) if rank == 1 else None, src=1)
    dist.barrier()
    dist.monitored_barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_collective_is_noted_once_as_it_was_called(world_size):
    n = world_size
    _, ledgers = right(every_collective, n)
    got = [(e.op, e.shape, e.root, e.reduce_op, e.num_bytes) for e in ledgers[1].entries]
    assert got == [
        ("all_reduce", (2 * n,), None, "max", 8 * n),
        ("broadcast", (2 * n,), n - 1, "", 8 * n),
        ("reduce", (2 * n,), 1, "product", 8 * n),
        ("all_gather", (2,), None, "", 8),
        ("all_gather", (2,), None, "", 8),
        ("reduce_scatter", (2 * n,), None, "sum", 8 * n),
        ("reduce_scatter", (2 * n,), None, "sum", 8 * n),
        ("all_to_all", (2 * n,), None, "", 8 * n),
        ("gather", (2,), 0, "", 8),
        ("scatter", (2,), 1, "", 8),
        ("barrier", (), None, "", 0),
        ("monitored_barrier", (), None, "", 0),
    ]
    for entry in ledgers[0].entries:
        assert (entry.state, entry.blocking, entry.ranks) == ("done", True, tuple(range(n)))
    first = inspect.getsourcelines(every_collective)[1]
    lines = [int(entry.place.rpartition(":")[2]) - first for entry in ledgers[0].entries]
    assert lines == list(range(3, 15)) and ledgers[0].entries[0].tensor == "t"


def uneven_and_objects(rank):
    n = dist.get_world_size()
    splits = [rank + 1] * n
    dist.all_to_all_single(torch.empty(sum(range(1, n + 1))), torch.ones(sum(splits)), list(range(1, n + 1)), splits)
    got = [None] * n
    dist.all_gather_object(got, {"rank": "x" * rank})
    shared = [("a" * 50, rank) if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    dist.gather_object(rank, [None] * n if rank == 1 else None, dst=1)
    one = [None]
    dist.scatter_object_list(one, [str(i) * i for i in range(n)] if rank == 0 else [None] * n, src=0)
    return got[-1], shared[0][0], one[0]


@pytest.mark.parametrize("world_size", WORLDS)
def test_uneven_splits_and_objects_are_no_difference(world_size):
    results, _ = right(uneven_and_objects, world_size)
    last = world_size - 1
    assert results == [({"rank": "x" * last}, "a" * 50, str(rank) * rank) for rank in range(world_size)]


def messages(rank):
    n = dist.get_world_size()
    after, before = (rank + 1) % n, (rank - 1) % n
    sent, got = torch.full((3,), float(rank)), torch.empty(3)
    if rank % 2 == 0:
        dist.send(sent, after)
        dist.recv(got, before)
    else:
        dist.recv(got, before)
        dist.send(sent, after)
    operations = [dist.P2POp(dist.isend, sent, after, tag=4), dist.P2POp(dist.irecv, got, before, tag=4)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank == 0:
        for _ in range(n - 1):
            dist.recv(got, tag=9)
    else:
        dist.send(sent, 0, tag=9)
    dist.send(sent, 1) if rank == 0 else dist.recv(got, 0) if rank == 1 else None


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_are_matched_by_peer_tag_and_order(world_size):
    _, ledgers = right(messages, world_size)
    sends = [(e.op, e.root, e.tag, e.sequence, e.state) for e in ledgers[1].entries if e.op == "send"]
    after = 2 % world_size
    assert sends == [("send", after, 0, 0, "done"), ("send", after, 4, 0, "done"), ("send", 0, 9, 0, "done")]
    taken = sorted((e.root, e.sequence) for e in ledgers[0].entries if e.any_source)
    assert taken == [(rank, 0) for rank in range(1, world_size)]
    batch = [e.blocking for e in ledgers[0].entries if e.tag == 4]
    assert batch == [False, False]


def libraries(rank):
    n = dist.get_world_size()
    x = torch.randn(4, 8)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(3):
        ddp(x).sum().backward()  # DDP
    mesh = init_device_mesh("cpu", (n,))
    sharded = torch.nn.Sequential(torch.nn.Linear(8, 8 * n), torch.nn.Linear(8 * n, 8))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(x).sum().backward()  # FSDP2
    DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    block = torch.nn.Sequential(torch.nn.Linear(8, 8 * n), torch.nn.Linear(8 * n, 8))
    block = parallelize_module(block, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    block(x).sum().backward()
    with torch.no_grad():
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_ddp_fsdp2_and_dtensor_are_noted_and_agree(world_size):
    _, ledgers = right(libraries, world_size)
    backward = [e for e in ledgers[0].entries if e.place == line(libraries, "DDP") and e.op == "all_reduce"]
    assert [(e.num_bytes, e.reduce_op) for e in backward] == [(72 * 4, "sum")] * 3
    fsdp = [e.op for e in ledgers[0].entries if e.place == line(libraries, "FSDP2")]
    assert fsdp.count("all_gather") >= 3 and fsdp.count("reduce_scatter") == 2


def functional(rank):
    group, t = dist.group.WORLD, torch.ones(4)
    total = fc.all_reduce(t, "max", group)
    waited = total + 1
    gathered = fc.all_gather_tensor(t, 0, group) + 0
    scattered = fc.reduce_scatter_tensor(torch.ones(4 * dist.get_world_size()), "sum", 0, group) + 0
    return float(waited.sum()), gathered.shape, float(scattered.sum())


def test_functional_collectives_are_noted_once_and_their_wait_is_seen():
    results, ledgers = right(functional, 2)
    assert results[0] == (8.0, (8,), 8.0)
    got = [(e.op, e.reduce_op, e.state, e.blocking) for e in ledgers[0].entries]
    assert got == [("all_reduce", "max", "done", False), ("all_gather", "", "done", False),
                   ("reduce_scatter", "sum", "done", False)]  # fmt: skip


def functional_sparse(rank):
    name = dist.group.WORLD.group_name
    first, second = (torch.eye(4).to_sparse() for _ in range(2))
    for each in (first, second):
        torch.ops._c10d_functional.all_reduce_(each, "sum", name)
    with contextlib.suppress(NotImplementedError):  # torch's own wait: "Cannot access storage of SparseTensorImpl"
        torch.ops._c10d_functional.wait_tensor(first)


def test_a_wait_for_the_first_of_two_sparse_results_is_the_firsts():
    _, ledgers = right(functional_sparse, 2)
    for ledger in ledgers:
        first, second = [entry.state for entry in ledger.entries]
        assert first in ("done", "failed") and second == "issued"


def below_everything(rank):
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    seen = []
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))
    with torch._C._AutoDispatchBelowAutograd():
        dist.all_reduce(torch.ones(2))
    with Seeing():
        dist.all_reduce(torch.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: dist.all_reduce(grad))
    (leaf * 2).sum().backward()
    return seen.count("c10d")


def test_inference_mode_hooks_and_dispatch_modes_hide_nothing():
    results, ledgers = right(below_everything, 2)
    assert results == [1, 1] and ops(ledgers[0]) == ["all_reduce"] * 4


def waiting_ways(rank):
    t = torch.ones(4)
    works = [dist.all_reduce(t, async_op=True) for _ in range(4)]
    works[0].wait()
    while not works[1].is_completed():
        pass
    works[2].get_future().wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    manager.wait()
    dist.barrier()


def test_waits_by_wait_by_polling_by_future_and_none_are_told_apart():
    _, ledgers = right(waiting_ways, 2)
    got = [(e.op, e.state, e.blocking) for e in ledgers[0].entries]
    assert got[:3] == [("all_reduce", "done", False)] * 3
    assert got[3:] == [("all_reduce", "issued", False), ("all_reduce_coalesced", "done", False),
                       ("barrier", "done", True)]  # fmt: skip


def groups(rank):
    n = dist.get_world_size()
    even, odd = dist.new_group(list(range(0, n, 2))), dist.new_group(list(range(1, n, 2)))
    mine = odd if rank % 2 else even
    t = torch.ones(2 + rank % 2)
    for _ in range(1 + rank % 2):
        dist.all_reduce(t, group=mine)
    root = rank % 2 + 2
    dist.broadcast(t, root, group=mine)
    dist.destroy_process_group(mine)
    dist.all_reduce(torch.ones(1))


def test_groups_keep_their_own_count_and_name_global_ranks():
    _, ledgers = right(groups, 4)
    got = [(e.op, e.ranks, e.sequence, e.root) for e in ledgers[3].entries]
    assert got == [("all_reduce", (1, 3), 0, None), ("all_reduce", (1, 3), 1, None), ("broadcast", (1, 3), 2, 3),
                   ("all_reduce", (0, 1, 2, 3), 0, None)]  # fmt: skip
    assert [tally.ranks for tally in ledgers[0].groups] == [(0, 2), (0, 1, 2, 3)]


def refused(rank):
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG)
    except Exception as error:
        message = str(error)
    dist.all_reduce(torch.ones(2))
    return message


def test_a_call_that_gloo_refuses_takes_no_number():
    _, ledgers = right(refused, 2)
    assert [(e.state, e.sequence) for e in ledgers[0].entries] in (
        [("refused", 0), ("done", 0)], [("failed", 0), ("done", 1)])  # fmt: skip


def names(rank):
    weights = {"w": torch.ones(4), "b": torch.ones(4)}
    leaf = torch.ones(4, requires_grad=True)
    leaf.sum().backward()

    def average(t):
        dist.all_reduce(t)

    average(weights["w"])
    average(leaf.grad)
    average(torch.ones(4) * 2)
    held = locals()
    average(weights["b"])
    return sorted(held)


def test_tensors_are_noted_under_the_names_the_reader_gives_them():
    results, ledgers = right(names, 2)
    assert [e.tensor for e in ledgers[0].entries] == ["t,weights['w']", "leaf.grad,t", "t", "t,weights['b']"]
    assert len({e.place for e in ledgers[0].entries}) == 1 and len({e.path for e in ledgers[0].entries}) == 4
    assert "weights" in results[0] and "rank" in results[0]


def frees_in_time(rank):
    import weakref

    big = torch.ones(1000)
    freed = weakref.ref(big)
    dist.all_reduce(big)
    work = dist.all_reduce(big, async_op=True)
    work.wait()
    work = big = None
    for _ in range(100):  # gloo's own thread lets go of a finished work a moment later
        if freed() is None:
            return True
        time.sleep(0.05)
    return False


def test_noting_keeps_no_tensor_alive():
    results, _ = right(frees_in_time, 2)
    assert results == [True, True]


def skip_one(rank):
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.ones(4))  # WAIT


def swap_shapes(rank):
    a, b = torch.ones(100), torch.ones(200)
    for t in (b, a) if rank == 1 else (a, b):
        dist.all_reduce(t, async_op=True)
    time.sleep(0.3)


def swap_silently(rank):
    a, b = torch.full((4,), 1.0), torch.full((4,), 10.0)
    if rank == 1:
        dist.all_reduce(b)  # WAIT
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)


def wrong_root(rank):
    dist.broadcast(torch.ones(4), src=1 if rank == 1 else 0)  # WAIT


def wrong_dtype(rank):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32))  # WAIT


def both_send_first(rank):
    if rank < 2:
        dist.send(torch.ones(4), 1 - rank)  # WAIT
        dist.recv(torch.ones(4), 1 - rank)


def crossed_groups(rank):
    n = dist.get_world_size()
    first, second = dist.new_group(list(range(n))), dist.new_group(list(range(n)))
    t = torch.ones(4)
    for group in (first, second) if rank == 0 else (second, first):
        dist.all_reduce(t, group=group)  # WAIT


def message_of_another_size(rank):
    if rank == 0:
        dist.isend(torch.ones(4), 1)
    if rank == 1:
        dist.irecv(torch.ones(8), 0)  # WAIT
    time.sleep(0.3)


def unmatched(rank):
    if rank == 0:
        dist.isend(torch.ones(4), 1)  # WAIT


def ddp_without_backward(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    if rank != 1:
        model(torch.ones(2, 4)).sum().backward()  # WAIT


def judged(ledgers):
    """As the notebook judges while ranks run: what is definite, at the end, or stuck."""
    states = [{"starting": "running"}.get(ledger.state, ledger.state) for ledger in ledgers]
    found = verdict.definite(ledgers)
    if set(states) == {"returned"}:
        found = found or verdict.at_end(ledgers)
    return found or verdict.stuck(ledgers, states)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "fn, code, rank, words",
    [
        (skip_one, "returned_early", 1, "in all_reduce #1"),
        (swap_shapes, "mismatch", 1, "all_reduce #0"),
        (swap_silently, "mismatch", 1, "#0 and #1 are b, then a on rank 1"),
        (wrong_root, "mismatch", 1, "rank 1 names root 1"),
        (wrong_dtype, "mismatch", 1, "rank 1 passes dtype float64"),
        (both_send_first, "deadlock", None, "ranks 0 and 1 both send first"),
        (crossed_groups, "deadlock", None, "deadlock: rank 0 waits in all_reduce #0"),
        (message_of_another_size, "mismatch", 1, "rank 0 sends shape (4,)"),
        (unmatched, "unmatched", 0, "rank 1 never received it"),
        (ddp_without_backward, "returned_early", 1, "rank 1 returned"),
    ],
)
def test_a_wrong_program_is_told_its_cause_rank_and_line(fn, code, rank, words, world_size):
    findings = []

    def believed(ledgers):  # said six times running, as who is odd shows only once the others have called too
        findings.append(judged(ledgers))
        return len(findings) > 5 and findings[-1] is not None and set(findings[-6:]) == {findings[-1]}

    _, ledgers = run_forked(fn, world_size, limit_s=20, until=believed)
    finding = judged(ledgers)
    assert finding is not None and (finding.code, finding.rank) == (code, rank), [ledger.entries for ledger in ledgers]
    assert words in finding.sentence
    if "# WAIT" in inspect.getsource(fn):
        assert finding.place == line(fn, "WAIT")


def exits(rank):
    os._exit(3)  # WAIT


def kills(rank):
    os.kill(os.getpid(), 0)
    os.kill(os.getpid(), 9)  # WAIT


@pytest.mark.parametrize("fn, words", [(exits, "os._exit(3)"), (kills, "os.kill(SIGKILL)")])
def test_a_rank_that_ends_itself_says_how_and_where_first(fn, words):
    _, ledgers = run_forked(fn, 1)
    assert (ledgers[0].last_words, ledgers[0].last_words_place) == (words, line(fn, "WAIT"))


def sleeps(rank):
    time.sleep(60)


def test_a_rank_asleep_says_until_when():
    start = time.monotonic()
    _, ledgers = run_forked(sleeps, 1, until=lambda ledgers: ledgers[0].asleep_until > 0)
    assert 0 < ledgers[0].asleep_until - start - 60 < 40
    assert [str(w) for w in verdict.whereabouts(ledgers, ("running",))] == ["rank 0: running in time.sleep"]


def listens(rank):
    import threading

    got = torch.empty(1)
    thread = threading.Thread(target=lambda: dist.recv(got, 1 - rank))
    thread.start()
    time.sleep(0.5)
    dist.send(torch.ones(1), 1 - rank)
    thread.join()


def test_a_listening_thread_does_not_make_its_rank_wait():
    said = []

    def look(ledgers):
        said.append(verdict.stuck(ledgers, ("running", "running")))
        return False

    run_forked(listens, 2, until=look)
    assert len(said) > 3 and set(said) == {None}
