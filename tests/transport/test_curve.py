"""CURVE keys for tcp: unnamed peers are refused, and no records are sent to a reader with the wrong key."""

from __future__ import annotations

import pytest
from hal_core.errors import InvalidValue, Undelivered
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink
from hal_engine.transport.curve import CurveKeys


@pytest.fixture(scope="module")
def keys():
    """Keys of the reader, which knows the sender; of the sender; and of a stranger that knows the reader."""
    sender, reader = CurveKeys.new(), CurveKeys.new()
    return reader.knowing(sender.public), sender.knowing(reader.public), CurveKeys.new(reader.public)


def test_records_travel_between_sides_that_know_each_other(keys, output):
    with OutputReader("tcp://127.0.0.1:*", curve=keys[0], timeout=10) as reader:
        sink = open_sink(reader.url, curve=keys[1])
        sink.put(output(1))
        assert reader.read(10).record.step == 1
        reader.acknowledge()
        sink.close(5)


@pytest.mark.parametrize("who", ["a stranger", "without keys", "a false reader"])
def test_nobody_else_is_let_in_and_nothing_is_lost_silently(keys, output, who, caplog):
    mine, sender, stranger = keys
    mine = CurveKeys.new(sender.public) if who == "a false reader" else mine
    curve = {"a stranger": stranger, "without keys": None, "a false reader": sender}[who]
    with OutputReader("tcp://127.0.0.1:*", curve=mine) as reader:
        sink = open_sink(reader.url, curve=curve, heartbeat=0.05)
        sink.put(output(1))
        assert reader.read(0.5) is None
        told = f"no reader answers on {reader.url}{' with this key' * (curve is not None)}[)]"
        with pytest.raises(Undelivered, match=told) as caught:
            sink.close(0.1)
    assert ("it uses another key" in caplog.text) is (who == "a false reader")
    assert caught.value.records == (("a", 1, 1), ("b", 1, 1))


def test_g26_keys_that_cannot_be_are_refused(keys):
    reader, sender, _ = keys
    with pytest.raises(InvalidValue, match="no tcp address"):
        open_sink("ipc:///tmp/hal-test", curve=sender)
    with pytest.raises(InvalidValue, match="0 peers"):
        open_sink("tcp://127.0.0.1:5", curve=CurveKeys.new())
    with pytest.raises(InvalidValue, match="nobody is let in"):
        OutputReader("tcp://127.0.0.1:*", curve=CurveKeys.new())
    with pytest.raises(InvalidValue, match="40 characters"):
        reader.knowing("short")
    with pytest.raises(InvalidValue, match="not the secret one's"):
        CurveKeys(sender.public, reader.secret)
    assert sender.secret not in repr(sender)
