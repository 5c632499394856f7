r"""Regular expressions of tokenizers that are known to take linear time, compared as text.

Oniguruma backtracks, and no reading of a pattern short of its whole syntax proves that it does so little. Each entry
here was read by a person. All have one form: alternatives that each read a run of one class of characters, or two runs
one behind the other. If an alternative fails, it has given back each character of its run at most once for each of its
runs, and another alternative then takes the run, but for its last character at most. So each character is read a
bounded number of times.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as _Backend

from .decoder import LONGEST, growth

# `\s*[\r\n]+`, where no line end follows the white space: each character of the run is given back once. Then
# `\s+(?!\S)` takes the run but for its last character, which the next match begins with.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # bounded: at most three characters
# `[upper]*[lower]+` and `[upper]+[lower]*` share \p{Lm}, \p{Lo} and \p{M}. A run without lower case is given back once
# by the first; the second then takes all of it.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # bounded: one character
_DEEPSEEK = (  # `[...][A-Za-z]+`, `[^...]?[\p{L}\p{M}]+` and ` ?[\p{P}\p{S}]+` begin with one character each
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"""
)

LINEAR = frozenset(
    {
        # hal's own checkpoint: runs of letters, of digits (three at most), of other signs, of spaces, of line ends.
        r"\n[\n ]*|[ ]?[A-Za-z_]+|[ ]?[0-9]{1,3}|[ ]?[^\sA-Za-z_0-9]+|[ ]+(?! )|\s+",
        # GPT-2, in its two spellings: runs of letters, of numbers, of other signs, of white space.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3 and GPT-4 (numbers of three at most), Qwen 2 to 3 (of one): as GPT-2, with line ends behind signs.
        rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # Qwen 3.5: as Qwen 3, with marks among the letters.
        rf"{_SUFFIXES}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # Mistral (Tekken), and GPT-4o with suffixes: two runs of letters, see _UPPER.
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIXES}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        # DeepSeek V3 and R1: three patterns one after another; the third also with the line ends themselves in it.
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _DEEPSEEK,
        _DEEPSEEK.replace(r"\r\n", "\r\n"),
    }
)
"""Patterns of pre-tokenizers. (DeepSeek's older `\\s+$` is none: it reads each end of a run of white space anew.)"""
_LITERAL, _STEPS = 16, 16
"""Most characters of a literal text that is searched for, which may be compared anew at each place, and most steps."""


def is_known(backend: _Backend) -> bool:
    """Return whether encoding a text takes linear time and memory, as far as the file's own patterns go."""
    before = steps_in(backend.normalizer, "normalizers")
    splits = steps_in(backend.pre_tokenizer, "pretokenizers")
    longer = 1.0
    for step in before:
        longer *= growth(step) if step["type"] == "Replace" and "String" in step["pattern"] else 1.0
    patterns = [(step["pattern"], step in splits) for step in (*before, *splits) if "pattern" in step]
    return (
        max(len(before), len(splits)) <= _STEPS
        and longer <= LONGEST
        and all(_is_linear(pattern, splits=here) for pattern, here in patterns)
    )


def steps_in(part: Any, field: str) -> list[dict[str, Any]]:  # noqa: ANN401 (the library's classes)
    """Return the steps of a normalizer or a pre-tokenizer, as in ``tokenizer.json``."""

    def steps(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for inner in step[field] for one in steps(inner)] if step["type"] == "Sequence" else [step]

    return [] if part is None else steps(json.loads(part.__getstate__()))


def _is_linear(pattern: dict[str, str], *, splits: bool) -> bool:
    if "String" in pattern:
        return 0 < len(pattern["String"]) <= _LITERAL
    return splits and pattern.get("Regex") in LINEAR
