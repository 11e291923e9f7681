"""Answers to lab 04's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 04` judges them all. They stand in modules beside this one, an exercise each.
"""

import lab04_checkpoint
import lab04_clip
import lab04_gradients
import lab04_gradients_right
import lab04_parameters
import lab04_parameters_cheats
import lab04_parameters_right
import lab04_state
import lab04_state_cheats
import lab04_state_right

WRONG = {
    "4.1": lab04_state.WRONG,
    "4.2": lab04_gradients.WRONG,
    "4.3": lab04_parameters.WRONG,
    "4.4": lab04_clip.WRONG,
    "4.5": lab04_checkpoint.WRONG,
}

RIGHT = {
    "4.1": lab04_state_right.RIGHT,
    "4.2": lab04_gradients_right.RIGHT,
    "4.3": lab04_parameters_right.RIGHT,
    "4.4": lab04_clip.RIGHT,
    "4.5": lab04_checkpoint.RIGHT,
}

CHEATS = {
    "4.1": lab04_state_cheats.CHEATS,
    "4.2": lab04_gradients.CHEATS,
    "4.3": lab04_parameters_cheats.CHEATS,
    "4.4": lab04_clip.CHEATS,
    "4.5": lab04_checkpoint.CHEATS,
}
