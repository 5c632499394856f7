"""``check.py``, which shows the runner on a GPU, on torch's CPU; the recorded tokens; and the package."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from hal_core import MemorySink, Request, SamplingParams, SlotStatus, StateConfig
from hal_engine.engine import Engine
from hal_engine.model import DEFAULT_CHECKPOINT

from hal import open_device
from hal.discovery import AUTOMATIC, RUNNERS, installed_in

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PACKAGE = FOLDER.parent / "src" / "hal_torch"
RECORDED = json.loads((FOLDER / "tokens.json").read_text())
LINES = 2000


def test_it_is_declared_for_cuda():
    assert [entry.target for entry in installed_in(RUNNERS) if entry.name == "torch"] == ["hal_torch:RUNNER"]
    assert [entry.target for entry in installed_in(AUTOMATIC) if entry.name == "cuda"] == ["torch"]


def test_it_is_a_package_of_at_most_2000_lines():
    assert sum(len(file.read_text().splitlines()) for file in PACKAGE.glob("*.py")) <= LINES


def test_torch_is_the_users_own():
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith("torch")]
    assert project["optional-dependencies"] == {"torch": ["torch>=2.11"]}


def test_importing_it_imports_no_torch():
    code = "import sys, hal_torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_without_torch_it_is_refused_by_name(monkeypatch):
    from hal_torch import RUNNER

    monkeypatch.setitem(sys.modules, "torch", None)
    assert RUNNER.why_not(None, FOLDER).startswith("torch cannot be imported: ")
    command = [sys.executable, "-c", "import sys; sys.modules['torch'] = None; from hal.cli import main; main()"]
    command += ["run", "--prompt", "x", "--device", "cpu", "--runner", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--runner: torch cannot be imported: " in done.stderr
    assert "pip install './runners/torch[torch]'" in done.stderr


def test_the_pages_install_the_torch_that_their_next_commands_need():
    for page in ("docs/overlap.md", "README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "pip install ./core ./engine . './plugins/cuda[cu13]' './runners/torch[torch]'" in text


def test_the_recorded_tokens_are_those_of_the_cpu_device():
    pytest.importorskip("paddle")
    from hal_paddle_runner.loading import load_model
    from hal_paddle_runner.worker import Worker

    ways = {json.dumps({k: v for k, v in row["params"].items() if k != "seed"}): row for row in RECORDED}
    sizes, sink = StateConfig(4, 128, 16, max_logprobs=0), MemorySink()
    with open_device("cpu") as device:
        engine = Engine(Worker(device, load_model(DEFAULT_CHECKPOINT), sizes, 32, sink))
        for row in ways.values():
            engine.submit(Request(row["request_id"], row["prompt"], SamplingParams(**row["params"])))
        ended = {one.request_id: list(one.token_ids) for one in engine.run()}
    assert len(ways) == 4
    assert ended == {row["request_id"]: row["tokens"] for row in ways.values()}
    assert all(row["margin"] >= 1e-3 for row in RECORDED)
    assert all(row.status is SlotStatus.TOKEN for record in sink.records for row in record.rows())


@pytest.mark.parametrize(
    "stages", ["tokens,controls,useless,cache,command", pytest.param("ranks", marks=pytest.mark.conform)]
)
def test_on_the_cpu_device(stages):
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [sys.executable, "check.py", "--device", "cpu", "--only", stages]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=400, check=False, env=one)
    assert done.returncode == 0, done.stdout + done.stderr
