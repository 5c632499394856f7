"""Episodes of ``hal run``: alone, on ranks, split, in groups and restarted, under the faults of ``episodes.py``.

Each run answers the same prompts; the answers of an undisturbed run are known. Conditions: the printed text, and the
records of its ``--sink``, are those answers or their beginning, once and in order; status 0 means all of them; a lost
rank is reported with all requests that it takes along; every run ends; no process, file or folder of it is left.
"""

import contextlib
import ctypes
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import episode_roles as roles
import episode_wires as wires
from episode_children import Child

from tests.commands import LIBRARIES, RUN
from tests.warm import Warm

PATIENCE = 120.0  #: seconds until a run counts as hung, on a machine that may be busy
GONE = 30.0  #: seconds in which ranks of an engine that was killed must be gone
PROMPTS = ("def main(", "for i in range(", "import os", "class Reader:", "with open(", "x = ")
TOKENS = 24
FORMS = ((), ("--tp", "2"), ("--split", "1,1"), ("--split", "2,2"), ("--dp", "2"))
COLLECTIVE = "4"  #: seconds that a collective, and so a stopped rank, may take
METADATA = "Metadata-Version: 2.1\nName: episode-observer\nVersion: 1.0\nRequires-Dist: paddle-hal-core>=1.1,<2\n"
ENTRY = "[hal.observers]\nsteps = episode_observer:Steps\n"
SWEEP = "from hal_engine.transport import private_ipc_url, release_ipc; release_ipc(private_ipc_url())"
DISK = 4 << 20
CLONE_NEWNS, CLONE_NEWIPC, MS_REC, MS_PRIVATE = 0x20000, 0x8000000, 0x4000, 0x40000


@functools.cache
def warm():
    """The process whose forks are the engines of this job's episodes."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of what Paddle imports
    return Warm(LIBRARIES)


@functools.cache
def plugins():
    """A folder with the observer as an installed distribution has it."""
    folder = Path(tempfile.mkdtemp(prefix="hal-episode-plugins-"))
    shutil.copy(Path(__file__).with_name("episode_observer.py"), folder)
    info = folder / "episode_observer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY)
    return folder


def end_job():
    """End the processes that this job's episodes share."""
    if warm.cache_info().currsize:
        warm().close()
    if plugins.cache_info().currsize:
        shutil.rmtree(plugins())


@functools.cache
def reference():
    """Map each request to its answer in an undisturbed run."""
    with tempfile.TemporaryDirectory(prefix="hal-episode-") as folder:
        done = warm().run(*arguments_of(()), code=RUN, env=environment(Path(folder), 0.0))
        assert done.returncode == 0, done.stderr
    return {answer["request_id"]: answer for answer in map(json.loads, done.stdout.splitlines())}


def arguments_of(form):
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    return ["run", *prompts, "--temperature=0", "--max-tokens", str(TOKENS), "--slots", "3", "--json", *form]


def environment(folder, pace):
    places = {"XDG_RUNTIME_DIR": folder / "run", "TMPDIR": folder / "run"}
    (folder / "run").mkdir(exist_ok=True, mode=0o700)
    paths = os.pathsep.join(filter(None, [str(plugins()), os.environ.get("PYTHONPATH")]))
    settings = {"HAL_EPISODE": folder, "HAL_EPISODE_PACE": pace, "HAL_OBSERVERS": "steps", "HAL_DEVICE": "cpu"}
    settings |= {"HAL_RANKS_TIMEOUT": COLLECTIVE, "HAL_RANKS_STEP": "8", "OMP_NUM_THREADS": 1, "PYTHONPATH": paths}
    return os.environ | {name: str(value) for name, value in (places | settings).items()}


