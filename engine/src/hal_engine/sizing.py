"""From an engine's options to its setup: what they come to for a checkpoint and the sizes of its state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hal_core import StateConfig

from hal.selection import ENVIRONMENT
from hal_engine.model.config import TextConfig, read_config, read_text_config
from hal_engine.options import EngineOptions, EngineSetup

BLOCK_SIZE = 16
"""Tokens of a KV block."""


def config_of(options: EngineOptions, model: Path) -> TextConfig:
    """Return what the engine needs of a checkpoint's configuration, which hal's own decoders need whole."""
    return read_text_config(model, options.max_model_len) if options.named_runner else read_config(model)


def setup_of(options: EngineOptions, model: Path, sizes: StateConfig, blocks: int, **more: Any) -> EngineSetup:  # noqa: ANN401 (of fields)
    """Return the setup of an engine; ``more``: its further fields."""
    given = {name: getattr(options, name) for name in EngineOptions.__struct_fields__}
    device = options.device or os.environ.get(ENVIRONMENT, "").strip() or None
    chosen = {"model": str(model.resolve()), "device": device}
    return EngineSetup(**{**given, **chosen, "blocks": blocks, "sizes": sizes, **more})
