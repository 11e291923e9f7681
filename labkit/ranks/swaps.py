"""Two collectives of one shape in swapped order: nothing hangs, nothing raises, and every number is wrong.

Nothing on the wire tells them apart, so the evidence is the reader's own: the names under which each rank knows the
tensor, and the lines. Two calls i < j (at most 3 apart) of one group with one signature are swapped if every member
made them in one of two orders, both orders occur, and
- by name: a name of the tensor at i on one rank is a name at j on the other, and another name the reverse; or
- by line (tensors without names): the lines are (x, y) on one rank and (y, x) on the other.
A program that is right can look so in one way: ranks that take turns (`all_reduce(x if rank == turn else zeros)`).
Turns come from a loop, so the two calls come from one path (the lines of all the reader's frames), or from the same
two paths in both orders. Such a pair is believed only if the order that is not the majority's has fewer ranks than
half the group, or if both tensors are items of one list or dict. Barriers carry nothing and have no order.
A reversed sequence of any length is found by its middle. Not found: tensors without a name (x.clone(), attributes
of objects) on one line, or on two lines in a group of two; rotations of three or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from labkit.ranks.ledger import Entry

MOST_APART = 3


def find(calls: Mapping[int, Mapping[int, Entry]], same) -> tuple[int, int, tuple[int, ...]] | None:
    """The first swapped pair in a group: (i, j, ranks of the minority order).

    `calls` maps each member's rank to its entries by sequence; `same(entry, entry)` compares signatures. A tie
    goes to the order of the lowest rank.
    """
    members = sorted(calls)
    if len(members) < 2:
        return None
    common = sorted(set.intersection(*(set(calls[rank]) for rank in members)))
    differing = [
        k
        for k in common
        if len({(calls[r][k].tensor, calls[r][k].place) for r in members}) > 1
        and not calls[members[0]][k].op.endswith("barrier")
    ]
    known = set(differing)
    for i in differing:
        for j in range(i + 1, i + 1 + MOST_APART):
            if j in known and _all_same(calls, members, i, j, same):
                odd = _odd_ranks(calls, members, i, j)
                if odd:
                    return i, j, odd
    return None


def _all_same(calls, members: list[int], i: int, j: int, same) -> bool:
    reference = calls[members[0]][i]
    return all(same(reference, calls[rank][k]) for rank in members for k in (i, j))


def _odd_ranks(calls, members: list[int], i: int, j: int) -> tuple[int, ...]:
    first = members[0]
    mine = (calls[first][i], calls[first][j])
    pairs = {rank: (calls[rank][i], calls[rank][j]) for rank in members}
    other = next((rank for rank in members[1:] if _by_name(mine, pairs[rank]) or _by_line(mine, pairs[rank])), None)
    if other is None:
        return ()
    split = _split_by_name(pairs, first, other) or _split_by_line(pairs, first, other)
    if split is None:
        return ()
    here, there = split
    odd = tuple(here if len(here) < len(there) else there)
    return odd if _is_believed(pairs, odd, first, other) else ()


def _by_name(a: tuple[Entry, Entry], b: tuple[Entry, Entry]) -> tuple[set[str], set[str]] | None:
    """Names (u, v): u at i on a and at j on b, v the reverse; None when there is no such pair of names."""
    (a_i, a_j), (b_i, b_j) = ((_names(x), _names(y)) for x, y in (a, b))
    u, v = (a_i - a_j) & (b_j - b_i), (a_j - a_i) & (b_i - b_j)
    return (u, v) if u and v else None


def _by_line(a: tuple[Entry, Entry], b: tuple[Entry, Entry]) -> bool:
    named = any(entry.tensor for entry in (*a, *b))
    x, y = a[0].place, a[1].place
    return not named and x != y and bool(x and y) and (b[0].place, b[1].place) == (y, x)


def _split_by_name(pairs, first: int, other: int) -> tuple[list[int], list[int]] | None:
    names = _by_name(pairs[first], pairs[other])
    if names is None:
        return None
    u, v = names
    here = [r for r, (x, y) in pairs.items() if u & _names(x) - _names(y) and v & _names(y) - _names(x)]
    there = [r for r, (x, y) in pairs.items() if v & _names(x) - _names(y) and u & _names(y) - _names(x)]
    return (here, there) if len(here) + len(there) == len(pairs) and not set(here) & set(there) else None


def _split_by_line(pairs, first: int, other: int) -> tuple[list[int], list[int]] | None:
    if not _by_line(pairs[first], pairs[other]):
        return None
    lines = {rank: (x.place, y.place) for rank, (x, y) in pairs.items()}
    here = [rank for rank in lines if lines[rank] == lines[first]]
    there = [rank for rank in lines if lines[rank] == lines[other]]
    return (here, there) if len(here) + len(there) == len(pairs) else None


def _is_believed(pairs, odd: tuple[int, ...], first: int, other: int) -> bool:
    if 2 * len(odd) < len(pairs) or not _may_be_turns(pairs, first, other):
        return True
    return all(_containers(x) & _containers(y) for x, y in (pairs[first], pairs[other]))


def _may_be_turns(pairs, first: int, other: int) -> bool:
    """Whether turns in a loop could have made both calls: one path, or the same two paths in both orders."""
    paths, others = ([(entry.place, entry.path) for entry in pairs[rank]] for rank in (first, other))
    return paths[0] == paths[1] or others[0] == others[1] or paths == others[::-1]


def _names(entry: Entry) -> set[str]:
    return set(entry.tensor.split(",")) - {""}


def _containers(entry: Entry) -> set[str]:
    return set(_container_names(_names(entry)))


def _container_names(names: set[str]) -> Iterator[str]:
    for name in names:
        head, bracket, _ = name.partition("[")
        if bracket:
            yield head
