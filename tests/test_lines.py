"""Lines of a server: nobody waits for the reader of standard error, and clients cause few."""

import logging
import os
import re
from contextlib import suppress

import pytest

from hal.cli import console, logs

PATIENCE = 60


@pytest.fixture
def full():
    """A pipe without room, for standard error; the end to read it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (1 << 16, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"." * size)
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)


def read_until(reading, holds):
    text = b""
    while not holds(text):
        text += os.read(reading, 1 << 16)
    return text.lstrip(b".").decode()


def test_lines_wait_for_no_reader_and_those_without_room_are_counted(full, monkeypatch):
    reading, stream = full
    monkeypatch.setattr("sys.stderr", stream)
    with console.lines_by_thread(PATIENCE):
        for number in range(1000):
            console.say(f"line {number}")
        text = read_until(reading, lambda text: text.count(b"\n") >= console.LineWriter.ROOM)
        shown = [int(one) for one in re.findall(r"^line (\d+)$", text, re.MULTILINE)]
        assert shown == [*range(console.LineWriter.ROOM)]
        assert console.lines_are_written(PATIENCE)
        console.say("after")
        text = read_until(reading, lambda text: text.count(b"\n") == 2)
    lost = 1000 - console.LineWriter.ROOM
    assert text == f"hal: {lost} lines are not shown: nobody read standard error\nafter\n"
    assert console._writer is None


def test_without_a_reader_the_end_is_not_waited_for(full, monkeypatch):
    reading, stream = full
    monkeypatch.setattr("sys.stderr", stream)
    with console.lines_by_thread(0.01):
        console.say("unread")
        assert not console.lines_are_written(0.01)
    writer = console._writer
    assert writer is not None, "a line after it would wait"
    console.say("nor is this one")
    read_until(reading, lambda text: b"nor is this one\n" in text)
    assert console.lines_are_written(PATIENCE)
    console._writer = None
    writer.close()


def record(name="uvicorn.error", text="Invalid HTTP request received."):
    return logging.LogRecord(name, logging.WARNING, __file__, 1, text, (), None)


def test_a_few_records_of_a_logger_pass_in_a_second_and_the_next_says_how_many_did_not():
    now = [10.0]
    few = logs.Few(3, lambda: now[0])
    assert [few.filter(record()) for _ in range(1806)] == [True] * 3 + [False] * 1803
    assert few.filter(record("asyncio", "another"))
    now[0] += 1
    later = record()
    assert few.filter(later)
    assert later.getMessage() == "Invalid HTTP request received. (and 1803 lines like it before)"
    now[0] += 1
    later = record()
    assert few.filter(later)
    assert later.getMessage() == "Invalid HTTP request received."


def test_warnings_of_libraries_are_lines_of_the_command(capsys):
    with logs.of_libraries():
        for _ in range(9):
            logging.getLogger("uvicorn.error").warning("no %s", "HTTP")
        logging.getLogger("uvicorn.error").info("nothing")
    assert capsys.readouterr().err == "hal: no HTTP\n" * 3
