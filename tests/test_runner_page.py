"""docs/runner.md: its runners run as printed, by the commands and options that it names, and are the template's."""

import re
from pathlib import Path

import pytest
from hal_conformance import scaffold
from hal_engine.model import DEFAULT_CHECKPOINT

import hal

from .vendors_environment import install, make, run

ROOT = Path(__file__).parents[1]
NUMPY, CAUSAL, DRAFTING = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "runner.md").read_text(encoding="utf-8"), re.S
)
PROMPTS = ["def a(): pass\ndef b(): ", "import os\nimport re\nimport ", "x"]
OPTIONS = {"device": "cpu", "max_tokens": 12}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The page's files in the working directory."""
    for name, text in (("my_runner", NUMPY), ("causal", CAUSAL), ("drafting", DRAFTING)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_pages_runner_is_the_templates():
    assert scaffold.render("my", scaffold.RUNNER)["src/hal_my/__init__.py"] == NUMPY


def test_the_runner_has_forty_lines_of_code():
    """Beside its docstrings, comments and blank lines."""
    body = NUMPY.partition("class MyRunner:")[2]
    lines = [line for line in body.splitlines() if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(lines) <= 45


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3}])
@pytest.mark.usefixtures("files")
def test_slots_chunks_and_drafts_change_no_token(params):
    runner = {"runner": "my_runner:MyRunner", **OPTIONS, **params}
    answers = hal.generate(PROMPTS, **runner)
    assert answers == hal.generate(PROMPTS, slots=1, chunk=2, **runner)
    assert answers == hal.generate(PROMPTS, drafts=3, **runner | {"runner": "drafting:DraftingRunner"})
    assert len({*answers}) == len(PROMPTS)


@pytest.mark.usefixtures("files")
def test_drafts_are_accepted_and_two_ranks_give_the_same(command):
    one = command("run", "--json", "--runner", "my_runner:MyRunner", "--temperature", "0", PROMPTS[0])
    two = command(
        *("run", "--json", "-v", "--runner", "drafting:DraftingRunner", "--drafts", "3", "--tp", "2"),
        *("--temperature", "0", PROMPTS[0]),
    )
    assert one.answers[0]["text"] == two.answers[0]["text"]
    assert re.search(r"[1-9]\d* of \d+ drafts accepted", two.err)


@pytest.mark.usefixtures("files")
def test_a_model_of_transformers_gives_the_tokens_of_the_paddle_model():
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    prompts = ["def main(", "class Stack:\n"]
    wanted = hal.generate(prompts, temperature=0, runner="paddle", model=str(DEFAULT_CHECKPOINT), **OPTIONS)
    for options in ({}, {"slots": 1, "chunk": 3}):
        assert hal.generate(prompts, temperature=0, runner="causal:CausalRunner", **OPTIONS, **options) == wanted


def test_a_made_package_is_found_and_passes_its_own_tests(tmp_path):
    make(tmp_path)
    scaffold.make("my_model", scaffold.RUNNER, tmp_path / "new")
    install(tmp_path, tmp_path / "new")
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "new/tests", "-W", "ignore")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
