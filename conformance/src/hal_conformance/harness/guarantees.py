"""The guarantees as data, and the mark that links a test to one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., object])

EVERY = "every hook"
HANDOVER = "a handover"


class Guarantee(NamedTuple):
    """One numbered guarantee of the contract: its hook, and a summary in one line."""

    number: int
    hook: str
    gist: str

    @property
    def name(self) -> str:
        """Its usual name, such as "G5"."""
        return f"G{self.number}"


GUARANTEES: tuple[Guarantee, ...] = (
    Guarantee(1, "async_set_value", "later work on the stream sees the value; the host after ticket.wait()"),
    Guarantee(2, "async_set_value", "the caller may change or free the value as soon as the call returns"),
    Guarantee(3, "async_set_value", "the call returns while the stream is held; a full ring waits for its oldest"),
    Guarantee(4, "async_set_value", "calls on one stream take effect in order; the last write wins"),
    Guarantee(5, "async_set_value", "not one byte outside the target changes"),
    Guarantee(6, "async_set_value", "scalars fill, shapes fit, types convert by class and by value, or are refused"),
    Guarantee(7, "async_set_value", "a device that is synchronous says so"),
    Guarantee(8, "insert_tasks", "all or nothing, and the error lists every problem"),
    Guarantee(9, "insert_tasks", "every field of every named slot is right, every other slot untouched"),
    Guarantee(10, "insert_tasks", "submissions do not grow with requests or fields"),
    Guarantee(11, "insert_tasks", "nothing of the slot's former request can be read"),
    Guarantee(12, "insert_tasks", "the decode role continues after the first token, with exactly the given drafts"),
    Guarantee(13, "broadcast_tokens", "every broadcast field is equal on all ranks of the group"),
    Guarantee(14, "broadcast_tokens", "one checked collective; on a mismatch the state is unusable"),
    Guarantee(15, "broadcast_tokens", "a group of one communicates nothing"),
    Guarantee(16, "broadcast_tokens", "a lost or hung peer is an error on every survivor, in time"),
    Guarantee(17, "save_output", "only the first rank of a group sends, on every path"),
    Guarantee(18, "save_output", "the step's clean-up happens on every rank, also where sending fails"),
    Guarantee(19, "save_output", "each token and each preemption is delivered once, in order, or reported"),
    Guarantee(20, "save_output", "rows are in batch-id order, whatever the slot order"),
    Guarantee(21, "save_output", "what is out of bounds is raised, never written or sent"),
    Guarantee(22, "save_output", "nothing of an earlier step is in a frame"),
    Guarantee(23, "save_output", "the compute stream is not stalled; nothing is dropped silently"),
    Guarantee(24, "save_output", "first token, drafts and log-probabilities are aligned; a count counts tokens"),
    Guarantee(25, "save_output", "every mode of decoding goes through the same record"),
    Guarantee(26, EVERY, "an error names device, hook and argument, and the cure"),
    Guarantee(27, EVERY, "the core asks for capabilities, never for names"),
    Guarantee(28, EVERY, "no write reaches a slot before the last step that reads it has passed"),
    Guarantee(29, HANDOVER, "no block is used before its seal was found complete and right"),
    Guarantee(30, HANDOVER, "no block is freed while it may still be written"),
    Guarantee(31, HANDOVER, "the fingerprints are compared before the first byte moves"),
    Guarantee(32, HANDOVER, "each offer ends, once on each side, in bounded time"),
)

BY_NUMBER = {guarantee.number: guarantee for guarantee in GUARANTEES}


RANKS = "several_ranks"
"""Required by tests that start several ranks."""


def guarantee(
    number: int, *, requires: str | tuple[str, ...] = (), last: bool = False, also: tuple[int, ...] = ()
) -> Callable[[T], T]:
    """Mark a test as checking guarantee ``number``. ``last``: it kills a rank, so it runs after the other tests.

    ``also``: guarantees that a failing device may have broken instead. The test runs if one of them is chosen, and is
    reported under its number.

    ``requires`` names features that the test needs: fields of :class:`hal_core.contract.capabilities.Capabilities`
    (with the prefix "not ": must be absent), or parts of a :class:`hal_conformance.Support`. If one is missing, the
    test is skipped and names it.
    """
    needs = (requires,) if isinstance(requires, str) else requires

    def mark(test: T) -> T:
        marked: T = pytest.mark.guarantee(number, needs, last, also)(test)
        return marked

    return mark
