"""``hal run``: the end of an answer, its printed part, the end of its request, and the summary."""

import itertools
import json
import shutil
import threading
from types import SimpleNamespace

import hal_engine.opening as opening
import numpy as np
import pytest
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason
from hal_engine.cli.run_output import Answers, Shown
from hal_engine.distributed.errors import RankLost
from hal_engine.engine import Engine, Finished
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.streaming import AnswerText
from hal_engine.model.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

PROMPT = ("--prompt", "if __name__ ==", "--max-tokens", 24)
pytestmark = pytest.mark.usefixtures("private_folders")


@pytest.fixture
def run(command):
    """Run the command here: ``run(*arguments)`` returns stdout, and stderr without the summary."""

    def call(*arguments):
        done = command("run", "--temperature", "0", *arguments)
        assert done.status == 0
        return done.out, [line for line in done.err.splitlines() if "tokens/s" not in line]

    return call


@pytest.fixture
def run_json(run):
    def call(*arguments):
        return [json.loads(line) for line in run("--json", *arguments)[0].splitlines()]

    return call


@pytest.fixture(scope="module")
def word_marks(tmp_path_factory):
    """The embedded weights with a tokenizer of the Llama-2 kind: a start token, word marks, bytes as a fallback."""
    folder = tmp_path_factory.mktemp("model") / "marks"
    shutil.copytree(DEFAULT_CHECKPOINT, folder)
    (folder / "tokenizer.json").unlink()
    letters = "abcdefghijklmnopqrstuvwxyz_(=):"
    words = ["<s>", "<unk>", "▁", *letters]
    pairs = [(mark + one, two) for mark in ("▁", "") for one, two in itertools.product(letters, letters)]
    merges = [("▁", letter) for letter in letters] + pairs
    words += ["▁" + letter for letter in letters] + ["".join(pair) for pair in pairs]
    words = [*dict.fromkeys(words)][:1792]
    merges = [pair for pair in merges if "".join(pair) in words]
    words += [f"<0x{byte:02X}>" for byte in range(256)]  # last: the model is not likely to choose these
    vocab = {word: at for at, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["embedded", "word marks"])
def model(request):
    return DEFAULT_CHECKPOINT if request.param == "embedded" else request.getfixturevalue("word_marks")


def ends_of(unstopped, tokenizer, stop):
    """How many of an answer's tokens complete ``stop``, and the text up to it."""
    prompt = tokenizer.encode(unstopped["prompt"])
    before = tokenizer.decode(prompt)
    for count in range(1, len(unstopped["token_ids"]) + 1):
        text = tokenizer.decode(prompt + unstopped["token_ids"][:count])[len(before) :]
        if stop in text:
            return count, text[: text.index(stop) + len(stop)]
    raise AssertionError(f"{stop!r} is not in the answer")


def test_the_answer_is_decoded_behind_its_prompt(run, run_json, model):
    tokenizer = Tokenizer.load(model, read_config(model))
    (answer,) = run_json("--model", model, *PROMPT)
    prompt = tokenizer.encode(answer["prompt"])
    assert tokenizer.decode(prompt) + answer["text"] == tokenizer.decode(prompt + answer["token_ids"])
    assert run("--model", model, *PROMPT)[0] == f"{answer['prompt']}{answer['text']}\n"


def test_a_stop_text_ends_the_answer_wherever_tokens_end(run, run_json, model):
    """Stop texts of all kinds: inside a token, across two, with a space before, and the longest possible."""
    tokenizer = Tokenizer.load(model, read_config(model))
    (unstopped,) = run_json("--model", model, *PROMPT)
    text = unstopped["text"]
    for begin, size in ((3, 1), (4, 2), (7, 5), (text.index(" ", 2), 3), (1, len(text) - 2)):
        stop = text[begin : begin + size]
        count, upto = ends_of(unstopped, tokenizer, stop)
        options = ("--model", model, *PROMPT, "--stop", "never so", "--stop", stop, "--logprobs", 1)
        (answer,) = run_json(*options)
        assert (answer["finish_reason"], answer["text"]) == ("stop", upto)
        assert answer["token_ids"] == unstopped["token_ids"][:count]
        assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert run(*options[:-2])[0] == f"{unstopped['prompt']}{upto}\n"


