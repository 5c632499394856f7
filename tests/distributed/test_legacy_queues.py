"""``hal run --sink sysv://…`` with several workers: a queue for each that sends, ids counting up."""

import importlib.util
import json
import threading
from pathlib import Path

import pytest

from hal.cli import main
from tests.split.rows import Own

pytest.importorskip("hal_fastdeploy", reason="pip install ./adapters/fastdeploy")
pytestmark = pytest.mark.long(15)
_spec = importlib.util.spec_from_file_location(
    "sysv_place", Path(__file__).parents[2] / "adapters/fastdeploy/tests/sysv_place.py"
)
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)
Place, legacy = shared.Place, shared.legacy
TOKENS = 12
PROMPTS = ("def main(", "import os", "x = ", "for i in range(", "class A")


@pytest.fixture
def queues(tmp_path, monkeypatch):
    """Return the queues of two consecutive ids; this test has its own IPC keys."""
    for name in ("INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"):
        monkeypatch.delenv(name, raising=False)
    places = [Place(tmp_path), Place(tmp_path)]
    assert places[1].number == places[0].number + 1
    yield places, [place.reader() for place in places]
    for place in places:
        place.end()


def streams_of(queues, work):
    """Run ``work`` while the queues are read as FastDeploy reads them; return each one's tokens by slot."""
    engines, over = [legacy.TodaysEngine([], []) for _ in queues], threading.Event()

    def read():
        while True:
            last, idle = over.is_set(), True
            for queue, engine in zip(queues, engines, strict=True):
                if (data := queue.receive()) is not None:
                    engine.take(legacy.parse_plain(data))
                    idle = False
            if last and idle:
                return
            over.wait(0.002 * idle)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join(20)
    return [[tokens for tokens in engine.tokens.values() if tokens] for engine in engines]


@pytest.mark.usefixtures("private_folders")
@pytest.mark.parametrize("workers", [("--dp", "2"), ("--split", "1,1")], ids=" ".join)
def test_each_worker_that_sends_has_a_queue(workers, queues, capsys, monkeypatch):
    places, readers = queues
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", lambda size, **_: Own(size))
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    more = ("--temperature=0", "--max-tokens", str(TOKENS), "--slots", "2", "--json", "--sink", places[0].url())

    def work():
        with pytest.raises(SystemExit) as end:
            main(["run", "--device", "cpu", *prompts, *more, *workers])
        assert end.value.code == 0, capsys.readouterr().err

    first, second = streams_of(readers, work)
    answers = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == len(PROMPTS)
    if workers[0] == "--dp":
        pieces = [stream[at : at + TOKENS] for stream in (*first, *second) for at in range(0, len(stream), TOKENS)]
        assert first
        assert second
        assert sorted(pieces) == sorted(answers)
    else:  # the prefill worker sends first tokens, the decode worker all later ones
        assert sorted(token for stream in first for token in stream) == sorted(answer[0] for answer in answers)
        rest = TOKENS - 1
        pieces = [stream[at : at + rest] for stream in second for at in range(0, len(stream), rest)]
        assert sorted(pieces) == sorted(answer[1:] for answer in answers)
