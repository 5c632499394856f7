"""Measures the shipped checkpoint and writes its card: ``python -m training.evaluate [--directory DIR]``.

Held-out loss against a unigram model of the same tokens, and the share of sampled continuations that Python's own
``tokenize`` accepts. Writes ``evaluation.json`` and ``README.md`` into the checkpoint's directory. Reads the model
through the same loader and decoder that users run.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.card import card
from training.corpus import Corpus, read_corpus

if TYPE_CHECKING:
    from hal.model.llama import LlamaModel
    from hal.model.tokenizer import Tokenizer
    from training.dense import DenseModel

DEFAULT_DIRECTORY = Path(__file__).parent.parent / "hal" / "model" / "default"
STRIDE = 256  # a held-out token is scored with at least this much context, where its file has it
SAMPLES, SAMPLE_TOKENS, TEMPERATURE, TOP_P, SEED = 50, 100, 0.7, 0.9, 20261120
MOST_LINES, MOST_PROMPT = 60, 300  # a prompt ends before line 60 of its file, within 300 tokens
END = 0  # <|endoftext|>


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 ``[n, vocab]`` log-probabilities."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    scores: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return scores


def file_loss(model: DenseModel, ids: list[int], *, mtp: bool = False) -> tuple[float, int]:
    """Sum of -log p (nats) and number of tokens over one file and its end, each file starting afresh after the end
    token, in windows that overlap by half so that no token is scored without context."""
    context = model.config.max_position_embeddings
    text = [END, *ids, END]
    ahead = 2 if mtp else 1
    total, count, scored = 0.0, 0, ahead  # tokens before index `scored` are done (or cannot be predicted)
    for start in range(0, max(1, len(text) - ahead), STRIDE):
        window = text[start : start + context]
        if start + len(window) <= scored:
            break
        scores = log_softmax(model.mtp_logits(window) if mtp else model.logits(window))
        targets = np.arange(scored, start + len(window))
        total -= float(scores[targets - start - ahead, np.array(text)[targets]].sum())
        count += len(targets)
        scored = start + len(window)
    return total, count


def unigram_loss(training: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """float64 ``[files]``: sum of -log p (nats) of each held-out file and its end, under the add-one smoothed
    frequencies of the training half's tokens."""
    counts = np.ones(vocab) + np.bincount(np.concatenate([[*ids, END] for ids in training]), minlength=vocab)
    scores = -np.log(counts / counts.sum())
    return np.array([scores[[*ids, END]].sum() for ids in held_out])


