"""Checks on real ranks: processes, what they run, and how they are lost."""
