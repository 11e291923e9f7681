"""Evidence from real ranks: what each predicate finds, and that it finds nothing in honest work."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labkit.check import evidence, honesty, sealed
from labkit.check.evidence import observe


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def ring(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(tensor)
    send = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(got, (rank - 1) % world_size)
    send.wait()
    return got


def star(tensor):
    if dist.get_rank() == 0:
        for rank in range(1, dist.get_world_size()):
            dist.send(tensor, rank)
    else:
        dist.recv(tensor, 0)
    return tensor


@pytest.fixture(scope="module")
def ring_seen():
    own = [(torch.full((300_000,), float(rank)),) for rank in range(3)]
    return observe(ring, 3, rank_args=own)


@pytest.fixture(scope="module")
def star_seen():
    return observe(star, 4, rank_args=[(torch.full((5,), float(rank)),) for rank in range(4)])


def test_honest_work_passes_every_predicate(ring_seen):
    expected = [torch.full((300_000,), float((rank - 1) % 3)) for rank in range(3)]
    assert evidence.ran(ring_seen, "ring") is None
    assert evidence.values_equal(ring_seen, expected) is None
    assert evidence.only_p2p(ring_seen) is None
    assert evidence.cannot_hang(ring_seen) is None
    assert evidence.rounds_at_most(ring_seen, 1) is None
    assert evidence.bytes_sent_equal(ring_seen, [1_200_000] * 3) is None
    assert evidence.received_at_least(ring_seen, [1_200_000] * 3) is None
    assert evidence.work_is_shared(ring_seen, [1_200_000] * 3) is None
    assert evidence.honest(ring_seen) is None


def test_messages_and_bytes_come_from_the_ledgers(ring_seen, star_seen):
    assert [(m.source, m.destination, m.num_bytes) for m in evidence.messages(ring_seen)] == [
        (rank, (rank + 1) % 3, 1_200_000) for rank in range(3)
    ]
    assert evidence.sent_bytes(star_seen) == [60, 0, 0, 0]
    assert evidence.received_bytes(star_seen) == [0, 20, 20, 20]


def test_a_star_takes_too_many_rounds_and_has_a_hot_rank(star_seen):
    verdict = evidence.rounds_at_most(star_seen, 2, "world_size=4")
    assert (verdict.cause, verdict.got, verdict.expected) == ("too_many_rounds", "3 rounds", "at most 2")
    assert evidence.rounds_at_most(star_seen, 3) is None
    assert evidence.work_is_shared(star_seen, [40] * 4).cause == "hot_rank"


def test_wrong_bytes_are_told_apart(star_seen):
    assert evidence.bytes_sent_equal(star_seen, [61, 0, 0, 0]).cause == "bytes_missing"
    assert evidence.bytes_sent_equal(star_seen, [59, 0, 0, 0]).cause == "bytes_extra"
    assert evidence.received_at_least(star_seen, [0, 21, 0, 0]).cause == "no_traffic"


def test_shapes_of_all_ranks_are_looked_at_before_values():
    def odd():
        return torch.zeros(3) if dist.get_rank() else torch.ones(2)

    seen = observe(odd, 2)
    verdict = evidence.values_equal(seen, [torch.zeros(2), torch.zeros(2)], "tried")
    assert (verdict.stage, verdict.cause) == ("shape", "wrong_shape") and "rank 1" in verdict.sentence
    verdict = evidence.values_equal(seen, [torch.zeros(2), torch.zeros(3)], "tried")
    assert (verdict.stage, verdict.cause, verdict.got) == ("values", "wrong_values", "rank 0: [1.0, 1.0]")
    assert evidence.ranks_agree(seen).cause == "ranks_differ"


def test_a_stub_is_not_attempted_and_an_exception_names_rank_and_line():
    def stub():
        return NotImplemented

    def raises():
        if dist.get_rank() == 1:
            raise KeyError("weight")
        dist.barrier()

    assert evidence.ran(observe(stub, 2), "f").cause == "not_attempted"
    verdict = evidence.ran(observe(raises, 2), "f", "tried")
    assert (verdict.stage, verdict.cause) == ("attempted", "raised")
    assert "rank 1 raised KeyError: 'weight'" in verdict.sentence and "test_evidence.py, line" in verdict.sentence


def test_collectives_are_found_in_ledger_record_and_counter():
    def all_of_them():
        dist.all_reduce(torch.ones(4))
        dist.barrier()

    seen = observe(all_of_them, 2)
    verdict = evidence.only_p2p(seen, "tried")
    assert verdict.cause == "collective" and "all_reduce, barrier" in verdict.sentence
    assert evidence.no_communication(seen).cause == "communication"
    assert evidence.honest(seen) is None
    without = replace(seen, outcome=replace(seen.outcome, ledgers=((), ())))
    assert evidence.collectives(without) == ["all_reduce", "barrier"]  # the record still knows
    alone = replace(without, records=(None, None))
    assert evidence.collectives(alone) == ["a hidden collective"]  # and so does the group's counter
    assert honesty.counters_agree(alone).cause == "hidden_collective"
    assert honesty.records_agree(without).cause == "record_differs"


def test_no_communication_holds_for_a_function_that_only_computes():
    assert evidence.no_communication(observe(lambda: sum(range(9)), 2)) is None


def test_a_ring_that_sends_first_is_told_live_and_in_virtual_time():
    def send_first(tensor):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.send(tensor, (rank + 1) % world_size)
        dist.recv(tensor, (rank - 1) % world_size)

    seen = observe(send_first, 2, args=(torch.ones(3),))
    assert evidence.ran(seen, "f").cause == "deadlock"
    verdict = evidence.cannot_hang(seen)
    assert verdict.cause == "deadlock" and "rank 0 waits in send to rank 1 (test_evidence.py, line" in verdict.got


def test_a_run_that_returned_by_luck_is_still_a_deadlock(ring_seen):
    """The same messages, waited for at once: it hangs wherever a send waits for its recv."""
    from labkit.record import events

    def waited_at_once(record):
        order = sorted(record.events, key=lambda e: (e.of if isinstance(e, events.Wait) else e.index, e.index))
        return replace(record, events=tuple(e for e in order if not isinstance(e, events.Op)))

    lucky = replace(ring_seen, records=tuple(map(waited_at_once, ring_seen.records)))
    assert evidence.cannot_hang(ring_seen) is None
    assert evidence.cannot_hang(lucky).cause == "deadlock"


def test_sockets_that_carried_more_or_less_than_the_calls_are_told(ring_seen):
    moved = ring_seen.outcome.socket_bytes
    if moved is None:
        pytest.skip("this system does not tell a process's socket bytes")

    def shifted(by):
        changed = (replace(moved[0], sent=moved[0].sent + by), *moved[1:])
        return replace(ring_seen, outcome=replace(ring_seen.outcome, socket_bytes=changed))

    assert honesty.sockets_agree(shifted(0)) is None
    assert honesty.sockets_agree(shifted(3000)).cause == "hidden_traffic"
    assert honesty.sockets_agree(shifted(-3000)).cause == "no_traffic"


@pytest.mark.parametrize(
    ("cheat", "cause"),
    [
        ("import numpy; torch.ones(2).numpy()", "numpy_used"),
        ("import threading; threading.Thread(target=print).start()", "thread_started"),
        ("open('/dev/null')", "file_used"),
        ("torch.allclose = lambda *a, **k: True", "patched"),
        ("import labkit.record.trace as t; t.Trace.__exit__ = lambda *a: None", "patched"),
        ("dist.distributed_c10d._get_default_store().set('x', 'y')", "store_used"),
    ],
)
def test_what_a_rank_does_on_the_side_is_told(cheat, cause):
    def cheats(source):
        exec(source, {"torch": torch, "dist": dist})
        return 1

    verdict = evidence.honest(observe(cheats, 2, args=(cheat,)), "tried")
    assert verdict is not None and verdict.cause == cause


class PatchesWhenOpened:
    """A callable that replaces what watches it as soon as its pickle is opened."""

    def __init__(self, source):
        self.source = source

    def __call__(self):
        return 1

    def __setstate__(self, state):
        from labkit.record import watching

        self.source = state["source"]
        exec(self.source, {"watching": watching})

    def __getstate__(self):
        return {"source": self.source}


@pytest.mark.parametrize(
    "source",
    [
        "watching.Findings.add = lambda *args: None",
        "watching.witness = lambda *args: None",
        "watching.Findings.by_learner = lambda *args, **kwargs: None",
        "import labkit.record.entries as e; e._snapshot = lambda holders: {}; e.remember = None",
        "import labkit.record.integrity as i; i._look_around = i._shared = lambda *args: ()",
        "import builtins; builtins.sorted = lambda names: []",
    ],
)
def test_what_a_pickle_does_when_it_is_opened_is_told(source):
    code = sealed.Sealed(cloudpickle.dumps(PatchesWhenOpened(source)), "f")
    verdict = evidence.honest(observe(code, 1), "tried")
    assert verdict is not None and verdict.cause == "patched"


@pytest.mark.parametrize("extra", ["", "; os.close(int(os.environ['LABKIT_REPORT_FD']))"])
def test_findings_that_are_wiped_are_told_all_the_same(extra):
    def wipes(extra):
        import os

        with open(os.devnull):
            pass
        sys.modules["torch"].overrides._get_current_function_mode().findings.found.clear()
        exec(extra.strip("; "), {"os": os})
        return 1

    assert evidence.honest(observe(wipes, 2, args=(extra,)), "tried").cause == "file_used"


def test_a_rank_that_closes_its_pipe_before_it_begins_is_refused():
    def closes(tensor):
        import os

        mode = torch.overrides._get_current_function_mode()
        os.close(mode.findings.pipe)
        mode.findings.found.clear()
        return tensor

    assert evidence.honest(observe(closes, 2, args=(torch.ones(2),)), "tried") is not None


def test_a_result_in_the_storage_of_an_argument_is_told():
    seen = observe(lambda tensor: (tensor.clone(), tensor), 2, args=(torch.ones(2),))
    assert evidence.own_storage(seen) is None
    assert evidence.own_storage(seen, item=1).cause == "aliased"
    assert evidence.own_storage(observe(lambda tensor: tensor[:1], 1, args=(torch.ones(2),))).cause == "aliased"


def test_a_result_that_would_run_code_here_is_not_opened():
    class Runs:
        def __reduce__(self):
            return exec, ("import sys; sys.modules['labkit.check.was_here'] = 1",)

    seen = observe(lambda: Runs(), 1)
    assert evidence.ran(seen, "f").cause == "unpicklable_result"
    assert "labkit.check.was_here" not in sys.modules


def test_a_rank_without_its_record_is_refused(ring_seen):
    assert evidence.honest(replace(ring_seen, integrity=(None,) * 3)).cause == "no_record"


def test_a_sealed_function_runs_in_ranks_and_not_here():
    def answer(x):
        return x + dist.get_rank()

    payload = sealed.seal(answer)
    assert observe(payload, 2, args=(5,)).results == (5, 6)
    with pytest.raises(TypeError, match="sealed"):
        payload(5)


def test_a_message_sent_by_a_thread_is_no_deadlock_but_a_thread():
    def by_a_thread():
        import threading

        rank = dist.get_rank()
        sender = threading.Thread(target=dist.send, args=(torch.ones(3), 1 - rank))
        sender.start()
        dist.recv(torch.empty(3), 1 - rank)
        sender.join()

    seen = observe(by_a_thread, 2)
    assert evidence.ran(seen, "f") is None
    assert evidence.cannot_hang(seen).cause == "thread_started" == evidence.rounds_at_most(seen, 0).cause
