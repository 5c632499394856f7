"""The steps of a tokenizer's decoder, and a check that their results are bounded. Imports no framework."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hal_core import InvalidValue
from tokenizers import Tokenizer as _Backend

LONGEST = 16
"""Most growth of a text by all of a decoder's steps together, as a multiple of its tokens' length."""

Step = dict[str, Any]
"""One step, as in ``tokenizer.json``."""


def steps_of(backend: _Backend) -> dict[str, Step]:
    """Return the steps of the decoder in their order, by the name of their field."""
    steps: dict[str, Step] = {}

    def collect(step: Step, field: str) -> None:
        if step["type"] != "Sequence":
            steps[field] = step
        for number, part in enumerate(step.get("decoders", ())):
            collect(part, f"{field}.decoders[{number}]")

    if backend.decoder is not None:
        collect(json.loads(backend.decoder.__getstate__()), "decoder")
    return steps


def check_steps(steps: dict[str, Step], source: str) -> None:
    """Raise ``InvalidValue`` naming ``source`` and the field for steps with unbounded time or memory. The decoder is
    called for each token, so it does not run in a bounded child as encoding does."""
    longer = 1.0
    for field, step in steps.items():
        if step["type"] == "Replace" and "Regex" in step["pattern"]:
            raise _refusal(source, f"{field}.pattern: is a regular expression, which may backtrack without end")
        longer *= growth(step)
        if longer > LONGEST:
            what = f"makes a text, with the steps before it, more than {LONGEST} times as long as its tokens"
            raise _refusal(source, f"{field}: {what}")


def is_by_token(steps: Sequence[Step]) -> bool:
    """Whether a token adds the same text behind any complete character: no step looks at the joined text but to shorten
    its begin. (Runs of byte tokens are apart.)"""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    joined = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    return (
        bool(kinds)
        and {*kinds[:joined]} <= {"Replace", "ByteFallback", "Metaspace"}
        and all(step["type"] == "Strip" and not step["stop"] for step in steps[joined + 1 :])
    )


def growth(step: Step) -> float:
    """Return the most bytes that a step makes per byte of a token. Steps not listed here do not lengthen the text."""
    if step["type"] == "Replace":
        old, new = step["pattern"]["String"], step["content"]
    elif step["type"] in ("BPEDecoder", "CTC"):
        old, new = step.get("suffix", step.get("word_delimiter_token", "")), " "
    else:
        return 1.0
    before, after = len(old.encode()), len(new.encode())
    return max(1.0, after / before) if old else 1.0 + 2 * after  # an empty pattern matches around every character


def _refusal(source: str, what: str) -> InvalidValue:
    return InvalidValue(
        what, cure="replace one text by another that is not longer, or use another checkpoint", argument=source
    )
