"""``hal run --device sim`` gives the tokens of the cpu device: nothing of the state's bytes is lost on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("hal", reason="the host (paddle-hal) is not installed")
pytest.importorskip("paddle", reason="the model needs Paddle", exc_type=ImportError)

PROMPTS = ("def main(", "for i in range(", "class Reader:")


def run(device, **options):
    command = [sys.executable, "-c", "from hal.cli import main; main()", "run", "--device", device, "--json"]
    command += ["--max-tokens", "24", "--slots", "2", "--chunk", "4", "--logprobs", "2"]
    command += [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    variables = {f"HALSIM_{name.upper()}": str(value) for name, value in options.items()}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert {answer.pop("device")["name"] for answer in answers} == {f"{device}:0"}
    return answers


def test_sim_and_cpu_give_the_same_tokens(built):
    should = run("cpu")
    assert len(should) == len(PROMPTS)
    assert run("sim", mode=2, staged=0) == should
