"""Answers to lab 06's exercises: WRONG with the cause each must be told, RIGHT, and CHEATS with theirs.

`labkit prove 06` judges them all. They stand in modules beside this one.
"""

import lab06_attention
import lab06_column
import lab06_conjugate
import lab06_embedding
import lab06_entropy
import lab06_ring
import lab06_ring_work
import lab06_row
import lab06_sequence

WRONG = {
    "6.1": lab06_column.WRONG,
    "6.1b": lab06_row.WRONG,
    "6.2": lab06_conjugate.F_WRONG,
    "6.2b": lab06_conjugate.G_WRONG,
    "6.3": lab06_attention.WRONG,
    "6.4": lab06_embedding.WRONG,
    "6.4b": lab06_entropy.WRONG,
    "6.5": lab06_sequence.WRONG,
    "6.6": lab06_ring.WRONG + lab06_ring_work.WRONG,
}

RIGHT = {
    "6.1": lab06_column.RIGHT,
    "6.1b": lab06_row.RIGHT,
    "6.2": lab06_conjugate.F_RIGHT,
    "6.2b": lab06_conjugate.G_RIGHT,
    "6.3": lab06_attention.RIGHT,
    "6.4": lab06_embedding.RIGHT,
    "6.4b": lab06_entropy.RIGHT,
    "6.5": lab06_sequence.RIGHT,
    "6.6": lab06_ring.RIGHT + lab06_ring_work.RIGHT,
}

CHEATS = {
    "6.1": lab06_column.CHEATS,
    "6.1b": lab06_row.CHEATS,
    "6.2": lab06_conjugate.F_CHEATS,
    "6.2b": lab06_conjugate.G_CHEATS,
    "6.3": lab06_attention.CHEATS,
    "6.4": lab06_embedding.CHEATS,
    "6.4b": lab06_entropy.CHEATS,
    "6.5": lab06_sequence.CHEATS,
    "6.6": lab06_ring.CHEATS,
}
