"""The file of a recording: its frames, whatever ends its run; what is refused."""

import gzip
import re
import signal
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
from hal_conformance.replay import frames, recorder
from hal_conformance.replay.player import replay
from hal_conformance.replay.recorder import CallRecorder
from hal_core import InvalidValue, StateConfig, bind
from hal_core.devices.cpu.device import CpuDevice

from .small_worker import SmallWorker, from_host, given_of


def test_a_run_without_a_call_keeps_an_earlier_recording(recorded):
    path = recorded(from_host)
    before = path.read_bytes()
    with bind(CpuDevice(0, {})) as bound, closing(CallRecorder(path, bound)):
        assert path.read_bytes() == before, "until the first call"
    assert path.read_bytes() == before


def test_two_runs_at_once_do_not_write_one_file(recorded, tmp_path):
    with (
        bind(CpuDevice(0, {})) as second,
        bind(CpuDevice(0, {})) as bound,
        closing(CallRecorder(tmp_path / "x", bound)),
    ):
        with pytest.raises(InvalidValue, match="x is being written by another run"):
            CallRecorder(tmp_path / "x", second)
        with closing(CallRecorder("/dev/null", bound)), closing(CallRecorder("/dev/null", second)):
            from_host(bound)
    assert len(given_of(tmp_path / "x", "record")) == 2


def test_a_step_of_128_slots_takes_at_most_5000_bytes(tmp_path):
    sizes = StateConfig(num_slots=128, max_model_len=256, max_draft_tokens=4)
    path, rng = tmp_path / "x.rec", np.random.default_rng(0)
    with bind(CpuDevice(0, {})) as bound:
        recorder = CallRecorder(path, bound)
        worker = SmallWorker(bound, sizes)
        worker.enter(range(128))
        worker.write(dict(enumerate(rng.integers(0, 99_999, 128).tolist())))
        worker.step(range(128))
        for _ in range(16):
            counts = rng.integers(1, 6, (128, 1), np.int32)
            worker.set("accept_tokens", np.where(np.arange(5) < counts, rng.integers(0, 99_999, (128, 5)), -1))
            worker.set("accept_num", counts)
            worker.step(range(128))
        recorder.close()
    entered = len(zlib.compress(b"".join(msg for msg in _raw(path)[:129]), 1))  # the admitted requests
    assert (path.stat().st_size - entered) / 17 <= 5000


