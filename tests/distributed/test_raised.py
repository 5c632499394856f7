"""Errors that a runner or plugin raised on a rank: the command shows the traceback only under ``-v``."""

from pathlib import Path

import pytest
from hal_core import DeviceNotFound, GroupLost, OutOfMemory, PluginError
from hal_engine.distributed.errors import failed_message
from hal_engine.stepping.runner import RunnerFailed

from hal.cli import main

from .rows import Pooled

FOLDER = str(Path(__file__).parents[1] / "overlap")
COMMAND = [
    "run",
    "--device",
    "cpu",
    "--runner",
    "failing:FailingRunner",
    "--prompt",
    "a",
    "--temperature=0",
    "--max-tokens",
    "4",
]
WAYS = [("--dp", "2"), ("--tp", "2")]
"""The options for ranks, all of which raise: the step's requests end, and the ranks continue."""


@pytest.fixture
def raising(worlds, monkeypatch, tmp_path):
    """The ranks' runner raises in step 1."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(
        "hal_engine.distributed.starting.LocalLaunch", lambda size, **_: Pooled(worlds.of(size), ("raising", FOLDER))
    )
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize("verbose", [True, False], ids=["verbose", "plain"])
def test_v_shows_where_a_runner_on_a_rank_raised(way, verbose, capsys):
    with pytest.raises(SystemExit) as end:
        main([*COMMAND, *way, *(["-v"] if verbose else [])])
    err = capsys.readouterr().err
    assert end.value.code == 2, err
    assert ('failing.py", line' in err) is verbose, err
    assert ("rank 0, where it raised:\nTraceback" in err) is verbose, err


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_a_rank_tells_the_traceback_of_what_is_not_its_own():
    message = failed_message(raised(RuntimeError("out of\nmemory")), 1, 3)
    assert message.what == "RuntimeError: out of memory"
    assert message.trace.startswith("Traceback (most recent call last):\n")
    assert f'{__file__}", line' in message.trace
    assert "lone \\ud800" in failed_message(raised(RuntimeError("lone \ud800")), 1, 3).trace, "a frame is UTF-8"
    cause = raised(KeyError("its own"))
    assert failed_message(raised(PluginError("it broke"), cause), 1, 0).trace.endswith("KeyError: 'its own'\n")


@pytest.mark.parametrize(
    "error",
    [DeviceNotFound("none"), GroupLost("rank 0 is lost"), OSError(24, "too many"), ModuleNotFoundError("x", name="x")],
    ids=lambda error: type(error).__name__,
)
def test_of_what_the_line_says_all_a_rank_tells_no_traceback(error):
    assert failed_message(raised(error), 1, 0).trace == ""


def test_of_a_package_that_is_missing_a_rank_tells_what_to_install_and_no_restart_follows():
    message = failed_message(ModuleNotFoundError("No module named 'paddle'", name="paddle"), 0, 0)
    assert message.refused
    assert message.what.startswith("the Python package 'paddle' is not installed (pip install 'paddlepaddle")


def test_a_device_that_a_runner_broke_is_a_loss_that_a_restart_may_mend():
    assert not failed_message(raised(RunnerFailed("it broke")), 1, 3).refused
    assert failed_message(raised(PluginError("it broke")), 1, 3).refused


def test_a_checkpoint_that_does_not_fit_is_refused_at_the_start_alone():
    """A restart would meet it again; in a step it is the device's trouble."""
    assert failed_message(OutOfMemory("26 bytes are needed, 17 are free"), 0, 0).refused
    assert not failed_message(OutOfMemory("26 bytes are needed, 17 are free"), 0, 3).refused


def test_of_a_long_traceback_a_rank_tells_the_end():
    message = failed_message(raised(RuntimeError("x" * 20_000 + "the end")), 1, 0)
    assert len(message.trace) == 8192
    assert message.trace.startswith("...")
    assert message.trace.endswith("the end\n")