def sample(model: LlamaModel, prompt: list[int], rng: np.random.Generator) -> tuple[list[int], bool]:
    """Up to ``SAMPLE_TOKENS`` tokens after ``prompt`` by temperature and nucleus sampling (Holtzman et al. 2020), and
    whether the text ended by itself."""
    from hal.model.batch import ModelBatch

    size = 16
    blocks = -(-(len(prompt) + SAMPLE_TOKENS) // size)
    model.allocate_cache(blocks, size)
    table = np.arange(blocks, dtype=np.int32)[None]
    generated: list[int] = []
    chunk, done = prompt, 0
    while len(generated) < SAMPLE_TOKENS:
        positions = np.arange(done, done + len(chunk))
        lengths, context = np.array([len(chunk)], np.int32), np.array([done], np.int32)
        logits = model.forward(ModelBatch(np.array(chunk), positions, lengths, context, table))
        assert logits is not None  # the model is whole
        token = draw(logits[0], rng)
        if token == END:
            return generated, True
        done, chunk = done + len(chunk), [token]
        generated.append(token)
    return generated, False


def draw(logits: np.ndarray, rng: np.random.Generator) -> int:
    """One token: the smallest set of tokens that holds ``TOP_P`` of the probability, renormalised."""
    chances = np.exp(log_softmax(logits[None] / TEMPERATURE)[0])
    order = np.argsort(-chances)
    kept = order[: int(np.searchsorted(np.cumsum(chances[order]), TOP_P)) + 1]
    return int(rng.choice(kept, p=chances[kept] / chances[kept].sum()))


def verdict(text: str, ended: bool) -> str:
    """Return ``"ok"``, ``"open"`` or the error of Python's tokenizer for ``text``.

    A text that was cut by the token limit loses its last line, which is cut anywhere, and may end inside a bracket or a
    string of several lines ("open"): the cut, not the model, left it open. Everything else that raises counts as wrong,
    and so does every ERRORTOKEN (Python 3.11 reports a stray character or quote that way and continues).
    """
    if not ended:
        text = text[: text.rfind("\n") + 1]
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.ERRORTOKEN and token.string.strip():
                return f"error token {token.string!r}"
    except tokenize.TokenError as error:
        opened = any(
            text in str(error) for text in ("EOF in multi-line", "unterminated triple-quoted")
        )  # 3.11; 3.12 on
        return "open" if opened and not ended else str(error)
    except SyntaxError as error:  # IndentationError among them
        return str(error)
    return "ok"


def prompts(held_out: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """``SAMPLES`` prompts from held-out files in turn: the first lines of a file, a random number of them, up to a line
    end outside any string and bracket."""
    rng = np.random.default_rng(SEED)
    chosen: list[list[int]] = []
    for text in itertools.cycle(held_out):
        lines = text.splitlines(keepends=True)
        starts = ("".join(lines[:end]) for end in range(1, min(len(lines), MOST_LINES)))
        encoded = (tokenizer.encode(start) for start in starts if verdict(start, ended=True) == "ok")
        fitting = [ids for ids in encoded if len(ids) <= MOST_PROMPT]
        if fitting:
            chosen.append(fitting[rng.integers(len(fitting))])
        if len(chosen) == SAMPLES:
            return chosen
    raise AssertionError("no held-out text")


def losses(model: DenseModel, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, Any]:
    """Held-out losses in nats a byte, over all held-out files and without ``encodings/``, whose tables are easy."""
    texts = [text for _, text in corpus.held_out]
    ids = [tokenizer.encode(text) for text in texts]
    unigram = unigram_loss([tokenizer.encode(text) for _, text in corpus.training], ids, model.config.vocab_size)
    main = np.array([file_loss(model, file)[0] for file in ids])
    mtp = np.array([file_loss(model, file, mtp=True)[0] for file in ids])
    size = np.array([len(text.encode()) for text in texts])
    code = np.array([not name.startswith("encodings/") for name, _ in corpus.held_out])
    result: dict[str, Any] = {}
    for part, chosen in (("held_out", code | True), ("held_out_without_encodings", code)):
        total = size[chosen].sum()
        values = {"model": main, "mtp_second_token": mtp, "unigram": unigram}
        result[part] = {name: round(float(value[chosen].sum() / total), 4) for name, value in values.items()}
        result[part]["bytes"] = int(total)
        result[part]["model_over_unigram"] = round(float(main[chosen].sum() / unigram[chosen].sum()), 4)
    return result


def samples(model: LlamaModel, tokenizer: Tokenizer, corpus: Corpus) -> list[dict[str, Any]]:
    """Every sampled continuation with its prompt and verdict."""
    rng = np.random.default_rng(SEED)
    rows = []
    for prompt in prompts([text for _, text in corpus.held_out], tokenizer):
        generated, ended = sample(model, prompt, rng)
        before, after = tokenizer.decode(prompt), tokenizer.decode(generated)
        rows.append({"prompt": before, "text": after, "ended": ended, "verdict": verdict(before + after, ended)})
    return rows


def evaluate(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All measurements of the checkpoint in ``directory``, and the samples."""
    from hal.model.llama import LlamaModel
    from hal.model.tokenizer import Tokenizer
    from training.dense import DenseModel

    model, corpus = LlamaModel.load(directory), read_corpus()
    tokenizer = Tokenizer.load(directory, model.config)
    rows = samples(model, tokenizer, corpus)
    verdicts = [row["verdict"] for row in rows]
    result = losses(DenseModel.load(directory), tokenizer, corpus)
    result["samples"] = {
        "count": len(rows),
        "tokenize": verdicts.count("ok"),
        "open_at_the_cut": verdicts.count("open"),
        "wrong": len(rows) - verdicts.count("ok") - verdicts.count("open"),
    }
    return result, rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="the checkpoint's directory")
    parser.add_argument("--samples", type=Path, help="also write the samples here, as JSON")
    options = parser.parse_args()
    result, rows = evaluate(options.directory)
    if options.samples:
        options.samples.write_text(json.dumps(rows, indent=1))
    (options.directory / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    record = json.loads((options.directory / "training.json").read_text())
    (options.directory / "README.md").write_text(card(record, result))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
