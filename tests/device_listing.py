"""``hal devices`` in a process of its own, with the modules that it has imported at its end."""

import json
import os
import subprocess
import sys

HEAVY = {"numpy", "paddle", "torch", "cryptography", "safetensors", "tokenizers", "pydantic"}
# Runs the command and prints the imported modules on the last line of stderr.
REPORTING = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from hal.cli import main
main()
"""


def environment(site=None, **extra):
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("HAL_", "FORCE_COLOR", "PYTHONPATH"))
    }
    if site is not None:
        clean["PYTHONPATH"] = str(site.folder)
    return {**clean, **extra}


def hal_command(*arguments, site=None, **extra):
    command = [sys.executable, "-c", REPORTING, *arguments]
    result = subprocess.run(command, env=environment(site, **extra), capture_output=True, text=True, timeout=60)
    *lines, modules = result.stderr.rstrip("\n").split("\n")
    result.stderr, result.modules = "\n".join(lines), set(json.loads(modules))
    return result


def rows_of(result, names=("alpha", "beta", "gamma", "late", "cpu")):
    return {row["name"]: row for row in json.loads(result.stdout)["devices"] if row["name"] in names}
