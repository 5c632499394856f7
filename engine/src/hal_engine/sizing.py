"""From an engine's options to its setup: what they come to for a checkpoint and the sizes of its state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hal_core import InvalidValue, StateConfig

from hal.selection import ENVIRONMENT
from hal_engine.engine import Limits
from hal_engine.options import EngineOptions, EngineSetup, typed_name

BLOCK_SIZE = 16
"""Tokens of a KV block."""


def check_budget(options: EngineOptions, sizes: StateConfig) -> None:
    """Raise :class:`InvalidValue`, naming the option, for a step that can feed nothing."""
    try:
        Limits.of(options).budget(sizes)
    except InvalidValue as error:
        error.argument = typed_name(error.argument)
        raise


def setup_of(options: EngineOptions, model: Path, sizes: StateConfig, blocks: int, **more: Any) -> EngineSetup:  # noqa: ANN401 (of fields)
    """Return the setup of an engine; ``more``: its further fields."""
    given = {name: getattr(options, name) for name in EngineOptions.__struct_fields__}
    device = options.device or os.environ.get(ENVIRONMENT, "").strip() or None
    chosen = {"model": str(model.resolve()), "device": device}
    return EngineSetup(**{**given, **chosen, "blocks": blocks, "sizes": sizes, **more})
