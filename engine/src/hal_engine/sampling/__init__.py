"""Sampling: from a step's logits to one token a row, with its log-probabilities. Pure NumPy, no device."""

from .adjust import needs_history
from .rejection import Weights, draw_drafts, sample_by_rejection
from .rows import STATE_FIELDS, SUPPORTED, Sampled, SamplingRows
from .sampler import sample

__all__ = [
    "STATE_FIELDS",
    "SUPPORTED",
    "Sampled",
    "SamplingRows",
    "Weights",
    "draw_drafts",
    "needs_history",
    "sample",
    "sample_by_rejection",
]
