"""Clients of ``hal serve``, by raw sockets, and what they measure."""

from __future__ import annotations

import json
import multiprocessing
import selectors
import socket
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import numpy as np

PROCESSES, STARTING = 4, 0.3
"""Most processes of clients; seconds that they have to begin together."""


class Times:
    """Of one load: tokens a second, seconds to first tokens, and between what comes of a request."""

    def __init__(self) -> None:
        self.first, self.gaps, self.tokens = list[float](), list[float](), 0
        self.began = self.ended = time.perf_counter()

    def note(self, sent: float, last: float) -> float:
        """Something of a request has come; ``last``: when the former came, 0 for none. Returns the time."""
        now = self.ended = time.perf_counter()
        if last:
            self.gaps.append(now - last)
        else:
            self.first.append(now - sent)
        return now

    def summary(self) -> dict[str, float]:
        """Return the figures, in milliseconds."""
        rate = self.tokens / (self.ended - self.began)
        gaps = np.array(self.gaps or [0.0]) * 1e3
        middle, late = (float(np.percentile(gaps, part)) for part in (50, 99))
        return {"rate": rate, "first": median(self.first) * 1e3, "gap": middle, "gap_p99": late}


class _Client:
    """One connection, over which requests go one behind the other."""

    def __init__(self, port: int, left: deque[dict[str, Any]]) -> None:
        self.socket, self.left = socket.create_connection(("127.0.0.1", port)), left
        self.sent, self.last, self.answer = 0.0, 0.0, bytearray()

    def send(self) -> int:
        """Send the next request; return its tokens, 0 if there is none."""
        if not self.left:
            return 0
        request = self.left.popleft()
        body = json.dumps(request | {"stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.sent, self.last, self.answer = time.perf_counter(), 0.0, bytearray()
        self.socket.sendall(head + body)
        return int(request["max_tokens"])

    def read(self, times: Times) -> bool:
        """Read what has come; return whether the answer has ended."""
        data = self.socket.recv(1 << 18)
        assert data, f"the server left: {bytes(self.answer[-300:])!r}"
        if b"data: {" in data:
            self.last = times.note(self.sent, self.last)
        self.answer += data
        if not self.answer.endswith(b"0\r\n\r\n"):
            return False
        assert b"data: [DONE]" in self.answer[-40:], bytes(self.answer[-300:])
        return True


def by_clients(port: int, clients: int, load: list[dict[str, Any]], begin: float) -> Times:
    """Raw sockets of this process with the server, from the moment ``begin`` on."""
    time.sleep(max(0.0, begin - time.perf_counter()))
    times, selector, running, left = Times(), selectors.DefaultSelector(), clients, deque(load)
    for _ in range(clients):
        one = _Client(port, left)
        times.tokens += one.send()
        selector.register(one.socket, selectors.EVENT_READ, one)
    while running:
        for key, _ in selector.select():
            if key.data.read(times):
                tokens = key.data.send()
                times.tokens += tokens
                if not tokens:
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
                    running -= 1
    return times


def by_processes(port: int, clients: int, load: list[dict[str, Any]]) -> dict[str, float]:
    """Raw sockets of some processes, as one would wait for itself."""
    count = min(PROCESSES, clients)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [STARTING] * count))  # each has started
        begin = time.perf_counter() + STARTING
        parts = [pool.submit(by_clients, port, clients // count, load[at::count], begin) for at in range(count)]
        found = [part.result() for part in parts]
    whole = Times()
    whole.began, whole.ended = min(one.began for one in found), max(one.ended for one in found)
    whole.tokens = sum(one.tokens for one in found)
    whole.first = [value for one in found for value in one.first]
    whole.gaps = [value for one in found for value in one.gaps]
    return whole.summary()