def test_a_stop_text_that_never_comes_changes_nothing(run_json):
    assert run_json(*PROMPT, "--stop", "never so") == run_json(*PROMPT)


def test_a_stop_text_before_min_tokens_is_passed_over(run_json):
    (unstopped,) = run_json(*PROMPT)
    stop = unstopped["text"][:2]
    (answer,) = run_json(*PROMPT, "--stop", stop, "--min-tokens", 12)
    assert answer["token_ids"] == unstopped["token_ids"][: len(answer["token_ids"])]
    assert len(answer["token_ids"]) >= 12


def test_one_answer_that_stops_takes_no_other_along(run_json):
    prompts = ("--prompt", "def main(", "--prompt", "for i in range(", "--prompt", "with open(", "--max-tokens", 16)
    unstopped = run_json(*prompts, "--slots", 2)
    stop = unstopped[1]["text"][4:9]
    assert stop not in unstopped[0]["text"] + unstopped[2]["text"]
    answers = run_json(*prompts, "--slots", 2, "--stop", stop)
    assert [answer["finish_reason"] for answer in answers] == ["length", "stop", "length"]
    assert (answers[0], answers[2]) == (unstopped[0], unstopped[2])
    assert answers[1]["text"] == unstopped[1]["text"].partition(stop)[0] + stop


def test_the_request_is_aborted_where_its_text_stops(run, monkeypatch):
    """Each step waits until the one before has been read: then two more run at most, that in which the text is read
    and the one that aborts."""
    read, engines = threading.Semaphore(1), []

    class InStep(Engine):
        def step(self):
            assert read.acquire(timeout=60)
            return super().step()

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(self)

    take = Answers.take

    def taken(self, record):
        take(self, record)
        read.release()

    monkeypatch.setattr(opening, "Engine", InStep)
    monkeypatch.setattr(Answers, "take", taken)
    unstopped = json.loads(run("--json", *PROMPT)[0])
    assert engines.pop().steps == len(unstopped["token_ids"])
    read.release()  # the last step of that run was read after it
    while read.acquire(blocking=False):
        pass
    read.release()
    stop = unstopped["text"][:4]
    answer = json.loads(run("--json", "--prompt", "if __name__ ==", "--max-tokens", 400, "--stop", stop)[0])
    assert answer["text"] == stop
    assert engines.pop().steps <= len(answer["token_ids"]) + 2


def test_fields_that_change_nothing_are_named_in_one_line(run, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"is_llama_config": True, "unsloth_fixed": True}))
    out, notes = run("--model", folder, *PROMPT, "-v")
    assert "hal: config.json: these change nothing at inference: is_llama_config, unsloth_fixed" in notes
    assert (out, []) == run(*PROMPT)


def test_end_tokens_are_those_of_the_generation_config(run_json, tmp_path):
    (unstopped,) = run_json(*PROMPT)
    folder = tmp_path / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, folder)
    last = unstopped["token_ids"][6]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, 5]}))
    (answer,) = run_json("--model", folder, *PROMPT)
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == unstopped["token_ids"][: unstopped["token_ids"].index(last) + 1]


# -- records of several tokens a row, as speculation gives them, straight into the answers -----------------------------


class Pages:
    """A screen that records its input."""

    def __init__(self):
        self.written, self.notes = [], []

    def write(self, text):
        self.written.append(text)

    def note(self, text):
        self.notes.append(text)

    def progress(self, text):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEFAULT_CHECKPOINT, read_config(DEFAULT_CHECKPOINT))


def answers_to(tokenizer, stops, count=1, logprobs=None, **options):
    """Answers to so many prompts ``x``, and their screen."""
    requests = [
        Request(f"r{n}", tokenizer.encode("x"), SamplingParams(max_tokens=64, logprobs=logprobs)) for n in range(count)
    ]
    plan = SimpleNamespace(
        requests=requests, prompts=["x"] * count, answer=lambda r: AnswerText(tokenizer.stream(r.prompt), stops)
    )
    screen = Pages()
    return Answers(plan, screen, **{"device": None, **options}), screen


