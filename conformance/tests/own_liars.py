"""Liars outside the kit's package, as a vendor writes them."""

import numpy as np
from hal_conformance.liars import Lie, liar
from hal_core import hookimpl


@liar(1, "a scalar arrives as zero")
class ScalarsAreZero(Lie):
    """A register that is read before it is loaded."""

    def laid(self):
        self.register = 0

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        if isinstance(value, np.generic):
            value = type(value)(self.register)
        return super().async_set_value(device, target, value, stream)


class NotRegistered(Lie):
    """A class without the decorator."""
