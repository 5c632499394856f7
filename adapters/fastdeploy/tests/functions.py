"""Functions of our own in the place of FastDeploy's: source with names that are written, set and called."""

import linecache
from itertools import count

from hal_fastdeploy.names import KNOWN, PROPOSED
from hal_fastdeploy.runners import GpuRunner, XpuRunner

NUMBER = count()
OF = {"gpu": KNOWN[GpuRunner], "xpu": KNOWN[XpuRunner], "proposer": PROPOSED}


def line_of(name):
    """A statement whose name is read as ``name``."""
    batch, _, entry = name.partition(".")
    if name.endswith("()"):
        held = f"self.{name}" if batch.endswith("_inputs") else name
        return held.replace("request.", "req_dicts[0].")
    if name.endswith(".*"):
        return f"{batch}.anything()"
    if batch.endswith("_inputs"):
        return f'self.{batch}["{entry}"][idx : idx + 1] = 0'
    return f"{name} = 0".replace("request.", "req_dicts[0].")


def source_of(kind, more=(), without=(), name="insert_tasks_v1"):
    """A function that does all that hal serves or ignores, and ``more`` lines."""
    known = OF[kind]
    lines = [line_of(one) for one in (*sorted(known.served), *known.ignored) if one not in without]
    body = "\n".join(f"        {line}" for line in (*lines, *more))
    return f"    def {name}(self, req_dicts, num_running_requests, slots=None):\n        idx = 0\n{body}\n"


def function_from(source, name="insert_tasks_v1"):
    """The function, with its source where ``inspect`` finds it."""
    file = f"<function {next(NUMBER)}>"
    text = f"class Runner:\n{source}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    held = {}
    exec(compile(text, file, "exec"), held)
    return getattr(held["Runner"], name)
