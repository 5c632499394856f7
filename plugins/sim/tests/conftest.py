"""Fixtures of the simulator's tests. Without a compiler they are all skipped, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hal_sim import Accelerator, Mode, NoCompiler, PinnedMemory, Stream, options
from hal_sim.build import core_library

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def built() -> Path:
    try:
        return core_library()
    except NoCompiler as error:
        pytest.skip(str(error))


class Bench:
    """A device with a test's tools around it; everything is released and closed at the end."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.streams: list[Stream] = []
        self.blocks: list[int] = []
        self.buffers: list[PinnedMemory] = []

    def stream(self) -> Stream:
        self.streams.append(self.device.stream())
        return self.streams[-1]

    def memory(self, nbytes: int = 64) -> int:
        self.blocks.append(self.device.allocate(nbytes))
        return self.blocks[-1]

    def pinned(self, nbytes: int = 64) -> PinnedMemory:
        self.buffers.append(self.device.pinned(nbytes))
        return self.buffers[-1]

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        """Device memory with these bytes, written without the checker's notice."""
        address = self.memory(array.nbytes)
        self.device.poke(address, array.tobytes())
        return address

    def download(self, address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.device.peek(address, like.nbytes), dtype=like.dtype).reshape(like.shape)

    def close(self) -> None:
        for stream in self.streams:
            stream.release()
        self.device._native.device_wait(self.device.device, -1)  # a fault that the test caused is no error here
        for stream in self.streams:
            stream.close()
        for block in self.blocks:
            self.device._native.free(self.device.device, block)  # the test may have freed it
        for buffer in self.buffers:
            if buffer.address:
                buffer.close()
        self.device.reset()


@pytest.fixture(params=list(Mode), ids=lambda m: m.name.lower())
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture
def bench(mode: Mode) -> Iterator[Bench]:
    """A bench in each mode of execution."""
    with options(mode=mode):
        b = Bench(Accelerator(0))
        yield b
        b.close()


@pytest.fixture
def lazy() -> Iterator[Bench]:
    """A bench where work runs only when a thread waits for it."""
    with options(mode=Mode.LAZY):
        b = Bench(Accelerator(0))
        yield b
        b.close()


@pytest.fixture(scope="session")
def probe() -> Callable[..., Any]:
    """Run one function of a script in a separate process and return its result."""

    def run(script: str, name: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        done = subprocess.run(
            [sys.executable, str(HERE / script), name, *arguments],
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{script} {name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
