"""Bit patterns of every type, and forms of values that ``async_set_value`` takes bit by bit."""

from __future__ import annotations

import mmap
import tempfile
from typing import Any

import numpy as np
from hal_core.memory.dtypes import DType

Array = np.ndarray[Any, Any]
FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
"""Bits of exponent and of fraction (IEEE 754-2019, table 3.5; bfloat16 is the upper half of binary32)."""
CLASSES = ("quiet NaN", "signalling NaN", "infinity", "denormal", "zero", "finite")


def noise(seed: int, nbytes: int) -> Array:
    """Return random bytes, so that a misplaced byte is noticed."""
    return np.random.default_rng([seed, nbytes]).integers(0, 256, nbytes, np.uint8)


def on_page(array: Array) -> Array:
    """Return a copy in a map of its own: it begins on a page, as a device may take it where it is."""
    place: Array = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    place[...] = array
    return place


class FileMap(mmap.mmap):
    """A read-only map of a file; its array's base. The file changes through ``writer``, uint8 ``[nbytes]``."""

    writer: Array

    @classmethod
    def over(cls, content: Array) -> Array:
        """Return an array of a new file with this content."""
        with tempfile.TemporaryFile() as file:
            file.truncate(content.nbytes)
            found = cls(file.fileno(), content.nbytes, access=mmap.ACCESS_READ)
            found.writer = np.frombuffer(mmap.mmap(file.fileno(), content.nbytes), np.uint8)
        found.writer[...] = content
        return np.frombuffer(found, np.uint8)


def words(dtype: DType) -> np.dtype[Any]:
    """Return the unsigned type with a type's width."""
    return np.dtype(f"<u{dtype.itemsize}")


def patterns(dtype: DType, *, every: bool = True) -> Array:
    """Return bit patterns as unsigned words.

    They are all patterns of 1-byte types, and of 2-byte types if ``every``. For wider types they are each exponent with
    the fractions at its borders, both signs, and each single bit.
    """
    kind, bits = words(dtype), 8 * dtype.itemsize
    if dtype.kind == "bool":
        return np.arange(2, dtype=kind)
    if bits == 8 or (bits == 16 and every):
        return np.arange(1 << bits).astype(kind)
    single = np.array([1 << bit for bit in range(bits)], np.uint64)
    some = [single, ~single, single - np.uint64(1), np.arange(300, dtype=np.uint64)]
    if dtype.name in FLOATS:
        exponent, fraction = FLOATS[dtype.name]
        step = 1 if exponent <= 8 else 3
        exponents = np.unique([*range(0, 1 << exponent, step), 0, 1, (1 << exponent) - 2, (1 << exponent) - 1])
        quiet = 1 << (fraction - 1)
        fractions = [0, 1, 2, quiet - 1, quiet, quiet | 1, (1 << fraction) - 1, 0x2BADCAFE % quiet]
        both = np.array([0, 1 << (bits - 1)], np.uint64)
        grid = exponents.astype(np.uint64)[:, None] << np.uint64(fraction)
        grid = (grid | np.array(fractions, np.uint64)).reshape(-1)
        some.append((grid[:, None] | both).reshape(-1))
    mask = np.uint64(2**bits - 1)
    return np.unique(np.concatenate(some) & mask).astype(kind)


def classes(found: Array, dtype: DType) -> dict[str, int]:
    """Count these words by class of floating-point data."""
    exponent, fraction = FLOATS[dtype.name]
    wide = found.astype(np.uint64)
    top, low = (wide >> np.uint64(fraction)) & np.uint64((1 << exponent) - 1), wide & np.uint64((1 << fraction) - 1)
    special, nan = top == (1 << exponent) - 1, (top == (1 << exponent) - 1) & (low != 0)
    quiet = nan & ((low >> np.uint64(fraction - 1)) == 1)
    small = top == 0
    counts = (quiet, nan & ~quiet, special & ~nan, small & (low != 0), small & (low == 0), ~small & ~special)
    return {name: int(chosen.sum()) for name, chosen in zip(CLASSES, counts, strict=True)}


class HostTensor:
    """A minimal host tensor of a framework: bfloat16 is given as raw uint16, as frameworks do."""

    def __init__(self, array: Array, dtype: str) -> None:
        self._array, self.dtype, self.shape = array, dtype, array.shape

    def numpy(self) -> Array:
        """Return the elements' storage."""
        return self._array


def given(found: Array, dtype: DType) -> Any:  # noqa: ANN401 (an array, or a tensor of bfloat16)
    """Return words as a value of the type."""
    return HostTensor(found, dtype.name) if dtype.name == "bfloat16" else found.view(dtype.storage)


def to_bfloat16(found: Array) -> Array:
    """Convert words of float32 to bfloat16, to nearest and ties to even, in integers; without NaNs."""
    wide = found.astype(np.uint64)
    rounded = wide + np.uint64(0x7FFF) + ((wide >> np.uint64(16)) & np.uint64(1))
    return (rounded >> np.uint64(16)).astype(np.uint16)
