"""Answers to lab 05's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 05` judges them all. They stand in modules beside this one, an exercise each, some with
right answers and cheats in ones of their own.
"""

import lab05_disk
import lab05_disk_cheats
import lab05_disk_right
import lab05_offloaded
import lab05_offloaded_cheats
import lab05_offloaded_right
import lab05_pays
import lab05_step_time

WRONG = {
    "5.1": lab05_offloaded.WRONG,
    "5.2": lab05_disk.WRONG,
    "5.3": lab05_step_time.WRONG,
    "5.4": lab05_pays.WRONG,
}

RIGHT = {
    "5.1": lab05_offloaded_right.RIGHT,
    "5.2": lab05_disk_right.RIGHT,
    "5.3": lab05_step_time.RIGHT,
    "5.4": lab05_pays.RIGHT,
}

CHEATS = {
    "5.1": lab05_offloaded_cheats.CHEATS,
    "5.2": lab05_disk_cheats.CHEATS,
    "5.3": lab05_step_time.CHEATS,
    "5.4": lab05_pays.CHEATS,
}
