"""``hal run`` on CPUs that this machine does not have, under QEMU's user emulation (Debian: qemu-user).

    python tools/older_cpu.py      the exit status is 77 without QEMU

On a Haswell, which has AVX2 and no AVX-512, `hal run` without and with each proposer must print what it prints here.
On a Nehalem, which has no AVX, it must end with one line. An instruction that the emulated CPU lacks is SIGILL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

QEMU = "qemu-x86_64"
PROPOSERS = ("none", "naive", "ngram", "suffix", "mtp", "hybrid")
CHOSEN = ("OPENBLAS_CORETYPE", "MKL_DEBUG_CPU_TYPE")
"""Variables with which a machine chooses kernels for its own CPU."""
LIMIT = 1200.0
"""Seconds that one emulated process may take; it takes one to two minutes on a quiet machine."""
RUN = ("run", "--prompt", "x = y + y = x + y = x + ", "--temperature=0", "--max-tokens", "6")
#: One process for all of them: half of a run is the import of Paddle.
EACH = f"""
from hal.cli import main
for name in {PROPOSERS!r}:
    print(name, flush=True)
    try:
        main([*{RUN!r}, "-v", "--speculate", name])
    except SystemExit as end:
        assert not end.code, end.code
"""
REFUSED = f"from hal.cli import main; main({[*RUN]!r})"


def on(cpu: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` on the emulated CPU, or on this one ("")."""
    emulated = [QEMU, "-cpu", cpu] if cpu else []
    command = [*emulated, sys.executable, "-W", "ignore", "-c", code]
    env = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)


def failures() -> Sequence[str]:
    """Return the failures, as text; empty if there are none."""
    here, haswell, nehalem = on("", EACH), on("Haswell", EACH), on("Nehalem", REFUSED)
    found = []
    if here.returncode or haswell.returncode or here.stdout != haswell.stdout:
        found.append(f"here: {here}\nHaswell: {haswell}")
    drafted = haswell.stderr.count("drafts accepted")
    if drafted != len(PROPOSERS) - 1:
        found.append(f"{drafted} of {len(PROPOSERS) - 1} proposers drafted: {haswell.stderr}")
    if nehalem.returncode != 2 or "this CPU has no AVX2" not in nehalem.stderr.splitlines()[-1]:
        found.append(f"Nehalem: {nehalem}")
    return found


if __name__ == "__main__":
    if shutil.which(QEMU) is None:
        print(f"{QEMU} is not installed (Debian: apt install qemu-user)")
        sys.exit(77)
    wrong = failures()
    print("\n".join(wrong) or "the same tokens on a Haswell, and one line on a Nehalem")
    sys.exit(1 if wrong else 0)
