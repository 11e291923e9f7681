"""Real ranks for tests of one rank's own code: plain forks over gloo, each with a ledger, under a time limit.

Left out: everything `labkit.ranks.launch` adds; this must work without it.
"""

import faulthandler
import os
import pickle
import signal
import time
import traceback

from labkit.ranks import intercept, ledger


def run_forked(fn, world_size: int, limit_s: float = 40.0, until=None):
    """fn(rank) in each of `world_size` forks, the default group over gloo made. Returns (results, ledgers).

    A rank that raised gives its exception's text, one that died or was killed at the limit None. `until(ledgers)`,
    when given, is asked every 50 ms; once it is true the ranks are killed, and those ledgers are returned.
    """
    store = os.memfd_create("store")
    books, outs = [ledger.create() for _ in range(world_size)], [os.memfd_create("out") for _ in range(world_size)]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _rank(fn, rank, world_size, store, books[rank], outs[rank])
        pids.append(pid)
    ledgers = _reap(pids, limit_s, until, books) or tuple(map(ledger.read, books))
    results = [_unpickled(os.pread(out, 1 << 24, 0)) for out in outs]
    for fd in (store, *books, *outs):
        os.close(fd)
    return results, ledgers


def _rank(fn, rank: int, world_size: int, store: int, book_fd: int, out: int):
    end = os._exit
    signal.alarm(60)
    faulthandler.disable()  # pytest's would print the expected aborts
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        book = ledger.open_in_rank(book_fd)
        intercept.install(book)
        rendezvous = dist.FileStore(f"/proc/{os.getpid()}/fd/{store}", world_size)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world_size)
        rendezvous.add("joined", 1)
        while rendezvous.add("joined", 0) < world_size:  # nobody leaves while others still join
            time.sleep(0.01)
        book.set_state("running")
        try:
            result, state = fn(rank), "returned"
        except BaseException:
            result, state = traceback.format_exc(), "raised"
        os.pwrite(out, pickle.dumps(result), 0)
        book.set_state(state)
        if state == "returned":
            time.sleep(0.1)
        end(0)
    finally:
        traceback.print_exc()
        end(1)


def _reap(pids: list[int], limit_s: float, until, books: list[int]):
    """Waits for all; kills them at the limit, or once `until` holds of the ledgers, which it then returns."""
    end, left = time.monotonic() + limit_s, set(pids)
    while left:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        ledgers = tuple(map(ledger.read, books))
        enough = until is not None and until(ledgers)
        if enough or time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return ledgers if enough else None
        time.sleep(0.05)
    return None


def _unpickled(raw: bytes):
    return pickle.loads(raw) if raw else None
