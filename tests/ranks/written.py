"""Ledgers written by hand for tests of verdicts: what each rank called, without any rank.

Left out: states of ranks, which a verdict is given separately.
"""

import os

from labkit.ranks import layout, ledger


def call(op, shape=(4,), dtype="float32", *, line=1, group=None, state="done", **more):
    """One call at train.py:`line`; `group` is a tuple of global ranks (None: all). More are Book.note's arguments."""
    if op == "barrier":
        shape, dtype = (), ""
    return {"op": op, "shape": shape, "dtype": dtype, "line": line, "group": group, "state": state, **more}


def send(to, shape=(4,), **more):
    return call("send", shape, root=to, **more)


def recv(source, shape=(4,), **more):
    return call("recv", shape, root=source, **more)


def written(*ranks_calls):
    """The ledgers of ranks 0, 1, ... that made these calls."""
    return tuple(_one(calls, tuple(range(len(ranks_calls)))) for calls in ranks_calls)


def _one(calls, everyone):
    fd = ledger.create()
    book = ledger.open_in_rank(fd)
    for fields in calls:
        fields = dict(fields)
        op, line, group, state = (fields.pop(name) for name in ("op", "line", "group", "state"))
        elements = 1
        for size in fields["shape"]:
            elements *= size
        group = everyone if group is None else group
        name = "0" if group == everyone else "g" + "_".join(map(str, group))
        fields.setdefault("reduce_op", "sum" if "reduce" in op else "")
        fields.setdefault("path", line)
        blocking = fields.pop("blocking", True)
        index = book.note(op, name, group, num_bytes=4 * elements, place=f"train.py:{line}", **fields)
        book.refuse(index) if state == "refused" else book.mark(index, state, blocking)
    result = ledger.read(fd)
    os.close(fd)
    assert len(result.entries) == min(len(calls), layout.CAPACITY)
    return result
