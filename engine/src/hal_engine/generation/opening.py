"""Opens an engine with its executor: a worker in this process, or ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import ALONE, OutputRecord
from hal_core.devices import check_processor

from hal.opening import open_as_asked, quiet_paddle
from hal_engine.distributed.control_messages import Serve, Setup
from hal_engine.distributed.ranks import Ranks
from hal_engine.engine import Engine
from hal_engine.engine.handed import HandedSink
from hal_engine.proposers import NONE
from hal_engine.proposers.asked import drafts_beside, no_drafts
from hal_engine.proposers.counted import closing_well, open_proposer
from hal_engine.stepping import AUTO, PADDLE, RunnerSetup, Stepper, check_drafts, choose_runner, make_runner, overlap_of
from hal_engine.timeouts import TIMEOUTS

if TYPE_CHECKING:
    pass

Take = Callable[[OutputRecord], object]


@contextmanager
def opened(serve: Serve, take: Take) -> Iterator[tuple[Engine, Any]]:
    """Open the engine; ``take`` gets each record that it has taken over. Yields it and what the device is: its name and
    ``capabilities``. Raises as opening a device, a model or ranks does."""
    with _ranks(serve, serve.ranks, take) if serve.ranks is not None else _worker(serve, take) as found:
        yield found


@contextmanager
def _worker(serve: Serve, take: Take) -> Iterator[tuple[Engine, Any]]:
    drafts = serve.sizes.max_draft_tokens
    with open_as_asked(serve.device, serve.require) as device, ExitStack() as stack:
        name, why = choose_runner(serve.runner, device, Path(serve.model))
        if serve.speculate != NONE and name != PADDLE:
            raise drafts_beside(serve.speculate, name)
        sink = HandedSink()
        worker: Stepper
        if name == PADDLE:
            check_processor()
            with quiet_paddle():
                from hal_engine.model.llama import LlamaModel
                from hal_engine.worker import Worker

            if drafts and serve.speculate == NONE:
                raise no_drafts(why)
            model = LlamaModel.load(Path(serve.model), place=serve.place)
            vocab, rejection = model.config.vocab_size, serve.rejection
            proposer = open_proposer(serve.speculate, serve.sizes, vocab, model, rejection=rejection)
            if proposer is not None:
                stack.enter_context(closing_well(proposer))
            worker = Worker(device, model, serve.sizes, serve.blocks, sink, proposer=proposer, rejection=rejection)
        else:
            state, vocab = device.state(serve.sizes), serve.sizes.vocab_size or 1
            setup = RunnerSetup(device, state, serve.blocks, Path(serve.model), serve.place, vocab, ALONE, serve.dtype)
            runner = make_runner(name, setup)
            check_drafts(name, runner, drafts)
            worker = Stepper(device, state, runner, sink, blocks=serve.blocks)
        overlap, _ = overlap_of(serve.overlap, device, name, worker.runner.needs_host)
        if serve.timed:
            worker.measure()
        sink.to = take
        try:
            engine = Engine(
                worker, chunk=serve.chunk, step_tokens=serve.step_tokens, overlap=overlap, on_record=sink.take
            )
            yield engine, device
        finally:
            sink.close(TIMEOUTS.records_end)


@contextmanager
def _ranks(serve: Serve, ranks: Ranks, take: Take) -> Iterator[tuple[Engine, Any]]:
    from hal_engine.distributed.engine import open_engine
    from hal_engine.distributed.starting import RankStart

    setup = Setup(
        model=serve.model,
        place=serve.place,
        device=serve.device,
        require=serve.require,
        sizes=serve.sizes,
        blocks=serve.blocks,
        **ranks.fields(),
        records="",
        timeout=TIMEOUTS.collective,
        runner="" if serve.runner in (AUTO, PADDLE) else serve.runner,
        dtype=serve.dtype,
        overlap=serve.overlap,
        speculate=serve.speculate,
        rejection=serve.rejection,
        timed=serve.timed,
    )
    with ExitStack() as stack:
        start = stack.enter_context(RankStart(ranks, serve.device))
        engine = open_engine(
            setup,
            start,
            vocab_size=serve.sizes.vocab_size or 1,
            split=ranks.split,
            chunk=serve.chunk,
            step_tokens=serve.step_tokens,
            restarts=ranks.restart,
            on_record=take,
        )
        stack.callback(engine.close)
        yield engine, engine.worker.rank_info
        engine.stop()
