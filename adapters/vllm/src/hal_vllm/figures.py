"""What workers count, under vLLM's ``/metrics``: each worker writes to a file, and the server reads them all.

The folder is made by the first process that vLLM loads the plugin in, its server, and named in the environment of the
others. With several API servers vLLM shows the files of prometheus_client's own kind alone, and none of these figures.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "HAL_VLLM_FIGURES"
FIGURES = {
    "steps": "Steps whose block tables were applied.",
    "submissions": "Submissions of staged writes to the device.",
    "tensors": "Tensors that those submissions wrote.",
}
"""Counters of :class:`hal_vllm.stage.Stage` and their help."""


class Collector:
    """prometheus_client's view of the files in ``folder``: each counter, labelled with the worker's process id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield each counter with its value in every worker."""
        family = import_module("prometheus_client.core").CounterMetricFamily
        read = {path.name: np.fromfile(path, np.int64).tolist() for path in sorted(self._folder.glob("*"))}
        for number, (name, text) in enumerate(FIGURES.items()):
            counter = family(f"hal_vllm_{name}", text, labels=["worker"])
            for worker, values in read.items():
                counter.add_metric([worker], values[number] if values else 0)  # a file that is being made is empty
            yield counter


def show() -> None:
    """Show the figures of all workers in this process, unless a process above it does."""
    if FOLDER in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="hal-vllm-")
    os.environ[FOLDER] = folder
    atexit.register(_remove, folder, os.getpid())
    import_module("prometheus_client").REGISTRY.register(Collector(Path(folder)))


def _remove(folder: str, owner: int) -> None:
    """Remove it, unless what ends is a fork of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def writer(counts: Mapping[str, int]) -> Callable[[], None]:
    """Return what writes this worker's ``counts`` to its file; nothing where no process shows them."""
    folder = os.environ.get(FOLDER)
    if folder is None or not os.path.isdir(folder):
        return lambda: None
    values = np.memmap(Path(folder) / str(os.getpid()), np.int64, "w+", shape=(len(FIGURES),))

    def write() -> None:
        values[:] = [counts[name] for name in FIGURES]

    return write
