"""The bytes of a ledger: a header, one row per process group, one per point-to-point channel, a ring of records.

Fixed sizes, so that a reader needs nothing from the writer. Left out: reading (`ledger`) and writing (`book`).
"""

import struct

CAPACITY = 4096
GROUPS, RANKS_IN_GROUP, CHANNELS = 128, 192, 1024
STATES = ("starting", "running", "returned", "raised")
ENTRY_STATES = ("issued", "waiting", "done", "failed", "refused")
P2P = ("send", "recv")
NO_SHAPE = frozenset({"barrier", "monitored_barrier", "all_to_all"})

HEADER = struct.Struct("<QQQdIIII48s208s")  # begun, ended, records, asleep_until, state, groups, channels, overflow
COUNTERS = struct.Struct("<QQQ")  # the first three of the header
TALLY = struct.Struct("<QQ")  # the beginning of a group's and of a channel's row
GROUP = struct.Struct(f"<QQH64s{RANKS_IN_GROUP}H")  # collectives, digest, number of ranks, name, ranks
CHANNEL = struct.Struct("<QQiiHB")  # messages, digest, peer, tag, group row, direction
BODY = struct.Struct("<QQQQQiiHBB8q32s16s16s88s192s")  # see Book._put
MARKS = struct.Struct("<IBB2x")  # checksum of the body; state and blocking, which change afterwards
ROW = {"header": 512, "group": 512, "channel": 32, "record": 512}
GROUPS_AT = ROW["header"]
CHANNELS_AT = GROUPS_AT + GROUPS * ROW["group"]
RECORDS_AT = CHANNELS_AT + CHANNELS * ROW["channel"]
NUM_BYTES = RECORDS_AT + CAPACITY * ROW["record"]


def signature(op: str, shape: tuple[int, ...], dtype: str, root: int | None, reduce_op: str, uneven: bool) -> tuple:
    """What must be equal on all ranks of a group; exact shapes, as TORCH_DISTRIBUTED_DEBUG=DETAIL compares them."""
    if op.endswith("barrier"):
        return (op,)
    return (op, None if uneven or op in NO_SHAPE else shape, dtype, root, reduce_op)
