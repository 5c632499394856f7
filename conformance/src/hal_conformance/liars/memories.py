"""Liars about plans over several memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal_core.tickets import DONE, Ticket

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.memory.plan import WritePlan
    from hal_core.streams import Stream


@liar(5, "the last of several memories is forgotten", requires="several_memories")
class ForgetsTheLastMemory(Lie):
    """A loop that ends one too early."""

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """Write all but one."""
        return super().submit_all(plans[:-1] or plans, stream)  # type: ignore[misc,no-any-return]


@liar(10, "each memory is a submission of its own", requires="several_memories", seen="FastDeploy (async_set_value)")
class MemoriesApart(Lie):
    """A tensor after the other."""

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """One call each."""
        ticket: Ticket = DONE
        for plan in plans:
            ticket = super().submit_all([plan], stream)  # type: ignore[misc]
        return ticket


@liar(5, "bytes for the second memory are taken from the first's", requires=("several_memories", "async_h2d"))
class SharesPayloads(Patch):
    """Joined plans whose payloads are not."""

    seam = "plan of several memories"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Every source begins at 0."""

        def joined(plans: Any, span: Any) -> Any:  # noqa: ANN401
            plan, first = true(plans, span), 0
            for one in plans[:-1]:
                first += len(one.flat().writes)
            copies = plan.writes[first:]
            copies["source"][copies["pattern"] == 0] = 0
            return plan

        return joined
