"""One episode (``episodes.py``): its participants, the faults that they meet, and the end."""

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import episode_roles as roles
import episode_wires as wires
from episode_account import Account
from episode_children import PATIENCE, Child
from episode_strangers import Strangers
from hal_engine.transport.curve import CurveKeys


class Episode:
    """One episode."""

    def __init__(self, folder, seed, number, schemes):
        self.random = draw = random.Random(f"{seed}:{number}")
        self.folder, self.number = Path(folder), number
        self.scheme = draw.choice(schemes)
        self.as_tail = draw.random() < 0.15
        self.size = draw.choice(["small", "small", "large"] + ["batches"] * (not self.as_tail))
        self.url = free_address(number) if self.scheme == "tcp" else f"ipc://{folder}/place/socket"
        self.wire, self.senders_url = None, self.url
        self.has_wire = self.scheme == "tcp" and draw.random() < 0.5
        self.keys = keys() if self.scheme == "tcp" and not self.as_tail and draw.random() < 0.4 else (None, None)
        (self.folder / "place").mkdir(mode=0o700)
        self.works, self.reads = self.folder / "works", self.folder / "reads"
        self.children, self.workers, self.killed_lives = [], [], set()
        self.lives, self.reader, self.done = 0, None, Counter()
        self.strangers = Strangers(self.url, draw)

    # Participants ----------------------------------------------------------------------------------------------

    def start(self, role, *arguments):
        self.children.append(Child(role, *arguments))
        return self.children[-1]

    def start_reader(self):
        if self.as_tail:
            read_end, write_end = os.pipe()
            roles.make_small(write_end)
            self.reader = self.start(roles.tail, self.url, write_end)
            os.close(write_end)
            self.pipe = read_end
        else:
            self.reader = self.start(roles.reader, self.url, self.reads, self.keys[0])

    def start_wire(self):
        host, _, port = self.url.removeprefix("tcp://").rpartition(":")
        with wires.listener_at(host) as listener:
            self.senders_url = f"tcp://{host}:{listener.getsockname()[1]}"
            self.wire = self.start(wires.wire, listener, (host, int(port)))

    def start_worker(self, sender, **more):
        self.lives += 1
        draw = self.random
        plan = {
            "life": f"w{self.lives}",
            "sender": sender,
            "size": self.size,
            "count": draw.choice([3, 30, 150] if self.size == "small" else [3, 20]),
            "capacity": draw.choice([2, 16, 1024]),
            "seed": draw.randrange(1 << 30),
            "curve": self.keys[1],
            "pace": 0.002,
        } | more
        worker = self.start(roles.worker, self.senders_url, self.works, plan)
        worker.plan, worker.hangs = plan, False
        self.workers.append(worker)

    # Faults ----------------------------------------------------------------------------------------------------

    def kill_worker(self):
        self.kill(self.random.choice(self.workers))

    def kill(self, worker):
        worker.kill()
        if worker.killed:
            self.killed_lives.add(worker.plan["life"])
        self.workers.remove(worker)
        if self.random.random() < 0.7:
            self.start_worker(worker.plan["sender"])

    def close_worker(self):
        self.random.choice(self.workers).tell(f"close {self.random.choice([0, 0.02, 0.2])}")

    def stop_worker(self):
        self.stop(self.random.choice(self.workers))

    def stop_reader(self):
        self.stop(self.reader)

    def stop(self, process):
        process.signal(signal.SIGSTOP)
        self.pause()
        process.signal(signal.SIGCONT)

    def hang_in_a_step(self):
        """Its output never comes, and its other threads live."""
        worker = self.random.choice(self.workers)
        worker.hangs = True
        worker.tell("hang")
        self.pause_or(3.5)

    def freeze_worker(self):
        """Its own thread waits forever, and its sink's lives; the test ends it."""
        worker = self.random.choice(self.workers)
        worker.tell("freeze")
        self.pause_or(3.5)
        self.kill(worker)

    def stop_all(self):
        """And continue them, in another order."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            together = [one for one in (self.wire, self.reader, *self.workers) if one is not None]
            for one in self.random.sample(together, len(together)):
                one.signal(number)
            self.pause_or(3.5)

    def stop_all_after_a_full_disk(self):
        self.open_on_full_disk()
        self.stop_all()

    def trouble_the_wire(self):
        """Both ends stay open and the wire passes no bytes, or loses them, or drips, or is cut."""
        if self.wire is not None:
            self.wire.tell(self.random.choice(["stall", "stall", "vanish", "drip", "cut"]))
            self.pause_or(3.5)
            if self.random.random() < 0.5:
                self.random.choice([self.kill_worker, self.close_worker, self.kill_reader, self.stop_reader])()
            self.wire.tell("go")

    def strangers_drip(self):
        for _ in range(self.random.choice([1, 3])):
            found = wires.HELLO + bytes(60)
            self.start(wires.drip, self.url, found[: self.random.randrange(1, len(found))])

    def kill_reader(self):
        if self.as_tail:
            self.stop_reader()  # the printed lines are in a pipe, and its cursor is lost
            return
        self.reader.kill()
        if self.random.random() < 0.5:
            self.pause()
        self.start_reader()

    def kill_both(self):
        if not self.as_tail:
            self.reader.kill()
            self.kill_worker()
            self.start_reader()

    def do_not_read(self):
        """For a moment, or beyond what any heartbeat takes, while a worker dies."""
        self.reader.tell("rest")  # the full pipe blocks tail
        self.pause()
        if self.random.random() < 0.5:
            self.random.choice([self.kill_worker, self.close_worker])()
        if self.random.random() < 0.05:
            time.sleep(2.2)
            self.done["long rests"] += 1
        self.reader.tell("go")

    def attack(self):
        for _ in range(self.random.choice([1, 5, 20])):
            self.strangers.attack()

    def second_reader(self):
        """Its error names the owner of the address, unless the address is free now."""
        if not self.as_tail:
            readers = [child.pid for child in self.children if child.role == "reader"]
            self.start(roles.second_reader, self.url, readers).wait()

    def few_files(self):
        self.random.choice([self.reader, *self.workers]).tell("few")
        self.pause()
        for process in (self.reader, *self.workers):
            process.tell("many")

    def open_with_few_files(self):
        place = self.folder / "few"
        place.mkdir(exist_ok=True)
        limit = self.random.randrange(8, 33)
        self.start(roles.open_with_few_files, f"ipc://{place}/socket", limit, self.random.random() < 0.5).wait()
        assert not list(place.iterdir()), "what could not be opened left something"

    def open_on_full_disk(self):
        place = self.folder / "full"
        place.mkdir(exist_ok=True)
        self.start(roles.open_on_full_disk, place).wait()

    def pause(self):
        time.sleep(self.random.random() ** 2 * 0.05)

    def pause_or(self, seconds):
        """Seldom for so long, beyond what any heartbeat takes."""
        if self.random.random() < 0.06:
            time.sleep(seconds)
            self.done["long pauses"] += 1
        else:
            self.pause()

    # The whole -----------------------------------------------------------------------------------------------

    @property
    def what(self):
        """Features of the episode, for the table."""
        more = {"with hal tail": self.as_tail, "with a wire": self.has_wire, "with keys": self.keys[0] is not None}
        more["of batches"] = self.size.endswith("batches")
        return [f"over {self.scheme}", *(name for name, there in more.items() if there)]

    def account(self):
        return Account(self.works, self.reads).check(self.killed_lives)

    def run(self):
        draw = self.random
        if draw.random() < 0.5:
            self.start_reader()
        if self.has_wire:
            self.start_wire()
        for sender in range(draw.choice([1, 1, 2, 3])):
            self.start_worker(sender)
        if self.reader is None:
            self.pause()
            self.start_reader()
        blows = [
            *(
                self.kill_worker,
                self.close_worker,
                self.stop_worker,
                self.stop_reader,
                self.kill_reader,
                self.kill_both,
            ),
            *(self.do_not_read, self.do_not_read, self.attack, self.attack, self.second_reader, self.few_files),
            *(self.open_with_few_files, self.open_on_full_disk),
            *(self.hang_in_a_step, self.freeze_worker, self.stop_all, self.stop_all_after_a_full_disk),
            *(self.strangers_drip, *[self.trouble_the_wire] * (3 * self.has_wire)),
        ]
        for _ in range(draw.randrange(1, 5)):
            self.pause()
            if self.workers:
                blow = draw.choice(blows)
                blow()
                self.done[blow.__name__.replace("_", " ")] += 1
        self.finish()

    def finish(self):
        self.strangers.leave()
        printed = b""
        for worker in self.workers:  # one that hangs is woken up, or gives up
            worker.tell("close 0.2" if worker.hangs and self.random.random() < 0.5 else "finish 60")
        if self.as_tail:
            printed = self.empty_pipe()
        for worker in self.workers:  # on a busy machine a reader may not even have met them
            worker.wait()
        self.reader.tell("stop")
        self.reader.wait()
        for child in self.children:
            if child.role in ("wire", "drip"):
                child.tell("stop")
            child.check()
        if self.as_tail:
            roles.journal_of_tail(printed, self.reads)

    def empty_pipe(self):
        """The output of tail until its last session is over; then Ctrl-C, because it waits for more."""
        found, end, quiet = b"", time.monotonic() + PATIENCE, None
        os.set_blocking(self.pipe, False)
        while not self.reader.is_over():
            now = time.monotonic()
            assert now < end, "tail hangs"
            with contextlib.suppress(BlockingIOError):
                found += os.read(self.pipe, 1 << 20)
                quiet = None
            started = set(re.findall(rb'"SessionStarted", "text": "session (\w{16})', found))
            over = set(re.findall(rb'"Session(?:Ended|Lost)", "text": ".*?session (\w{16})', found))
            if started <= over and all(worker.is_over() for worker in self.workers):
                quiet = quiet or now
                if now > quiet + 0.3:
                    self.reader.signal(signal.SIGINT)
                    if not started:  # it may not listen yet, and then ends at once
                        self.reader.expected = (0, 130)
                    end, quiet = now + PATIENCE, now + PATIENCE
            time.sleep(0.002)
        while more := os.read(self.pipe, 1 << 20):
            found += more
        os.close(self.pipe)
        return found

    def clean_up(self):
        for child in self.children:
            if not child.is_over():
                child.signal(signal.SIGCONT)
                child.kill()
        self.strangers.leave()

    def check_left(self):
        """The last reader has closed in order, so no file of any reader is left."""
        left = [path.name for path in (self.folder / "place").iterdir()]
        assert not left, f"left behind: {left}"


def keys():
    """Return the keys of the reader, and of all senders."""
    reader, sender = CurveKeys.new(), CurveKeys.new()
    return reader.knowing(sender.public), sender.knowing(reader.public)


def free_address(number):
    """Private to this process, so that workers of a second run on this host cannot meet this episode's reader; the port
    is below those that the system assigns to clients.
    """
    host = f"127.{1 + (os.getpid() >> 16) % 254}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    for port in range(10_000 + number % 10_000, 32_000, 10_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return f"tcp://{host}:{port}"
    raise AssertionError("no free port")
