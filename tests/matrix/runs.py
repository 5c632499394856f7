"""Rows of the matrix on worlds of ranks that are kept, against the plain run of one rank."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
from hal_conformance.ranks.processes import RankPool, job_variables
from hal_core import MemorySink
from hal_core.slots.admission import draw_seed
from hal_engine.distributed.control_messages import Setup
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.distributed.ray_launch import RayCluster
from hal_engine.engine import Engine, Limits
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.proposers import Setup as ProposerSetup
from hal_engine.proposers import make_proposer
from hal_engine.stepping import RunnerSetup, Stepper, make_runner, overlap_of
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.worker import Worker
from hal_sim import paddle_env
from hal_sim.mixing import mixed

from hal import open_device
from tests.distributed import rows
from tests.distributed.rows import PATIENCE, SCARCE, TOLERANCE, Delivered, reference
from tests.matrix.rows import SUBSTITUTES, Row, mixing_requests
from tests.ranks import ForkedRanks
from tests.split import rows as split_rows

LONG = 4 * PATIENCE
"""Seconds in which the one process of a world has run a row."""
MOST_RANKS = 6
"""Of a row: three workers of two."""


class Worlds:
    """A world of ranks for each size. Those of ``maca`` are separate: Paddle needs its device before it is imported."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool, int], RankPool] = {}
        self._cluster: RayCluster | None = None

    def of(self, row: Row, number: int = 0) -> RankPool:
        """The world that a row runs on, of a split that of each worker."""
        key = row.ranks, row.device == "maca", number
        if key not in self._pools:
            maca = row.device == "maca"
            more = SUBSTITUTES | (paddle_env.environment("metax_gpu") if maca else {})
            made = RankPool if maca else ForkedRanks
            self._pools[key] = made(
                row.ranks, environment=lambda rank, endpoints: job_variables(rank, endpoints) | more
            )
        return self._pools[key]

    def cluster(self) -> RayCluster:
        """Ray on this host, with CPUs for the ranks of every row."""
        if self._cluster is None:
            self._cluster = RayCluster(None, MOST_RANKS).__enter__()
        return self._cluster

    def end(self, row: Row) -> None:
        """End a world, including ranks that hang; it is restarted when it is needed."""
        for key in [key for key in self._pools if key[:2] == (row.ranks, row.device == "maca")]:
            pool = self._pools.pop(key)
            pool.kill()
            pool.close()

    def close(self) -> None:
        """End all."""
        for pool in self._pools.values():
            pool.kill()
            pool.close()
        self._pools.clear()
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
            self._cluster = None


@contextlib.contextmanager
def worlds() -> Iterator[Worlds]:
    """Worlds that end with the block."""
    made = Worlds()
    try:
        yield made
    finally:
        made.close()


def alone(rank: object, row: Row) -> Delivered:
    """In the one process of a world of one: the engine with its worker, as ``hal run`` has them."""
    if row.runner:
        return mixing_alone(row)
    outcome, sink = Delivered(), MemorySink()
    with mock.patch.dict(os.environ, SUBSTITUTES), open_device(row.device) as device:
        model, sizes = load_model(DEFAULT_CHECKPOINT), row.sizes
        setup = ProposerSetup(
            sizes.max_draft_tokens, sizes.num_slots, sizes.max_model_len, model.config.vocab_size, model
        )
        worker = Worker(device, model, sizes, row.blocks, sink, proposer=make_proposer(row.speculate, setup))
        engine = Engine(worker, Limits(chunk=row.chunk))
        run_all(engine, row)
        outcome.drafts = (worker.acceptance.drafted, worker.acceptance.accepted, worker.acceptance.turns)
    for record in sink.records:
        outcome.take(record)
    return outcome


