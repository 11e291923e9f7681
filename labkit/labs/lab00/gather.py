"""Judge of exercise 0.4, `gather_uneven`: each rank has its own number of rows, only the root receives them.

What may travel: each rank's rows, to the root, once; and before them at most one int64 a rank, also to the
root, that says how many rows to expect (a message, or torch's own gather). So a rank with B bytes of rows
sends B or B + 8 bytes, and nobody but the root receives anything. Left out: sending in pieces.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab00.inputs as inputs
import labkit.labs.lab00.traffic as traffic
from labkit.check import evidence
from labkit.check.compare import difference, kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest

NAME = "gather_uneven"


@dataclass(frozen=True)
class Case:
    """One call: the rows that went in, by rank, and the root."""

    tensors: tuple[Any, ...]
    root: int

    @property
    def world_size(self) -> int:
        return len(self.tensors)

    @property
    def rows(self) -> list[int]:
        return [len(tensor) for tensor in self.tensors]

    @property
    def tried(self) -> str:
        first = self.tensors[0]
        rows = (
            f"{self.rows} rows of shape {tuple(first.shape[1:])}, {str(first.dtype).removeprefix('torch.')}"
        )
        return f"world_size={self.world_size}, root={self.root}, {rows}"

    def whole(self, order: list[int] | None = None) -> Any:
        import torch

        return torch.cat(
            [self.tensors[rank] for rank in (range(self.world_size) if order is None else order)]
        )


def judge(fn: Callable, seed: int) -> Verdict:
    """Two ranks, then four, other roots, ranks without rows, ranks that come late, one rank alone."""
    seen = []
    for case in _cases(random.Random(seed)):
        observed = evidence.observe(call, case.world_size, args=(fn,), rank_args=_rank_args(case))
        found = _ran(case, observed) or _returned(case, observed) or _values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    # Each question is put to all cases before the next one: padding cannot show where all counts are equal.
    for question in (_collectives, _nothing_open, _arrived, _straight, _unpadded, _others_receive, _honest):
        for case, observed in seen:
            found = question(case, observed)
            if found is not None:
                return found
    return right(
        "rows in rank order at the root alone; every rank sent its own rows and at most one count of 8 bytes"
    )


def _cases(rng: random.Random) -> list[Case]:
    def case(world_size: int, root: int, dtype: str, empty: int = 0, least_dims: int = 0) -> Case:
        rows = rng.sample(range(2, 14), world_size - empty) + [0] * empty
        # The root is never the one without rows: who forgets the root's own must be seen.
        while not rows[root]:
            rng.shuffle(rows)
        rest = tuple(rng.choice((2, 3, 5)) for _ in range(rng.randint(least_dims, 2)))
        return Case(tuple(inputs.tensor(rng, (count, *rest), dtype) for count in rows), root)

    return [
        case(2, 0, "float32"),
        # Rows of at least two dims: a whole shape in place of a count must be seen.
        case(4, rng.randint(1, 2), "int64", least_dims=1),
        case(3, rng.randint(1, 2), "float64"),
        case(5, rng.randint(0, 4), rng.choice(inputs.DTYPES), empty=2),
        case(1, 0, "int32"),
    ]


def _rank_args(case: Case) -> list[tuple]:
    """Lower ranks come later, by a twentieth of a second each: they do not arrive in the order of ranks."""
    return [
        (tensor, case.root, 0.05 * (case.world_size - rank - 1)) for rank, tensor in enumerate(case.tensors)
    ]


def call(fn: Callable, tensor: Any, root: int, late_s: float) -> Any:
    """Runs in a rank, which comes `late_s` seconds late."""
    import time

    time.sleep(late_s)
    return attempts.called(fn, "tensor, root", tensor, root)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    if case.world_size == 1:
        cause, sentence = "world_of_one", "one rank has nobody to receive from: its own rows are the result."
    elif _assumes_own_size(case, observed):
        cause, sentence = (
            "same_size_assumed",
            "the root receives as many rows as it has itself, from ranks with other counts.",
        )
    elif (skipped := traffic.left_out(observed, case.tensors, case.root)) is not None:
        cause, sentence = (
            "empty_recv_missing",
            f"rank {skipped} sends its 0 rows, and the root leaves that recv out: both take part, or neither.",
        )
    elif 0 in case.rows:
        cause, sentence = (
            "empty_rank",
            "it works until a rank has no rows: that rank must still play its part.",
        )
    else:
        return failed
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _assumes_own_size(case: Case, observed: Observed) -> bool:
    own = case.tensors[case.root].nbytes
    received = [entry for entry in observed.outcome.ledgers[case.root] if entry.op == "recv"]
    return any(entry.num_bytes == own != case.tensors[entry.root or 0].nbytes for entry in received)


def _returned(case: Case, observed: Observed) -> Verdict | None:
    whole, at_root = case.whole(), observed.results[case.root]
    if at_root is None:
        holders = [rank for rank, out in enumerate(observed.results) if out is not None]
        if holders:
            sentence = f"rank {holders[0]} returned the rows; the root is rank {case.root}."
            return wrong(
                "shape", "root_ignored", sentence, case.tried, f"rank {holders[0]}: {kind(whole)}", "None"
            )
        return wrong(
            "shape", "returns_nothing", "the root returned nothing.", case.tried, "None", kind(whole)
        )
    for rank, out in enumerate(observed.results):
        if rank != case.root and out is not None:
            own = inputs.same(out, case.tensors[rank])
            cause = "returns_own" if own else "returned_everywhere"
            what = "its own rows" if own else "a result as well"
            sentence = f"rank {rank} returned {what}; only the root has the result, the others return None."
            return wrong("shape", cause, sentence, case.tried, kind(out), "None")
    if isinstance(at_root, (list, tuple)):
        sentence = "the root returned a list of parts; concatenate them into one tensor."
        return wrong("shape", "not_concatenated", sentence, case.tried, kind(at_root), kind(whole))
    return _wrong_shape(case, at_root, whole)


def _wrong_shape(case: Case, at_root: Any, whole: Any) -> Verdict | None:
    found = difference(at_root, whole)
    if found is None or found.stage != "shape":
        return None
    others = [rank for rank in range(case.world_size) if rank != case.root]
    if others and inputs.same(at_root, case.whole(others)):
        cause, sentence = "root_missing", "all rows are there except the root's own."
    elif inputs.same(at_root, whole.flatten()):
        cause, sentence = "flattened", "the values are right and the rows have lost their shape."
    elif kind(at_root).split("shape")[0] != kind(whole).split("shape")[0]:
        cause, sentence = "wrong_dtype", "the root returned another type than the rows have."
    elif hasattr(at_root, "shape") and tuple(at_root.shape[1:]) == tuple(whole.shape[1:]):
        more = len(at_root) > len(whole)
        cause = "padding_left_in" if more else "rows_missing"
        sentence = "there are more rows than the ranks have: padding." if more else "some rows are missing."
    else:
        cause, sentence = (
            "wrong_shape",
            "the root returned another shape than the rows of all ranks together.",
        )
    return wrong("shape", cause, sentence, case.tried, found.got, found.expected)


def _values(case: Case, observed: Observed) -> Verdict | None:
    at_root, whole = observed.results[case.root], case.whole()
    found = difference(at_root, whole)
    if found is None:
        return None
    if attempts.left_open(observed) is not None:
        sentence = "a recv was still under way when its tensor was used: call `wait()` on it first."
        return wrong("values", "not_waited", sentence, case.tried, found.got, found.expected)
    others = [rank for rank in range(case.world_size) if rank != case.root]
    backwards = list(range(case.world_size))[::-1]
    if inputs.same(at_root, inputs.through_float32(whole)):
        cause, sentence = (
            "dtype_lost",
            "the values lost precision on the way: they were sent as another dtype.",
        )
    elif inputs.same(at_root, case.whole([case.root, *others])):
        cause, sentence = (
            "root_first",
            "the root's own rows come first; they belong between those of its neighbours.",
        )
    elif inputs.same(at_root, case.whole([*others, case.root])):
        cause, sentence = (
            "root_last",
            "the root's own rows come last; they belong between those of its neighbours.",
        )
    elif _same_blocks(case, at_root):
        came = (
            " as they arrived"
            if not inputs.same(at_root, case.whole(backwards))
            else " as they arrived, or backwards"
        )
        cause, sentence = (
            "arrival_order",
            f"all rows are there, in blocks{came}; they belong in the order of ranks.",
        )
    else:
        cause, sentence = "wrong_values", "the root returned other values than the ranks sent."
    return wrong("values", cause, sentence, case.tried, found.got, found.expected)


def _same_blocks(case: Case, at_root: Any) -> bool:
    """Whether the result is the ranks' blocks in some other order."""
    from itertools import permutations

    return any(
        inputs.same(at_root, case.whole(list(order))) for order in permutations(range(case.world_size))
    )


