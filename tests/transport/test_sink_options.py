"""The options of ``open_sink``: one that would break the sender's thread later is refused at once, by its name."""

import threading
from decimal import Decimal

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_engine.transport import open_sink

NAN, INF = float("nan"), float("inf")
NO_COUNT = (0, -1, 1.5, 2.0, INF, NAN, True, "8", None, b"8", [1], 1 << 63, 10**400)
BAD = (
    [("capacity", value) for value in NO_COUNT]
    + [("capacity_bytes", value) for value in NO_COUNT]
    + [("sender", value) for value in (-1, 1.5, 0.0, True, "0", None, 1 << 32)]
    + [("deadline", value) for value in (-0.1, NAN, INF, -INF, 1e10, True, "1", b"1", None, 10**400, 1j, [1])]
    + [("heartbeat", value) for value in (0, -1, NAN, INF, 1e7, 3601, True, "1", None, 1j)]
)


@pytest.mark.parametrize("url", ["ipc:///tmp/hal-test-options/none", "sysv:///tmp?layout=plain"])
@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:20])
def test_g26_an_option_that_cannot_be_is_named_with_a_cure(url, name, value):
    with pytest.raises(InvalidValue) as refused:
        open_sink(url, **{name: value})
    assert refused.value.argument == name
    assert repr(value) in str(refused.value)
    assert refused.value.cure.startswith("give ")


@pytest.mark.parametrize("url", [None, 5, b"tcp://127.0.0.1:5", object()])
def test_g26_a_url_that_is_no_text_is_refused(url):
    with pytest.raises(InvalidValue, match=r"^url: .* is not a URL .*ipc:///folder/name"):
        open_sink(url)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 1, "capacity_bytes": 1, "sender": 0, "deadline": 0, "heartbeat": 0.001},
        {"capacity": (1 << 63) - 1, "capacity_bytes": (1 << 63) - 1, "sender": (1 << 32) - 1, "deadline": 1e9},
        {"heartbeat": 3600, "sender": np.uint32(7), "capacity": np.int64(4), "deadline": np.float32(0.5)},
        {"deadline": Decimal("0.5")},
    ],
)
def test_what_is_at_the_bounds_delivers(opened, url, output, options):
    reader = opened.reader()
    sink = opened.sink(**options)
    sink.put(output(3))
    frame = reader.read(10)
    assert frame is not None
    assert (frame.record.step, frame.header.sender) == (3, options.get("sender", 0))


def test_the_longest_deadline_is_one_that_a_wait_takes(opened, url, output):
    """With room for one frame the second put waits, until the reader has acknowledged the first."""
    sink = opened.sink(capacity=1, deadline=1e9)
    sink.put(output(0))
    reader = opened.reader()
    waiting = threading.Thread(target=sink.put, args=(output(1),))
    waiting.start()
    assert [reader.read(10).record.step for _ in range(2)] == [0, 1]
    waiting.join(10)
    assert not waiting.is_alive()
