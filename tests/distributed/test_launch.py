"""Errors and files of the starter of ranks; stand-ins take the places of their processes."""

import socket
import subprocess
import sys

import pytest
from hal_core import Unavailable
from hal_engine.distributed import launch
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.urls import private_ipc_url, release_folder, socket_of

from hal.local_rank import AMONG

NOISE = "W1122 18:55:00 compiled with something\n" * 40
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 6\n    raise ValueError\nValueError: no room\n'


class Process:
    """A rank's process that has ended with a code, or runs (None) until it is killed."""

    def __init__(self, code=None):
        self.code = code

    def poll(self):
        return self.code

    def wait(self, seconds=None):
        if self.code is None:
            raise subprocess.TimeoutExpired("a rank", seconds)
        return self.code

    def kill(self):
        self.code = -9 if self.code is None else self.code


@pytest.fixture
def started(monkeypatch):
    """A launch of three ranks, whose codes a test sets, and its folder."""
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: Process())
    url, starter = private_ipc_url(), launch.LocalLaunch(3)
    starter.start(url)
    yield starter, starter._folder, url
    starter.end(0.0)
    release_folder(url)


def test_what_a_launch_keeps_lies_in_the_folder_that_goes_with_the_process(started):
    """However the process ends: the folder of a dead one's socket is removed by the next."""
    starter, folder, url = started
    assert folder.parent == socket_of(url).parent
    release_folder(url)
    assert not folder.exists()
    starter.end(0.0)


HANGS = """
import signal
from hal_engine.transport.urls import private_ipc_url
private_ipc_url()
print("made", flush=True)
signal.pause()
"""


def test_folders_of_ranks_that_are_ended_by_force_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_RANK", HANGS)
    url, starter = private_ipc_url(), launch.LocalLaunch(1)
    starter.start(url)
    while not (starter._folder / "rank.0").read_text():
        assert not starter.ended()
    starter.end(0.0)
    release_folder(url)
    assert [*tmp_path.iterdir()] == []


LEFT = """
import os
from hal_engine.distributed import launch
os.environ["XDG_RUNTIME_DIR"] = {folder!r}
launch.subprocess.Popen = lambda *_, **__: os.kill(os.getpid(), 9)
launch.LocalLaunch(1).start("tcp://127.0.0.1:1")
"""


def test_what_a_killed_worker_over_tcp_has_left_is_removed_by_the_next(tmp_path, monkeypatch):
    """Its folder goes with no socket; one of a process that lives stays."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", LEFT.format(folder=str(tmp_path))], check=False)
    (dead,) = tmp_path.iterdir()
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: Process(0))
    first, second = launch.LocalLaunch(1), launch.LocalLaunch(1)
    first.start("tcp://127.0.0.1:1")
    assert not dead.exists()
    second.start("tcp://127.0.0.1:1")
    assert len(list(tmp_path.iterdir())) == 2
    for starter in (first, second):
        starter.end(0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_error_quotes_what_tells_how_ranks_have_ended(started):
    starter, folder, _ = started
    for process, code in zip(starter._processes, (2, -9, 1), strict=True):
        process.code = code
    (folder / "rank.0").write_text(f"{NOISE}hal: rank 0: no such folder (make it)\n{NOISE}")
    (folder / "rank.1").write_text(NOISE)
    (folder / "rank.2").write_text(f"{TRACE}\nDuring handling of the above\n\n{TRACE}{NOISE}")
    assert starter.ended() == (
        "rank 0 ended with code 2; rank 1 ended with code -9; rank 2 ended with code 1; "
        "rank 0: no such folder (make it); rank 2: ValueError: no room"
    )


def test_ranks_that_run_or_end_well_one_after_the_other_have_not_ended(started):
    starter, folder, _ = started
    (folder / "rank.1").write_text(f"{NOISE}the last line\n")
    for process in starter._processes:
        assert starter.ended() == ""
        process.code = 0
    assert starter.ended().startswith("the ranks have ended; ")
    assert starter.ended().endswith("the last line")


def test_a_rank_that_fails_ends_the_others_when_they_had_time_to_say_why(started, monkeypatch):
    starter, _, _ = started
    now = [100.0]
    monkeypatch.setattr(launch, "monotonic", lambda: now[0])
    starter._processes[1].code = -9
    assert starter.ended() == ""
    now[0] += 2 * TIMEOUTS.loss_reason
    assert starter.ended() == "rank 1 ended with code -9"
    assert [process.code for process in starter._processes] == [-9, -9, -9]
    assert starter.ended() == "rank 1 ended with code -9", "the others were ended by this one"


def test_ranks_meet_at_a_port_that_is_held_until_they_do(monkeypatch):
    given = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, env, **__: given.append(env) or Process(0))
    for name in ("MASTER_ADDR", "PADDLE_MASTER", "PADDLE_TRAINER_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("FLAGS_selected_gpus", "3")
    url, starter = private_ipc_url(), launch.LocalLaunch(2, before=2, among=4)
    starter.start(url)
    assert [one["PADDLE_TRAINER_ID"] for one in given] == ["0", "1"]
    assert {one[AMONG] for one in given} == {"2/4"}
    (ends,) = {one["PADDLE_TRAINER_ENDPOINTS"] for one in given}
    host, port = ends.split(",")[0].split(":")
    for one in given:
        assert not {"MASTER_ADDR", "PADDLE_MASTER"} & one.keys(), "of another job"
        assert "FLAGS_selected_gpus" not in one, "every rank would take it for its own"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    starter.end(0.0)
    with socket.socket() as other:
        other.bind((host, int(port)))
    release_folder(url)


def test_a_rank_that_cannot_be_started_ends_the_others(monkeypatch):
    made = []

    def start(*_, **__):
        if made:
            raise OSError("no memory")
        made.append(Process())
        return made[0]

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    url = private_ipc_url()
    with pytest.raises(Unavailable, match="the ranks cannot be started: no memory"):
        launch.LocalLaunch(2).start(url)
    assert made[0].code == -9
    release_folder(url)


@pytest.mark.parametrize("what", ["HeldPort", "tempfile.mkdtemp"])
def test_what_the_ranks_need_before_they_start_is_named_as_well(monkeypatch, what):
    def full(*_, **__):
        raise OSError("no room")

    url = private_ipc_url()
    monkeypatch.setattr(f"hal_engine.distributed.launch.{what}", full)
    starter = launch.LocalLaunch(2)
    with pytest.raises(Unavailable, match="the ranks cannot be started: no room"):
        starter.start(url)
    assert starter._folder is None
    release_folder(url)


def test_the_engine_waits_for_the_starter_longer_than_that_waits_for_the_other_ranks(started):
    starter, *_ = started
    starter._processes[0].code = -9
    executor = RankExecutor.__new__(RankExecutor)
    executor._starter, executor._take_messages = starter, lambda seconds: None
    assert executor._ended_by().startswith("rank 0 ended with code -9")
