"""`hal serve` with a runner that raises: the server's fault, with a line on standard error, and a bounded number."""

import re
import signal
from pathlib import Path

import httpx
import pytest

from .conftest import serving

OVERLAP = Path(__file__).parents[1] / "overlap"
WHAT = r"CheckingRunner\.launch raised RuntimeError: out of memory: 2 GiB were asked for \(failing\.py:\d+\)"
CHECK = r"CheckingRunner\.check raised OSError: no table \\udc80 for eleven \(failing\.py:\d+\)"


@pytest.mark.parametrize("level", ["", "DEBUG"])
def test_a_runner_that_raises_is_named_to_the_client_and_on_standard_error(monkeypatch, level):
    monkeypatch.setenv("PYTHONPATH", str(OVERLAP))
    monkeypatch.setenv("HAL_LOG", level)
    monkeypatch.setenv("FAILING_STEPS", ",".join(map(str, {0, *range(3, 40)})))
    with serving("--runner", "failing:CheckingRunner", until_loaded=False) as served:
        while "hal: ready on " not in served.process.stderr.readline():
            pass

        def ask(name, tokens=8):
            body = {"prompt": [1, 2, 3], "max_tokens": tokens}
            answer = httpx.post(f"{served.url}/v1/completions", json=body, headers={"X-Request-Id": name})
            return answer.status_code, answer.json()["error"]

        begun, late, refused = ask("first-step"), ask("third-step"), ask("nine", 9)
        eleven = ask("eleven", 11)
        for number in range(20):
            ask(f"many-{number}")
        served.process.send_signal(signal.SIGTERM)
        lines = served.process.stderr.read()
    for status, error in (begun, late):
        assert (status, error["type"]) == (500, "server_error")
        assert re.fullmatch(WHAT, error["message"])
    assert eleven[0] == 500
    assert re.fullmatch(CHECK, eleven[1]["message"])
    assert re.search(rf"^hal: request eleven: {CHECK}$", lines, re.M)
    assert (refused[0], refused[1]["message"]) == (400, "max_tokens: nine (ask for ten)")
    assert re.search(rf"^hal: request first-step: {WHAT}$", lines, re.M)
    assert re.search(rf"^hal: request third-step: {WHAT}", lines, re.M)
    assert "request nine" not in lines
    assert ('failing.py", line' in lines) is bool(level)
    assert len(re.findall("^hal: request many", lines, re.M)) < 20
