"""Ranks of a group: shared configuration, membership and the detection of lost ranks."""
