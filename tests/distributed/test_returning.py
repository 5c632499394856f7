"""A worker that was lost and comes again under its url: it is taken up, if it is what was lost, and is waited for."""

from __future__ import annotations

import errno
import json
import re
import signal
import threading
import time
from unittest import mock

import pytest
from hal_core import InvalidValue, Unavailable

from hal.cli import run_workers
from hal.cli.run_workers import hire
from hal.distributed.hiring import Met, RemoteWorker
from hal.distributed.rank import versions
from hal.distributed.returning import ReturningWorker
from tests.commands import environment, left_in, start
from tests.distributed.rows import Row
from tests.distributed.test_hiring import LOCAL, PATIENCE, Employed, ipc, needs_curve, options

__all__ = ["ipc"]


class Launches:
    """Ranks that are started by nobody; where they were to come to."""

    def __init__(self):
        self.urls, self.status, self.begun = [], 0, threading.Event()

    def __call__(self, size, more):
        return self

    def start(self, url):
        self.urls.append(url)
        self.begun.set()

    def ended(self):
        return ""

    def end(self, patience):
        pass


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setattr("hal.distributed.hired.PaddleLaunch", made := Launches())
    monkeypatch.setattr("hal.distributed.returning._ASK_SECONDS", 0.05)
    monkeypatch.setattr("hal.distributed.hired._LEAVE_SECONDS", 0.0)  # its ranks never end
    return made


def until(worker, there):
    """Ask for it until something is there."""
    end = time.monotonic() + PATIENCE
    while not (found := there()):
        assert time.monotonic() < end
        assert not worker.ended(), worker.ended()
    return found


def fits(met: Met):
    assert met.role == "decode"


def test_who_comes_again_is_taken_up_and_starts_its_ranks(ipc, launches):
    first = Employed("decode", ipc[0])
    engine = RemoteWorker(ipc[0], None)
    engine.meet(versions(), PATIENCE)
    engine.dismiss()
    assert first.wait() == 0
    again = ReturningWorker(ipc[0], None, versions(), fits)
    again.start("tcp://engine:1")
    for _ in range(5):
        assert again.ended() == ""  # nobody is there yet
    second = Employed("decode", ipc[0])
    until(again, launches.begun.is_set)
    assert launches.urls == ["tcp://engine:1"]
    assert again.ended() == ""
    again.dismiss()
    assert (second.wait(), second.how) == (1, "its ranks did not end within 0 s")


def test_who_is_still_taken_is_asked_again(ipc, launches):
    taken = Employed("decode", ipc[0])
    engine = RemoteWorker(ipc[0], None)
    engine.meet(versions(), PATIENCE)
    again, refusals = ReturningWorker(ipc[0], None, versions(), fits), []
    refused = again._refused
    again._refused = lambda said: (refusals.append(said), refused(said))
    again.start("ipc:///engine")
    until(again, lambda: refusals)
    assert again.ended() == ""
    engine.dismiss()
    assert taken.wait() == 0
    second = Employed("decode", ipc[0])
    until(again, launches.begun.is_set)
    again.dismiss()
    assert (second.wait(), second.how) == (1, "its ranks did not end within 0 s")


def test_who_never_came_is_given_up_at_once(ipc):
    again = ReturningWorker(ipc[0], None, versions(), fits)
    again.start("ipc:///engine")
    begin = time.monotonic()
    again.end(PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2


@needs_curve
def test_who_is_lost_with_the_way_to_it_is_waited_for_all_the_same(tmp_path, launches, monkeypatch):
    """A cable that is pulled is a loss, and while it is, no address of this host leads there."""
    urls = []
    monkeypatch.setattr(run_workers, "Crew", lambda setup, worker, **how: urls.append(how["url"]) or worker)
    key = tmp_path / "key"
    workers = [Employed(role, LOCAL, key) for role in ("prefill", "decode")]
    with hire(options(*(one.url for one in workers), key=key), PATIENCE) as hired:
        hired.crew(Row().setup(), 1).dismiss()
        assert workers[1].wait() == 0
        pulled = mock.Mock(side_effect=OSError(errno.ENETUNREACH, "Network is unreachable"))
        monkeypatch.setattr("hal.distributed.hiring.socket.getaddrinfo", pulled)
        again = hired.crew(Row().setup(), 1)
        assert again.ended() == ""
        with pytest.raises(Unavailable, match=f"leads to the worker at {workers[1].url}: Network is unreachable"):
            again.own_address()
    assert urls == ["tcp://127.0.0.1:*"] * 2


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"role": "prefill"}, "was a decode worker, and is a prefill worker now"),
        ({"tp": 2}, "--tp of the worker at .*: 2, here 1"),
        ({"found": {"paddle-hal-core": "0.9"}}, "the worker paddle-hal-core 0.9"),
    ],
    ids=("role", "tp", "versions"),
)
def test_who_is_another_by_then_is_refused_by_name_on_both_sides(what, told, ipc, launches, monkeypatch):
    monkeypatch.setattr(run_workers, "Crew", lambda setup, worker, **_: worker)
    workers = [Employed(role, url) for role, url in zip(("prefill", "decode"), ipc[:2], strict=True)]
    with hire(options(*ipc[:2]), PATIENCE) as hired:
        setup = Row().setup()
        first = hired.crew(setup, 1)
        first.dismiss()
        assert workers[1].wait() == 0
        again = hired.crew(setup, 1)
        again.start("ipc:///engine")
        workers.append(Employed(url=ipc[1], **{"role": "decode"} | what))
        end = time.monotonic() + PATIENCE
        while not (how := again.ended()):
            assert time.monotonic() < end
        again.end(1.0)
    refused = workers[2].wait()
    assert isinstance(refused, InvalidValue)
    for words in (how, str(refused)):
        assert re.search(told, words), words
    assert launches.urls == []


LONG = ("--max-tokens", "60", "--json", "--slots", "2")
PROMPTS = [part for text in ("def main(", "import os", "x = [", "for") for part in ("--prompt", text)]


@pytest.mark.conform
@pytest.mark.long(60)
def test_a_decode_worker_that_is_killed_and_started_again_takes_part_again(tmp_path):
    """As a supervisor would, after a job has lost it with requests in its slots: every token once, and status 0."""
    env = environment(tmp_path)
    alone = start(tmp_path, "run", *PROMPTS, *LONG, env=env).communicate(timeout=120)[0].splitlines()
    urls = {role: f"ipc://{tmp_path}/{role}" for role in ("prefill", "decode")}

    def worker(role):
        made = start(tmp_path, "worker", "--role", role, "--listen", urls[role], env=env)
        assert urls[role] in made.stderr.readline()
        return made

    workers = {role: worker(role) for role in urls}
    engine = start(tmp_path, "run", *PROMPTS, *LONG, "--workers", ",".join(urls.values()), "--restart", "1", env=env)
    try:
        first = engine.stdout.readline()
        workers["decode"].send_signal(signal.SIGKILL)
        workers["decode"].communicate()
        workers["decode"] = worker("decode")
        out, err = engine.stdout.read(), engine.stderr.read()
        assert engine.wait(120) == 0, err
        tokens = [json.loads(line)["token_ids"] for line in (first + out).splitlines()]
        assert tokens == [json.loads(line)["token_ids"] for line in alone]
        assert f"it is waited for at {urls['decode']}" in err
        assert "started again 1 time(s)" in err
        assert [one.wait(60) for one in workers.values()] == [0, 0]
    finally:
        for process in (engine, *workers.values()):
            process.kill()
            with process:
                pass
    assert left_in(tmp_path) == []
