"""Checks on real ranks: processes, their work, and their loss."""
