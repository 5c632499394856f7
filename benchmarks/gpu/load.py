"""Load of a decode node: arrival times, and tokens to generate. The same seed gives the same arrivals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Parameters of the load.

    - ``slots``: of the node; the Poisson process keeps ``share`` of them busy.
    - ``shortest``, ``longest``: tokens that a request is given, drawn evenly.
    - ``burst``: additional requests that come at once, every ``burst_seconds``.
    """

    slots: int = 128
    share: float = 0.9
    prompt: int = 1024
    shortest: int = 64
    longest: int = 512
    burst: int = 16
    burst_seconds: float = 8.0

    @property
    def mean(self) -> float:
        """Tokens of a request in the mean."""
        return (self.shortest + self.longest) / 2


@dataclass(frozen=True, order=True)
class Arrival:
    """One request: when it comes (seconds from the beginning), its name, and how many tokens it is given."""

    at: float
    name: str
    tokens: int


def arrivals(shape: Shape, step_seconds: float, seconds: float, seed: int) -> list[Arrival]:
    """Return all arrivals, by time. ``step_seconds``: duration of a step, which gives the rate: ``share`` of the slots
    are busy.

    At 0, the mean number of running requests arrives at once, each with the remaining length of a request met at
    random.
    """
    rng = np.random.default_rng(seed)
    found = []
    there = round(shape.slots * shape.share)
    met = rng.choice(np.arange(shape.shortest, shape.longest + 1), there, p=_by_length(shape))
    for number, tokens in enumerate(met.tolist()):
        found.append(Arrival(0.0, f"there{number}", max(2, round(tokens * rng.random()))))
    rate = shape.slots * shape.share / (shape.mean * step_seconds)
    at, number = float(rng.exponential(1 / rate)), 0
    while at < seconds:
        found.append(Arrival(at, f"one{number}", int(rng.integers(shape.shortest, shape.longest + 1))))
        at, number = at + float(rng.exponential(1 / rate)), number + 1
    for burst, begin in enumerate(np.arange(shape.burst_seconds / 2, seconds, shape.burst_seconds).tolist()):
        lengths = rng.integers(shape.shortest, shape.longest + 1, shape.burst).tolist()
        found += [Arrival(begin, f"burst{burst}.{number}", tokens) for number, tokens in enumerate(lengths)]
    return sorted(found)


def _by_length(shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How likely it is that a request met at any moment has each length: long ones are there for longer."""
    lengths = np.arange(shape.shortest, shape.longest + 1, dtype=np.float64)
    return lengths / lengths.sum()
