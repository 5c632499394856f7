"""Errors and files of the starter of Paddle's launcher; a stand-in process takes the launcher's place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hal_engine.distributed import launch, process
from hal_engine.transport.urls import private_ipc_url, release_folder, socket_of

NOISE = "W1122 18:55:00 compiled with something\n" * 40
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 6\n    raise ValueError\nValueError: no room\n'


@pytest.fixture
def started(monkeypatch):
    """A launch whose launcher has ended with status 1, and its folder."""
    ended = SimpleNamespace(pid=os.getpid(), poll=lambda: 1, wait=lambda seconds: 1)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: ended)
    url, starter = private_ipc_url(), launch.PaddleLaunch(3)
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


LEFT = """
import os
from hal_engine.distributed import launch
os.environ["XDG_RUNTIME_DIR"] = {folder!r}
launch.subprocess.Popen = lambda *_, **__: None
launch.PaddleLaunch(1).start("tcp://127.0.0.1:1")
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_worker_over_tcp_has_left_is_removed_by_the_next(tmp_path, monkeypatch):
    """Its folder goes with no socket; one of a process that lives stays."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", LEFT.format(folder=str(tmp_path))], check=False)
    (dead,) = tmp_path.iterdir()
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: None)
    first, second = launch.PaddleLaunch(1), launch.PaddleLaunch(1)
    first.start("tcp://127.0.0.1:1")
    assert not dead.exists()
    second.start("tcp://127.0.0.1:1")
    assert len(list(tmp_path.iterdir())) == 2
    for starter in (first, second):
        starter.end(0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_error_quotes_what_tells_how_ranks_have_ended(started):
    starter, folder, _ = started
    (folder / "launcher").write_text(
        f"{NOISE}LAUNCH ERROR Container failed !!!\n"
        f"Container rank 1 status failed cmd ['python', '-c', 'code 5 log x'] code -9 log {folder}/workerlog.1\n{NOISE}"
    )
    (folder / "workerlog.0").write_text(f"{NOISE}hal: rank 0: no such folder (make it)\n{NOISE}")
    (folder / "workerlog.1").write_text(NOISE)
    (folder / "workerlog.2").write_text(f"{TRACE}\nDuring handling of the above\n\n{TRACE}{NOISE}")
    assert starter.ended() == (
        "Paddle's launcher ended with status 1; rank 1 ended with code -9; rank 0: no such folder (make it); "
        "rank 2: ValueError: no room"
    )


def test_where_nothing_tells_more_the_launcher_is_quoted(started):
    starter, folder, _ = started
    (folder / "launcher").write_text(f"{NOISE}no such option\n")
    assert starter.ended().endswith("something no such option")


def test_ranks_meet_at_a_port_that_is_held_until_they_do(monkeypatch):
    """The launcher's own is free when it is chosen, and anybody's until Paddle has been imported in the first rank."""
    given = {}
    ended = SimpleNamespace(pid=os.getpid(), poll=lambda: 1, wait=lambda seconds: 1)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, env, **__: given.update(env) or ended)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("FLAGS_selected_gpus", "3")
    url, starter = private_ipc_url(), launch.PaddleLaunch(2)
    starter.start(url)
    host, port = given[launch.STORE].split(":")
    assert "MASTER_ADDR" not in given, "Paddle would go there"
    assert "FLAGS_selected_gpus" not in given, "every rank would take it for its own"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    starter.end(0.0)
    with socket.socket() as other:
        other.bind((host, int(port)))
    release_folder(url)


def test_the_ranks_meet_where_the_launch_says(monkeypatch):
    seen = []
    for name, value in {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(launch.URL, "ipc:///nowhere")
    monkeypatch.setenv(launch.STORE, "127.0.0.1:7")
    monkeypatch.setattr(process, "serve", lambda *_, **__: seen.append(os.environ["PADDLE_TRAINER_ENDPOINTS"]))
    monkeypatch.setattr(process.signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    assert process.main() == 0
    assert seen == ["127.0.0.1:7,b:2"]
