"""``hal run --speculate``: the same answers with any proposer, on any device; its summary of drafts; its refusals."""

import json
import re
import shutil

import pytest
from hal_engine.model import DEFAULT_CHECKPOINT

GREEDY = ("--prompt", "def main(", "--prompt", "try:\n    ", "--temperature=0", "--max-tokens", 24)
DRAWN = (*GREEDY, "--temperature", 0.7, "--top-p", 0.9, "--seed", 3, "--logprobs", 2, "--blocks", 5, "--chunk", 3)
MARGIN = 1e-3
pytestmark = pytest.mark.usefixtures("private_folders")


@pytest.fixture
def run(command):
    """Run the command here; return the exit status, the JSON objects, and stderr."""

    def call(*arguments):
        done = command("run", "--json", "-v", *arguments)
        return done.status, done.answers, done.err

    return call


def answers(objects):
    """Return the answers, without log-probabilities."""
    texts = [(o["request_id"], o["token_ids"], o["finish_reason"]) for o in objects]
    logprobs = [(e["token_id"], e["rank"], e["logprob"]) for o in objects for e in o.get("logprobs", ())]
    return texts, logprobs


@pytest.mark.parametrize(
    "options", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.conform), pytest.param(DRAWN, id="drawn")]
)
def test_the_answers_are_the_same_whatever_drafts(run, options):
    code, objects, err = run("--device", "cpu", *options)
    assert code == 0
    assert "drafts" not in err
    assert "speculation" not in objects[0]
    expected, logprobs = answers(objects)
    for device, name in (("cpu", "naive"), ("cpu", "ngram"), ("cpu", "mtp"), ("sim", "mtp"), ("sim", "hybrid")):
        code, objects, err = run("--device", device, *options, "--speculate", name, "--drafts", 5)
        assert code == 0, err
        found, values = answers(objects)
        assert found == expected, (device, name)
        assert [(token, rank) for token, rank, _ in values] == [(token, rank) for token, rank, _ in logprobs]
        assert all(abs(one[2] - other[2]) < MARGIN for one, other in zip(values, logprobs, strict=True))
        counts = re.search(r"(\d+) of (\d+) drafts accepted, (\d+\.\d+) tokens a step", err)
        assert counts is not None
        accepted, drafted, rate = int(counts[1]), int(counts[2]), float(counts[3])
        parts = [o["speculation"] for o in objects]
        assert {part["proposer"] for part in parts} == {name}
        assert sum(part["accepted"] for part in parts) == accepted <= drafted <= sum(part["drafted"] for part in parts)
        assert rate == 1 if name == "naive" else rate > 1


def test_rejection_changes_no_greedy_token(run):
    _, plain, _ = run("--device", "cpu", *GREEDY)
    code, objects, err = run("--device", "cpu", *GREEDY, "--speculate", "mtp", "--acceptance", "rejection")
    assert code == 0
    assert answers(objects) == answers(plain)
    assert " drafts accepted" in err


@pytest.fixture
def headless(tmp_path):
    """A checkpoint without a prediction layer, according to its configuration."""
    directory = shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "headless")
    fields = json.loads((directory / "config.json").read_text())
    del fields["num_nextn_predict_layers"]
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("name", ["mtp", "hybrid", "mtp+suffix"])
def test_a_checkpoint_without_a_prediction_layer_is_refused(run, headless, name):
    code, objects, err = run("--device", "cpu", "--prompt", "a", "--model", headless, "--speculate", name)
    assert (code, objects) == (2, [])
    assert "--speculate" in err
    assert "no multi-token-prediction layer" in err
