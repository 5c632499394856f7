"""How long ranks may take for what: the limits, their defaults and the variables that set them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from hal_core import InvalidValue


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds, by default ``seconds``, unless the environment variable ``variable`` gives others."""

    variable: str
    seconds: float

    def read(self) -> float:
        """Return the seconds that hold here. Raises :class:`InvalidValue` for what is no number above 0."""
        given = os.environ.get(self.variable) or str(self.seconds)
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise InvalidValue(f"{given!r}", cure="give seconds above 0, as 30", argument=self.variable)
        return seconds


COLLECTIVE = Limit("HAL_RANKS_TIMEOUT", 30.0)
"""A collective."""
STARTING = Limit("HAL_RANKS_STARTING", 300.0)
"""The start of all ranks: each imports its framework, perhaps on a busy machine."""
STEP = Limit("HAL_RANKS_STEP", 600.0)
"""A step, from the end of the one before it. 256 prompt tokens (--chunk) through 7 B parameters are 3.6 TFLOP, which
10 GFLOP/s do in 360 s."""