def _raw(path):
    """Return the encoded frames of a whole file."""
    rest, found = gzip.decompress(path.read_bytes().partition(b"\n")[2]), []
    while rest:
        size = 4 + int.from_bytes(rest[:4], "little")
        found.append(rest[4:size])
        rest = rest[size:]
    return found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"def main(", "magic is b'def main(': not a recording (give a file of hal run --record FILE)"),
        (lambda data: data.replace(b"g 4 ", b"g 5 ", 1), "version is 5, but this kit reads 4 (install the kit"),
        (lambda data: b"hal recording 3\n" + data, "version is 3, but this kit reads 4 (install the kit"),
        (lambda data: data[:-60], "end is missing: the file is truncated after call"),
        (lambda data: data[:-1], "end is missing: the file is truncated after call 10 (record again"),
        (lambda data: data[: data.index(b"\n") + 1], "end is missing: the file is truncated after call 0 (record"),
        (lambda data: data + b"more", "stream is damaged after call 10: Not a gzipped file (b'mo')"),
        (lambda data: data[:-5] + bytes([data[-5] ^ 255]) + data[-4:], "is damaged after call 10: CRC check failed"),
        (lambda data: data[:90] + bytes([data[90] ^ 255]) + data[91:], "is damaged"),
        (lambda data: _with(data, STATE, INSERT + b"\x99\x63" + bytes(8)), "not valid: Invalid enum value 99"),
        (lambda data: _with(data, STATE, INSERT + b"\x98\1" + bytes(7)), "frame after call 0 is not valid: "),
        (lambda data: _with(data, b"\x92\xa7release"), "frame after call 0 is not valid: "),
        (lambda data: _with(data, b"\x93\xa3end\0\x90"), "frame after call 0 is not valid: 'end'"),
        (lambda data: _with(data, b"\x93\xa3\xe9nd\0\x90"), "frame after call 0 is not valid: "),
        (lambda data: _with(data, STATE, b"\x93\xabsave_output\x00\x91\xc0"), "not valid: Expected `array`"),
        (lambda data: _with(data, STATE.replace(b"\4", b"\0")), "not valid: sizes: num_slots = 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_field(recorded, cpu, tmp_path, damage, message):
    path = tmp_path / "bad.rec"
    path.write_bytes(damage(recorded(from_host).read_bytes()))
    with pytest.raises(InvalidValue) as raised:
        replay(cpu, path)
    assert str(raised.value).startswith(f"--replay: {path}: ")
    assert message in str(raised.value)
    assert raised.value.cure


STATE = b"\x93\xa5state\0\x94\xa6target\x82\xa9num_slots\x04\xadmax_model_len\x40\x90\x90"
INSERT = b"\x93\xacinsert_tasks\0\x91\x91"


def _with(data, *made):
    """A recording with only these frames."""
    return data[: data.index(b"\n") + 1] + gzip.compress(b"".join(len(one).to_bytes(4, "little") + one for one in made))


@pytest.mark.parametrize("size", [0, 1, 70_000, 200_000])
def test_frames_are_complete_whenever_they_are_written(tmp_path, monkeypatch, size):
    """Each frame alone, or all at the end."""
    data = np.random.default_rng(size).bytes(size)
    for period in (0, 1e6):
        monkeypatch.setattr(frames, "PERIOD", period)
        path = tmp_path / f"{period}.rec"
        writer = frames.Writer(path, "cpu:0 with hal 1.1.0")
        for number in range(3):
            before = path.stat().st_size
            writer.put(frames.Frame, "record", 0, (number, True, data))
            while period == 0 and path.stat().st_size == before:
                assert writer._thread.is_alive()
        writer.close()
        assert given_of(path, "record") == [(number, True, data) for number in range(3)]


def test_a_record_is_encoded_by_the_writing_thread(recorded, monkeypatch):
    encoded, threads = recorder.encode_body, []
    monkeypatch.setattr(recorder, "encode_body", lambda record: threads.append(get_ident()) or encoded(record))
    recorded(from_host)
    assert len(threads) == 2
    assert get_ident() not in threads


def test_the_error_of_a_frame_is_raised_by_close(tmp_path, monkeypatch):
    def fail(record):
        raise ValueError(f"step {record.step} cannot be encoded")

    monkeypatch.setattr(recorder, "encode_body", fail)
    path = tmp_path / "x.rec"
    with bind(CpuDevice(0, {})) as bound:
        kept = CallRecorder(path, bound)
        from_host(bound)
        with pytest.raises(ValueError, match="step 0 cannot be encoded"):
            kept.close()
    with pytest.raises(InvalidValue, match="end is missing"):
        [*frames.Recording(path).frames()]


WORKER = """
import sys
from hal_conformance.replay.recorder import CallRecorder
from hal_core import bind
from hal_core.devices.cpu.device import CpuDevice
from small_worker import from_host

bound = bind(CpuDevice(0, {}))
recorder = CallRecorder(sys.argv[1], bound)
from_host(bound)
sys.stdin.read()
"""


def test_the_file_of_a_killed_process_has_its_calls(tmp_path, cpu):
    path = tmp_path / "x.rec"
    worker = [sys.executable, "-c", WORKER, path]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, cwd=Path(__file__).parent) as process:
        while _calls(path) != 10:
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(InvalidValue, match="end is missing: the file is truncated after call 10"):
        replay(cpu, path)


def _calls(path):
    """Return how many calls of an unfinished file can be read."""
    try:
        return len([*frames.Recording(path).frames()])
    except InvalidValue as wrong:
        return int((re.search(r"after call (\d+)", str(wrong)) or [0, 0])[1])


def test_a_full_disk_is_raised_by_name_when_it_is_met(tmp_path, monkeypatch):
    def full(writer, _, flush):
        with Path("/dev/full").open("ab") as file:
            write(writer, file, flush)

    write, path = frames.Writer._write, tmp_path / "x.rec"
    with bind(CpuDevice(0, {})) as bound:
        device = CallRecorder("/dev/full", bound)
        SmallWorker(bound).enter([1])
        with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
            device.close()
        kept = CallRecorder(path, bound)
        monkeypatch.setattr(frames.Writer, "_write", full)
        from_host(bound)
        with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
            kept.close()


def test_a_recording_is_written_over_and_another_file_is_kept(recorded, tmp_path):
    path = recorded(from_host)
    other = tmp_path / "prompts.txt"
    other.write_text("def main(\n")
    with bind(CpuDevice(0, {})) as bound:
        with pytest.raises(InvalidValue, match=r"prompts\.txt exists, and is no recording \(give another name"):
            CallRecorder(other, bound)
        with closing(CallRecorder(path, bound)):
            SmallWorker(bound).enter([1])
    assert other.read_text() == "def main(\n"
    assert [frame.name for frame in frames.Recording(path).frames()] == ["state", "request", "insert_tasks"]


def test_what_is_no_regular_file_is_refused(cpu, tmp_path):
    for path, message in ((tmp_path, "file is no file"), (tmp_path / "x", "file does not exist")):
        with pytest.raises(InvalidValue, match=message):
            replay(cpu, path)
