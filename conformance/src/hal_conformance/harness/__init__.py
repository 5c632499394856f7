"""The harness of the kit: the device under test, its memory seen from behind, and what checks share."""
