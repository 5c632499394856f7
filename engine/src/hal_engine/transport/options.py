"""The options with which a sink is opened, checked."""

from __future__ import annotations

import contextlib
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core import InvalidValue

from hal_engine.timeouts import LEAST_HEARTBEAT, MOST, MOST_HEARTBEAT

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys

_MOST_FRAMES, _MOST_SENDER = (1 << 63) - 1, (1 << 32) - 1  #: the largest values of the fields of a frame


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """See :func:`hal_engine.transport.open_sink`. A transport refuses an option that it cannot provide."""

    capacity: int
    capacity_bytes: int
    deadline: float
    heartbeat: float
    sender: int
    curve: CurveKeys | None = None
    require_loss_detection: bool = False

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for a value out of its bounds."""
        for name, low, high in (
            ("capacity", 1, _MOST_FRAMES),
            ("capacity_bytes", 1, _MOST_FRAMES),
            ("sender", 0, _MOST_SENDER),
        ):
            object.__setattr__(self, name, _whole(name, getattr(self, name), low, high))
        for name, least, most in (
            ("deadline", 0.0, MOST),
            ("heartbeat", LEAST_HEARTBEAT, MOST_HEARTBEAT),
        ):
            object.__setattr__(self, name, _seconds(name, getattr(self, name), least, most))


def _whole(name: str, value: object, low: int, high: int) -> int:
    """Return the value as an int. NumPy's integers pass; True is refused, and a float, which would fail in the sender's
    thread."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        cure = f"give a whole number from {low} to 2**{high.bit_length()} - 1"
        raise InvalidValue(f"{value!r} cannot be used", cure=cure, argument=name)
    return number


def _seconds(name: str, value: object, least: float, most: float) -> float:
    """Return the value as a float of seconds. NaN is outside all bounds."""
    number = math.nan
    if not isinstance(value, bool | str | bytes | bytearray):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if not least <= number <= most:
        cure = f"give seconds, a number from {least:g} to {most:g}"
        raise InvalidValue(f"{value!r} cannot be used", cure=cure, argument=name)
    return number
