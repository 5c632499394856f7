"""The fingerprint of a cache: what two workers must hold equal before a block may move between them (G31)."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from hal_core.errors import InvalidValue

FACTS = (
    *("contract", "checkpoint", "dtype", "byte order", "block size", "layers", "kv heads", "tp shard"),
    *("head dim", "layout", "slot table"),
)
"""The labels of a fingerprint, in the order in which differences are told; others follow in the order of their names.

``contract``: version of hal's contract; ``checkpoint``: digest of configuration and weights; ``layers``: those with
keys and values, a proposer's among them; ``tp shard``: "i/n", which part of the heads; ``layout``: a name for the order
of bytes in a block; ``slot table``: digest of the state's layout.
"""


def first_difference(own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """In words the first fact that differs, or that one side alone has; "" if none does."""
    for name in [*FACTS, *sorted({*own, *theirs} - {*FACTS})]:
        mine, its = own.get(name), theirs.get(name)
        if mine != its:
            told = [
                f"{value!r} {where}" if value is not None else f"none {where}"
                for value, where in ((mine, "here"), (its, "there"))
            ]
            return f"{name}: {told[0]}, {told[1]}"
    return ""


def check_facts(own: Mapping[str, str], theirs: Mapping[str, str], peer: str, argument: str) -> None:
    """Raise InvalidValue, naming the first fact that differs from those of ``peer``."""
    if difference := first_difference(own, theirs):
        raise InvalidValue(
            f"the blocks of {peer} are not like those here: {difference}",
            cure="start both workers with the same checkpoint, sizes, tp and version",
            argument=argument,
        )


def facts_digest(facts: Mapping[str, str]) -> bytes:
    """Eight bytes that say the same as all the facts; each message with blocks carries them."""
    told = "\0".join(f"{name}={facts[name]}" for name in sorted(facts))
    return sha256(told.encode()).digest()[:8]