def record(position, tokens, finish=FinishReason.NONE, name="r0"):
    """One row of a request with log-probabilities of one alternative."""
    ids = np.array(tokens, np.int64)
    return OutputRecord(
        step=position,
        request_ids=(name,),
        status=np.array([SlotStatus.TOKEN if tokens else SlotStatus.ABORTED], np.uint8),
        finish=np.array([finish], np.uint8),
        positions=np.array([position]),
        counts=np.array([len(tokens)], np.int32),
        tokens=ids,
        first_token=np.array([False]),
        logprob_token_ids=np.stack([ids, ids], axis=1),
        logprobs=np.zeros((len(tokens), 2), np.float32),
        ranks=np.ones(len(tokens), np.int32),
    )


def test_tokens_behind_a_stop_text_in_the_same_row_are_given_out_nowhere(tokenizer):
    tokens = tokenizer.encode(" = 1\nif y:\n    z")
    answers, screen = answers_to(tokenizer, ["\ni"], device={"name": "cpu:0"}, logprobs=1)
    answers.take(record(0, tokens))
    (answer,) = map(json.loads, screen.written)
    count, text = ends_of({"prompt": "x", "token_ids": tokens}, tokenizer, "\ni")
    assert count < len(tokens)
    assert (answer["text"], answer["finish_reason"]) == (text, "stop")
    assert answer["device"] == {"name": "cpu:0"}
    assert answer["token_ids"] == tokens[:count]
    assert [entry["token_id"] for entry in answer["logprobs"]] == tokens[:count]
    assert (answers.tokens, [*answers.stopped]) == (count, ["r0"])


def test_what_comes_after_a_stop_is_passed_over(tokenizer):
    """The request runs on until it is aborted: its further tokens, its end in a record, and its end by the engine."""
    tokens = tokenizer.encode("ab")
    answers, screen = answers_to(tokenizer, ["b"])
    answers.take(record(0, tokens))
    written = [*screen.written]
    assert "".join(written) == "xab\n"
    answers.take(record(len(tokens), tokens))
    answers.take(record(2 * len(tokens), [], FinishReason.ABORT))
    answers.end(Finished("r0", (*tokens, *tokens), FinishReason.ABORT, reported=False))
    assert (screen.written, screen.notes, answers.tokens, answers.ended) == (written, [], len(tokens), 1)
    assert (answers.failed, answers.incomplete) == ([], [])


def test_the_beginning_of_a_stop_text_waits_until_it_is_none(tokenizer):
    answers, screen = answers_to(tokenizer, ["ab!"])
    written = []
    for at, token in enumerate([tokenizer.encode(letter)[0] for letter in "zabz"]):
        answers.take(record(at, [token]))
        written.append("".join(screen.written))
    assert written == ["xz", "xz", "xz", "xzabz"]


@pytest.mark.parametrize("device", [None, {"name": "cpu:0"}], ids=["text", "json"])
def test_complete_answers_behind_one_of_a_lost_rank_are_shown(tokenizer, device):
    """Of three groups of ranks the first is lost in its answer; the third has only begun."""
    tokens = tokenizer.encode("ab")
    answers, screen = answers_to(tokenizer, [], count=4, device=device)
    answers.take(record(0, tokens))
    for name in ("r1", "r3"):
        answers.take(record(0, tokens, name=name))
        answers.end(Finished(name, (*tokens,), FinishReason.LENGTH, reported=False))
    with pytest.raises(RankLost), Shown().by(answers):
        raise RankLost("rank 0 was lost", 0, 3, [("r0", 2, -1), ("r2", 0, -1)])
    shown = "".join(screen.written)
    if device is None:
        assert shown == "--- r0 ---\nxab\n\n--- r1 ---\nxab\n\n--- r3 ---\nxab\n"
    else:
        assert [json.loads(line)["request_id"] for line in shown.splitlines()] == ["r1", "r3"]
