"""`hal serve` with a runner that raises: the server's fault, with a line on standard error, and a bounded number."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from .conftest import serving

OVERLAP = Path(__file__).parents[1] / "overlap"
WHAT = r"FailingRunner\.launch raised RuntimeError: out of memory: 2 GiB were asked for \(failing\.py:\d+\)"
REFUSING = """
from failing import FailingRunner
from hal_core import InvalidValue

class FailingRunner(FailingRunner):
    def check(self, request):
        if request.params.max_tokens == 9:
            raise InvalidValue("nine", cure="ask for ten", argument="max_tokens")
"""


@pytest.mark.parametrize("level", ["", "DEBUG"])
def test_a_runner_that_raises_is_named_to_the_client_and_on_standard_error(tmp_path, monkeypatch, level):
    (tmp_path / "refusing.py").write_text(REFUSING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(OVERLAP), str(tmp_path)]))
    monkeypatch.setenv("HAL_LOG", level)
    monkeypatch.setenv("FAILING_STEPS", ",".join(map(str, {0, *range(3, 40)})))
    with serving("--runner", "refusing:FailingRunner", until_loaded=False) as served:
        while "hal: ready on " not in served.process.stderr.readline():
            pass

        def ask(name, tokens=8):
            body = {"prompt": [1, 2, 3], "max_tokens": tokens}
            answer = httpx.post(f"{served.url}/v1/completions", json=body, headers={"X-Request-Id": name})
            return answer.status_code, answer.json()["error"]

        begun, late, refused = ask("first-step"), ask("third-step"), ask("nine", 9)
        for number in range(20):
            ask(f"many-{number}")
        served.process.send_signal(signal.SIGTERM)
        lines = served.process.stderr.read()
    for status, error in (begun, late):
        assert (status, error["type"]) == (500, "server_error")
        assert re.fullmatch(WHAT, error["message"])
    assert (refused[0], refused[1]["message"]) == (400, "max_tokens: nine (ask for ten)")
    assert re.search(rf"^hal: request first-step: {WHAT}$", lines, re.M)
    assert re.search(rf"^hal: request third-step: {WHAT}", lines, re.M)
    assert "request nine" not in lines
    assert ('failing.py", line' in lines) is bool(level)
    assert len(re.findall("^hal: request many", lines, re.M)) < 20
