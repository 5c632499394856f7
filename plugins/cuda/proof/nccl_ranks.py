"""Two ranks over NCCL, step by step, each step printed: the first diagnosis if the kit's rank tests fail.

    python plugins/cuda/proof/nccl_ranks.py [device]

It uses the kit's own parts (the pool, the plugin's ``Support``, the ranks' side of its tests) and makes few checks. The
ranks start and connect, agree on a state, and refuse states that differ. Then one is stopped, or (in new processes)
killed: the stream on which the survivor waited must continue. The stopped rank is resumed, and both open their group
again. Another device as the argument, such as ``cpu``, uses that device's library; with ``one_gpu:opened`` both ranks
share one GPU.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from hal_conformance.harness.subject import Recipe
from hal_conformance.opening import subject_of
from hal_conformance.ranks import losses as rank_losses
from hal_conformance.ranks import work as rank_work
from hal_conformance.ranks.processes import Rank, RankPool
from hal_core import HalError
from hal_core.contract.support import Support
from hal_core.slots.fields import StateConfig

PAIR = ((0, 1),)
TIMEOUT = 4.0
"""Seconds that a collective may last."""
STARTING, ANSWERING, ALL = 120.0, 30.0, 220
"""Seconds until the ranks must be up, must have answered, and until this script must have ended."""
SIZES = StateConfig(num_slots=128, max_model_len=64, max_draft_tokens=5)


def say(text: str, begin: float) -> None:
    """Print a line with the seconds since the beginning."""
    print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)


def start(support: Support, recipe: Recipe, begin: float) -> RankPool:
    """Start two ranks with an open group."""

    def environment(rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        variables = dict(support.rank_environment(rank, endpoints))
        say(f"rank {rank} gets {variables}", begin)
        return {"PYTHONPATH": paths, "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")} | variables

    pool = RankPool(2, environment=environment)
    join = lambda: pool.run(rank_work.join, recipe, PAIR, TIMEOUT, "proof", timeout=STARTING)  # noqa: E731
    attempt(pool, begin, "joined, group open", join)
    for line in pool.output(0, 20_000).splitlines():
        if "NCCL version" in line:
            say(line, begin)
    return pool


def attempt(pool: RankPool, begin: float, what: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Return a call's result; if it raises, print the ranks' output and end the ranks first."""
    try:
        answer = call()
    except Exception:
        for rank in range(pool.size):
            print(f"--- output of rank {rank}:\n{pool.output(rank, 6000)}\n---", flush=True)
        pool.kill()
        pool.close()
        raise
    say(what, begin)
    return answer


def agree(pool: RankPool, recipe: Recipe, begin: float) -> bool:
    """Check that three broadcasts leave the source's bytes on both ranks, and that states that differ are refused."""
    run = lambda: pool.run(rank_work.agree, recipe, PAIR, (), SIZES, 1, 3, timeout=ANSWERING)  # noqa: E731
    seen = attempt(pool, begin, "three broadcasts are over", run)
    good = all(one.error is None and one.collectives == [1, 1, 1] for one in seen.values())
    part = slice(*_slice())
    good = good and all(seen[1].after[at][part] == seen[0].before[at][part] for at in range(3))
    say(f"G13: {'equal on both ranks, one collective a call' if good else [one.error for one in seen.values()]}", begin)
    other = {1: {"sizes": StateConfig(num_slots=129, max_model_len=64, max_draft_tokens=5)}}
    refuse = lambda: pool.run(rank_work.disagree, recipe, SIZES, other, timeout=ANSWERING)  # noqa: E731
    answers = attempt(pool, begin, "states that differ were opened", refuse)
    kinds = {rank: getattr(error, "kind", "no error") for rank, (error, *_) in answers.items()}
    say(f"G14: {kinds}", begin)
    return good and set(kinds.values()) == {"StateUnusable"}


def _slice() -> tuple[int, int]:
    """Return the broadcast slice without its header, which the source writes in between."""
    from hal_core.slots.fields import HEADER_BYTES
    from hal_core.slots.layout import lay_out

    part = lay_out(SIZES).groups["broadcast_speculative"]
    return part.offset + HEADER_BYTES, part.end


def lose_and_go_on(rank: Rank, recipe: Recipe, victim: int, how: str) -> tuple[Any, float, float]:
    """In a rank: return the error (``Lost``), the seconds until its stream was empty, and until its device was
    closed."""
    emptied: list[float] = []
    opened = rank_work.opened

    @contextmanager
    def watched(recipe: Recipe) -> Iterator[Any]:
        with opened(recipe) as bound:
            try:
                yield bound
            finally:
                began = time.monotonic()
                with suppress(HalError):  # an error in place of the time: the stream never became empty
                    bound.default_stream.synchronize(10.0)
                    emptied.append(time.monotonic() - began)
                emptied.append(time.monotonic())

    with mock.patch.object(rank_losses, "opened", watched):
        answer = rank_losses.lose(rank, recipe, PAIR, victim, how)
    return answer, emptied[0] if len(emptied) > 1 else -1.0, time.monotonic() - emptied[-1]


def lose(pool: RankPool, recipe: Recipe, begin: float, victim: int, how: str) -> bool:
    """Return the survivor's result when ``victim`` stops or kills itself after two broadcasts."""
    pool.begin(lose_and_go_on, recipe, victim, how, ranks=[0, 1])
    survivor = 1 - victim
    result = attempt(pool, begin, f"rank {victim} was {how}", lambda: pool.finish([survivor], ANSWERING))[survivor]
    answer, emptied, closed = result
    say(f"G16, rank {victim} {how}: {answer}", begin)
    say(
        f"the survivor's stream was empty {emptied:.3f} s later (-1: never), its device closed in {closed:.3f} s", begin
    )
    error = answer.error
    good = error is not None and error.kind == "GroupLost" and error.seconds < TIMEOUT + 8.0 and answer.rest is None
    return good and emptied >= 0


def anew(pool: RankPool, recipe: Recipe, begin: float, victim: int) -> bool:
    """Resume the stopped rank, which gets the loss, and open the group again on both."""
    pool.signal(victim, signal.SIGCONT)
    result = attempt(pool, begin, f"rank {victim} went on", lambda: pool.finish([victim], ANSWERING))[victim]
    say(f"it met {result[0].error and result[0].error.kind}; its stream was empty {result[1]:.3f} s later", begin)
    join = lambda: pool.run(rank_work.join, recipe, PAIR, TIMEOUT, "anew", timeout=STARTING)  # noqa: E731
    attempt(pool, begin, "the group is open anew", join)
    return agree(pool, recipe, begin)


def recipe_of(device: str) -> Recipe:
    """Return the recipe of a device's name, or of the factory at ``module:attribute``."""
    return Recipe(factory=device) if device.partition(":")[2].isidentifier() else Recipe(device)


def main(device: str) -> int:
    """Return 0 if the ranks gave the expected results."""
    faulthandler.dump_traceback_later(ALL, exit=True)
    begin, recipe = time.monotonic(), recipe_of(device)
    support = subject_of(recipe).support
    if not support.ranks:
        print(f"no ranks of {device} can be started here: {support.why_not('several_ranks')}")
        return 1
    good = True
    for victim, how in ((0, "hung"), (1, "lost")):
        pool = start(support, recipe, begin)
        if how == "hung":
            good = agree(pool, recipe, begin) and good
        good = lose(pool, recipe, begin, victim, how) and good
        if how == "hung" and not support.loss_ends_ranks:
            good = anew(pool, recipe, begin, victim) and good
        pool.kill()
        pool.close()
        say("the ranks have ended", begin)
    print("well" if good else "NOT WELL", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
