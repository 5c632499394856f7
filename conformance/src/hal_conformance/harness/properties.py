"""Running of properties: bounded shrinking, and an error for devices that are not deterministic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from hypothesis.errors import Flaky, HypothesisException
from hypothesis.internal.conjecture import engine, providers
from hypothesis.reporting import current_reporter, with_reporter

SHRINKING = 500
"""Examples after which shrinking ends: counted, as a limit in seconds would give a busy machine another example."""
SLOW, SLOW_COUNTS = 5.0, 200
"""An example of at least so many seconds, as one in which a call hangs, counts as so many."""
LIMIT = "MAX_SHRINKING_SECONDS"
CAN_BOUND = hasattr(engine, LIMIT)
"""False with a Hypothesis without such a limit: then no example is shrunk, as the time would be unbounded."""
LITERALS = "_get_local_constants"
"""The function of Hypothesis that collects the literals of imported modules."""


class Budget:
    """Examples left to shrinking, in place of a limit in seconds. Hypothesis adds the limit to its clock when it begins
    to shrink, and compares the sum with the clock after each example."""

    def __init__(self) -> None:
        self._left = SHRINKING

    def spend(self, seconds: float) -> None:
        """Count an example that took so long."""
        self._left -= SLOW_COUNTS if seconds >= SLOW else 1

    def __radd__(self, now: float) -> Budget:
        self._left = SHRINKING
        return self

    def __lt__(self, now: float) -> bool:
        return self._left < 0


class Results:
    """The outcomes of one property's examples: the failures, the last result, and the budget of shrinking."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.last = ""
        self.budget = Budget()

    @contextmanager
    def example(self) -> Iterator[None]:
        """Context around one example."""
        began = monotonic()
        try:
            yield
        except HypothesisException:
            raise  # an unmet assumption is not a result
        except Exception as error:
            self.last = told(error)
            if self.last not in self.failed[-1:]:
                self.failed.append(self.last)
            raise
        finally:
            self.budget.spend(monotonic() - began)
        self.last = "every check held"


def told(error: BaseException) -> str:
    """Return an error with its class; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@contextmanager
def bounded(budget: Budget) -> Iterator[None]:
    """Let Hypothesis shrink as long as the budget lasts."""
    before, say = getattr(engine, LIMIT, None), current_reporter()

    def report(text: Any) -> None:  # noqa: ANN401 (a text, or what gives it)
        if "five minutes" not in str(text):  # The warning gives Hypothesis' own limit, which is not ours.
            say(text)

    if before is None:
        yield
        return
    setattr(engine, LIMIT, budget)
    try:
        with with_reporter(report):
            yield
    finally:
        setattr(engine, LIMIT, before)


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
        with bounded(results.budget), own_draws():
            run()
    except Flaky as error:
        first = results.failed[-1] if results.failed else told(error)
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
