"""A check shared by tests of several guarantees: the profile quick runs it once, and skips it later if it passed."""

import pytest
from hal_conformance.harness.subject import Subject
from hal_conformance.kit import Effort, Kit
from hal_core.contract.support import Support
from hal_core.devices.cpu.device import CpuDevice


@pytest.fixture
def kit():
    return Kit(Subject("cpu", lambda: CpuDevice(0, {}), Support()), Effort("quick"))


def run(kit, *names, wrong=()):
    """Return the checks of these names that ran; those in ``wrong`` fail."""
    ran = []

    def check(name):
        ran.append(name)
        assert name not in wrong

    for name in names:
        try:
            kit.once(name, lambda: check(name))  # noqa: B023 (it is called at once)
        except AssertionError:
            ran.append("failed")
    return ran


def test_what_has_passed_is_not_run_again_for_another_guarantee(kit):
    kit.sparing = True
    assert run(kit, "a", "b", "a", ("a", 1)) == ["a", "b", ("a", 1)]
    assert run(kit.another(), "a", "c") == ["c"]
    assert run(kit, "c") == []


def test_what_has_failed_fails_again(kit):
    kit.sparing = True
    assert run(kit, "a", "a", wrong=("a",)) == ["a", "failed", "a", "failed"]
    assert run(kit, "a", "a") == ["a"]


def test_where_guarantees_are_chosen_each_test_runs_it(kit):
    assert run(kit, "a", "a") == ["a", "a"]