class RankEpisode:
    """One episode."""

    def __init__(self, folder, seed, number, address):
        """``address``: gives a free tcp address."""
        self.random = draw = random.Random(f"{seed}:{number}:ranks")
        self.folder, self.children, self.done = Path(folder), [], Counter()
        self.form = draw.choice(FORMS)
        if self.form and draw.random() < 0.5:
            self.form += ("--restart", "1")
        self.sink = draw.choice(["", "ipc", "tcp"])
        self.pace = draw.choice([0.0, 0.01, 0.03])
        self.has_disk = draw.random() < 0.4
        self.address = address
        self.reader = self.wire = self.process = None
        self.engine_killed = self.was_signaled = False

    # Participants -------------------------------------------------------------------------------------------------

    def start(self, role, *arguments):
        self.children.append(Child(role, *arguments))
        return self.children[-1]

    def start_sink(self):
        """The reader of ``--sink``, over tcp behind a wire; the url to send to."""
        (self.folder / "place").mkdir(mode=0o700)
        self.url = self.address() if self.sink == "tcp" else f"ipc://{self.folder}/place/socket"
        self.start_reader()
        if self.sink == "ipc":
            return self.url
        host, _, port = self.url.removeprefix("tcp://").rpartition(":")
        with wires.listener_at(host) as listener:
            self.wire = self.start(wires.wire, listener, (host, int(port)))
            return f"tcp://{host}:{listener.getsockname()[1]}"

    def start_reader(self):
        self.reader = self.start(roles.reader, self.url, self.folder / "reads")

    def start_run(self):
        form = [*self.form, *(["--sink", self.start_sink()] if self.sink else [])]
        settings = environment(self.folder, self.pace)
        if self.has_disk:
            self.has_disk = mount(self.folder / "run")
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self.process = warm().start(*arguments_of(form), code=RUN, env=settings, stdout=out, stderr=err)

    def others(self):
        """The processes that the run has started, by their environment: the launchers and the ranks."""
        mark, found = f"\0HAL_EPISODE={self.folder}\0".encode(), []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and mark in b"\0" + Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
        return found

    def stepping(self):
        """Processes that have run steps and are alive."""
        pids = [int(path.name.removeprefix("steps-")) for path in self.folder.glob("steps-*")]
        return [pid for pid in pids if pid in self.others() or pid == self.process.pid]

    def steps(self):
        return sum(path.stat().st_size for path in self.folder.glob("steps-*"))

    def wait_for_steps(self, count):
        end = time.monotonic() + PATIENCE
        while self.steps() < count and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)

    # Faults -------------------------------------------------------------------------------------------------------

    def send(self, number, pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_one(self):
        if others := self.others():
            self.send(signal.SIGKILL, [self.random.choice(sorted(others))])

    def kill_engine(self):
        self.process.kill()
        self.engine_killed = True

    def interrupt(self):
        self.process.send_signal(self.random.choice([signal.SIGTERM, signal.SIGINT]))
        self.was_signaled = True

    def hang_in_a_step(self):
        """And be interrupted, or not."""
        if there := self.stepping():
            (self.folder / f"hang-{self.random.choice(sorted(there))}").touch()
            if there == [self.process.pid] or self.random.random() < 0.3:  # a worker without ranks has no supervisor
                self.pause()
                self.interrupt()
                self.done["hung, then interrupted (run)"] += 1

    def stop_some(self):
        together = [self.process.pid, *self.others()]
        chosen = self.random.sample(together, self.random.randint(1, len(together)))
        self.stop_and_continue(chosen)

    def stop_all(self):
        self.stop_and_continue([self.process.pid, *self.others()])

    def stop_and_continue(self, pids):
        if self.process.poll() is not None:
            return
        self.send(signal.SIGSTOP, pids)
        if self.random.random() < 0.2:
            time.sleep(float(COLLECTIVE) + 2)
            self.done["long pauses"] += 1
        else:
            self.pause()
        self.random.shuffle(pids)
        self.send(signal.SIGCONT, pids)

    def fill_the_disk(self):
        """Stop all and continue them, while the disk is full or has room again."""
        if not self.has_disk:
            return
        filler = self.folder / "run" / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as out:
            while True:
                out.write(bytes(1 << 16))
        if self.random.random() < 0.5:
            self.stop_all()
            filler.unlink()
        else:
            filler.unlink()
            self.stop_all()

    def stop_reader(self):
        if self.reader is not None:
            self.reader.signal(signal.SIGSTOP)
            self.pause()
            self.reader.signal(signal.SIGCONT)

    def kill_reader(self):
        if self.reader is not None:
            self.reader.kill()
            self.start_reader()

    def trouble_the_wire(self):
        if self.wire is not None:
            self.wire.tell(self.random.choice(["stall", "vanish", "drip", "cut"]))
            self.pause()
            self.wire.tell("go")

    def pause(self):
        time.sleep(self.random.random() * 0.3)

    # The whole ---------------------------------------------------------------------------------------------------

    @property
    def what(self):
        """Features of the episode, for the table."""
        more = [f"of hal run --sink {self.sink}"] if self.sink else []
        return ["of hal run", f"of hal run {' '.join(self.form) or 'alone'}", *more]

    def run(self):
        draw = self.random
        reference()
        self.start_run()
        blows = [self.kill_one, self.kill_one, self.hang_in_a_step, self.hang_in_a_step, self.interrupt]
        blows += [self.stop_some, self.stop_all, self.fill_the_disk, self.fill_the_disk, self.kill_engine]
        blows += [self.stop_reader, self.kill_reader, self.trouble_the_wire, self.trouble_the_wire]
        if draw.random() < 0.15:  # while it starts
            time.sleep(draw.random() * 3)
            self.random.choice([self.kill_one, self.stop_all, self.fill_the_disk, self.interrupt])()
        for _ in range(draw.randint(1, 3)):
            self.wait_for_steps(draw.randint(1, 45))
            blow = draw.choice(blows)
            if self.process.poll() is None:
                blow()
                self.done[f"{blow.__name__.replace('_', ' ')} (run)"] += 1
        self.finish()

    def finish(self):
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < end, "hal run hangs"
            time.sleep(0.01)
        self.process.wait()
        end = time.monotonic() + (GONE if self.engine_killed else 1.0)
        while self.others() and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.others(), "processes are left"
        if self.reader is not None:
            if self.wire is not None:
                self.wire.tell("go")
            self.reader.tell("stop")
            self.reader.wait()
        for child in self.children:
            if child.role == "wire":
                child.tell("stop")
            child.check()

    def clean_up(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.send(signal.SIGCONT, others := self.others())
        self.send(signal.SIGKILL, others)
        for child in self.children:
            if not child.is_over():
                child.signal(signal.SIGCONT)
                child.kill()
        if self.has_disk:
            unmount(self.folder / "run")

    # The account -------------------------------------------------------------------------------------------------

    def account(self):
        totals, code = Counter(), self.process.returncode
        stderr = (self.folder / "err").read_text(errors="replace")
        printed = self.printed()
        complete = {name for name, answer in printed.items() if is_whole(name, answer)}
        assert "Traceback" not in stderr, stderr
        if not self.engine_killed:
            allowed = (0, 1, 2) + ((128 + signal.SIGTERM, 128 + signal.SIGINT) if self.was_signaled else ())
            assert code in allowed, f"status {code}: {stderr}"
            assert code or self.was_signaled or len(complete) == len(PROMPTS), (
                f"status 0, but {sorted(complete)}: {stderr}"
            )
            assert not code or stderr.strip() or self.was_signaled, f"status {code}, and not a word"
        if code == 1 and self.steps():  # ranks were lost
            unnamed = set(reference()) - complete - named_in(stderr)
            assert not unnamed, f"{sorted(unnamed)} are neither answered nor named: {stderr}"
        if self.sink:
            totals["tokens of runs read"] += self.check_sink(code)
        totals[f"runs that ended with {code}"] += 1
        totals["answers"] += len(complete)
        return totals

    def printed(self):
        found = {}
        for line in (self.folder / "out").read_text().splitlines():
            try:
                answer = json.loads(line)
            except ValueError:
                assert self.engine_killed, f"a torn line: {line}"
                continue
            name = answer["request_id"]
            assert name not in found, f"{name} was answered twice"
            expected = reference()[name]["token_ids"]
            assert answer["token_ids"] == expected[: len(answer["token_ids"])], f"{name}: {answer}"
            found[name] = answer
        return found

    def check_sink(self, code):
        """Frames once and in order; tokens come twice, or are missing, only where a session was lost."""
        sequences, places, is_lost = {}, {}, False
        for fact in roles.facts(self.folder / "reads"):
            assert fact["event"] != "gap", fact
            is_lost |= fact["event"] == "lost"
            if fact["event"] != "record":
                continue
            sequences.setdefault(fact["session"], []).append(fact["sequence"])
            for name, _, position, tokens, _ in fact["rows"]:
                for at, token in enumerate(tokens, position):
                    assert reference()[name]["token_ids"][at] == token, f"{name} at {at}: {token}"
                    places.setdefault((name, at), []).append(fact["session"])
        for session, found in sequences.items():
            assert found == list(range(1, len(found) + 1)), f"{session:016x}: sequences {found}"
        for place, sessions in places.items():
            assert len(set(sessions)) == len(sessions), f"{place} came twice in one session"
            assert len(sessions) == 1 or is_lost, f"{place} came {len(sessions)} times, and no session was lost"
        wanted = sum(len(answer["token_ids"]) for answer in reference().values())
        assert code or is_lost or self.was_signaled or len(places) == wanted, f"{len(places)} of {wanted} tokens came"
        return len(places)

    def check_left(self):
        """The next command removes the files that a killed one has left."""
        place = self.folder / "run"
        warm().run(code=SWEEP, env=environment(self.folder, 0.0))
        left = [str(path.relative_to(place)) for path in place.rglob("*") if path.name != "filler"]
        left += [path.name for path in self.folder.glob("place/*")]
        assert not left, f"left behind: {left}"


def named_in(stderr):
    """The requests that a line names, one by one or as "r3 to r5"."""
    found = re.findall(r"\br(\d+)(?: to r(\d+))?\b", stderr)
    return {f"r{number}" for first, last in found for number in range(int(first), int(last or first) + 1)}


def is_whole(name, answer):
    expected = reference()[name]
    return (answer["token_ids"], answer["finish_reason"]) == (expected["token_ids"], expected["finish_reason"])


@functools.cache
def is_alone():
    """Give this process and its children mounts, queues, semaphores and shared memory of their own.

    What lies there at the end was left behind. False where that may not be.
    """
    libc = ctypes.CDLL(None)
    if os.geteuid() or libc.unshare(CLONE_NEWNS | CLONE_NEWIPC):
        return False
    libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def shared_left():
    """Shared memory, queues and semaphores of this namespace."""
    left = os.listdir("/dev/shm")
    for kind in ("shm", "msg", "sem"):
        left += Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
    return left


def mount(place):
    """A small file system of its own, which this process and its children alone see; False where that may not be."""
    libc = ctypes.CDLL(None, use_errno=True)
    return is_alone() and not libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=%d,mode=700" % DISK)


def unmount(place):
    ctypes.CDLL(None).umount2(os.fsencode(place), 2)  # MNT_DETACH
