"""The text of the default checkpoint's card, from what training and evaluation recorded."""

from __future__ import annotations

from typing import Any

DATE = "2026-11-22"

_CARD = """\
# The embedded default checkpoint

A Llama-architecture decoder of {parameters:,} parameters, trained on the sources of the Python standard library, so
that `hal run` has a real model to run without a download. It writes text that looks like Python. It knows nothing else,
and its programs are not meant to work.

Written by `python -m training.evaluate` on {date}; do not edit.

| | |
|---|---|
| architecture | {layers} layers, hidden {hidden}, {heads} attention heads, {kv_heads} key/value heads, \
SwiGLU {intermediate}, RMSNorm, rotary positions, tied embeddings |
| multi-token prediction | one layer (DeepSeek-V3 style, `num_nextn_predict_layers: 1`), trained jointly{drafting}, \
counted in the parameters; it takes the decoder's output after the last norm |
| context | {context} tokens |
| tokenizer | byte-level BPE, {vocab} tokens, `<\\|endoftext\\|>` (id 0) begins and ends every file |
| stored as | float16, computed in float32 |
| made with | {versions} |
| command | `{command}` ({cpu:.0f} minutes of processor time over two cores, {minutes:.0f} by the clock{note}) |
| tokens seen | {seen:,} ({epochs:.1f} times the training half) |

## Corpus and license

The `.py` files of CPython {python}'s standard library: {training_files} files ({training_bytes:,} bytes,
{training_tokens:,} tokens) for training, {held_out_files} files ({held_out_bytes:,} bytes) held out. Left out: all
tests, `idlelib`, `lib2to3`, `pydoc_data` (the manual as one string), the build's settings and third-party packages. One
file in twenty is held out, by the hash of its path (`training/corpus.py`).

The sources are © the Python Software Foundation and contributors, under the PSF License Version 2. The checkpoint is
distributed under this repository's license (Apache-2.0); text that it reproduces from the corpus stays under the PSF's.

## Measured on the shipped files

Held-out loss in nats a byte; a file's tokens and its end, each file on its own, windows of {context} tokens that
overlap by half. The unigram model has the add-one smoothed frequencies of the training half's tokens. `encodings/`
holds tables that are easy to predict, so the loss without them is given, too. The prediction layer's loss is for the
token after the next, given the next: it knows as much as the model does one token later, and is one layer deeper. It
was trained to say what the model says there and not what the text does, which its drafts are measured by.

| | bytes | model | unigram | model / unigram | MTP layer |
|---|---|---|---|---|---|
| all held-out files | {all[bytes]:,} | {all[model]:.3f} | {all[unigram]:.3f} | {all[model_over_unigram]:.1%} | \
{all[mtp_second_token]:.3f} |
| without `encodings/` | {code[bytes]:,} | {code[model]:.3f} | {code[unigram]:.3f} | {code[model_over_unigram]:.1%} | \
{code[mtp_second_token]:.3f} |

Of {samples[count]} sampled continuations of 100 tokens, **{samples[tokenize]}** tokenize with Python's `tokenize` to
the end, {samples[open_at_the_cut]} more are correct up to the cut but end inside a bracket or a string of several
lines, and {samples[wrong]} are wrong. The rule: prompts are beginnings of held-out files, up to a line end outside any
string and bracket; temperature 0.7, top-p 0.9, seeded; prompt and continuation are tokenized together; a continuation
that the limit cut loses its last, incomplete line; an exception counts as wrong, and so does an ERRORTOKEN.
"""

_DRAFTING = (
    """, then alone for what it drafts (`{command}`: {tokens[seen]:,} tokens, {cpu_seconds} s of processor time)"""
)


def card(record: dict[str, Any], result: dict[str, Any]) -> str:
    """``README.md``: ``record`` is ``training.json``, ``result`` is ``evaluation.json``."""
    shape, tokens = record["shape"], record["tokens"]
    versions = record["versions"]
    return _CARD.format(
        **{name: shape[name] for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "context", "vocab")},
        parameters=record["parameters"],
        date=DATE,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        command=record["command"],
        drafting=_DRAFTING.format(**record["prediction"]) if "prediction" in record else "",
        note="; " + record["note"] if "note" in record else "",
        minutes=record["seconds"] / 60,
        cpu=record["cpu_seconds"] / 60,
        seen=tokens["seen"],
        epochs=tokens["seen"] / tokens["training"],
        python=versions["python"],
        training_files=record["files"]["training"],
        training_bytes=record["bytes"]["training"],
        training_tokens=tokens["training"],
        held_out_files=record["files"]["held_out"],
        held_out_bytes=record["bytes"]["held_out"],
        all=result["held_out"],
        code=result["held_out_without_encodings"],
        samples=result["samples"],
    )
