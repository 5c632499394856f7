"""``hal run``: its output, and its refusals. In this process."""

import json
import shutil
from functools import partial

import pytest
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("private_folders")


@pytest.fixture
def run(command):
    """Run the command here: ``run(*arguments)`` gives ``(status, stdout, stderr)``."""

    return partial(command, "run", "--temperature", "0")


@pytest.fixture
def run_json(command):
    """As ``run`` with ``--json``; the objects instead of stdout."""

    def call(*arguments):
        done = command("run", "--temperature", "0", "--json", *arguments)
        return done.status, done.answers, done.err

    return call


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEFAULT_CHECKPOINT, read_config(DEFAULT_CHECKPOINT))


def test_one_prompt_streams_prompt_and_text(run, run_json):
    status, out, err = run("--prompt", "def main(", "--max-tokens", 24)
    (answer,) = run_json("--prompt", "def main(", "--max-tokens", 24)[1]
    assert status == 0
    assert out == f"def main({answer['text']}\n"
    assert err.startswith("hal: 24 tokens in ")
    assert err.endswith(" tokens/s), device cpu:0, model on cpu; 3 notes (-v shows them)\n")
    assert (err.count("\n"), len(err) <= 101) == (1, True)


def test_without_an_nvidia_gpu_nothing_is_printed_of_cuda(run, monkeypatch):
    """The device is chosen here, with the cuda plugin installed; a user without such a GPU gets no message about it."""
    hal_cuda = pytest.importorskip("hal_cuda")
    monkeypatch.delenv("HAL_DEVICE")
    monkeypatch.setattr(hal_cuda, "has_card", lambda: False)
    monkeypatch.setattr(hal_cuda, "_devices", lambda driver: 0)
    status, out, err = run("--prompt", "def main(", "--max-tokens", 4)
    assert status == 0
    assert "cuda" not in (out + err).lower()
    assert [line for line in err.splitlines() if ", device cpu:0, model on cpu" not in line] == []


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("", ""),
        (" cpu ", ""),
        ("nope", "HAL_DEVICE: no device 'nope'"),
    ],
)
def test_the_variable_of_the_device_may_be_empty_and_a_wrong_one_is_named(run, monkeypatch, value, line):
    monkeypatch.setenv("HAL_DEVICE", value)
    status, _, err = run("-q", "--prompt", "x", "--max-tokens", 1)
    assert (status, err.startswith(f"hal: error: {line}" if line else "")) == (2 if line else 0, True), err
    assert bool(err) == bool(line)


def test_what_falls_back_is_shown_on_request_and_in_the_json(run, run_json):
    status, _, err = run("--prompt", "x", "--max-tokens", 1, "--require", "async_set_value=sync", "-v")
    assert status == 0
    _, (answer,), again = run_json("--prompt", "x", "--max-tokens", 1, "--require", "fused_scatter=yes", "-v")
    reason = answer["device"]["fallbacks"]["async_set_value"]
    assert reason.startswith("host memory: ")
    assert answer["device"] == {"name": "cpu:0", "substituted": "", "fallbacks": {"async_set_value": reason}}
    for text in (err, again):
        lines = text.splitlines()[-6:]
        assert lines[0] == "hal: 1 of 1 slots used, 0 preemptions"
        assert lines[1].startswith("hal: runner paddle: ")  # its calls, or why it has Paddle's operators
        assert lines[2] == f"hal: async_set_value falls back: {reason}"
        assert lines[3].startswith("hal: steps do not overlap: ")
        assert lines[4] == "hal: runner paddle, as no installed runner is for device cpu"
        assert lines[5].endswith(" tokens/s), device cpu:0, model on cpu")


def test_q_prints_the_text_alone(run):
    status, out, err = run("-q", "--prompt", "x", "--max-tokens", 2)
    assert (status, err) == (0, "")
    assert out.startswith("x")
    assert run("-q", "--prompt", "")[2].startswith("hal: error: ")


def test_a_device_that_falls_back_is_refused_where_it_is_required_not_to(run):
    status, out, err = run("--prompt", "x", "--require", "async_set_value=async")
    (line,) = err.splitlines()
    assert (status, out) == (2, "")
    assert line.startswith("hal: error: cpu: async_set_value: --require: ")
    assert "is required to be asynchronous, but: host memory" in line
    assert "drop the requirement or choose another device" in line


