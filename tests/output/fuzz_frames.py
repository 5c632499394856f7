"""Fuzz the decoding of frames, of control messages, and of messages between engine and ranks, with atheris (libFuzzer).

    python tests/output/fuzz_frames.py [--seconds 600] [corpus folder]

Any bytes must be a frame or a FrameError. Three inputs: the bytes unchanged; as a body in a valid frame, so that
checksums do not stop everything at once; and as changes to a valid frame. atheris is not among the requirements: ``pip
install atheris``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["hal_core.frames.envelope", "hal_core.frames.bodies", "hal_core.output.records"]
):
    from hal_core.errors import FrameError
    from hal_core.frames import envelope as frames
    from hal_core.output.records import OutputRecord

import msgspec
import numpy as np
from hal_engine.distributed.control_messages import decode_message
from hal_engine.distributed.steps import decode_step
from hal_engine.transport.protocol import decode_control


def sample(columns: int, drafts: bool) -> OutputRecord:
    """A valid record."""
    ones = np.ones(3, np.uint8)
    optional = {}
    if columns:
        ids = np.arange(3 * columns).reshape(3, columns)
        ids[:, 0] = np.arange(3)
        optional = {"logprob_token_ids": ids, "logprobs": np.zeros((3, columns), np.float32)}
        optional["ranks"] = np.zeros(3, np.int32)
    if drafts:
        optional |= {"draft_counts": np.array([0, 2, 0], np.int32), "drafts": np.arange(2), "messages": {1: "text"}}
        optional |= {"draft_logprob_token_ids": np.arange(2)[:, None], "draft_logprobs": np.zeros((2, 1), np.float32)}
    return OutputRecord(
        7, ("a", "b", "c"), ones, ones * 0, np.arange(3), ones.astype(np.int32), np.arange(3), ones < 0, **optional
    )


SAMPLES = [
    frames.encode(sample(columns, drafts), session=1, sender=2, sequence=3)
    for columns in (0, 3)
    for drafts in (False, True)
]


def read(data: bytes) -> None:
    """Decode; a decoded record must pass its own checks."""
    try:
        record = frames.decode(data).record
    except FrameError:
        return
    assert replace(record) == record


def one_input(data: bytes) -> None:
    """The function that libFuzzer calls."""
    read(data)
    read(frames.seal(frames.FrameKind.OUTPUT, data, session=1, sender=2, sequence=3))
    for decode in (decode_control, decode_step, decode_message):
        try:
            decode(data)
        except FrameError:
            continue
    source = SAMPLES[data[0] % len(SAMPLES)] if data else SAMPLES[0]
    changed = bytearray(source)
    for at in range(1, len(data) - 2, 3):
        changed[int.from_bytes(data[at : at + 2], "little") % len(changed)] = data[at + 2]
    read(bytes(changed))
    body = msgspec.msgpack.decode(source[64:])
    name = sorted(body)[len(data) % len(body)]
    body[name] = data if isinstance(body[name], bytes) else len(data)
    read(frames.seal(frames.FrameKind.OUTPUT, msgspec.msgpack.encode(body), session=1, sender=2, sequence=3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("corpus", nargs="?", type=Path, help="a folder that keeps what was found from run to run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as seeds:
        for number, frame in enumerate(SAMPLES):
            Path(seeds, f"frame{number}").write_bytes(frame)
            Path(seeds, f"body{number}").write_bytes(frame[64:])
        folders = [str(options.corpus)] if options.corpus else []
        atheris.Setup(
            [sys.argv[0], *folders, seeds, f"-max_total_time={options.seconds}", "-rss_limit_mb=2048"], one_input
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
