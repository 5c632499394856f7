"""``hal tail URL``: rows, gaps, restarts, losses and duplicates as they come, in text and JSON."""

import json
import os
import stat
import subprocess
import sys
import textwrap

import pytest
from hal_engine.cli.tail import Printer
from hal_engine.reading import FrameSkipped
from hal_engine.transport import open_sink, private_ipc_url, release_ipc

from hal.cli import main

WORKER = """
    import os, sys, time
    import numpy as np
    from hal_core.output.records import OutputRecord
    from hal_engine.transport import open_sink

    class Output:
        def __init__(self, step, finish=0):
            self.step, self.finish = step, finish
        def resolve(self):
            one = np.ones(1, np.uint8)
            ids = np.array([[70 + self.step, 5]])
            lps = np.array([[-0.5, -2.0]], np.float32)
            return OutputRecord(self.step, ("req-a",), one, one * self.finish, np.array([self.step]), one.astype("i4"),
                                np.array([70 + self.step]), one < 0, logprob_token_ids=ids, logprobs=lps)
        def complete(self, error):
            pass

    sink = open_sink(sys.argv[1], heartbeat=0.05)
    sink.put(Output(0))
    if sys.argv[2] == "dies":
        while not sink.counters()["frames"] or sink.counters()["unacknowledged"]:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    sink.put(Output(1, finish=1))
    sink.close(20)
"""


@pytest.fixture
def url():
    url = private_ipc_url()
    yield url
    release_ipc(url)


def tail(url, *lives, options=()):
    """The lines of stdout and stderr while workers run one after the next."""
    arguments = [sys.executable, "-m", "hal", "tail", url, "--timeout", "30", *options]
    arguments[1:3] = ["-c", "from hal.cli import main; main()"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for life in lives:
            subprocess.run([sys.executable, "-c", textwrap.dedent(WORKER), url, life], check=False, timeout=60)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.splitlines(), err


def test_it_prints_rows_losses_restarts_and_ends_with_the_session(url):
    lines, summary = tail(url, "dies", "closes")
    words = [line.split("  ", 1)[1] if not line.startswith("--") else line.split(":")[0] for line in lines]
    assert words[:2] == ["-- SessionStarted", "req-a  at 0: 70, logprobs -0.500"]
    assert "-- SessionLost" in words
    assert any("was started again" in line for line in lines)
    assert words[-2:] == ["req-a  at 1: 71, logprobs -0.500, finished: stop", "-- SessionEnded"]
    assert "3 frames" in summary
    assert "1 lost sessions, 1 restarts" in summary


@pytest.mark.parametrize("as_json", [False, True])
def test_bytes_of_a_stranger_are_told_in_words(capsys, as_json):
    printer = Printer(as_json=as_json, request=None)
    printer.event(FrameSkipped("a message of nobody"))
    line = json.dumps({"event": "FrameSkipped", "text": "a message of nobody"})
    assert capsys.readouterr().out == f"{line if as_json else '-- FrameSkipped: a message of nobody'}\n"


def test_json_lines_of_one_request(url):
    lines, _ = tail(url, "closes", options=["--json", "--request", "req-a"])
    rows = [fact for fact in map(json.loads, lines) if fact["event"] == "row"]
    assert [(row["position"], row["tokens"], row["finish"]) for row in rows] == [(0, [70], "NONE"), (1, [71], "STOP")]
    assert rows[0]["logprobs"] == [-0.5]


def test_g26_a_url_that_cannot_be_read_is_one_line(url):
    for bad, message in [("nonsense", "no scheme"), ("sysv://?layout=plain", "no scheme of ipc, tcp")]:
        done = subprocess.run(
            [sys.executable, "-c", "from hal.cli import main; main()", "tail", bad],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "soon"])
def test_a_timeout_that_would_never_end_is_refused(url, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["tail", url, f"--timeout={text}"])
    assert stop.value.code == 2
    refusal = "'soon' is no number" if text == "soon" else f"{text} (give seconds from 0.1 to 86400)"
    assert f"--timeout: {refusal}" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(url):
    command = [sys.executable, "-c", "from hal.cli import main; main()", "tail", url, "--timeout", "30"]
    worker = [sys.executable, "-c", textwrap.dedent(WORKER), url, "closes"]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE) as process,
        subprocess.Popen(worker, stderr=subprocess.DEVNULL) as sending,
    ):
        _, err = process.communicate(timeout=60)
        sending.kill()
    assert process.returncode == 2
    assert err.startswith(b"hal: error: standard output: cannot be written: No space left")
    assert err.count(b"\n") == 1


def test_network_records_need_a_key_on_both_sides(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HAL_DEVICE", "cpu")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    key = tmp_path / "key"
    arguments = ["tail", "tcp://127.0.0.1:*", "--key", str(key), "--json", "--timeout", "60"]
    command = [sys.executable, "-c", "from hal.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stderr.readline().split()[-1]
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        stranger = open_sink(url, heartbeat=0.05)
        with pytest.raises(SystemExit) as ended:
            main(["run", "--prompt", "x", "--temperature=0", "--max-tokens", "3", "--sink", url, "--key", str(key)])
        out, _ = process.communicate(timeout=60)
        stranger.close(0.0)
    assert ended.value.code in (0, None), capsys.readouterr().err
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events if event["event"] != "row"] == ["SessionStarted", "SessionEnded"]
    assert sum(len(event["tokens"]) for event in events if event["event"] == "row") == 3
