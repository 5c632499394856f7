"""Ranks of a group: what they agree on, who is there, and who is gone."""
