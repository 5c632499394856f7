"""Roles of an episode's processes (``episodes.py``). Each runs in a fork, gets commands, and keeps a journal."""

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import random
import resource
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from episode_batches import Batches
from episode_strangers import SESSIONS
from hal_core.errors import HalError, InvalidValue, SinkClosed, SinkFull, Unavailable, Undelivered
from hal_core.output.records import OutputRecord
from hal_core.slots.fields import FinishReason
from hal_engine.reading import FrameSkipped, Gap, OutputReader, SessionEnded, SessionLost, SessionStarted
from hal_engine.transport import open_sink, private_ipc_url

LARGE_COLUMNS = 1 << 14
LOST_AFTER, GRACE = 3.0, 0.1
PORT_TAKEN = "another program listens there"


def play(role, heard, *arguments):
    """Run the role in this child, and end the process with it."""
    status = 1
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell runs this in the background
        logging.disable(logging.WARNING)
        if role is not tail:
            heed_interrupts()
        role(Words(heard), *arguments)
        status = 0
    except BaseException:  # noqa: BLE001  # told here, for a fork must not unwind its parent's stack
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def heed_interrupts():
    """Take a Ctrl-C, also one that came before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Words:
    """The pipe with a role's commands."""

    def __init__(self, heard):
        self._heard, self._said, self._limit = heard, "", resource.getrlimit(resource.RLIMIT_NOFILE)

    def next(self, timeout=0.0):
        """Return the next command, "" if none comes in time. Those about files are executed here."""
        while "\n" not in self._said:
            if not select.select([self._heard], [], [], timeout)[0]:
                return ""
            self._said += os.read(self._heard, 4096).decode()
        word, _, self._said = self._said.partition("\n")
        if word == "few":
            used = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, self._limit[1]))
        elif word == "many":
            resource.setrlimit(resource.RLIMIT_NOFILE, self._limit)
        return word


class Journal:
    """Lines of JSON; a write of the kernel survives SIGKILL."""

    def __init__(self, path, **facts):
        self._out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._facts = facts

    def note(self, event, **facts):
        os.write(self._out, (json.dumps({"event": event} | self._facts | facts) + "\n").encode())


def facts(path):
    """The lines of a journal; the last may be torn by a kill."""
    found = []
    for line in Path(path).read_text().splitlines() if Path(path).exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Output:
    """A pending output: one request, one token, which encodes the step."""

    def __init__(self, life, step, last, large, latch=None):
        self.step, self._life, self._last, self._large, self._latch = step, life, last, large, latch
        self.request_ids = (life,)

    def resolve(self):
        if self._latch is not None:
            self._latch.wait()
        one = np.ones(1, np.uint8)
        finish = np.full(1, FinishReason.LENGTH if self._last else FinishReason.NONE, np.uint8)
        optional = {}
        if self._large:
            ids = np.arange(LARGE_COLUMNS, dtype=np.int32).reshape(1, -1) + self.step
            optional = {"logprob_token_ids": ids, "logprobs": ids.astype(np.float32)}
        position = np.array([self.step])
        count, tokens = one.astype(np.int32), position.copy()
        return OutputRecord(self.step, (self._life,), one, finish, position, count, tokens, one < 0, **optional)

    def complete(self, error):
        if error is not None and not isinstance(error, SinkClosed):
            raise error


class Singles:
    """Outputs of one token each, of one request with the name ``life``."""

    def __init__(self, sink, plan):
        self._sink, self._plan, self._latch = sink, plan, None

    def step(self, number):
        """Put a step's output; return the rows that its record must have."""
        life, is_last = self._plan["life"], number == self._plan["count"] - 1
        with contextlib.suppress(SinkFull):  # it is kept
            self._sink.put(Output(life, number, is_last, self._plan["size"] == "large", self._latch))
        return [[life, "TOKEN", number, [number]]]

    def hang(self):
        """Hang in the step that comes next, while the other threads live."""
        self._latch = self._latch or threading.Event()

    def release(self):
        """End that."""
        if self._latch is not None:
            self._latch.set()

    def close(self):
        """There is no device."""


def worker(words, url, journal, plan):
    """Put its records, and close on the command to finish; on the command to close, do so at once."""
    draw = random.Random(plan["seed"])
    options = {"capacity": plan["capacity"], "deadline": 0.02, "heartbeat": 0.05, "sender": plan["sender"]}
    sink = open_sink(url, curve=plan["curve"], **options)
    out = Journal(journal, life=plan["life"], session=sink.session)
    has_batches = plan["size"].endswith("batches")
    large = plan["size"].startswith("large")
    source = Batches(sink, plan["life"], plan["seed"], large=large) if has_batches else Singles(sink, plan)
    out.note("opened")
    word = ""
    for step in range(plan["count"]):
        try:
            rows = source.step(step)
        except SinkClosed as error:
            out.note("refused", why=error.what)
            break
        out.note("saved", step=step, rows=rows)
        word = words.next() or word
        if word == "hang" and not has_batches:
            source.hang()
        elif word == "hang":
            word = words.next(60)
            assert word, "no command for a minute"
        elif word == "freeze":  # forever: its parent has to end it
            threading.Event().wait()
        if word.startswith("close"):  # and not finish: that is when all has been put
            break
        time.sleep(draw.random() * plan["pace"])
    while not word.startswith(("close", "finish")):
        word = words.next(60)
        assert word, "no command for a minute"
    if word.startswith("finish") and not has_batches:
        source.release()
    try:
        sink.close(float(word.split()[1]))
    except Undelivered as error:
        out.note("undelivered", records=error.records)
    out.note("closed")
    source.close()


