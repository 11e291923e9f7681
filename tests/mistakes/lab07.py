"""Answers to lab 07's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 07` judges them all. They stand in modules beside this one, an exercise each.
"""

import lab07_gpipe
import lab07_one_f_one_b

WRONG = {
    "7.2": lab07_gpipe.WRONG,
    "7.3": lab07_one_f_one_b.WRONG,
}

RIGHT = {
    "7.2": lab07_gpipe.RIGHT,
    "7.3": lab07_one_f_one_b.RIGHT,
}

CHEATS = {
    "7.2": lab07_gpipe.CHEATS,
    "7.3": lab07_one_f_one_b.CHEATS,
}
