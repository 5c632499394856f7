"""docs/runner.md: its runners run as printed, by the commands and options that it names, and are the template's."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from hal_conformance import scaffold
from hal_engine.model import DEFAULT_CHECKPOINT

import hal

from .serving.conftest import serving
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


@pytest.fixture
def gpt2(tmp_path):
    """A folder with the shipped model's tokenizer and a configuration as GPT-2's; call it to change fields."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    shutil.copy(DEFAULT_CHECKPOINT / "tokenizer.json", folder)
    vocab = json.loads((DEFAULT_CHECKPOINT / "config.json").read_bytes())["vocab_size"]
    own = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "activation_function": "gelu_new", "eos_token_id": 0}

    def write(**fields):
        (folder / "config.json").write_text(json.dumps(fields))
        return str(folder)

    write(**own, model_type="gpt2", vocab_size=vocab, n_positions=96)
    write.vocab, write.folder = vocab, str(folder)
    return write


@pytest.mark.usefixtures("files")
def test_a_named_runner_needs_no_llama_but_a_tokenizer_and_two_sizes(command, gpt2):
    options = ("run", "--json", "--runner", "my_runner:MyRunner", "--temperature", "0", "--max-tokens", "9", PROMPTS[0])
    own, shipped = command(*options, "--model", gpt2.folder), command(*options)
    assert own.answers[0]["text"] == shipped.answers[0]["text"]
    with serving("--runner", "my_runner:MyRunner", "--model", gpt2.folder) as served:
        body = {"prompt": PROMPTS[0], "max_tokens": 9, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == own.answers[0]["text"]
        (model,) = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert model["max_model_len"] == 96
    refused = command("run", "--model", gpt2.folder, "x")
    assert "config.json: architectures: " in refused.err


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("fields", "options", "missing"),
    [
        ((), (), "vocab_size"),
        (("vocab_size",), (), "max_position_embeddings"),
        (("vocab_size",), ("--max-model-len", "64"), ""),
    ],
)
def test_a_missing_size_is_named(command, gpt2, fields, options, missing):
    folder = gpt2(**dict.fromkeys(fields, gpt2.vocab))
    done = command("run", "--runner", "my_runner:MyRunner", "--model", folder, "--max-tokens", "4", "x", *options)
    assert done.status == (2 if missing else 0)
    assert (f"gpt2/config.json: {missing}: absent: a whole number" in done.err) is bool(missing)


def test_a_made_package_is_found_and_passes_its_own_tests(tmp_path):
    make(tmp_path)
    scaffold.make("my_model", scaffold.RUNNER, tmp_path / "new")
    install(tmp_path, tmp_path / "new")
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "new/tests", "-W", "ignore")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
