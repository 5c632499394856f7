"""A pytest plugin (``-p hal_sim.pytest_races``): a test fails if the checker has reports after it.

A test may read memory behind a stream that it holds, ordered only by the latch. Such a test is named here with the
reason; an unneeded entry is an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

BEHIND_A_LATCH = {
    "test_g03_the_call_returns_while_the_stream_is_held": "reads the target by another stream before the release",
    "test_g03_the_call_returns_while_held_for_values_of_any_size": "the same, of many values",
}


@pytest.fixture(autouse=True)
def no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the test caused a report of the checker."""
    from hal_sim.accelerator import Accelerator
    from hal_sim.settings import get_option

    yield
    accelerator = Accelerator(0)
    for device in range(get_option("devices")):
        Accelerator(device).synchronize()  # accesses are recorded when they happen
    found, dropped = accelerator.races(), accelerator.dropped[1]
    exempt = request.node.name in BEHIND_A_LATCH
    if not found:
        assert not exempt, f"{request.node.name} made no report: take it out of BEHIND_A_LATCH"
        return
    accelerator.reset()
    if not exempt:
        pytest.fail(f"{len(found) + dropped} reports, the first of them:\n" + "\n".join(map(str, found[:3])))
