"""Answers to lab 02's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 02` judges them all. They stand in modules beside this one, an exercise each, and the cheats on 2.1 and
2.2 in one of their own.
"""

import lab02_accumulate
import lab02_average
import lab02_bucketed
import lab02_bucketed_right
import lab02_cheats
import lab02_sampler

WRONG = {
    "2.1": lab02_average.WRONG,
    "2.2": lab02_bucketed.WRONG,
    "2.3": lab02_accumulate.WRONG,
    "2.4": lab02_sampler.WRONG,
}

RIGHT = {
    "2.1": lab02_average.RIGHT,
    "2.2": lab02_bucketed_right.RIGHT,
    "2.3": lab02_accumulate.RIGHT,
    "2.4": lab02_sampler.RIGHT,
}

CHEATS = {
    "2.1": lab02_cheats.AVERAGE,
    "2.2": lab02_cheats.BUCKETED,
    "2.3": lab02_accumulate.CHEATS,
    "2.4": lab02_sampler.CHEATS,
}
