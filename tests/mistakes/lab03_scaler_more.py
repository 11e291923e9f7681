"""More answers to exercise 3.4: a step on zeros, and labkit's own scaler under other names.

What is judged, and in which order, stands in `labkit.labs.lab03.scaler`.
"""

import torch
from lab03_scaler import RightOne

from labkit.labs.lab03.pictures import TorchScaler


class StepsOnZeros(RightOne):
    """Plain SGD does not move then; momentum and weight decay would."""

    def step(self, optimizer):
        stepped = super().step(optimizer)
        if not stepped:
            for grad in self.gradients(optimizer):
                grad.zero_()
            optimizer.step()
        return stepped


WRONG = [(StepsOnZeros, "steps_on_zeros")]


class StepsWithoutGradients(RightOne):
    """Where every .grad is None, an optimizer leaves all as it is."""

    def step(self, optimizer):
        stepped = super().step(optimizer)
        if not stepped:
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()
        return stepped


RIGHT = [StepsWithoutGradients]


class LabkitsOwnAsABase(TorchScaler):
    pass


class TorchsFromTheStart(RightOne):
    """Each rank decides for itself, which is wrong too; that it is ready-made is told first."""

    def __init__(self, **settings):
        self.settings = settings
        self.inner = torch.amp.GradScaler("cpu", settings["scale"], settings["growth_factor"])

    @property
    def scale(self):
        return self.inner.get_scale()

    def step(self, optimizer):
        before = self.scale
        self.inner.scale(torch.ones(1))
        self.inner.step(optimizer)
        self.inner.update()
        return self.scale >= before


CHEATS = [(LabkitsOwnAsABase, "ready_made"), (TorchsFromTheStart, "ready_made")]
