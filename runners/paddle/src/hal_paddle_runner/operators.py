"""Paddle's operators for the model's layers: the generated functions, without Python around them.

``paddle.matmul`` and the like check modes, argument names and types first. In a decode step of a small model these
checks take as long as the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paddle import _C_ops

if TYPE_CHECKING:
    from paddle import Tensor

_operators: Any = _C_ops  # most of them have no types


def matmul(x: Tensor, y: Tensor, *, transpose_y: bool = False) -> Tensor:
    """Return ``x @ y``, or ``x @ y.T`` over the last two dimensions."""
    found: Tensor = _operators.matmul(x, y, False, transpose_y)
    return found


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` of ``x``."""
    found: Tensor = _operators.gather(x, index, 0)
    return found


def scatter_(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """Overwrite the rows ``index`` of ``x``, in place."""
    _operators.scatter_(x, index, rows, True)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` in another shape."""
    found: Tensor = _operators.reshape(x, shape)
    return found


def softmax_(x: Tensor) -> Tensor:
    """Apply softmax over the last dimension, in place."""
    found: Tensor = _operators.softmax_(x, -1)
    return found


def silu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(x)``."""
    found: Tensor = _operators.silu(x)
    return found
