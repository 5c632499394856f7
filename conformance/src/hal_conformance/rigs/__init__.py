"""Fixtures of checks: a state or bare memory with its model, batches, steps, cases of hook calls."""
