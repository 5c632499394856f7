"""Paddle's operators as the model calls them in each layer: the generated functions, without Python around them.

``paddle.matmul`` and the like look at modes, argument names and types first. In a decode step of a small model these
calls take as long as the operators: about a tenth of the step. What they call is the same in Paddle 3.0 to 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paddle import _C_ops

if TYPE_CHECKING:
    from paddle import Tensor


def matmul(x: Tensor, y: Tensor, *, transpose_y: bool = False) -> Tensor:
    """``x @ y``, or ``x @ y.T`` over the last two dimensions."""
    return _C_ops.matmul(x, y, False, transpose_y)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` of ``x``."""
    return _C_ops.gather(x, index, 0)


def scatter_(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """Overwrite the rows ``index`` of ``x``, in place."""
    _C_ops.scatter_(x, index, rows, True)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` in another shape."""
    return _C_ops.reshape(x, shape)


def softmax_(x: Tensor) -> Tensor:
    """Softmax over the last dimension, in place."""
    return _C_ops.softmax_(x, -1)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return _C_ops.silu(x)
