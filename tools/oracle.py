"""Compare ``hal run`` with transformers on small random checkpoints that transformers itself makes and saves.

    python tools/oracle.py --python DIR/bin/python [--record FILE]
    python tools/oracle.py --only Qwen3 --options="--device cuda --runner torch --dtype float32"

``--python`` is an interpreter that has transformers and torch (this one, if not given); hal needs neither. For each
family, tied or not, in one file or sharded: transformers saves a checkpoint and generates greedily from what it saved,
and ``hal run --json`` answers the same prompts, fed whole and in pieces. The status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

VOCAB, END, NEW_TOKENS = 512, 2, 48
LENGTHS = (1, 2, 7, 16, 33, 64, 200, 700)
"""Tokens of the prompts."""
RUNS: Mapping[str, Sequence[str]] = {
    "whole": ("--chunk", "1024", "--slots", "8"),
    "in pieces of 5": ("--chunk", "5", "--slots", "3"),
}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}


class Family(NamedTuple):
    """Shape of a family's checkpoint."""

    model: str
    dtype: str
    fields: Mapping[str, Any]


FAMILIES = {
    "Llama 3.1": Family(
        "Llama", "float32", {"rope_parameters": _LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 128}}
    ),
    "Llama 3.2": Family(
        "Llama",
        "bfloat16",
        {"head_dim": 32, "rope_parameters": _LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 256}},
    ),
    "Qwen2.5": Family("Qwen2", "bfloat16", {"rms_norm_eps": 1e-6}),
    "Qwen3": Family("Qwen3", "bfloat16", {"head_dim": 48}),
    "Qwen3, with bias": Family("Qwen3", "float32", {"attention_bias": True}),
    "Mistral": Family("Mistral", "float16", {"sliding_window": None, "head_dim": 24}),
}
KINDS = tuple(product(FAMILIES, (False, True), (False, True)))
"""Family, tied, sharded."""


def prompts() -> list[list[int]]:
    """Token ids of the prompts, the same in every process."""
    draw = random.Random(13)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def folder(directory: Path, number: int) -> Path:
    """Return the path of the checkpoint of ``KINDS[number]``."""
    return directory / f"checkpoint-{number}"


def kinds(only: str) -> Iterator[tuple[int, tuple[str, bool, bool]]]:
    """Return those of ``KINDS`` whose family has ``only`` in its name, with their numbers."""
    return ((number, kind) for number, kind in enumerate(KINDS) if only in kind[0])


def generate(directory: Path, only: str) -> None:
    """With transformers: save every checkpoint, and the output of ``generate`` as ``expected.json`` beside it."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for number, (name, tied, sharded) in kinds(only):
        family, target = FAMILIES[name], folder(directory, number)
        torch.manual_seed(number)
        config_class = getattr(transformers, f"{family.model}Config")
        model_class = getattr(transformers, f"{family.model}ForCausalLM")
        model = model_class(config_class(**_SIZES, **family.fields, tie_word_embeddings=tied))
        with torch.no_grad():
            for parameter in model.parameters():  # far from the initial values, so that every part matters
                parameter.copy_(torch.randn_like(parameter) * 0.25 + (parameter.ndim == 1) * 0.5)
        size = "100KB" if sharded else "1GB"
        model.to(getattr(torch, family.dtype)).save_pretrained(target, max_shard_size=size)
        _save_tokenizer(target)
        saved = model_class.from_pretrained(target, dtype=torch.float32).eval()
        answers = [_answer(torch, saved, prompt) for prompt in prompts()]
        (target / "expected.json").write_text(json.dumps(answers))
    packages = {name: version(name) for name in ("transformers", "torch")}
    (directory / "versions.json").write_text(json.dumps(packages))


def _save_tokenizer(target: Path) -> None:
    """A tokenizer whose words are the ids themselves: a prompt is the text of its ids."""
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(target / "tokenizer.json"))


def _answer(torch: Any, model: Any, prompt: Sequence[int]) -> dict[str, Any]:  # noqa: ANN401 (modules without types)
    """The greedy tokens, and the lead of each over the second best."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].topk(2).values.tolist() for logits in out.logits]
    return {"tokens": out.sequences[0, len(prompt) :].tolist(), "leads": [first - second for first, second in best]}


