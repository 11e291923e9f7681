"""Collectives written out message by message, to hold the formulas against: no formula of labkit stands here.

A schedule is a list of rounds, a round a list of (source, destination, share of S); a rank sends and receives at most
one message in a round, so a round takes alpha + its largest share / bandwidth.
"""

from collections import Counter


def ring_pass(n):
    """One trip round the ring less a step: every rank passes on n-1 parts."""
    return [[(rank, (rank + 1) % n, 1 / n) for rank in range(n)] for _ in range(n - 1)]


def chain(n):
    return [[(rank, rank + 1, 1.0)] for rank in range(n - 1)]


def binomial(n):
    """Broadcast from rank 0: who has the tensor passes it on, far ranks first."""
    rounds, have = [], {0}
    step = 1
    while step < n:
        step *= 2
    while step > 1:
        step //= 2
        rounds.append([(rank, rank + step, 1.0) for rank in sorted(have) if rank + step < n])
        have |= {rank + step for rank in have if rank + step < n}
    return rounds


def binomial_scatter(n):
    """From rank 0: each message carries the parts of all the ranks behind its destination."""
    rounds, span, owns = [], 1, {0: n}
    while span < n:
        span *= 2
    while span > 1:
        span //= 2
        messages = []
        for rank, count in sorted(owns.items()):
            if count > span:
                messages.append((rank, rank + span, (count - span) / n))
                owns[rank], owns[rank + span] = span, count - span
        rounds.append(messages)
    return rounds


def halving(n):
    """Reduce-scatter by recursive halving, near ranks first; n a power of two."""
    rounds, distance, share = [], 1, 0.5
    while distance < n:
        rounds.append([(rank, rank ^ distance, share) for rank in range(n)])
        distance, share = distance * 2, share / 2
    return rounds


def star(n, share):
    return [[(0, rank, share)] for rank in range(1, n)]


def exchange(n):
    """all_to_all: in round d everybody sends to the rank d places further on."""
    return [[(rank, (rank + d) % n, 1 / n) for rank in range(n)] for d in range(1, n)]


def backwards(rounds):
    return [[(target, source, share) for source, target, share in messages] for messages in reversed(rounds)]


def time_s(rounds, num_bytes, link):
    for messages in rounds:
        assert max(Counter(source for source, _, _ in messages).values()) == 1
        assert max(Counter(target for _, target, _ in messages).values()) == 1
    return sum(link.alpha_s + max(share for *_, share in messages) * num_bytes / link.bandwidth for messages in rounds)


def leaving(rounds, per_node):
    """Share of S through the cards of the busiest node, in its busier direction."""
    out, come = Counter(), Counter()
    for messages in rounds:
        for source, target, share in messages:
            if source // per_node != target // per_node:
                out[source // per_node] += share
                come[target // per_node] += share
    return max([*out.values(), *come.values(), 0.0])


def trees(n):
    """NCCL's double binary tree: each rank's parent in either tree, None for a root (src/graph/trees.cc, described)."""

    def parent(rank):
        if rank == 0:
            return None
        low = rank & -rank
        above = (rank ^ low) | (low << 1)
        return above if above < n else rank ^ low

    first = [parent(rank) for rank in range(n)]
    there = [n - 1 - rank if n % 2 == 0 else (rank + 1) % n for rank in range(n)]
    second = [None] * n
    for rank in range(n):
        second[there[rank]] = None if first[rank] is None else there[first[rank]]
    return first, second
