"""``--sink URL``: another reader gets the records of each group's first rank, over every transport."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hal import OutputReader

from .rows import PATIENCE, TOLERANCE, Delivered, Row, engine_of, reference, requests, run
from .test_losses import Anew

_spec = importlib.util.spec_from_file_location(
    "legacy_reader", Path(__file__).parents[2] / "adapters/fastdeploy/tests/legacy_reader.py"
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
    delivered = Delivered()

    with OutputReader() as reader:

        def take():
            frame = reader.read(0.1)
            if frame is not None:
                delivered.take(frame.record)
            return frame is not None

        reading(take, lambda: run(replace(row, sink=reader.url), worlds.of(2)))
    assert dict(delivered.tokens) == dict(reference().tokens)
    for request, values in reference().logprobs.items():
        np.testing.assert_allclose(delivered.logprobs[request], values, atol=TOLERANCE, rtol=0)


def test_hal_tail_stays_until_restarted_ranks_have_sent_all(worlds, tmp_path):
    """The sender of a lost rank announces its restart; the tail ends with the last session."""
    url = f"ipc://{tmp_path}/tail"
    begin, delivered, rows = Anew(worlds, 2, "killed", 1, 7), Delivered(), defaultdict(list)
    command = [sys.executable, "-c", "from hal.cli import main; main()", "tail", url, "--json", "--timeout", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tail:
        engine = engine_of(Row(tp=2, timeout=2.0, sink=url), begin, delivered, restarts=1)
        try:
            for request in requests():
                engine.submit(request)
            for _ in engine.run():
                pass
            engine.stop()
        finally:
            engine.close()
        out, err = tail.communicate(timeout=PATIENCE)
    assert tail.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    for row in (event for event in events if event["event"] == "row"):
        assert row["position"] == len(rows[row["request"]]), "a token was lost, or came twice"
        rows[row["request"]] += row["tokens"]
    assert dict(rows) == dict(reference().tokens)
    assert engine.restarts == 1
    assert not engine.undelivered
    ends = [event["text"] for event in events if event["event"] == "SessionEnded"]
    assert [text.endswith("its worker is started again") for text in ends] == [True, False]


READ = {
    "plain": ("get_output", legacy.parse_plain),
    "topk": ("get_output_topk", legacy.parse_topk_today),
    "speculative": ("speculate_get_output", legacy.parse_speculative),
    "speculative-topk": ("speculate_get_output_topk", legacy.parse_speculative_topk_today),
}
"""Layout to the operation of FastDeploy that reads it, and the parser of its messages."""


def through_queue(worlds, layout, folder):
    """One request on two ranks, whose first one sends to a queue: its tokens, and their log-probabilities if any."""
    operation, parse = READ[layout]
    top, drafts = layout.endswith("topk"), layout.startswith("speculative")
    one_request = (
        requests()[0] if top else structs.replace(requests()[0], params=replace(requests()[0].params, logprobs=None))
    )
    key = legacy.custom_ftok(folder, 321)
    queue = legacy.LegacyQueue(key, operation, mode=0o600)
    tokens, logprobs = [], []

    def take():
        data = queue.receive()
        if data is None:
            return threading.Event().wait(0.01)
        found = parse(data)
        rows = found["tokens"][0] if drafts else found["tokens"][:1]  # of slot 0, the only one in use
        tokens.extend(row[0] if top else row for row in rows)
        if top:
            scores = found["scores"][0] if drafts else found["scores"][:1]
            logprobs.extend(row[0] for row in scores)
        return True

    more = "&meta=packed" if layout == "speculative-topk" else ""
    sink = f"sysv://{folder}?layout={layout}&id=321{more}"
    try:
        reading(
            take,
            lambda: run(Row(tp=2, speculate="ngram" * drafts or "none", sink=sink), worlds.of(2), chosen=[one_request]),
        )
    finally:
        queue.remove()
        importlib.import_module("sysv_ipc").Semaphore(key).remove()
    return tokens, logprobs


@pytest.mark.parametrize("layout", [pytest.param("plain", marks=pytest.mark.conform), "speculative"])
def test_a_legacy_queue_is_sent_to(worlds, layout, tmp_path, monkeypatch):
    """FastDeploy's own reader finds the tokens of a request at its batch id."""
    pytest.importorskip("hal_fastdeploy", reason="pip install ./adapters/fastdeploy")
    for name in ("INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"):
        monkeypatch.delenv(name, raising=False)
    tokens, _ = through_queue(worlds, layout, tmp_path)
    assert tokens == reference().tokens[requests()[0].request_id]


RAISED = """
import sys
from pathlib import Path
for name, value in (("msgmax", "1048576"), ("msgmnb", "16777216")):
    Path("/proc/sys/kernel", name).write_text(value)
from tests.distributed.conftest import Worlds
from tests.distributed.test_sink import TOLERANCE, np, reference, requests, through_queue
worlds, name = Worlds(), requests()[0].request_id
tokens, logprobs = through_queue(worlds, *sys.argv[1:])
worlds.end(2)
assert tokens == reference().tokens[name], tokens
np.testing.assert_allclose(logprobs, reference().logprobs[name], atol=TOLERANCE, rtol=0)
print("fine")
"""


@pytest.mark.conform
@pytest.mark.parametrize("layout", ["topk", "speculative-topk"])
def test_a_legacy_queue_of_alternatives_is_sent_to(layout, tmp_path):
    """Messages that the kernel accepts only with raised limits: in a separate IPC namespace."""
    pytest.importorskip("hal_fastdeploy", reason="pip install ./adapters/fastdeploy")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-i", "true"], check=False).returncode:
        pytest.skip("no IPC namespace may be made here")
    alone = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCE_")}
    command = ["unshare", "-i", sys.executable, "-W", "ignore", "-c", RAISED, layout, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("fine\n"), done.stderr
