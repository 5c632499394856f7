"""The language model: configuration, checkpoint loading, tokenizer and the Paddle decoder with its paged cache.

Importing this package, ``hal_engine.model.config`` or ``hal_engine.model.tokenizer`` imports no framework;
``hal_paddle_runner.llama`` imports Paddle, so import it only to run a model.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_CHECKPOINT = Path(__file__).parent / "default"
"""Directory of the embedded default: a trained checkpoint of 1.4 million parameters; its ``README.md`` is the model
card."""
