"""Groups without real ranks, for checks."""

from hal_core.group import Group

FOLLOWER = Group((0, 1), 1)
"""The second rank of two, which does not send."""
