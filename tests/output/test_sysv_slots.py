"""``hal run --sink sysv://…`` as FastDeploy reads it: entry ``i`` of a message is slot ``i``'s."""

import importlib.util
import json
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

pytest.importorskip("hal_fastdeploy", reason="pip install ./adapters/fastdeploy")
_spec = importlib.util.spec_from_file_location(
    "sysv_place", Path(__file__).parents[2] / "adapters/fastdeploy/tests/sysv_place.py"
)
shared = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("sysv_place", shared)
_spec.loader.exec_module(shared)
legacy, place = shared.legacy, shared.place

READ = {
    "plain": ("get_output", legacy.parse_plain, ()),
    "speculative": ("speculate_get_output", legacy.parse_speculative, ("--speculate", "ngram")),
    "topk": ("get_output_topk", legacy.parse_topk_today, ("--logprobs", "2")),
    "speculative-topk": (
        "speculate_get_output_topk",
        legacy.parse_speculative_topk_today,
        ("--logprobs", "2", "--speculate", "ngram"),
    ),
}
"""Layout to FastDeploy's operation, the parser of its messages, and the options of ``hal run`` that fill it."""
LARGE = ("topk", "speculative-topk")
PROMPTS = ("def main(", "import os\nimport sys\nimport re\nimport json\n", "x = ", "for i in range(", "class A")
"""Each is fed in pieces of 8 tokens: they begin, and so end, at different steps."""


class Reader:
    """FastDeploy's side: each slot's received tokens, read by a thread until :meth:`end`."""

    def __init__(self, key, layout):
        operation, self._parse, _ = READ[layout]
        self._queue = legacy.LegacyQueue(key, operation)
        self.engine, self.sizes = legacy.TodaysEngine([], []), set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        while True:
            over = self._over.is_set()
            if (data := self._queue.receive()) is not None:
                found = self._parse(data)
                self.sizes.add(len(legacy.sampled(found)))
                self.engine.take(found)
            elif over:
                return
            else:
                self._over.wait(0.002)

    def end(self):
        self._over.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._queue.remove()
        return self.engine.tokens


def run_and_read(url, key, layout, monkeypatch, capsys):
    """Run five prompts on three slots; return the tokens read from each slot, and the tokens of its requests."""
    from hal_engine.engine.generation import Generation

    from hal.cli import main

    entered, enter = [], Generation.enter

    def noted(self, slot, blocks, length):
        entered.append((slot, self.request_id))
        enter(self, slot, blocks, length)

    monkeypatch.setattr(Generation, "enter", noted)
    reader = Reader(key, layout)
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    more = (
        "--temperature=0",
        "--max-tokens",
        "9",
        "--slots",
        "3",
        "--chunk",
        "8",
        "--step-tokens",
        "24",
        "--json",
        *READ[layout][2],
    )
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", *prompts, *more, "--sink", url])
    assert end.value.code == 0, capsys.readouterr().err
    found, lines = reader.end(), capsys.readouterr().out.splitlines()
    answers = {answer["request_id"]: answer["token_ids"] for answer in map(json.loads, lines)}
    expected = {slot: [] for slot in range(3)}
    for slot, request in entered:
        expected[slot] += answers[request]
    assert reader.sizes == {3}, "the batch is not the state's slots"
    return found, expected


RAISED = """
    import sys
    from pathlib import Path
    import pytest
    for name, value in (("msgmax", "1048576"), ("msgmnb", "16777216")):
        Path("/proc/sys/kernel", name).write_text(value)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", *sys.argv[1:]]))
"""


LAYOUTS = ["plain", "speculative", *(pytest.param(layout, marks=pytest.mark.conform) for layout in LARGE)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_entry_belongs_to_the_request_in_its_slot(layout, place, monkeypatch, capsys):
    """Messages with alternatives need higher limits than usual: for these the test runs in an IPC namespace."""
    if layout in LARGE and int(Path("/proc/sys/kernel/msgmax").read_text()) < 530_448:
        if shutil.which("unshare") is None or subprocess.run(["unshare", "-i", "true"], check=False).returncode:
            pytest.skip("no IPC namespace may be made here")
        test = f"{__file__}::test_an_entry_belongs_to_the_request_in_its_slot[{layout}]"
        command = ["unshare", "-i", sys.executable, "-c", textwrap.dedent(RAISED), test]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        return
    found, expected = run_and_read(place.url(layout), place.key, layout, monkeypatch, capsys)
    assert found == expected


def test_more_slots_than_entries_are_refused(place, capsys):
    from hal.cli import main

    prompts = [part for number in range(257) for part in ("--prompt", f"x{number}")]
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", *prompts, "--slots", "257", "--sink", place.url("speculative")])
    assert end.value.code == 2
    refusal = (
        "hal: error: --sink: 257 slots, and a message of the sink has 256 entries (have at most 256 slots, or choose"
    )
    assert refusal in capsys.readouterr().err
