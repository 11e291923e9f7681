"""Closed forms of the bubble, to stand beside a played schedule. p: ranks, m: microbatches, v: stages per rank.

Two shares are in use: of all time (idle / (idle + ideal)), which a timeline shows, and Megatron's overhead (idle /
ideal), which is larger. Both are exact for equal stages and a free link. Times F, I and W are those of one stage and
one microbatch; the zero-bubble paper writes T_B for the I of here, DeepSeek's B is I + W. GPipe's and 1F1B's hold for
any m; interleaved takes multiples of p, zero bubble p microbatches or more (with fewer, there are gaps that no W can
fill, and ranks idle longer), DualPipe 2p. Left out: communication.
"""

from __future__ import annotations

from numbers import Real


def idle_share(p: int, m: int, v: int = 1) -> float:
    """Of all time: (p-1)/(mv+p-1). v = 1: GPipe and 1F1B (GPipe, arXiv:1811.06965, section 2.3, has it as an order of
    magnitude); v > 1: interleaved. F, I and W may differ. From `overhead` x by x / (1 + x)."""
    return (p - 1) / (m * v + p - 1)


def overhead(p: int, m: int, v: int = 1) -> float:
    """Idle time over ideal time: (p-1)/(vm) (Megatron-LM, arXiv:2104.04473, sections 2.2.1 and 2.2.2)."""
    return (p - 1) / (v * m)


def zero_bubble_idle_share(p: int, m: int, v: int = 1) -> float:
    """Of all time, with F = I = W and m >= p: (p-1)/(3mv+p-1): ZB-H1 (v = 1), ZB-V (v = 2), interleaved zero-bubble.

    From (p-1)(F + I - W) of idle time a rank, one F, beside 3mv of work (arXiv:2401.10241, section 2.3).
    """
    return (p - 1) / (3 * m * v + p - 1)


def one_f_one_b_idle_s(p: int, f: Real, i: Real, w: Real) -> Real:
    """Seconds a rank is idle under GPipe and 1F1B: (p-1)(F + I + W) (arXiv:2401.10241, table 2)."""
    return (p - 1) * (f + i + w)


def zb_h1_idle_s(p: int, f: Real, i: Real, w: Real) -> Real:
    """Seconds a rank is idle under ZB-H1: (p-1)(F + I - W) (arXiv:2401.10241, table 2), for p microbatches or more, and
    a W that takes no longer than F and than I."""
    return (p - 1) * (f + i - w)


def zb_h2_idle_s(p: int, f: Real, i: Real, w: Real) -> Real:
    """Seconds a rank is idle under ZB-H2: (p-1)(F + I - 2W) (arXiv:2401.10241, table 2)."""
    return (p - 1) * (f + i - 2 * w)


def dual_pipe_idle_s(p: int, f: Real, i: Real, w: Real, overlapped: Real | None = None) -> Real:
    """Seconds a rank is idle under DualPipe: (p/2 - 1)(F&B + B - 3W), B being I + W (DeepSeek-V3, arXiv:2412.19437,
    table 2). overlapped: F&B, of a forward and a backward that overlap and hand on their results together; by default
    F + B. Where the forward of such a pair hands on at once, as in `dual.dual_pipe`, the chain from the middle to the
    ends is that of ZB-H1 on half of the ranks, and so is the bubble: `zb_h1_idle_s(p // 2, ...)`."""
    both = f + i + w if overlapped is None else overlapped
    return (p // 2 - 1) * (both + i - 2 * w)


def dual_pipe_v_idle_s(p: int, f: Real, i: Real, w: Real, overlapped: Real | None = None) -> Real:
    """The same under DualPipeV, which is DualPipe on 2p ranks, folded: (p-1)(F&B + B - 3W), the times being those of
    one of 2p stages; with F's output handed on at once, `zb_h1_idle_s(p, ...)`."""
    return dual_pipe_idle_s(2 * p, f, i, w, overlapped)
