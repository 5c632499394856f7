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
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import episode_roles as roles
from episode import Episode, free_address
from episode_children import PATIENCE
from episode_ranks import RankEpisode, end_job, is_alone, shared_left


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