def mixing_alone(row: Row) -> Delivered:
    """The same of the device's own runner, as ``--runner`` has it."""
    outcome, sink = Delivered(), MemorySink()
    with open_device(row.device) as device:
        sizes = replace(row.sizes, vocab_size=read_config(DEFAULT_CHECKPOINT).vocab_size)
        setup = RunnerSetup(device, sizes, row.blocks, DEFAULT_CHECKPOINT)
        stepper = Stepper(device, setup.state, make_runner(row.runner, setup), sink, blocks=row.blocks)
        overlap, _ = overlap_of(row.overlap, device, row.runner, stepper.runner.needs_host)
        run_all(Engine(stepper, Limits(chunk=row.chunk), overlap=overlap), row)
        acceptance = stepper.acceptance
        outcome.drafts = (acceptance.drafted, acceptance.accepted, acceptance.turns)
    for record in sink.records:
        outcome.take(record)
    return outcome


def run_all(engine: Engine, row: Row) -> None:
    """All requests of a row, to their ends."""
    for request in row.requests:
        engine.submit(request)
    for _ in engine.run():
        pass


def on_ranks(row: Row, pool: RankPool, how: tuple[object, ...] = ()) -> Delivered:
    """The engine of this process with the ranks of a pool; ``how`` names a faulty kind of rank."""
    outcome, answers = rows.run(row, pool, how, row.requests)
    assert set(answers.values()) == {None}, answers
    return outcome


def on_ray(row: Row, cluster: RayCluster) -> Delivered:
    """The engine of this process with ranks that Ray starts, as under ``--launcher ray``."""

    def rank_executor(setup: Setup, _: object) -> RankExecutor:
        return cluster.rank_executor(setup, {"CPU": 1.0}, "pack", look=lambda: None)

    if row.split != "off":
        return split_rows.run(row, row.workers, lambda number: None, row.requests, made_by=rank_executor)
    return rows.run_with(row, lambda: None, row.requests, rank_executor=rank_executor)


def missing(row: Row) -> str:
    """Return the features that this machine lacks for a row, with the cure, or ""."""
    if row.device != "opencl":
        return ""
    try:
        from hal_opencl import OpenCLPlugin
    except ModuleNotFoundError:
        return "paddle-hal-opencl is missing: pip install './plugins/opencl[pocl]'"
    probe = OpenCLPlugin.probe()
    return "" if probe.available else f"opencl: {probe.reason} ({probe.cure})"


def run(row: Row, made: Worlds) -> Delivered:
    """Run a row."""
    if row.launcher == "ray":
        return on_ray(row, made.cluster())
    if row.split != "off":
        return split_rows.run(row, row.workers, lambda number: rows.Pooled(made.of(row, number)), row.requests)
    pool = made.of(row)
    if row.ranks == 1:
        outcome: Delivered = pool.run(alone, row, timeout=LONG)[0]
        return outcome
    return on_ranks(row, pool)


@functools.cache
def foretold() -> Delivered:
    """Return the tokens that the device's own runner must give."""
    outcome, config = Delivered(), read_config(DEFAULT_CHECKPOINT)
    for request in mixing_requests():
        params = request.params
        tokens = mixed(draw_seed(params.seed, request.request_id), request.prompt, params.max_tokens, config.vocab_size)
        ends = [at for at, token in enumerate(tokens) if token in params.eos_token_ids]
        outcome.tokens[request.request_id] = tokens[: ends[0] + 1] if ends else tokens
    return outcome


def check(row: Row, outcome: Delivered) -> None:
    """Compare with the plain run token by token, and its log-probabilities; check that the row has exercised its
    feature."""
    expected = reference() if not row.runner else foretold()
    assert dict(outcome.tokens) == dict(expected.tokens), f"{row.name}: other tokens"
    for request, values in expected.logprobs.items():
        np.testing.assert_allclose(outcome.logprobs[request], values, atol=TOLERANCE, rtol=0, err_msg=row.name)
    own_pace = row.dp > 1 or row.split != "off"  # of which blocks may do for either's requests, or for those let in
    if not own_pace or row.blocks != SCARCE:
        assert bool(outcome.preempted) == (row.blocks == SCARCE), f"{row.name}: {outcome.preempted} preemptions"
    if row.runner:
        assert (outcome.longest > 1) == (row.speculate == "own"), (
            f"{row.name}: {outcome.longest} tokens in a step at most"
        )
    drafts = row.speculate not in ("none", "naive")
    assert bool(outcome.drafts[0]) == drafts, f"{row.name}: {outcome.drafts[0]} drafts"
