"""check: judge an answer by its values and by how they came about; cards, progress and predictions.

Left out: the exercises themselves, which stand in `labkit.labs`, and plots: the only thing drawn here is
the card.
"""
