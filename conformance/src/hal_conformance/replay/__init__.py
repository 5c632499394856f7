"""Recordings of a worker's calls (``hal run --record FILE``) and their replay (``hal conform NAME --replay FILE``)."""
