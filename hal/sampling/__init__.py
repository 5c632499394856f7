"""Sampling: from a step's logits to one token a row, with its log-probabilities. Pure NumPy, no device."""

from .adjust import needs_history
from .rows import STATE_FIELDS, Sampled, SamplingRows
from .sampler import sample

__all__ = ["STATE_FIELDS", "Sampled", "SamplingRows", "needs_history", "sample"]
