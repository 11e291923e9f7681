"""Answers to lab 03's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 03` judges them all. They stand in modules beside this one, an exercise each.
"""

import lab03_activations
import lab03_checkpoints
import lab03_scaler
import lab03_scaler_more
import lab03_states

WRONG = {
    "3.1": lab03_states.WRONG,
    "3.2": lab03_activations.WRONG,
    "3.3": lab03_checkpoints.WRONG,
    "3.4": lab03_scaler.WRONG + lab03_scaler_more.WRONG,
}
RIGHT = {
    "3.1": lab03_states.RIGHT,
    "3.2": lab03_activations.RIGHT,
    "3.3": lab03_checkpoints.RIGHT,
    "3.4": lab03_scaler.RIGHT + lab03_scaler_more.RIGHT,
}
CHEATS = {
    "3.1": lab03_states.CHEATS,
    "3.2": lab03_activations.CHEATS,
    "3.3": lab03_checkpoints.CHEATS,
    "3.4": lab03_scaler.CHEATS + lab03_scaler_more.CHEATS,
}
