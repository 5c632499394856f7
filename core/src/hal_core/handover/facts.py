"""The fingerprint of a cache, which two workers must share before blocks move between them (G31)."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from hal_core.errors import InvalidValue

FACTS = (
    *("contract", "checkpoint", "dtype", "byte order", "block size", "layers", "kv heads", "tp shard"),
    *("head dim", "layout", "slot table"),
)
"""The labels of a fingerprint, in the order in which differences are reported. Other labels follow, sorted by name.

``contract``: version of hal's contract; ``checkpoint``: digest of configuration and weights; ``layers``: layers with
keys and values, including a proposer's; ``tp shard``: "i/n", the part of the heads; ``layout``: a name for the order of
bytes in a block; ``slot table``: digest of the state's layout.
"""


def first_difference(own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return a text about the first fact that differs or that one side lacks; "" if all are equal."""
    for name in [*FACTS, *sorted({*own, *theirs} - {*FACTS})]:
        mine, its = own.get(name), theirs.get(name)
        if mine != its:
            here, there = ("none" if value is None else repr(value) for value in (mine, its))
            return f"{name}: {here} here, {there} there"
    return ""


def check_facts(own: Mapping[str, str], theirs: Mapping[str, str], peer: str, argument: str) -> None:
    """Raise InvalidValue naming the first fact that differs from those of ``peer``."""
    if difference := first_difference(own, theirs):
        raise InvalidValue(
            f"the blocks of {peer} differ from those here: {difference}",
            cure="start both workers with the same checkpoint, sizes, tp and version",
            argument=argument,
        )


def facts_digest(facts: Mapping[str, str]) -> bytes:
    """Return an 8-byte digest of all facts; each message with blocks carries it."""
    text = "\0".join(f"{name}={facts[name]}" for name in sorted(facts))
    return sha256(text.encode()).digest()[:8]
