"""Hypothesis strategies: requests, batches, values, views."""
