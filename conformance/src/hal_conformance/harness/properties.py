"""Running of properties: bounded shrinking, and an error for devices that are not deterministic.

Two attributes of Hypothesis are set for a run, and put back, as no setting says it. Shrinking can be left out or ends
after 500 smaller examples, with which a device that fails 42 tests takes twice the time; ``seed`` and ``derandomize``
leave the literals of imported modules in the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from hypothesis.errors import Flaky, HypothesisException
from hypothesis.internal.conjecture import engine, providers

SHRINKS = 60
"""How often an example is made smaller: counted, as a limit in seconds would give a busy machine another example."""
SLOW = 5.0
"""A failing example of at least so many seconds, as one in which a call hangs, is made no smaller."""
CAN_BOUND = hasattr(engine, "MAX_SHRINKS")
"""False with a Hypothesis without such a limit: then no example is shrunk, as the time would be unbounded."""
LITERALS = "_get_local_constants"
"""The function of Hypothesis that collects the literals of imported modules."""
PROGRESS: list[Callable[[], None]] = []
"""Called as each example begins, for a run that ends a test without progress."""


class Results:
    """The outcomes of one property's examples: the failures, and the last result."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.last = ""

    @contextmanager
    def example(self) -> Iterator[None]:
        """Context around one example."""
        for call in PROGRESS:
            call()
        began = monotonic()
        try:
            yield
        except HypothesisException:
            raise  # an unmet assumption is not a result
        except Exception as error:
            self.last = message_of(error)
            if self.last not in self.failed[-1:]:
                self.failed.append(self.last)
            if monotonic() - began >= SLOW:
                engine.MAX_SHRINKS = 0
            raise
        self.last = "every check held"


def message_of(error: BaseException) -> str:
    """Return an error with its class; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@contextmanager
def bounded() -> Iterator[None]:
    """Let Hypothesis make an example smaller :data:`SHRINKS` times, and one that is slow not at all."""
    if not CAN_BOUND:
        yield
        return
    before, engine.MAX_SHRINKS = engine.MAX_SHRINKS, SHRINKS
    try:
        yield
    finally:
        engine.MAX_SHRINKS = before


@contextmanager
def own_draws() -> Iterator[None]:
    """Let the seed alone determine the draws.

    Hypothesis draws some values from the literals of all imported modules outside site-packages. An editable install
    would then draw otherwise than a wheel, and an edited number in a plugin would change every example.
    """
    find, cache = getattr(providers, LITERALS, None), getattr(providers, "CONSTANTS_CACHE", None)
    if find is None or cache is None:  # a Hypothesis that has no such pool
        yield
        return
    nothing = vars(providers)["Constants"]()
    setattr(providers, LITERALS, lambda: nothing)
    cache.cache.clear()
    try:
        yield
    finally:
        setattr(providers, LITERALS, find)
        cache.cache.clear()


def explore(device: str, results: Results, run: Callable[[], None]) -> None:
    """Run a property. A flaky result becomes a failed assertion that names the device and both results."""
    __tracebackhide__ = True
    try:
        with bounded(), own_draws():
            run()
    except Flaky as error:
        first = results.failed[-1] if results.failed else message_of(error)
        then = results.last
        if then == first:
            then = results.failed[-2] if len(results.failed) > 1 else "other values to go on with"
        raise AssertionError(
            f"{device} is not deterministic: the same calls gave different results.\n"
            f"  once: {first}\n"
            f"  then: {then}\n"
            "Either the results depend on chance (a race, uninitialized memory), or the device carries state between "
            "the calls of two examples. Seed and example do not help then; look for shared state."
        ) from error