def _nothing_open(case: Case, observed: Observed) -> Verdict | None:
    return evidence.cannot_hang(observed, case.tried)


def _arrived(case: Case, observed: Observed) -> Verdict | None:
    needed = [0] * case.world_size
    needed[case.root] = sum(tensor.nbytes for tensor in case.tensors) - case.tensors[case.root].nbytes
    return evidence.received_at_least(observed, needed, case.tried)


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)


def _collectives(case: Case, observed: Observed) -> Verdict | None:
    """torch's gather may carry the counts and nothing else; who tells everybody is told so later."""
    return traffic.collectives(observed, case.tried)


def _sent(observed: Observed, rank: int) -> list[evidence.Message]:
    return [message for message in evidence.messages(observed) if message.source == rank]


def _straight(case: Case, observed: Observed) -> Verdict | None:
    """Nobody but the root sends to anyone but the root."""
    for rank in range(case.world_size):
        other = [message.destination for message in _sent(observed, rank) if message.destination != case.root]
        if rank != case.root and other:
            sentence = (
                f"rank {rank} sends to rank {other[0]}, which must hand it on: rows travel more than once."
            )
            got = f"a message from rank {rank} to rank {other[0]}"
            return wrong("evidence", "forwarded", sentence, case.tried, got, f"straight to rank {case.root}")
    return None


def _unpadded(case: Case, observed: Observed) -> Verdict | None:
    """Each rank but the root sends its rows exactly; a count of 8 bytes may go before."""
    for rank, tensor in enumerate(case.tensors):
        if rank != case.root:
            found = traffic.beside_the_rows(observed, rank, tensor, case.tried)
            if found is not None:
                return found
    return None


def _others_receive(case: Case, observed: Observed) -> Verdict | None:
    told = [name for name in evidence.collectives(observed) if name != "gather"]
    told += [
        f"a message to rank {m.destination}"
        for m in evidence.messages(observed)
        if m.destination != case.root
    ]
    if not told:
        return None
    sentence = f"only the root receives; with {told[0]} the others are told what they do not need."
    return wrong(
        "evidence", "others_receive", sentence, case.tried, ", ".join(dict.fromkeys(told)), "nothing"
    )
