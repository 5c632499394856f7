"""``--sink URL``: what the first rank of each group sends can be read elsewhere, over every transport."""

from __future__ import annotations

import importlib.util
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hal import OutputReader

from .rows import PATIENCE, TOLERANCE, Row, Told, reference, requests, run

_spec = importlib.util.spec_from_file_location(
    "legacy_reader", Path(__file__).parents[1] / "output" / "legacy_reader.py"
)
legacy = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("legacy_reader", legacy)
_spec.loader.exec_module(legacy)


def reading(take, work):
    """Run ``work`` while a thread calls ``take`` again and again; it does once more afterwards, until it takes none."""
    over = threading.Event()

    def loop():
        while take() or not over.is_set():
            pass

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(loop)
        try:
            work()
        finally:
            over.set()
        done.result(PATIENCE)


@pytest.mark.parametrize("row", [Row(tp=2, speculate="ngram"), Row(dp=2)], ids=["tp, drafts", "dp"])
def test_another_reader_gets_what_the_engine_gets(worlds, row):
    """Each token once and in order, log-probabilities and all."""
    told = Told()

    with OutputReader() as reader:

        def take():
            frame = reader.read(0.1)
            if frame is not None:
                told.take(frame.record)
            return frame is not None

        reading(take, lambda: run(replace(row, sink=reader.url), worlds.of(2)))
    assert dict(told.tokens) == dict(reference().tokens)
    for request, values in reference().logprobs.items():
        np.testing.assert_allclose(told.logprobs[request], values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", [pytest.param("plain", marks=pytest.mark.conform), "speculative"])
def test_a_legacy_queue_is_sent_to(worlds, layout, tmp_path, monkeypatch):
    """FastDeploy's own reader finds the tokens of a request at its batch id."""
    sysv_ipc = pytest.importorskip("sysv_ipc")
    for name in ("INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"):
        monkeypatch.delenv(name, raising=False)
    asked = requests()[0]
    asked = replace(asked, params=replace(asked.params, logprobs=None))
    drafts = layout == "speculative"
    key = legacy.custom_ftok(tmp_path, 321)
    queue = legacy.LegacyQueue(key, "speculate_get_output" if drafts else "get_output", mode=0o600)
    tokens = []

    def take():
        data = queue.receive()
        if data is None:
            return threading.Event().wait(0.01)
        found = legacy.parse_speculative(data)["tokens"][0] if drafts else legacy.parse_plain(data)["tokens"]
        tokens.extend(found)
        return True

    row = Row(tp=2, speculate="ngram" if drafts else "none", sink=f"sysv://{tmp_path}?layout={layout}&id=321")
    try:
        reading(take, lambda: run(row, worlds.of(2), chosen=[asked]))
    finally:
        queue.remove()
        sysv_ipc.Semaphore(key).remove()
    assert tokens == reference().tokens[asked.request_id]
