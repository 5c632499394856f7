"""Running every request to its end, and the line that sums it up: the same for a worker here and for ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from . import deadline, signals

if TYPE_CHECKING:
    from hal_core import Request

    from hal.engine import Finished

    from .run_output import Answers
    from .run_plan import Plan
    from .run_screen import Screen


class Drivable(Protocol):
    """What is asked of an engine; :class:`hal.engine.Engine` is one."""

    @property
    def busy(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[Finished]: ...


class Shows(Protocol):
    """What shows the records elsewhere."""

    @property
    def error(self) -> BaseException | None:
        """What has ended it."""


def drive(engine: Drivable, plan: Plan, answers: Answers, show: Shows) -> None:
    """Run every request to its end, which may be that all are aborted. After a signal that takes half of the time that
    is left: where a step hangs, what need not wait for it still ends in order."""
    for request in plan.requests:
        engine.submit(request)
    aborted = False
    while engine.busy and show.error is None and signals.since() < deadline.SECONDS / 2:
        for finished in engine.step():
            if not finished.reported:
                answers.end(finished)
        while answers.stopped:
            engine.abort(answers.stopped.popleft())
        if signals.came() is not None and not aborted:
            aborted = True
            answers.break_off()
            for request in plan.requests:
                engine.abort(request.request_id)


def summarize(
    screen: Screen, answers: Answers, seconds: float, used: tuple[int, int, int], drafts: str, place: str
) -> None:
    """Say how much was generated how fast. ``used``: most slots at once, slots there are, preemptions; ``drafts``: what
    is told of them, with a comma before it, or ""."""
    speed = answers.tokens / seconds if seconds else 0.0
    most, slots, preemptions = used
    preempted = f"{preemptions} preemption{'s' * (preemptions != 1)}"
    screen.close()
    if answers.cut_off:
        screen.note(answers.cut_off)
    screen.note(
        f"{answers.tokens} tokens in {seconds:.2f} s ({speed:.1f} tokens/s), {most} of {slots} slots used, "
        f"{preempted}{drafts}; {place}"
    )
