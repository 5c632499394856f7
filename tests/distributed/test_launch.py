"""What the starter of Paddle's launcher says and leaves; the launcher is a process that is given out as it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hal.distributed import launch
from hal.transport.urls import private_ipc_url, release_folder, socket_of

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
    release_folder(url)


def test_what_a_launch_keeps_lies_in_the_folder_that_goes_with_the_process(started):
    """However the process ends: the folder of a dead one's socket is removed by the next."""
    starter, folder, url = started
    assert folder.parent == socket_of(url).parent
    release_folder(url)
    assert not folder.exists()
    starter.end(0.0)


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
