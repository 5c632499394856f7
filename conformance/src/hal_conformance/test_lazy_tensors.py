"""Host tensors of a framework whose memory is not their elements: resolved, or refused by name (G6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hal_core.errors import HalError
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View

from .fixtures.large_blocks import LargeBlock
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import PATIENCE
from .harness.bits import Array
from .harness.guarantees import guarantee
from .kit import Kit


class LikeTorch:
    """A host tensor with torch's ways to say what its memory is; the kit needs no torch.

    ``negative``: the elements are the negated memory. Another layout, ``is_quantized`` and ``is_nested``: the memory is
    no elements.
    """

    def __init__(self, memory: Array, negative: bool = False, **kind: Any) -> None:  # noqa: ANN401 (attributes)
        self._memory, self._negative = memory, negative
        self.dtype, self.shape, self.device = str(memory.dtype), memory.shape, SimpleNamespace(type="cpu")
        self.layout, self.is_quantized, self.is_nested = "torch.strided", False, False
        vars(self).update(kind)

    def data_ptr(self) -> int:
        """Return the address of the memory."""
        return int(self._memory.ctypes.data)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._memory.size

    def is_neg(self) -> bool:
        """Return whether the memory is negated lazily."""
        return self._negative

    def is_conj(self) -> bool:
        """Return False: these are real."""
        return False

    def detach(self) -> LikeTorch:
        """Return the same tensor."""
        return self

    resolve_conj = detach

    def resolve_neg(self) -> LikeTorch:
        """Return a tensor whose memory is its elements."""
        return LikeTorch(-self._memory) if self._negative else self

    def numpy(self) -> Array:
        """Return the elements, if they are the memory; torch raises otherwise."""
        if self._negative or self.is_quantized or self.is_nested or self.layout != "torch.strided":
            raise RuntimeError("no NumPy array can be made of this tensor")
        return self._memory


KINDS: dict[str, dict[str, Any]] = {
    "sparse": {"layout": "torch.sparse_coo"},
    "of compressed rows": {"layout": "torch.sparse_csr"},
    "quantized": {"is_quantized": True},
    "nested": {"is_nested": True},
}


@guarantee(6)
@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64"])
def test_g06_a_lazily_negated_tensor_is_written_as_its_elements(kit: Kit, name: str) -> None:
    dtype, memory = dtype_of(name), np.arange(1, 25, dtype=name).reshape(4, 6)
    for step in (1, 2):
        block = LargeBlock(kit, 64 + 48 * dtype.itemsize)
        target = View(block.memory, 64, (4, 6), (6 * step * dtype.itemsize, step * dtype.itemsize), dtype)
        block.write(target, LikeTorch(memory.copy(), negative=True), -memory)
        block.check(f"a tensor of {name} whose memory is the negative of its elements")
        block.write(target, LikeTorch(memory.copy()), memory)
        block.check(f"a tensor of {name} whose memory is its elements")


@guarantee(6)
@pytest.mark.parametrize("kind", KINDS)
def test_g06_a_tensor_whose_memory_is_no_elements_is_refused(kit: Kit, kind: str) -> None:
    block = LargeBlock(kit, 256)
    target = View.contiguous(block.memory, 0, (4, 6), dtype_of("float32"))
    tensor = LikeTorch(np.ones((4, 6), np.float32), **KINDS[kind])
    error = assert_raises(HalError, lambda: block.set(target, tensor).wait(PATIENCE), f"a value that is {kind}")
    assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
    block.check(f"a value that is {kind}, refused")