def test_several_prompts_are_labelled_and_in_order(run, run_json):
    arguments = ("--prompt", "import", "--prompt", "class A", "--prompt", "x = ", "--max-tokens", 8, "--slots", 2, "-v")
    status, out, err = run(*arguments)
    answers = run_json(*arguments)[1]
    assert status == 0
    assert out == "\n".join(f"--- {a['request_id']} ---\n{a['prompt']}{a['text']}\n" for a in answers)
    assert "2 of 2 slots used" in err


def test_json_has_one_object_a_prompt_in_order(run_json, tokenizer, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("import os\nclass Naïve:\n")
    status, answers, _ = run_json("--prompt", "def f(", "--prompts", file, "--max-tokens", 6, "--slots", 1)
    assert status == 0
    assert [answer["prompt"] for answer in answers] == ["def f(", "import os", "class Naïve:"]
    assert [answer["request_id"] for answer in answers] == ["r0", "r1", "r2"]
    for answer in answers:
        assert answer.keys() == {"request_id", "prompt", "text", "token_ids", "finish_reason", "device"}
        assert answer["text"] == tokenizer.decode(answer["token_ids"])
        assert answer["finish_reason"] == "length"
        assert len(answer["token_ids"]) == 6


def test_logprobs_are_in_the_json_on_request(run_json):
    _, (answer,), _ = run_json("--prompt", "def f(", "--max-tokens", 5, "--logprobs", 2)
    assert len(answer["logprobs"]) == 5
    for token, entry in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert entry["token_id"] == token
        assert entry["rank"] == 1
        assert len(entry["top"]) == 2
        assert entry["top"][0] == {"token_id": token, "logprob": entry["logprob"]}
        assert entry["top"][1]["logprob"] <= entry["logprob"] <= 0


def test_objects_are_answered_each_as_it_asks(run_json, tmp_path):
    file = tmp_path / "all.jsonl"
    lines = [{"prompt": "def f(", "logprobs": 1}, {"prompt": "import", "max_tokens": 2}, {"prompt": "x", "stop": "0"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    status, answers, _ = run_json("--prompts", file, "--max-tokens", 4)
    assert status == 0
    assert [len(answer["token_ids"]) for answer in answers[:2]] == [4, 2]
    assert (answers[2]["finish_reason"], answers[2]["text"]) == ("stop", "0")
    assert [len(answer.get("logprobs", ())) for answer in answers] == [4, 0, 0]


def test_min_p_leaves_out_what_is_far_less_likely_than_the_best(run_json):
    def tokens(*options):
        return run_json("--prompt", "def ", "--max-tokens", 12, *options)[1][0]["token_ids"]

    assert tokens("--temperature", 1.5, "--seed", 6, "--min-p", 1) == tokens()  # the best alone, which is greedy
    assert tokens("--temperature", 1.5, "--seed", 6, "--min-p", 0.01) != tokens()


def broken_config(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "yarn"}}))
    return "rope_scaling"


def unknown_field(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": 8}))
    return "num_experts"


def truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return "model.safetensors"


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json: no such file"


@pytest.mark.parametrize("damage", [broken_config, unknown_field, truncated_weights, no_tokenizer])
def test_a_damaged_checkpoint_ends_before_anything_runs(run, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, folder)
    named = damage(folder)
    status, out, err = run("--prompt", "x", "--model", folder)
    assert (status, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


def test_a_bad_request_among_good_ones_ends_alone(run_json, tmp_path):
    file = tmp_path / "prompts"
    file.write_text(f"import\n{'x' * 4000}\ndef f(\n")
    status, answers, _ = run_json("--prompt", "", "--prompts", file, "--max-tokens", 5)
    assert status == 2
    assert [answer["finish_reason"] for answer in answers] == ["error", "length", "error", "length"]
    assert "the prompt has no tokens" in answers[0]["message"]
    assert "512" in answers[2]["message"]
    assert all("message" not in answer and len(answer["token_ids"]) == 5 for answer in (answers[1], answers[3]))


def test_a_bad_request_is_named_on_stderr_too(run):
    status, out, err = run("--prompt", "import", "--prompt", "", "--max-tokens", 3, "-q")
    assert status == 2
    assert "the prompt has no tokens" in err
    assert "--- r1 ---" in out


def test_blocks_too_few_for_some_are_errors_of_those(run_json):
    status, answers, _ = run_json("--prompt", "x", "--prompt", "y " * 60, "--max-tokens", 16, "--blocks", 2)
    assert status == 2
    assert [answer["finish_reason"] for answer in answers] == ["length", "error"]
    assert "KV blocks" in answers[1]["message"]
