"""``hal run`` hands its records over in its own process, and shows them however slowly standard output is read."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import SinkClosed
from hal_core.output.records import OutputRecord
from hal_engine import opening
from hal_engine.cli import run_output
from hal_engine.reading import OutputReader
from hal_engine.timeouts import TIMEOUTS

from .commands import environment, left_in


class Slow:
    """Answers that accept no records until the test lets them."""

    def __init__(self):
        self.begun, self.let, self.taken = threading.Event(), threading.Event(), []

    def take(self, record):
        self.begun.set()
        assert self.let.wait(60)
        self.taken.append(record.step)


def record(step):
    one = np.ones(1, np.uint8)
    return OutputRecord(step, ("r0",), one, one, np.array([step]), one.astype("i4"), np.array([7]), one < 0)


class Output:
    """A step's output; ``ends`` records how it was completed."""

    request_ids = ("r0",)

    def __init__(self, step):
        self.step, self.ends = step, []

    def resolve(self):
        return record(self.step)

    def complete(self, error):
        self.ends.append(error)


def opened_output(url=""):
    """The output of an engine in one process, which also sends records to ``url``."""
    return opening.open_output(SimpleNamespace(sink=url, sink_key=""), opening.Host())


def test_it_waits_for_a_reader_that_takes_its_time(monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "shown", 0.01)
    answers = Slow()
    shown = run_output.Shown().by(answers)
    for step in range(3):
        shown.take(record(step))

    def use():
        with shown:
            pass

    leaving = threading.Thread(target=use)
    leaving.start()
    assert answers.begun.wait(60)
    leaving.join(0.5)  # it would have given up long ago
    assert leaving.is_alive()
    answers.let.set()
    leaving.join(60)
    assert answers.taken == [0, 1, 2]


def test_an_output_is_complete_when_the_engine_has_taken_its_record():
    outputs, taken = [Output(step) for step in range(3)], []
    with opened_output() as (sink, handed):
        handed.to = taken.append
        for one in outputs:
            sink.put(one)
        assert [one.ends for one in outputs] == [[], [], []]
        for one in outputs[:2]:
            handed.take(one.resolve())
    assert [one.step for one in taken] == [0, 1]
    assert [one.ends for one in outputs] == [[None], [None], [None]], "the step behind the last end is complete too"
    with pytest.raises(SinkClosed):
        sink.put(Output(3))


def test_after_an_error_the_tickets_of_outputs_end_with_their_sink():
    output = Output(0)

    def fail():
        with opened_output() as (sink, _):
            sink.put(output)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert isinstance(output.ends[0], SinkClosed)


def test_with_a_sink_the_records_are_sent_there_as_well(tmp_path):
    taken, outputs = [], [Output(step) for step in range(2)]
    with OutputReader(f"ipc://{tmp_path}/socket", auto_ack=True) as reader:

        def use():
            with opened_output(reader.url) as (sink, handed):
                handed.to = taken.append
                for one in outputs:
                    sink.put(one)
                    handed.take(one.resolve())

        sending = threading.Thread(target=use)
        sending.start()
        frames = [reader.read(60.0) for _ in outputs]
        while sending.is_alive():  # waits for the acknowledgement, sent when the reader's next event is requested
            reader.read(0.01)
        sending.join()
    assert [frame.record.step for frame in frames] == [one.step for one in taken] == [0, 1]
    assert [one.ends for one in outputs] == [[None], [None]]


WITHOUT_SOCKETS = """
import sys
sys.modules["hal_engine.transport.hub"] = sys.modules["hal_engine.transport.acknowledged_sink"] = None
from hal.cli import main
main()
"""


def test_in_one_process_nothing_is_sent_and_no_file_is_made(tmp_path):
    """What sends between processes cannot be imported here."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_SOCKETS,
        "run",
        "--prompt",
        "def f(",
        "--temperature=0",
        "--max-tokens",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "def f("), done.stderr
    assert left_in(tmp_path) == []
