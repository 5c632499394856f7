"""The pytest plugin of the kit: options, the fixture ``kit``, selection by guarantee, and the report.

Every pytest of an environment with the kit loads it, so it imports only pytest. Everything else is imported when a test
of the kit is collected.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

from .report.key import FINDINGS, KEY

if TYPE_CHECKING:
    from .fixtures.large_offsets import HugeBlock
    from .harness.subject import Subject
    from .kit import Kit

pytest.register_assert_rewrite("hal_conformance.suite", "hal_conformance.fixtures.world")

_RANKS = "several_ranks"  # guarantees.RANKS, without importing it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hal", "hal conformance kit")
    group.addoption("--hal-device", default="", metavar="NAME", help="device to test, as hal devices lists it")
    group.addoption("--hal-device-factory", default="", metavar="MODULE:ATTR", help="callable that opens the device")
    group.addoption(
        "--hal-target", default="", metavar="MODULE:ATTR", help="the device's entry point, if several have it"
    )
    group.addoption("--hal-policy", default="", metavar="MODULE:ATTR", help="another Policy class or object")
    group.addoption("--hal-liar", default="", metavar="NAME", help="lay a liar over it: NAME, or MODULE:CLASS")
    group.addoption("--hal-fault", default="", metavar="NAME", help="run the device under one of the kit's faults")
    group.addoption(
        "--hal-fields", default="", metavar="MODULE:ATTR", help="a worker's StateFields, instead of drawn ones"
    )
    group.addoption("--hal-profile", default="", metavar="NAME", help="quick, default or nightly (env HAL_PROFILE)")
    group.addoption("--hal-examples", default=0, type=int, metavar="N", help="examples a property, over the profile's")
    group.addoption("--hal-seed", default=None, type=int, metavar="N", help="seed of everything that is drawn")
    group.addoption("--hal-only", default="", metavar="G3,G15", help="only the tests of these guarantees")
    group.addoption("--hal-no-shrink", action="store_true", help="report the first failing example as it is")
    group.addoption(
        "--hal-hang",
        default=0.0,
        type=float,
        metavar="SECONDS",
        help="without progress, after which a call waits",
    )
    group.addoption(
        "--hal-skip", action="append", default=[], metavar="NAME", help="leave a test out, by name; repeatable"
    )
    group.addoption(
        "--hal-report",
        action="append",
        default=[],
        metavar="FILE",
        help="write the report; .json, .xml or .html; repeatable",
    )
    parser.addini("hal_device", "device to test where --hal-device is not given", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "guarantee(number, needs): the guarantee that a test of the kit checks")


def _number(item: pytest.Item) -> int:
    mark = item.get_closest_marker("guarantee")
    return int(mark.args[0]) if mark else 0


def _primitive(item: pytest.Item) -> bool:
    """Whether a test checks the reads and writes by which all others see the device."""
    return item.path.stem == "test_primitives"


def _place(item: pytest.Item) -> tuple[bool, bool, int, bool]:
    """Return the sort key: primitives first, then by number; tests of one process before those of several; tests that
    kill a rank last."""
    mark = item.get_closest_marker("guarantee")
    if mark is None:
        return False, False, 0, False
    return not _primitive(item), bool(mark.args[2]), int(mark.args[0]), _RANKS in mark.args[1]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Make one item of a test that is not chosen, instead of one for each case: it is deselected below."""
    option = collector.config.getoption
    mark = next((one for one in getattr(obj, "pytestmark", ()) if one.name == "guarantee"), None)
    if mark is None or not option("--hal-only") or option("--hal-skip"):  # a case may be skipped by its name
        return None
    from hal_core.errors import HalError

    from .report.report import borne, chosen

    try:
        wanted = chosen(option("--hal-only"))
    except HalError:  # refused below
        return None
    return None if borne(mark) & wanted else [pytest.Function.from_parent(collector, name=name)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen guarantees, and sort the tests by their numbers."""
    ours = [item for item in items if _number(item)]
    if not ours:
        return
    from hal_core.errors import HalError

    from .report.findings import Findings, check_target
    from .report.report import Recorder, bears, chosen, effort, leave_out

    findings = config.stash.get(FINDINGS, None) or Findings()
    findings.present = {item.name.partition("[")[0] for item in ours}
    recorder = config.stash[KEY] = Recorder(config, findings)
    try:
        findings.only = wanted = chosen(config.getoption("--hal-only"))
        effort(config)
        leave_out(config.getoption("--hal-skip"), ours)
        for target in config.getoption("--hal-report"):
            check_target(target, "--hal-report")
    except HalError as error:
        findings.problems.append(str(error))
        raise pytest.UsageError(str(error)) from None
    left_out = [item for item in ours if wanted and not bears(item) & wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    besides = {
        item for item in ours if wanted and _number(item) not in wanted
    }  # after the chosen guarantees' own tests
    kept = sorted((item for item in ours if item not in left_out), key=lambda item: (item in besides, _place(item)))
    recorder.await_all(kept, _number)
    items[:] = [item for item in items if not _number(item)] + [item for item in kept if not recorder.is_over(item)]


@pytest.fixture(scope="session")
def device_subject(request: pytest.FixtureRequest) -> Subject:
    """The device under test. A plugin's own test file may override it with another Subject."""
    from hal_core.errors import HalError

    from .opening import subject

    option = request.config.getoption
    name = option("--hal-device") or request.config.getini("hal_device")
    factory = option("--hal-device-factory")
    if not name and not factory:
        pytest.exit("name the device to test: --hal-device=NAME (hal devices lists them)", returncode=4)
    try:
        laid = {each: option(f"--hal-{each}") for each in ("policy", "liar", "fault", "target")}
        return subject(name, factory=factory, **laid)
    except HalError as error:
        pytest.exit(f"the device under test was not found: {error}", returncode=4)


@pytest.fixture(scope="session")
def kit_session(request: pytest.FixtureRequest, device_subject: Subject) -> Iterator[Kit]:
    """Open the device under test once, and again after a failure."""
    from hal_core.errors import trace_of

    from .draw.fields import declared_at
    from .kit import Kit
    from .report.report import effort

    option = request.config.getoption
    kit = Kit(device_subject, effort(request.config))
    if path := option("--hal-fields"):
        kit.fields = declared_at(path)
    kit.sparing = kit.effort.profile == "quick" and not option("--hal-only")
    try:
        request.config.stash[KEY].opened(kit)
    except Exception as error:  # noqa: BLE001 (whatever a plugin raises, no test can run without its device)
        what = f"{device_subject.name} was not opened: {type(error).__name__}: {error}"
        pytest.exit(f"{what}\n{trace_of(error)}".rstrip(), returncode=4)
    # The checks collect garbage hundreds of times; objects imported until now are no garbage, and Paddle is most of
    # them. What a caller of the kit has frozen stays so.
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    yield kit
    if not frozen:
        gc.unfreeze()
    kit.renew()
    device_subject.undo()
    from .ranks.pool import release

    release()


@pytest.fixture
def kit(request: pytest.FixtureRequest, kit_session: Kit) -> Iterator[Kit]:
    """Return the kit for one test; skip the test if the device does not offer its requirements."""
    mark = request.node.get_closest_marker("guarantee")
    missing = kit_session.missing(mark.args[1]) if mark else ""
    if missing:
        why = kit_session.subject.support.why_not(missing)
        pytest.skip(f"needs {missing}" + (f": {why}" if why else ""))
    if mark and _RANKS in mark.args[1] and kit_session.sparing:
        pytest.skip("several ranks are started by the profiles default and nightly, or by --only")
    recorder = request.config.stash[KEY]
    if mark and _RANKS in mark.args[1]:
        findings = recorder.findings
        findings.unfinished = findings.unfinished or kit_session.ranks.start(kit_session.recipe)
        if findings.unfinished:
            pytest.skip(findings.unfinished)
    yield kit_session
    if recorder.failed(request.node):
        kit_session.renew()


@pytest.fixture
def small(kit: Kit) -> Iterator[Kit]:
    """Return another opened device with a small staging ring."""
    from .fixtures.ring_cases import pressed

    with pressed(kit) as found:
        yield found


@pytest.fixture
def huge_block(kit: Kit) -> HugeBlock:
    """Return a block of more than 4 GiB; skip the test if there is no room for one."""
    from .fixtures.large_offsets import allocate_huge

    return allocate_huge(kit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record how a test of the kit ended; an expected failure counts as success, an unexpected pass as failure."""
    report = yield
    if _number(item) and KEY in item.config.stash:
        from .report.outcomes import PRIMITIVES

        recorder = item.config.stash[KEY]
        recorder.note(item, call, report, _number(item))
        lines = recorder.first_failure(item.nodeid)
        reporter = item.config.pluginmanager.get_plugin("terminalreporter")
        if lines and reporter is not None:
            for line in ("", *lines):  # "" ends the line of dots
                reporter.write_line(line)
        if _primitive(item) and recorder.outcome_of(item.nodeid) == "failed":
            recorder.findings.stopped = PRIMITIVES
            item.session.shouldfail = PRIMITIVES
            item.config.option.tbstyle = "no"  # the report has it once
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if KEY in config.stash and FINDINGS not in config.stash:
        config.stash[KEY].summarize(terminalreporter.write_line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail on expectations without a test, and write the report, unless a supervisor does."""
    if KEY in session.config.stash and FINDINGS not in session.config.stash:
        recorder = session.config.stash[KEY]
        if recorder.finish(session.exitstatus) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
