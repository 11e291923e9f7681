"""Schedules that the tests of this room look at, and what theory says about each."""

from labkit.schedule import classic, dual, theory, zero_bubble

MAKERS = {
    "gpipe": classic.gpipe,
    "1f1b": classic.one_f_one_b,
    "interleaved": classic.interleaved,
    "zb_h1": zero_bubble.zb_h1,
    "zb_v": zero_bubble.zb_v,
    "dual_pipe": dual.dual_pipe,
    "dual_pipe_v": dual.dual_pipe_v,
}
SIZES = [(p, m) for p in (2, 4) for m in (4, 8, 16)]
# dual_pipe takes at least 2p microbatches.
GRID = [(name, p, m) for name in MAKERS for p, m in SIZES if not (name.startswith("dual") and m < 2 * p)]


def made(name, p, m):
    return MAKERS[name](p, m)


def expected_idle_share(name, p, m):
    """With F = I = W and a free link."""
    if name == "dual_pipe":  # ZB-H1's chain on half of the ranks, and 3 units of work for each of m microbatches
        idle = theory.zb_h1_idle_s(p // 2, 1, 1, 1)
        return idle / (3 * m + idle)
    shares = {
        "interleaved": theory.idle_share(p, m, 2),
        "zb_h1": theory.zero_bubble_idle_share(p, m),
        "zb_v": theory.zero_bubble_idle_share(p, m, 2),
        "dual_pipe_v": theory.zero_bubble_idle_share(p, m, 2),
    }
    return shares.get(name, theory.idle_share(p, m))
