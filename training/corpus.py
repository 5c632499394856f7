"""The corpus: the Python standard library's own sources, split by file into training and held-out text.

Left out: third-party packages, the library's tests, idlelib and lib2to3 whole, byte-code caches, and files that are not
program source: ``pydoc_data`` (the language manual as one string, 7 % of all bytes) and the build's settings. One file
in twenty is held out; the choice ranks the hashes of the files' paths inside the library, so it does not depend on the
order of listing, on the machine or on a seed.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "site-packages", "__pycache__", "dist-packages"}
)
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """The two halves as ``(path inside the library, text)``, sorted by path."""

    training: tuple[tuple[str, str], ...]
    held_out: tuple[tuple[str, str], ...]

    @staticmethod
    def size(part: tuple[tuple[str, str], ...]) -> int:
        """UTF-8 bytes of the texts of one half."""
        return sum(len(text.encode()) for _, text in part)


def held_out_names(names: list[str]) -> frozenset[str]:
    """Which of these paths (``/`` separated, inside the library) are held out: those whose hashes are the smallest
    twentieth, rounded up."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return frozenset(ranked[: -(-len(names) // HELD_OUT_ONE_IN)])


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library of the running interpreter (or the one at ``root``)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # The build's own settings (_sysconfigdata…) differ from machine to machine and hold its paths.
        if LEFT_OUT.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of sources declare another encoding; the model is for UTF-8 text
        if text:
            texts[relative.as_posix()] = text
    held_out = held_out_names(list(texts))
    return Corpus(
        tuple((name, text) for name, text in texts.items() if name not in held_out),
        tuple((name, text) for name, text in texts.items() if name in held_out),
    )
