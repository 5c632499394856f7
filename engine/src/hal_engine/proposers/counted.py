"""A proposer whose drafts are counted by request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hal_core import HalError

from .loading import make_proposer
from .proposer import Setup

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, StateConfig

    from .proposer import Fed, Int64s, Proposer


def open_proposer(
    speculate: str, sizes: StateConfig, vocab_size: int, model: object, *, rejection: bool = False
) -> Counted | None:
    """Return the proposer with that name, with its drafts counted; None for ``none``."""
    setup = Setup(sizes.max_draft_tokens, sizes.num_slots, sizes.max_model_len, vocab_size, model, rejection=rejection)
    proposer = make_proposer(speculate, setup)
    return None if proposer is None else Counted(proposer, speculate)


@contextmanager
def closing_well(proposer: Proposer) -> Iterator[None]:
    """Close the proposer at the end. After an error that one is raised, with an error of closing as its note."""
    try:
        yield
    except BaseException as error:
        try:
            proposer.close()
        except HalError as second:
            error.add_note(str(second))
        raise
    proposer.close()


class Counted:
    """A proposer whose drafts are counted by request: ``drafted``, request id to their number."""

    def __init__(self, inner: Proposer, name: str) -> None:
        self.inner, self.name, self.wants_hidden = inner, name, inner.wants_hidden
        self.drafted: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Record the slot's request."""
        self._names[slot] = request.request_id
        self.inner.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Forward the call."""
        self.inner.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Count the drafts."""
        drafts = self.inner.propose(room)
        for slot, tokens in drafts.items():
            name = self._names[slot]
            self.drafted[name] = self.drafted.get(name, 0) + len(tokens)
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forward the call."""
        self._names.pop(slot, None)
        self.inner.leave(slot, finished=finished)

    def close(self) -> None:
        """Forward the call."""
        self.inner.close()