def compare(directory: Path, only: str, more: Sequence[str]) -> Iterator[tuple[str, int, int, list[str]]]:
    """With hal: for each checkpoint its name, answers, tokens, and a line for each answer that differs."""
    for number, (name, tied, sharded) in kinds(only):
        target = folder(directory, number)
        files = len(list(target.glob("*.safetensors")))
        if sharded != (files > 1):
            raise RuntimeError(f"{target} has {files} files of tensors")
        expected = json.loads((target / "expected.json").read_text())
        tokens, different = 0, []
        for how, options in RUNS.items():
            for at, (answer, want) in enumerate(zip(_run(directory, target, (*options, *more)), expected, strict=True)):
                tokens += len(want["tokens"])
                if answer["token_ids"] != want["tokens"]:
                    different.append(f"{how}, prompt {at}: {_difference(answer['token_ids'], want)}")
        title = f"{name}, {'tied' if tied else 'not tied'}, {f'{files} files' if sharded else 'one file'}"
        yield title, len(RUNS) * len(expected), tokens, different


def _run(directory: Path, target: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """The answers of ``hal run``."""
    texts = directory / "prompts.txt"
    texts.write_text("".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts()))
    command: list[object] = [
        sys.executable,
        "-c",
        "from hal.cli import main; main()",
        "run",
        "--json",
        "--device",
        "cpu",
    ]
    command += ["--model", target, "--prompts", texts, "--temperature=0", "--max-tokens", NEW_TOKENS, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"hal run: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _difference(got: Sequence[int], want: Mapping[str, Any]) -> str:
    """Return where two answers differ, and how large transformers' lead was there."""
    tokens = want["tokens"]
    at = next((i for i, (a, b) in enumerate(zip(got, tokens, strict=False)) if a != b), min(len(got), len(tokens)))
    lead = f"{want['leads'][at]:.2g}" if at < len(want["leads"]) else "none"
    return f"parts at token {at}, {got[at : at + 1]} for {tokens[at : at + 1]}, whose lead is {lead}"


def report(directory: Path, results: Sequence[tuple[str, int, int, list[str]]]) -> str:
    """The record as Markdown."""
    packages = json.loads((directory / "versions.json").read_text())
    packages |= {name: version(name) for name in ("paddle-hal", "paddlepaddle", "numpy")}
    of = f"{len(LENGTHS)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, up to {NEW_TOKENS} greedy tokens each"
    total = [
        sum(column)
        for column in zip(*((answers, tokens, len(bad)) for _, answers, tokens, bad in results), strict=True)
    ]
    lines = [
        "# hal run against transformers' generate",
        "",
        "    python tools/oracle.py --python PYTHON --record docs/evidence/checkpoints.md",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, cpu, Python {platform.python_version()}, "
        + ", ".join(f"{name} {number}" for name, number in packages.items()),
        "",
        f"Small random checkpoints, made and saved by transformers; {of}. hal answers each twice: prompts fed",
        f"{' and '.join(RUNS)} ({'; '.join(' '.join(options) for options in RUNS.values())}).",
        "",
        "| checkpoint | stored as | answers | tokens | answers that differ |",
        "|---|---|---|---|---|",
    ]
    for title, answers, tokens, bad in results:
        lines.append(f"| {title} | {FAMILIES[_family(title)].dtype} | {answers} | {tokens:,} | {len(bad)} |")
    lines += ["| all | | {} | {:,} | {} |".format(*total), ""]
    lines += [f"- {title}: {line}" for title, _, _, bad in results for line in bad]
    return "\n".join(lines).rstrip() + "\n"


def _family(title: str) -> str:
    return max((name for name in FAMILIES if title.startswith(name)), key=len)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has transformers and torch")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the counts here, as Markdown")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="take the families alone that have this in their name"
    )
    parser.add_argument("--options", default="", help="further options of hal run, as one argument")
    parser.add_argument("--generate", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.generate:
        generate(chosen.generate, chosen.only)
        return 0
    missing = "import importlib.util as u, sys; sys.exit(not (u.find_spec('transformers') and u.find_spec('torch')))"
    if subprocess.run([chosen.python, "-c", missing], check=False).returncode:
        print(f"{chosen.python} has no transformers or no torch: give one that has with --python", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        subprocess.run([chosen.python, __file__, "--generate", name, "--only", chosen.only], check=True)
        results = []
        for title, answers, tokens, bad in compare(directory, chosen.only, chosen.options.split()):
            print(f"{title}: {answers} answers, {tokens} tokens, {len(bad)} differ", flush=True)
            print("".join(f"  {line}\n" for line in bad), end="")
            results.append((title, answers, tokens, bad))
        if chosen.record:
            chosen.record.write_text(report(directory, results), encoding="utf-8")
    return int(any(bad for *_, bad in results))


if __name__ == "__main__":
    sys.exit(main())
