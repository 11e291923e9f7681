"""Answers to lab 01's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 01` judges them all. They stand in modules beside this one, an exercise each, and the cheats on messages
in one of their own.
"""

import lab01_bandwidth
import lab01_cheats
import lab01_fit
import lab01_hierarchy
import lab01_ring

WRONG = {
    "1.1": lab01_ring.WRONG,
    "1.2": lab01_bandwidth.WRONG,
    "1.3": lab01_fit.WRONG,
    "1.4": lab01_hierarchy.WRONG,
}

RIGHT = {
    "1.1": lab01_ring.RIGHT,
    "1.2": lab01_bandwidth.RIGHT,
    "1.3": lab01_fit.RIGHT,
    "1.4": lab01_hierarchy.RIGHT,
}

CHEATS = {
    "1.1": lab01_cheats.RING,
    "1.2": lab01_bandwidth.CHEATS,
    "1.3": lab01_fit.CHEATS,
    "1.4": lab01_cheats.HIERARCHY,
}
