"""``hal run`` with a runner that raises: only that step's requests end, or the command ends in one line, status 1."""

import re
from pathlib import Path

import pytest

RUNNER = ("--runner", "failing:FailingRunner")
WHAT = "FailingRunner.launch raised RuntimeError: out of memory: 2 GiB were asked for"


@pytest.fixture
def run(command, monkeypatch, private_folders):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def call(*arguments, steps="", drafts="", breaks="0"):
        monkeypatch.setenv("FAILING_STEPS", steps)
        monkeypatch.setenv("FAILING_DRAFTS", drafts)
        monkeypatch.setenv("FAILING_BREAKS", breaks)
        given = [part for name in ("aa", "bb", "cc") for part in ("--prompt", name)]
        sizes = ("--slots", 2, "--temperature=0", "--max-tokens", 4)
        done = command("run", "--json", *RUNNER, *sizes, *given, *arguments)
        return done.status, done.answers, done.err

    return call


@pytest.mark.parametrize(("device", "overlap"), [("cpu", "off"), ("sim", "off"), ("sim", "on")])
@pytest.mark.parametrize("steps", ["0", "2"])
def test_a_step_that_raises_ends_its_requests_and_no_others(run, device, overlap, steps):
    if device == "sim":
        pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    code, objects, err = run("--device", device, "--overlap", overlap, steps=steps)
    assert code != 0, "requests have failed"
    assert "Traceback" not in err
    ends = {found["request_id"]: found["finish_reason"] for found in objects}
    assert sorted(ends.values()) == ["error", "error", "length"], err
    assert WHAT not in err, "each answer has it"
    for found in objects:
        if found["finish_reason"] == "error":
            assert re.fullmatch(rf"{WHAT} \(failing\.py:\d+\)", found["message"])
            assert found["token_ids"] == [300] * min(int(steps[0]), 4)
        else:
            assert found["token_ids"] == [300] * 4


@pytest.mark.parametrize(("device", "overlap"), [("cpu", "off"), ("sim", "off"), ("sim", "on")])
@pytest.mark.parametrize("step", [0, 2, 3])
def test_drafting_that_raises_ends_the_steps_requests_that_go_on(run, device, overlap, step):
    """Both have ended by their length in step 3, so that no request is left for the error."""
    if device == "sim":
        pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    code, objects, err = run("--device", device, "--overlap", overlap, "--drafts", "2", drafts=str(step))
    assert "Traceback" not in err
    unread = "FailingRunner.propose raised RuntimeError: out of memory: 2 GiB were asked for (failing.py:" in err
    assert unread is (step == 3), err  # the line is for an error that no answer has
    ends = sorted(found["finish_reason"] for found in objects)
    assert ends == (["length"] * 3 if step == 3 else ["error", "error", "length"]), err
    assert (code != 0) == (step != 3)
    for found in objects:
        failed = found["finish_reason"] == "error"
        assert found["token_ids"] == [300] * (step if failed else 4)
        assert ("FailingRunner.propose raised" in found.get("message", "")) is failed


@pytest.mark.parametrize(
    ("arguments", "raises", "says"),
    [
        (("--drafts", "2"), "drafts", "FailingRunner.propose raised RuntimeError"),
        ((), "steps", rf"{WHAT} \(failing\.py:\d+\), and the device is broken: "),
    ],
)
def test_a_runner_that_breaks_the_device_ends_the_command_in_one_line(run, arguments, raises, says):
    code, _, err = run("--device", "cpu", *arguments, breaks="1", **{raises: "2"})
    assert code == 1
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "hal: error:" in line]
    assert re.search(says, line)
    assert line.endswith("(mend the runner, then start again: a process cannot use a broken device any more)")


def test_v_shows_where_a_runner_raised(run):
    _, _, err = run("--device", "cpu", "-v", steps="2")
    assert 'failing.py", line' in err


def test_without_json_one_line_names_the_request_the_file_and_the_line(command, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("FAILING_STEPS", "0")
    err = command("run", *RUNNER, "--device", "cpu", "aa").err
    assert re.search(rf"^hal: request 'r0': {WHAT} \(failing\.py:\d+\)$", err, re.MULTILINE)
    assert err.count(WHAT) == 1


def test_a_runner_that_calls_exit_ends_the_command_with_an_error(run, monkeypatch):
    def leaves(*_):
        raise SystemExit(0)

    monkeypatch.setattr("failing.FailingRunner.launch", leaves)
    code, _, err = run("--device", "cpu", steps="9")
    assert code == 2
    assert "hal: error: a runner or plugin called sys.exit(0) during the run (" in err


def test_a_preempted_request_is_not_checked_again(command, monkeypatch, private_folders):
    """Its tokens so far are no part of what the user asked for."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sizes = ("--slots", 2, "--blocks", 5, "--temperature=0", "--max-tokens", 40)
    done = command(
        "run", "--json", "-v", "--runner", "failing:CheckingRunner", *sizes, "--prompt", "aa", "--prompt", "bb"
    )
    assert done.status == 0, done.err
    assert "1 preemption" in done.err
    assert [one["token_ids"] for one in done.answers] == [[300] * 40] * 2
