"""Answers to lab 07's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 07` judges them all. They stand in modules beside this one, an exercise each.
"""

import lab07_design
import lab07_gpipe
import lab07_gpipe_more
import lab07_one_f_one_b
import lab07_one_f_one_b_more
import lab07_split
import lab07_tied

WRONG = {
    "7.1": lab07_split.WRONG,
    "7.2": lab07_gpipe.WRONG + lab07_gpipe_more.WRONG,
    "7.3": lab07_one_f_one_b.WRONG + lab07_one_f_one_b_more.WRONG,
    "7.4": lab07_tied.WRONG,
    "7.5": lab07_design.WRONG,
}

RIGHT = {
    "7.1": lab07_split.RIGHT,
    "7.2": lab07_gpipe.RIGHT + lab07_gpipe_more.RIGHT,
    "7.3": lab07_one_f_one_b.RIGHT + lab07_one_f_one_b_more.RIGHT,
    "7.4": lab07_tied.RIGHT,
    "7.5": lab07_design.RIGHT,
}

CHEATS = {
    "7.1": lab07_split.CHEATS,
    "7.2": lab07_gpipe.CHEATS + lab07_gpipe_more.CHEATS,
    "7.3": lab07_one_f_one_b.CHEATS,
    "7.4": lab07_tied.CHEATS,
    "7.5": lab07_design.CHEATS,
}