def cursors_of(journal):
    """Map each running session to its last recorded sequence."""
    found = {}
    for fact in facts(journal):
        if fact["event"] == "record":
            found[fact["session"]] = fact["sequence"]
        elif fact["event"] in ("ended", "lost"):
            found.pop(fact["session"], None)
    return found


def when_free(opening):
    """Open a reader, once the second one, which may have been faster, has left."""
    end = time.monotonic() + 60
    while True:
        try:
            return opening()
        except InvalidValue as error:
            if not (any(words in str(error) for words in ("already", PORT_TAKEN)) and time.monotonic() < end):
                raise
        time.sleep(0.01)


def reader(words, url, journal, curve=None):
    """Record each event, then acknowledge it, from the journal's end, until the command to stop and the end of all
    sessions. It passes over sessions that the journal has as lost, of which a restarted ``OutputReader`` knows nothing.
    """
    out, skipped = Journal(journal, reader=os.getpid()), 0
    gone = {fact["session"] for fact in facts(journal) if fact["event"] in ("ended", "lost")}

    def hear(event):
        nonlocal skipped
        if isinstance(event, FrameSkipped):
            skipped += 1
        elif event.session in gone:
            return
        elif isinstance(event, SessionLost):
            out.note("lost", session=event.session, last=event.last_sequence, requests=event.requests)
        elif isinstance(event, SessionEnded):
            out.note("ended", session=event.session)
        elif isinstance(event, SessionStarted):
            out.note("started", session=event.session)
        elif isinstance(event, Gap):
            out.note("gap", session=event.session, first=event.first, last=event.last)

    options = {"curve": curve, "auto_ack": False, "lost_after": LOST_AFTER, "grace": GRACE, "on_event": hear}
    found = when_free(lambda: OutputReader(url, after=cursors_of(journal), **options))
    out.note("reads")
    stopping, quiet = False, 0
    with found:
        while not (stopping and not found.cursors and quiet > 4):
            word = words.next()
            stopping |= word == "stop"
            while word == "rest":
                while (word := words.next(60)) not in ("go", "stop"):
                    assert word, "no command for a minute"
                stopping |= word == "stop"
            frame = found.read(0.05)
            quiet = quiet + 1 if frame is None else 0
            if frame is not None and frame.header.session not in (*SESSIONS, *gone):
                rows = [
                    [row.request_id, row.status.name, row.position, row.tokens.tolist(), bool(row.finish)]
                    for row in frame.record.rows()
                ]
                where = {"session": frame.header.session, "sequence": frame.header.sequence}
                out.note("record", **where, step=frame.record.step, rows=rows)
                found.acknowledge(frame.header.session, frame.header.sequence)
    assert skipped == found.counters()["skipped"]
    out.note("left", skipped=skipped)


def make_small(pipe):
    """Have the pipe hold one page, so that it is full soon."""
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)


def tail(_words, url, out):
    """``hal tail`` itself; Ctrl-C ends it."""
    from hal_engine.cli.tail import command

    from hal.cli import signals

    os.dup2(out, 1)
    sys.stdout = os.fdopen(1, "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with signals.watched(to_the_end=True):  # as the command does
        heed_interrupts()
        command(url, as_json=True)


def journal_of_tail(printed, path):
    """Write down what tail printed as the reader would have noted it."""
    out = Journal(path)
    for line in printed.decode().splitlines():
        fact = json.loads(line)
        if fact["event"] == "row" and fact["request"].startswith("w"):
            where = {"session": int(fact["session"], 16), "sequence": fact["sequence"]}
            row = [fact["request"], "TOKEN", fact["step"], fact["tokens"], False]
            out.note("record", **where, step=fact["step"], rows=[row])
        elif fact["event"] in ("SessionEnded", "SessionLost"):
            words = fact["text"].split("session ")[1]
            kind = "ended" if fact["event"] == "SessionEnded" else "lost"
            last = None if kind == "ended" else int(fact["text"].split("after frame ")[1].split()[0])
            out.note(kind, session=int(words[:16], 16), last=last)
        elif fact["event"] == "Gap":
            out.note("gap", session=int(fact["text"].split("of session ")[1][:16], 16), text=fact["text"])


def second_reader(_words, url, holders):
    """Open a second reader of an address; the error names the first one's process, unless that has not opened yet."""
    refusal = ""
    try:
        OutputReader(url, grace=0).close()
    except InvalidValue as error:
        refusal = str(error)
    known = [f"already: process {one} " for one in holders]
    if url.startswith("tcp:"):
        known = [PORT_TAKEN]
    assert not refusal or any(words in refusal for words in known), refusal


def open_with_few_files(_words, url, limit, reads):
    """Opening works, or its error names the shortage."""
    for kept in map(int, os.listdir("/proc/self/fd")):
        if kept > 2:
            try:
                os.close(kept)
            except OSError:
                continue
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    cure = "ulimit"
    try:
        if reads:
            OutputReader(url).close()
        else:
            open_sink(url).close(0)
    except Unavailable as error:
        cure = error.cure
    assert "ulimit" in cure, cure


def open_on_full_disk(_words, place):
    """On a file system without a free inode: an error, and no partial files. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() or libc.unshare(0x00020000):  # CLONE_NEWNS
        return
    libc.mount(None, b"/", None, 0x44000, None)  # private, with all below it
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"nr_inodes=1"):
        return
    os.environ["XDG_RUNTIME_DIR"] = str(place)
    for opening in (private_ipc_url, OutputReader, lambda: OutputReader(f"ipc://{place}/socket")):
        refusal = ""
        try:
            opening()
        except HalError as error:
            refusal = error.cure and str(error)
        assert "No space left" in refusal, refusal
    assert not os.listdir(place)
