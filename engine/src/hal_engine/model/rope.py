"""The rotary positions of a checkpoint: their fields in ``config.json``, and the resulting frequencies.

Sources: Su et al. 2021; the scaling of type ``llama3`` is that of Llama 3.1 ("The Llama 3 Herd of Models", 2024, and
Meta's reference code, ``apply_scaling``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal_engine.model.fields import SUPPORTED, Fields

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Llama3Scaling:
    """Slows the frequencies with long wavelengths relative to the first training's context, and keeps short ones."""

    factor: float
    """Factor of long wavelengths."""
    low_freq_factor: float
    """Wavelengths above ``original_max_position_embeddings`` over this are long."""
    high_freq_factor: float
    """Those below ``original_max_position_embeddings`` over this are short; between the two, the scaling is
    interpolated."""
    original_max_position_embeddings: int
    """Tokens of context in the training before the scaling."""

    def apply(self, frequencies: Floats) -> Floats:
        """Return the scaled frequencies, radians a position."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)  # context over wavelength
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        scaled: Floats = kept * frequencies + (1 - kept) * frequencies / self.factor
        return scaled


@dataclass(frozen=True)
class Rope:
    """Rotation of queries and keys by their positions."""

    theta: float
    """The base of the frequencies."""
    scaling: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> Floats:
        """Return float64 ``[head_dim / 2]``, radians a position, of the pairs (i, i + head_dim / 2)."""
        plain: Floats = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        return plain if self.scaling is None else self.scaling.apply(plain)


def read_rope(given: Fields) -> Rope:
    """Return the rotary positions of the file. Newer files keep the base and its scaling in one object.

    Raises ``InvalidValue`` naming the field for a scaling that is not implemented, or that two fields give differently.
    """
    base = given.number("rope_theta", default=10000.0)
    scalings = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            given.refuse(name, "must be an object", SUPPORTED)
        inner = Fields(rope, f"{given.source}: {name}")
        scalings.append(_read_scaling(given, name, inner))
        theta = inner.number("rope_theta", default=base)
        if "rope_theta" in given and theta != base:
            given.refuse("rope_theta", f"{name} says {theta}", "keep the right one of the two")
        base = theta
    if len(set(scalings)) > 1:
        given.refuse("rope_scaling", "rope_parameters gives another scaling", "keep the right one of the two")
    return Rope(base, scalings[0] if scalings else None)


_LLAMA3 = frozenset(["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
# Fields allowed beside the factor of a scaling.
_FIELDS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(),
    "dynamic": frozenset(),
    "llama3": _LLAMA3,
    "yarn": frozenset(["beta_fast", "beta_slow", "truncate"]),
}


def _read_scaling(given: Fields, name: str, rope: Fields) -> Llama3Scaling | None:
    """Return the scaling in the object ``name``. A type other than ``llama3`` is refused unless it changes no position:
    a factor of 1, or a dynamic one, which begins where ``max_position_embeddings`` ends."""
    kinds = [rope.given[key] for key in ("rope_type", "type") if key in rope] or ["default"]
    kind = kinds[0]
    if not isinstance(kind, str) or any(other != kind for other in kinds) or kind not in _FIELDS_OF_TYPE:
        given.refuse(name, "only the types 'default' and 'llama3' are supported", SUPPORTED)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"} | _FIELDS_OF_TYPE[kind]
    if not known.issuperset(rope.given) or rope.given.get("partial_rotary_factor", 1) != 1:
        given.refuse(name, f"it has more than rotary positions of type {kind!r} that are supported", SUPPORTED)
    if kind == "default" and "factor" not in rope:
        return None
    factor = rope.number("factor")
    if kind == "llama3" and factor != 1:
        return _llama3(rope, factor)
    if factor != 1 and kind != "dynamic":
        given.refuse(name, f"a factor is supported for the type 'llama3' only, not for {kind!r}", SUPPORTED)
    given.idle.add(name)
    return None


def _llama3(rope: Fields, factor: float) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", f"must be above low_freq_factor={low}")
    return Llama3Scaling(factor, low, high, rope.count("original_max_position_embeddings"))
