"""Chaos: a worker and a reader in processes of their own, stopped, killed and restarted; then every token is counted.

    python tests/output/chaos.py [--steps 10000] [--seed N] [--large]

What must hold: each token for which ``save_output`` returned was read once, or named by ``Undelivered``, or belongs to
a session that was reported lost, where it lies behind everything read of its request. Never twice, never both.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
LEFT = ("PREEMPTED", "ABORTED")


class Chaos:
    """One run."""

    def __init__(self, folder, seed, steps, pause, *, large=False):
        self.folder, self.seed, self.steps, self.pause = Path(folder), seed, steps, pause
        self.random = random.Random(seed)
        self.url = f"ipc://{folder}/socket"
        self.size = "large" if large else "small"
        self.works, self.reads, self.stop = self.folder / "worker", self.folder / "reader", self.folder / "stop"
        self.enough = self.folder / "enough"
        self.lives = 0
        self.done = Counter()
        self.killed = set()

    def start(self, script, *arguments):
        return subprocess.Popen([sys.executable, HERE / script, self.url, *map(str, arguments)])

    def start_reader(self):
        self.reader = self.start("chaos_reader.py", self.reads, self.stop)

    def start_worker(self):
        self.lives += 1
        left = self.steps - self.noted("step")
        seed = self.random.randrange(1 << 30)
        told = (self.works, f"w{self.lives}", seed, max(1, left), self.size, self.enough)
        self.worker = self.start("chaos_worker.py", *told)

    def noted(self, event):
        return sum(1 for fact in facts(self.works) if fact["event"] == event)

    def run(self, timeout):
        end = time.monotonic() + timeout
        self.start_reader()
        self.start_worker()
        acts = [self.stop_reader, self.kill_reader, self.kill_worker, self.kill_both]
        try:
            while self.worker.poll() is None:
                assert time.monotonic() < end, "the worker hangs"
                time.sleep(self.random.uniform(0.2, 2) * self.pause)
                if not self.both_are_there():  # on a slow machine they would do no work before the next kill
                    continue
                if self.worker.poll() is None:
                    act = acts.pop(0) if acts else self.random.choice([self.stop_reader, self.kill_reader])
                    act()
                    self.done[act.__name__] += 1
                    if not acts:  # the first four kinds have occurred
                        self.enough.touch()
                    if not acts and self.random.random() < 0.25 and self.steps - self.noted("step") > self.steps // 20:
                        acts = [self.random.choice([self.kill_worker, self.kill_both])]
            assert self.worker.returncode == 0
            self.stop.touch()
            self.reader.wait(max(1, end - time.monotonic()))
        finally:
            for process in (self.worker, self.reader):
                process.kill()
                process.wait()
        assert self.reader.returncode == 0

    def both_are_there(self):
        """Whether the current worker and reader have begun."""
        lives = {fact["life"] for fact in facts(self.works)}
        return f"w{self.lives}" in lives and self.reader.pid in {fact["reader"] for fact in facts(self.reads)}

    def stop_reader(self):
        self.reader.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.1, 1) * self.pause)
        self.reader.send_signal(signal.SIGCONT)

    def kill_reader(self):
        self.reader.kill()
        self.reader.wait()
        time.sleep(self.random.uniform(0, 0.5) * self.pause)
        self.start_reader()

    def kill_worker(self):
        self.worker.kill()
        if self.worker.wait() == -signal.SIGKILL:
            self.killed.add(f"w{self.lives}")
        self.start_worker()

    def kill_both(self):
        self.reader.kill()
        self.kill_worker()
        self.reader.wait()
        self.start_reader()


def facts(journal):
    """The lines of a journal; the last may be torn by a kill."""
    found = []
    for line in journal.read_text().splitlines() if journal.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Account:
    """Compare the saved and the read records, session by session."""

    def __init__(self, chaos):
        self.chaos = chaos
        self.saved, self.read, self.ended, self.lost, self.undelivered = {}, {}, {}, {}, {}
        self.lives = {}
        self.totals = Counter()
        for fact in facts(chaos.works):
            session = fact["session"]
            self.lives[session] = fact["life"]
            if fact["event"] == "step":
                self.saved.setdefault(session, []).append(fact)
            elif fact["event"] == "undelivered":
                self.undelivered[session] = [tuple(record) for record in fact["records"]]
        self.gaps = []
        for fact in facts(chaos.reads):
            kinds = {"record": self.read, "lost": self.lost, "ended": self.ended}
            if fact["event"] == "gap":
                self.gaps.append(fact)
            elif fact["event"] in kinds:
                kinds[fact["event"]].setdefault(fact["session"], []).append(fact)

    def check(self):
        assert not self.gaps, self.gaps
        assert set(self.read) <= set(self.lives), "a record of no worker"
        for session in self.lives:
            self.check_session(session)
        return dict(self.totals)

    def check_session(self, session):
        # A worker killed after its final message, and before its process was over, counts as ended.
        killed = self.lives[session] in self.chaos.killed and session not in self.ended
        saved = [tuple_rows(fact) for fact in self.saved.get(session, [])]
        read = [tuple_rows(fact) for fact in self.read.get(session, [])]
        steps = [fact["step"] for fact in self.read.get(session, [])]
        sequences = [fact["sequence"] for fact in self.read.get(session, [])]
        assert sequences == list(range(1, len(sequences) + 1)), f"{session}: sequences {sequences[:20]}"
        assert steps == list(range(len(steps))), "a step twice, or left out"
        assert len(read) <= len(saved) + killed, "more was read than was saved"
        for number, (should, got) in enumerate(zip(saved, read, strict=False)):
            assert got == should, f"life {self.lives[session]}, step {number}: {got} instead of {should}"
        missing = saved[len(read) :]
        ends = self.ended.get(session, []) + self.lost.get(session, [])
        assert len(ends) <= 1, f"one session ended {len(ends)} times"
        self.totals["sessions"] += 1
        self.totals["records read"] += len(read)
        self.totals["tokens read"] += sum(len(tokens) for row in read for *_, tokens in row)
        self.totals["preemptions read"] += sum(status == "PREEMPTED" for rows in read for _, status, *_ in rows)
        if killed:
            self.check_killed(session, missing, read)
        else:
            named = Counter(self.undelivered.get(session, []))
            expected = Counter(told for rows in missing for told in deliveries(rows))
            assert named == expected, f"undelivered {named - expected}, nowhere {expected - named}"
            assert session in self.ended or missing, "a worker that closed did not say good-bye"
            self.totals["tokens named undelivered"] += sum(count for _, _, count in named.elements())

    def check_killed(self, session, missing, read):
        """A killed worker is a lost session, and the reader reports its requests so."""
        tokens = sum(len(tokens) for rows in missing for *_, tokens in rows)
        if session not in self.lost:
            assert not read, f"{self.lives[session]} was killed after {len(read)} records, and nobody was told"
            self.totals["tokens of sessions that no reader had heard of"] += tokens
            return
        (lost,) = self.lost[session]
        assert lost["last"] == len(read), f"lost after {lost['last']}, but {len(read)} records were read"
        unfinished, finished = set(), set()
        for fact in self.read.get(session, []):
            for name, *_, finish in fact["rows"]:
                (finished if finish else unfinished).add((name, fact["reader"] == lost["reader"]))
        known = {name for name, mine in unfinished if mine} - {name for name, _ in finished}
        assert set(lost["requests"]) == known, f"{set(lost['requests']) ^ known}"
        self.totals["tokens of lost sessions"] += tokens


def tuple_rows(fact):
    """A record's rows, sorted; the worker records removed requests and tokens, the reader in batch-id order."""
    return sorted((row[0], row[1], row[2], tuple(row[3])) for row in fact["rows"])


def deliveries(rows):
    return [(name, position, len(tokens)) for name, status, position, tokens in rows if status != "NONE"]


def run(steps, seed, pause=1.0, timeout=3600, *, large=False):
    """Run and check; return the counts."""
    with tempfile.TemporaryDirectory(prefix="hal-chaos-") as folder:
        chaos = Chaos(folder, seed, steps, pause, large=large)
        try:
            chaos.run(timeout)
            return dict(chaos.done) | Account(chaos).check()
        except BaseException as error:
            error.add_note(f"seed {seed}, {steps} steps, {dict(chaos.done)}")
            raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--large", action="store_true", help="most frames large: too large for a checksum")
    parser.add_argument("--pause", type=float, default=0.5, help="about how many seconds between two blows")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    start = time.monotonic()
    found = run(options.steps, options.seed, options.pause, large=options.large)
    for name, number in found.items():
        print(f"{number:8}  {name.replace('_', ' ')}")
    print(f"every token accounted for, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
