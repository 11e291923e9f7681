"""Judge of exercise 1.4, `hierarchical_all_reduce`: few bytes between nodes, many within.

With k nodes of g ranks, 2(k-1)/k S leave each node where a flat ring sends 2(n-1)/n S (`labkit.cost.algorithms`,
hierarchical and ring): S against 1.5 S on 2 nodes of 2. Every rank carries its g-th part of it. Messages and
collectives of smaller groups are both allowed. Left out: nodes of different sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab01.crossing as crossing
import labkit.labs.lab01.inputs as inputs
import labkit.labs.lab01.told as told
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import describe, head, same

NAME = "hierarchical_all_reduce"


@dataclass(frozen=True)
class Case:
    """One call: the tensors that went in, by rank, and how many ranks a node holds."""

    tensors: tuple[Any, ...]
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return len(self.tensors)

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def tried(self) -> str:
        return f"{self.num_nodes} nodes of {self.ranks_per_node} ranks, {describe(self.tensors[0])}"

    @property
    def num_bytes(self) -> int:
        return self.tensors[0].nbytes

    @property
    def leaving_bytes(self) -> float:
        """Bytes that must leave each node."""
        return 2 * (self.num_nodes - 1) / self.num_nodes * self.num_bytes

    @property
    def flat_bytes(self) -> float:
        """Bytes that leave each node in a flat ring."""
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes

    @property
    def slack_bytes(self) -> int:
        """Where nothing divides, chunks may be rounded up or padded, by an element per rank and half."""
        return 2 * self.world_size * self.tensors[0].element_size()


def judge(fn: Callable, seed: int) -> Verdict:
    """2 nodes of 2 first; then chunks that differ, 3 ranks a node, 3 nodes, a single node."""
    seen = []
    for case in _cases(random.Random(seed)):
        rank_args = [(tensor, case.ranks_per_node) for tensor in case.tensors]
        observed = evidence.observe(call, case.world_size, args=(fn,), rank_args=rank_args)
        found = _ran(case, observed) or _returned(case, observed) or _values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for question in (_waited, _not_flat, _leaving, _honest):
        for case, observed in seen:
            found = question(case, observed)
            if found is not None:
                return found
    case, observed = seen[0]
    leaving = max(_by_node(case, observed))
    return right(
        f"{leaving / case.num_bytes:.2f} S leaves each of 2 nodes of 2, where a flat ring sends "
        f"{case.flat_bytes / case.num_bytes:.2f} S; each rank carries its share"
    )


def _cases(rng: random.Random) -> list[Case]:
    def case(num_nodes: int, ranks_per_node: int, shape: tuple[int, ...], dtype: str) -> Case:
        tensors = tuple(inputs.tensor(rng, shape, dtype) for _ in range(num_nodes * ranks_per_node))
        return Case(tensors, ranks_per_node)

    return [
        case(2, 2, (rng.randint(20, 40), 8 * rng.randint(2, 5)), "float32"),
        case(2, 2, (rng.randint(20, 40) * 2 + 1, 2 * rng.randint(20, 30) + 1), "int64"),
        case(2, 3, (rng.randint(100, 200), 11), "float64"),
        case(3, 2, (rng.randint(100, 200), 13), "float32"),
        case(1, 2, inputs.split(rng, 2, 1), "float64"),
    ]


def call(fn: Callable, tensor: Any, ranks_per_node: int) -> Any:
    """Runs in a rank: what came back, and what the tensor that was handed in holds afterwards."""
    out = fn(tensor, ranks_per_node)
    return out if out is NotImplemented else (out, tensor)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = evidence.ran(observed, NAME, case.tried)
    if failed is None or failed.cause == "not_attempted":
        return failed
    if case.num_nodes == 1:
        cause, sentence = (
            "single_node",
            "it works on several nodes; on one there is nobody to send across to.",
        )
    elif case.ranks_per_node != 2:
        cause, sentence = (
            "two_per_node",
            "it works with 2 ranks a node: ranks_per_node can be another number.",
        )
    elif case.num_nodes != 2:
        cause, sentence = "two_nodes", "it works on 2 nodes: there can be more."
    elif case.tensors[0].numel() % case.world_size:
        cause, sentence = (
            "uneven_chunks",
            "it works where the tensor divides into equal chunks; here it does not.",
        )
    else:
        return failed
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _returned(case: Case, observed: Observed) -> Verdict | None:
    for rank, (out, _) in enumerate(observed.results):
        if out is None or kind(out) != kind(case.tensors[0]):
            cause = "returns_nothing" if out is None else "wrong_shape"
            sentence = f"rank {rank} must return the tensor it was given, reduced in place."
            return wrong("shape", cause, sentence, case.tried, kind(out), kind(case.tensors[0]))
    return None


def _values(case: Case, observed: Observed) -> Verdict | None:
    total = inputs.total(case.tensors)
    outs = [out for out, _ in observed.results]
    for rank, out in enumerate(outs):
        if not same(out, total):
            cause, sentence = _wrong_value(case, outs, rank)
            return wrong("values", cause, sentence, case.tried, f"rank {rank}: {head(out)}", head(total))
    for rank, (_, held) in enumerate(observed.results):
        if not same(held, total):
            sentence = f"rank {rank} returned the sum, but `tensor` still holds something else: reduce it in place."
            return wrong("values", "not_in_place", sentence, case.tried, head(held), head(total))
    return None


def _wrong_value(case: Case, outs: list, rank: int) -> tuple[str, str]:
    g, total = case.ranks_per_node, inputs.total(case.tensors)
    node = inputs.total(case.tensors[rank // g * g : rank // g * g + g])
    if same(outs[rank], node):
        return "node_only", "this is the sum over one node: nothing of the other nodes is in it."
    if same(outs[rank], inputs.total(case.tensors[rank % g :: g])):
        return "across_only", "this is the sum over one rank of each node: those beside it are missing."
    for times in (g, case.num_nodes):
        if times > 1 and same(outs[rank], total * times):
            return "counted_twice", f"this is {times} times the sum: it was added up after every rank had it."
    if any(same(out, total) for out in outs):
        return (
            "not_passed_on",
            f"rank {rank} does not hold the sum, and others do: pass it on within the node.",
        )
    part = (outs[rank] == total).flatten()
    if part.any() and float(part.float().mean()) > 0.2:
        return "not_gathered", "each rank has the sum in its own part only: gather the parts within the node."
    return told.wrong_sum(case.tensors, outs, rank)


def _waited(case: Case, observed: Observed) -> Verdict | None:
    found = attempts.never_waited(observed)
    if found is None:
        return None
    rank, op = found
    sentence = f"rank {rank} never waited for its {op}: its tensor was used while under way."
    return wrong("evidence", "not_waited", sentence, case.tried, f"{op} without wait()", "a wait for it")


def _found(case: Case, observed: Observed) -> list[crossing.Crossing]:
    return crossing.crossings(observed, case.ranks_per_node)


def _by_node(case: Case, observed: Observed) -> list[float]:
    return crossing.by_node(_found(case, observed), case.world_size, case.ranks_per_node)


def _not_flat(case: Case, observed: Observed) -> Verdict | None:
    """No collective over all ranks, where there are two levels."""
    if case.num_nodes == 1:
        return None
    whole = [each.op for each in _found(case, observed) if each.whole and each.op != "barrier"]
    if not whole:
        return None
    flat = case.flat_bytes / case.num_bytes
    sentence = f"{whole[0]} over all ranks knows no nodes: as a ring it sends {flat:.3g} S out of each."
    return wrong("evidence", "flat_collective", sentence, case.tried, whole[0], "groups of a node, groups across nodes")


def _leaving(case: Case, observed: Observed) -> Verdict | None:
    found, g = _found(case, observed), case.ranks_per_node
    nodes, ranks = _by_node(case, observed), crossing.by_rank(found, case.world_size)
    most = max(nodes)
    got, due = f"{most / case.num_bytes:.3g} S leaves a node", f"{case.leaving_bytes / case.num_bytes:.3g} S"
    if most > case.leaving_bytes + case.slack_bytes:
        cause, sentence = _too_much(case, found, most)
        return wrong("evidence", cause, sentence, case.tried, got, due)
    if min(nodes) < case.leaving_bytes - case.slack_bytes:
        sentence = "the values are right, but too few bytes for them left a node: something went another way."
        return wrong("evidence", "no_traffic", sentence, case.tried, f"{min(nodes):g} bytes", f"{case.leaving_bytes:g}")
    hot = max(range(case.world_size), key=ranks.__getitem__)
    if ranks[hot] > case.leaving_bytes / g + case.slack_bytes:
        sentence = f"rank {hot} carries more than its share across; the network cards of the others beside it idle."
        got, due = (
            f"{ranks[hot] / case.num_bytes:.3g} S",
            f"{case.leaving_bytes / g / case.num_bytes:.3g} S a rank",
        )
        return wrong("evidence", "leaders_only", sentence, case.tried, got, due)
    return None


def _too_much(case: Case, found: list[crossing.Crossing], most: float) -> tuple[str, str]:
    across, within = sum(each.across_bytes for each in found), sum(each.within_bytes for each in found)
    if max(each.across_bytes for each in found) >= case.num_bytes:
        return (
            "whole_tensor",
            "ranks send the whole tensor across; each need only send its part of the node's sum.",
        )
    if across > within:
        return (
            "nodes_mixed_up",
            "more goes across than within: ranks of one node follow one another, 0 and 1, 2 and 3.",
        )
    if abs(most - case.flat_bytes) <= case.slack_bytes:
        return (
            "flat_ring",
            "this is a flat ring: reduce within the node first, so that less is left to send across.",
        )
    return "too_much", "more leaves a node than a sum over nodes needs."


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)
