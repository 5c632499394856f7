"""``hal run --device sim`` gives the tokens of the cpu device: no byte of the state is lost on the way."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("hal", reason="the host (paddle-hal) is not installed")
pytest.importorskip("paddle", reason="the model needs Paddle", exc_type=ImportError)


PROMPTS = ("def main(", "for i in range(", "class Reader:")


ARGUMENTS = ["--json", "--temperature=0", "--max-tokens", "24", "--slots", "2", "--chunk", "4", "--logprobs", "2"]
ARGUMENTS += [part for prompt in PROMPTS for part in ("--prompt", prompt)]
CODE = "from hal.cli import main; main()"


def answers(printed, device):
    found = [json.loads(line) for line in printed.splitlines()]
    assert {answer.pop("device")["name"] for answer in found} == {f"{device}:0"}
    return found


@pytest.mark.steady
@pytest.mark.conform
def test_sim_and_cpu_give_the_same_tokens(built):
    """Both in separate processes, in which the command chooses the same kernels of MKL."""
    should = answers(run("cpu"), "cpu")
    assert len(should) == len(PROMPTS)
    assert answers(run("sim"), "sim") == should


def run(device):
    command = [sys.executable, "-c", CODE, "run", "--device", device, *ARGUMENTS]
    variables = os.environ | {"HALSIM_MODE": "2", "HALSIM_STAGED": "0"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
