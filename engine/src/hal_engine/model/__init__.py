"""The language model, without a framework: its configuration, the reading of a checkpoint, and the tokenizer. Runners
compute with it."""

from __future__ import annotations

from pathlib import Path

DEFAULT_CHECKPOINT = Path(__file__).parent / "default"
"""Directory of the embedded default: a trained checkpoint of 1.4 million parameters; its ``README.md`` is the model
card."""
