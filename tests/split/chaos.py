"""Chaos: workers of a split are killed at any moment, again and again, and every token is counted.

    python -m tests.split.chaos [--deaths 200] [--seed N] [--split P,D] [--speculate NAME]

A worker is killed (SIGKILL), or stopped for a while and continued, some steps after the previous kill, or some seconds
if no step comes: so a slow machine has no more kills in one step than a fast one. Conditions: each request ends, with
the tokens of the plain run, each reported once, in order; and no run hangs.
"""

import argparse
import random
import signal
import sys
import time

from hal_core import FinishReason
from hal_engine.options import split_of

from tests.distributed.rows import Delivered, Row, reference, requests
from tests.split.rows import Own, engine_of

LONGEST = 300.0
"""Most seconds of a round of requests after the last kill."""
STEPS, SECONDS = 12, 3.0
"""At most so many steps, or seconds, lie between two deaths."""


class Chaos:
    """One run: rounds of requests, and deaths, until there were enough."""

    def __init__(self, split, row, seed, deaths):
        self.random, self.deaths, self.row = random.Random(seed), deaths, row
        self.killed = self.stopped = self.rounds = 0
        self.starters, self.reasons = {}, []
        self.delivered = Delivered()
        self.engine = engine_of(row, split, self.starter, self, restarts=10 * deaths, note=self.reasons.append)

    def starter(self, number):
        self.starters[number] = made = Own(self.row.tp)
        return made

    def take(self, record):
        self.delivered.take(record)

    def run(self):
        """All rounds."""
        with_end = 0
        while self.killed < self.deaths:
            self.rounds += 1
            with_end += self.round()
        return with_end

    def round(self):
        """All requests once; their names are those of the round before."""
        self.delivered, end = Delivered(), time.monotonic() + LONGEST
        for request in requests():
            self.engine.submit(request)
        ended, due = {}, self.due()
        while self.engine.busy:
            for finished in self.engine.step():
                assert finished.request_id not in ended, f"{finished.request_id} ended twice"
                ended[finished.request_id] = finished
            assert time.monotonic() < end, {one.name: one.state for one in self.engine.front.split_requests.values()}
            if self.killed < self.deaths and (self.engine.steps > due[0] or time.monotonic() > due[1]):
                self.strike()
                due, end = self.due(), time.monotonic() + LONGEST
        for name, tokens in reference().tokens.items():
            assert ended[name].reason in (FinishReason.STOP, FinishReason.LENGTH), ended[name]
            assert self.delivered.tokens[name] == tokens, name
            assert len(self.delivered.logprobs[name]) == len(tokens), name
        return len(ended)

    def due(self):
        """Return the time of the next kill: a step, and the latest second."""
        return (
            self.engine.steps + self.random.randrange(STEPS),
            time.monotonic() + self.random.uniform(0.0, SECONDS),
        )

    def strike(self):
        """One worker that is up, or is being started, loses a rank or waits for a moment."""
        there = [one for one in self.engine.workers if one.rank_executor is not None]
        up = [one for one in there if one.up]
        if self.random.random() < 0.9 and not (there := up):
            return
        worker = self.random.choice(there)
        pool = self.starters[self.engine.workers.index(worker)].pool
        rank = self.random.randrange(self.row.tp)
        if self.random.random() < 0.2:
            self.stopped += 1
            pool.signal(rank, signal.SIGSTOP)
            time.sleep(self.random.uniform(0.0, 0.3))
            pool.signal(rank, signal.SIGCONT)
        else:
            self.killed += 1
            pool.kill([rank])
            if self.killed % 20 == 0:
                print(f"{self.killed} deaths, {self.stopped} stops, {self.rounds} rounds", flush=True)


def main():
    """Run; the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--split", default="2,2")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--speculate", default="mtp")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    row, began = Row(tp=options.tp, speculate=options.speculate, timeout=3.0, check=False), time.monotonic()
    chaos = Chaos(split_of(options.split), row, options.seed, options.deaths)
    try:
        ended = chaos.run()
    finally:
        chaos.engine.close()
    seconds = time.monotonic() - began
    print(
        f"{chaos.killed} deaths, {chaos.stopped} stops, {chaos.rounds} rounds, {ended} requests ended whole, "
        f"{chaos.engine.restarts} workers started again, {chaos.engine.steps} steps in {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
