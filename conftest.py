"""What all tests of the repository share: one profile of Hypothesis, one thread a library, long files first."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# Set before NumPy or Paddle is imported, here and in every process that a test starts: files run beside each other, and
# waiting threads of a matrix product spin, and so take the cores from the threads that work.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# No test uses anyio's plugin, whose imports take each pytest that a test starts a tenth of a second.
os.environ.setdefault("PYTEST_ADDOPTS", "-p no:anyio")

os.environ.setdefault("HAL_TEST_SHARE", "0.1")
EXAMPLES = round(100 * float(os.environ["HAL_TEST_SHARE"]))
"""Examples of a property without a number of its own (``tests/share.py``)."""
# The cores are shared, so a deadline in milliseconds would measure the neighbours.
settings.register_profile("hal", deadline=None, max_examples=EXAMPLES)
# For tools/mutants.py, which wants to know that a test fails, not the smallest example of it.
generate = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("unshrunk", deadline=None, max_examples=EXAMPLES, phases=generate)
settings.load_profile("hal")


gc.disable()  # until pytest has collected the tests: imported modules are not garbage

WARM: dict[object, Any] = {}
"""The processes of :func:`warm`, each with what its files asked for; they end with this process."""


@pytest.fixture(scope="module")
def warm(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401 (of a module that this one loads late)
    """A process that has imported the test file's ``WARM``, and forks for each command (``tests/warm.py``).

    ``WARM_UNDER``: a command that starts it. Files that ask for the same have the same."""
    wanted = tuple(request.module.WARM), tuple(getattr(request.module, "WARM_UNDER", ()))
    if wanted in WARM:
        return WARM[wanted]
    spec = importlib.util.spec_from_file_location("warm", Path(__file__).parent / "tests" / "warm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    WARM[wanted] = module.Warm(*wanted)
    return WARM[wanted]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """End them before pytest reports its time."""
    while WARM:
        WARM.popitem()[1].close()


LACKS_COMPILER = not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++"))))
"""The simulator cannot be built here, unless an earlier build of it is found."""


def _skipped_without_compiler() -> Generator[None, object, object]:
    """Skip a test that fails for want of a C++ compiler, on a machine that has none."""
    try:
        return (yield)
    except Exception as error:
        found = re.search(r"sim: no C\+\+ compiler found .*?variable CXX\)", str(error), re.DOTALL)
        if LACKS_COMPILER and found:
            pytest.skip(" ".join(found[0].split()))
        raise


# Fixtures open sim too.
pytest_runtest_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skipped_without_compiler)


def pytest_terminal_summary(terminalreporter: Any) -> None:  # noqa: ANN401 (pytest's own, not in its face)
    """Print the number of skipped tests, a line for each reason."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


TOGETHER = ("core/tests/groups/",)
"""Folders whose files share ranks, so that one process runs them all."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # noqa: ANN401 (xdist has no types)
    """With ``--dist loadfile``: a file, or a folder of :data:`TOGETHER`, runs in one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """All is imported, and stays: tests that collect garbage need not walk through Paddle each time. Some of it is
    garbage, some 20 MB, which takes a third of a second to find.

    Tests that need a collection ask for it; by itself it comes seldom."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file has left to live, such as caches, is no garbage of the next one's either."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files marked ``long`` come first, the longest before the others, so that no worker begins one when the others
    have nothing left."""
    marks = ((item.path, item.get_closest_marker("long")) for item in items)
    long = {path: mark.args[0] for path, mark in marks if mark is not None}
    items.sort(key=lambda item: -long.get(item.path, 0))
