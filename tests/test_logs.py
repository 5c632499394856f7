"""``HAL_LOG``: which records of the library the commands show."""

import logging

import pytest
from hal_core import InvalidValue

from hal.cli import logs


def shown(capsys, monkeypatch, word):
    """Return the shown part of one record a level."""
    monkeypatch.setenv("HAL_LOG", word)
    with logs.printed(logs.level(), without="bound"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("hal").log(level, "%s", logging.getLevelName(level).lower())
    return capsys.readouterr().err.split("\n")[:-1]


@pytest.mark.parametrize(("word", "count"), [("debug", 4), ("INFO", 3), (" Warning ", 2), ("ERROR", 1)])
def test_records_from_the_named_level_on_are_shown(capsys, monkeypatch, word, count):
    lines = ["hal: debug", "hal: info", "hal: warning", "hal: error"]
    log = logging.getLogger("hal")
    before = list(log.handlers), log.propagate, log.level
    assert shown(capsys, monkeypatch, word) == lines[-count:]
    assert (log.handlers, log.propagate, log.level) == before


def test_another_word_is_refused(command, capsys, monkeypatch):
    with pytest.raises(InvalidValue, match=r"^HAL_LOG: 'loud' \(give DEBUG, INFO, WARNING or ERROR\)$"):
        shown(capsys, monkeypatch, "loud")
    done = command("devices")
    assert done.status == 2
    assert done.err.startswith("hal: error: HAL_LOG: 'loud' (give")


def test_without_it_the_level_is_left_alone(monkeypatch):
    monkeypatch.delenv("HAL_LOG", raising=False)
    assert logs.level() is None
