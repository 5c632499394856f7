"""Chaos: workers, readers and strangers at one address, faults of every kind, and then the account.

    python tests/output/episodes.py [--episodes 1000] [--seed N] [--jobs 4] [--only NUMBER] [--ranks 0.04]
    python tests/output/episodes.py --soak 10000 [--large]     one long episode of that many steps
    python tests/output/episodes.py --siege 60 [--schemes tcp]     strangers attack a reader for so many seconds

Each episode follows from seed and number. All processes are forked from this one, so an episode takes a fraction of a
second. Conditions in each: a token for which ``put`` or ``save_output`` returned was read once and in order, or is
named by ``Undelivered``, or lies behind the position of a ``SessionLost``, which names the requests; no process aborts
or hangs; no socket, lock, folder, process or file in memory is left.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import episode_roles as roles
import episode_wires as wires
from episode_account import Account
from episode_children import PATIENCE, Child
from episode_ranks import RankEpisode, end_job, is_alone, shared_left
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


class Soak(Episode):
    """One long episode of batches over ipc: ``steps`` in all, whatever is killed meanwhile."""

    def __init__(self, folder, seed, steps, pause, *, large=False):
        """``pause``: about how many seconds lie between two blows."""
        super().__init__(folder, seed, 0, ["ipc"])
        self.steps, self.interval, self.as_tail = steps, pause, False
        self.size = "large batches" if large else "batches"

    def start_worker(self, sender, **more):
        left = self.steps - sum(fact["event"] == "saved" for fact in roles.facts(self.works))
        capacity = self.random.choice([2, 4, 16])
        super().start_worker(sender, **{"count": max(1, left), "capacity": capacity} | more)

    def kill(self, worker):
        super().kill(worker)
        if not self.workers:
            self.start_worker(worker.plan["sender"])

    def run(self):
        self.start_reader()
        self.start_worker(0)
        draw, first = self.random, [self.stop_reader, self.kill_reader, self.kill_worker, self.kill_both]
        usual = [self.stop_reader, self.kill_reader] * 4 + [self.stop_worker, self.stop_all, self.attack]
        end = time.monotonic() + PATIENCE + self.steps  # a worker that hangs makes no step
        while first or sum(fact["event"] == "saved" for fact in roles.facts(self.works)) < self.steps:
            assert time.monotonic() < end, "a worker hangs"
            time.sleep(draw.uniform(0.2, 2) * self.interval)
            if not self.are_at_work():  # on a slow machine they would do no work before the next kill
                continue
            blow = first.pop(0) if first else draw.choice(usual)
            blow()
            self.done[blow.__name__.replace("_", " ")] += 1
            if not first and draw.random() < 0.25:
                first = [draw.choice([self.kill_worker, self.kill_both])]
                if self.steps - sum(fact["event"] == "saved" for fact in roles.facts(self.works)) <= self.steps // 20:
                    first = []
        self.finish()

    def are_at_work(self):
        """Whether the present worker and reader have begun."""
        begun = {fact["life"] for fact in roles.facts(self.works)}
        read = {fact["reader"] for fact in roles.facts(self.reads)}
        return self.workers[0].plan["life"] in begun and self.reader.pid in read


class Siege(Episode):
    """Strangers attack a reader that at times does not read, beside one worker, for so many seconds or attacks."""

    def __init__(self, folder, seed, schemes, seconds=None, attacks=None):
        super().__init__(folder, seed, 0, schemes)
        self.as_tail, self.has_wire, self.size, self.keys = False, False, "small", (None, None)
        self.seconds, self.attacks = seconds, attacks

    def run(self):
        self.start_reader()
        self.start_worker(0, count=1 << 40, capacity=1024, pace=0.02)
        end = None if self.seconds is None else time.monotonic() + self.seconds
        while (end is None or time.monotonic() < end) and self.done["attacks"] != self.attacks:
            self.strangers.attack()
            self.done["attacks"] += 1
            assert not self.reader.is_over(), f"it ended at attack {self.done['attacks']}"
            if self.random.random() < 0.01:
                self.reader.tell("rest")
                time.sleep(0.1)
                self.reader.tell("go")
        self.workers[0].tell("close 60")
        self.finish()

    def account(self):
        found = super().account()
        assert found["tokens read"] == found["tokens saved"], found
        return found


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


def run(numbers, seed, schemes, ranks, keep=False):
    """Run them; return the counts. Raises AssertionError, with seed and number, for a violated condition."""

    def made(number, folder):
        if random.Random(f"{seed}:{number}:kind").random() < ranks:
            return RankEpisode(folder, seed, number, lambda: free_address(number))
        return Episode(folder, seed, number, schemes)

    return sum(
        (run_one(partial(made, number), f"--seed {seed} --only {number}", keep) for number in numbers), Counter()
    )


def run_one(make, name, keep=False):
    """Run the episode that ``make`` makes in a folder; return the counts. Raises as :func:`run`."""
    folder = tempfile.mkdtemp(prefix="hal-episode-")
    episode = make(folder)
    try:
        episode.run()
        totals = episode.account()
        episode.check_left()
    except BaseException as error:
        error.add_note(f"{name}: {dict(episode.done)}, {episode.what}, {folder}")
        raise
    finally:
        episode.clean_up()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return totals + episode.done + Counter(f"episodes {one}" for one in episode.what)


def run_beside(jobs, episodes, seed, schemes, ranks):
    """Run them in so many processes beside each other: most of an episode is waiting."""
    pipes = []
    for job in range(jobs):
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                os.write(write_end, json.dumps(run(range(job, episodes, jobs), seed, schemes, ranks)).encode())
                status = 0
            except BaseException:  # noqa: BLE001  # told here, for a fork must not unwind its parent's stack
                traceback.print_exc()
            finally:
                end_job()
                sys.stderr.flush()
                os._exit(status)
        os.close(write_end)
        pipes.append(read_end)
    found = [b"".join(iter(lambda end=end: os.read(end, 4096), b"")) for end in pipes]
    assert all(os.wait()[1] == 0 for _ in pipes), "see above"
    return sum((Counter(json.loads(counts)) for counts in found), Counter())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--jobs", type=int, default=4, help="episodes beside each other")
    parser.add_argument("--only", type=int, help="the episode of this number alone, whose journals are kept")
    parser.add_argument("--schemes", default="ipc,tcp")
    parser.add_argument("--ranks", type=float, default=0.04, help="the share of episodes of hal run, most on ranks")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="one long episode instead")
    parser.add_argument("--large", action="store_true", help="of it: most frames large: too large for a checksum")
    parser.add_argument("--pause", type=float, default=0.5, help="of it: about how many seconds between two blows")
    parser.add_argument("--siege", type=float, metavar="SECONDS", help="one episode of strangers instead")
    parser.add_argument("--attacks", type=int, help="of it: so many instead of seconds")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if not is_alone():
        print("not root: no full disks, and no look for shared memory that is left")
    start, schemes = time.monotonic(), options.schemes.split(",")
    if options.soak is not None:
        make = partial(Soak, seed=options.seed, steps=options.soak, pause=options.pause, large=options.large)
        found = run_one(make, f"--soak {options.soak} --seed {options.seed}")
    elif options.siege is not None or options.attacks is not None:
        make = partial(Siege, seed=options.seed, schemes=schemes, seconds=options.siege, attacks=options.attacks)
        found = run_one(make, f"--siege --seed {options.seed}")
    elif options.only is not None:
        found = run([options.only], options.seed, schemes, options.ranks, keep=True)
        end_job()
    else:
        found = run_beside(options.jobs, options.episodes, options.seed, schemes, options.ranks)
    assert not is_alone() or not shared_left(), f"left behind: {shared_left()}"
    for name in sorted(found):
        print(f"{found[name]:8}  {name}")
    print(f"every token accounted for, nothing left behind, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
