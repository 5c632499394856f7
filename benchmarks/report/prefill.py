"""Steps of prompts against the same matrix products and attention alone; see :mod:`benchmarks.gpu.torch_runner`."""

from __future__ import annotations

from typing import Any

from hal_engine.model.config import parse_config

from .node import SHAPES


def measure(shape: str = "8B") -> dict[str, Any]:
    """Times in ms, by events, in turn."""
    from benchmarks.gpu.torch_runner import steps

    return steps(parse_config(SHAPES[shape]))
