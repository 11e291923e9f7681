"""Answers to lab 00's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 00` judges them all. They stand in modules beside this one, an exercise each, and the cheats on
messages and the answers that miss by a detail in one of their own.
"""

import lab00_attempts
import lab00_broadcast
import lab00_cheats
import lab00_gather
import lab00_ring
import lab00_rows

WRONG = {
    "0.1": lab00_rows.WRONG,
    "0.2": lab00_broadcast.WRONG + lab00_attempts.BROADCAST,
    "0.3": lab00_ring.WRONG + lab00_attempts.RING,
    "0.4": lab00_gather.WRONG + lab00_attempts.GATHER,
}

RIGHT = {
    "0.1": lab00_rows.RIGHT,
    "0.2": lab00_broadcast.RIGHT + lab00_attempts.BROADCAST_RIGHT,
    "0.3": lab00_ring.RIGHT,
    "0.4": lab00_gather.RIGHT,
}

CHEATS = {
    "0.1": lab00_rows.CHEATS,
    "0.2": lab00_cheats.BROADCAST,
    "0.3": lab00_cheats.RING,
    "0.4": lab00_cheats.GATHER,
}
