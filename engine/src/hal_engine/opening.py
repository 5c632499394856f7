"""Opens an engine: its steps run in this process, or on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import HalError, InvalidValue, OutputRecord, Sink, Unavailable
from hal_core.devices import check_processor

from hal.cli.failures import cure_of, of_option, one_line
from hal.opening import open_as_asked, quiet_paddle
from hal_engine.engine import Engine
from hal_engine.engine.handed import HandedSink
from hal_engine.model.config import read_config
from hal_engine.model.split import check_split
from hal_engine.options import CHECK_RANKS, PADDLE_MODEL, EngineOptions, EngineSetup
from hal_engine.proposers import NONE
from hal_engine.proposers.asked import drafts_beside, no_drafts
from hal_engine.proposers.counted import closing_well, open_proposer
from hal_engine.steppers import open_runner
from hal_engine.stepping import AUTO, PADDLE, Acceptance, choose_runner, overlap_of
from hal_engine.timeouts import TIMEOUTS
from hal_engine.worker import ModelRunner, Worker

if TYPE_CHECKING:
    from hal_core import BoundDevice

    from hal_engine.model.llama import LlamaModel


@dataclass(frozen=True, kw_only=True)
class Host:
    """Callbacks of the process that opens an engine; the defaults do nothing.

    ``status``: is given a line for each part that takes long. ``check``: is called from time to time while ranks start;
    what it raises ends the start. ``hurried``: whether the end must not wait for readers of records. ``importing``:
    encloses Paddle's import. ``loading``: encloses the loading of a model; it is given what closes the device.
    """

    status: Callable[[str], object] = lambda text: None
    check: Callable[[], None] = lambda: None
    hurried: Callable[[], bool] = lambda: False
    importing: Callable[[], AbstractContextManager[object]] = nullcontext
    loading: Callable[[Callable[[], None]], AbstractContextManager[object]] = lambda close: nullcontext()


_QUIET = Host()


@dataclass(kw_only=True)
class Opened:
    """An engine and what it runs on.

    ``device``: its ``name`` and ``capabilities``. ``place``: what runs the steps and where, for the user.
    ``no_overlap``, ``why_paddle``: why steps do not overlap, and why ``auto`` took the Paddle model, or "".
    ``drafter``: what drafts, or "". ``drafted``: drafts by request; None if they stay on the device. ``details``:
    further lines.
    """

    engine: Engine
    device: Any
    place: str
    no_overlap: str = ""
    why_paddle: str = ""
    drafter: str = ""
    drafted: Mapping[str, int] | None = None
    details: list[str] = field(default_factory=list)
    acceptance: Callable[[], Acceptance]


@contextmanager
def open_engine(
    setup: EngineSetup,
    on_record: Callable[[OutputRecord], object],
    *,
    host: Host = _QUIET,
    record: Path | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Iterator[Opened]:
    """Open the engine of a setup; ``on_record`` gets each record that it has taken over.

    - ``record``: a file for the calls of the device (``--record``).
    - ``note``: is given a line about each worker of a split that is lost; otherwise the error says it.

    At the end the engine is stopped, with everything sent. Raises as opening a device, a model or ranks does.
    """
    if not setup.several:  # ranks look for themselves, on their own hosts
        check_paddle(setup)
    with _ranks(setup, on_record, host, note) if setup.several else _here(setup, on_record, host, record) as opened:
        yield opened
        opened.engine.stop()


def check_paddle(setup: EngineOptions, *, needed: bool = False) -> None:
    """Raise if the options name the Paddle model (or it is ``needed``), and Paddle is missing or cannot run on this
    processor. A proposer is refused first where a runner would run."""
    alone = setup.runner == AUTO and setup.paddle_alone and setup.speculate == NONE
    if needed or setup.runner == PADDLE or alone:
        if find_spec("paddle") is None:
            raise ModuleNotFoundError("No module named 'paddle'", name="paddle")
        check_processor()


@contextmanager
def _here(
    setup: EngineSetup, on_record: Callable[[OutputRecord], object], host: Host, record: Path | None
) -> Iterator[Opened]:
    with open_as_asked(setup.device, setup.require) as device, ExitStack() as stack:
        if record is not None:
            stack.enter_context(_recorded(record, device))
        name, why_paddle = _choose(setup, device)
        if name == PADDLE:  # checked before the model is loaded
            overlap_of(setup.overlap, device, PADDLE_MODEL, ModelRunner.needs_host)
        sink, handed = stack.enter_context(open_output(setup, host))
        handed.to = on_record
        drafter, drafted = setup.drafter and (setup.drafter if name == PADDLE else name), None
        with host.loading(device.close):  # it may take long, and only the device needs cleaning up
            if name == PADDLE:
                model = _load_model(setup, host)
            else:
                host.status(f"preparing runner {name}")
                worker = open_runner(name, setup, device, sink, place=setup.model_place)
        if name == PADDLE:
            proposer = open_proposer(
                setup.speculate, setup.sizes, model.config.vocab_size, model, rejection=setup.rejection
            )
            if proposer is not None:
                stack.enter_context(closing_well(proposer))
                drafted = proposer.drafted
            worker = Worker(
                device, model, setup.sizes, setup.blocks, sink, proposer=proposer, rejection=setup.rejection
            )
        shown = PADDLE_MODEL if name == PADDLE else name
        overlap, no_overlap = overlap_of(setup.overlap, device, shown, worker.runner.needs_host)
        if setup.timed:
            worker.measure()
        engine = Engine(
            worker, chunk=setup.chunk, step_tokens=setup.step_tokens, overlap=overlap, on_record=handed.take
        )
        own = getattr(worker.runner, "note", "")
        yield Opened(
            engine=engine,
            device=device,
            place=f"model on {setup.model_place}" if name == PADDLE else f"runner {name}",
            no_overlap=no_overlap,
            why_paddle=why_paddle,
            drafter=drafter,
            drafted=drafted,
            details=[f"runner {name}: {own}"] if own else [],
            acceptance=lambda: worker.acceptance,
        )


@contextmanager
def _ranks(
    setup: EngineSetup, on_record: Callable[[OutputRecord], object], host: Host, note: Callable[[str], object]
) -> Iterator[Opened]:
    from hal_engine.distributed.control_messages import Setup
    from hal_engine.distributed.engine import engine_of_ranks
    from hal_engine.distributed.starting import RankStart
    from hal_engine.transport.descriptors import check_rank_limit

    if setup.launcher != "ray":  # checked before a rank fails deep in a library
        check_rank_limit(setup.size, argument="--split" if setup.split else "--tp" if setup.tp > 1 else "--dp")
    if not setup.named_runner:
        check_split(read_config(Path(setup.model)), setup.tp)
        overlap_of(setup.overlap, None, PADDLE_MODEL, ModelRunner.needs_host)
    elif setup.check:
        what = "the comparison of the ranks' states goes with the Paddle model's steps, and not with a runner's"
        raise InvalidValue(what, cure="unset it, or leave --runner out", argument=CHECK_RANKS)
    host.status("starting the ranks")
    with ExitStack() as stack:
        start = stack.enter_context(RankStart(setup, setup.device, host.check))
        said = note if setup.split else lambda text: None
        made = Setup(**setup.fields(), timeout=TIMEOUTS.collective)
        engine = engine_of_ranks(made, start, on_record=on_record, note=said)
        stack.callback(engine.close)
        able = engine.worker.rank_info
        place = f"runner {setup.named_runner}" if setup.named_runner else f"model on {setup.model_place}"
        devices = f" on devices {', '.join(map(str, able.indices))}" if len(set(able.indices)) > 1 else ""
        yield Opened(
            engine=engine,
            device=able,
            place=f"{place}, {_counted(setup)}{devices}",
            no_overlap=able.no_overlap,
            why_paddle=setup.paddle_alone if setup.runner == AUTO else "",
            drafter=setup.drafter,
            drafted=None if setup.asks_runner else engine.drafted,
            acceptance=lambda: Acceptance(*engine.drafts),
        )


def _counted(setup: EngineSetup) -> str:
    """Return the ranks as the closing line names them."""
    if setup.split is None:
        return f"tp {setup.tp} x dp {setup.dp}"
    return f"split {setup.split[0]},{setup.split[1]}{f' of tp {setup.tp}' * (setup.tp > 1)}"


def _choose(setup: EngineSetup, device: BoundDevice) -> tuple[str, str]:
    """Return the runner's name, and why ``auto`` chose the Paddle model. Raises if that needs Paddle and it is
    missing."""
    name, why = choose_runner(setup.runner, device, Path(setup.model))
    if setup.runner == AUTO and setup.speculate != NONE and name != PADDLE:
        raise drafts_beside(setup.speculate, name)
    if setup.runner == AUTO and setup.paddle_alone:
        name, why = PADDLE, setup.paddle_alone
    elif name == PADDLE and setup.asks_runner:
        raise no_drafts(why)
    if name == PADDLE:
        check_paddle(setup, needed=True)
    return name, why


def _load_model(setup: EngineSetup, host: Host) -> LlamaModel:
    host.status("loading Paddle")
    try:
        with quiet_paddle(), host.importing():
            from hal_engine.model.llama import LlamaModel
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a library of Paddle's cannot be loaded
        if isinstance(error, ModuleNotFoundError):
            raise
        what = f"Paddle, which the model runs on, cannot be imported: {one_line(error)[:400]}"
        raise Unavailable(what, cure=f"reinstall it: {cure_of('paddle')}") from error
    host.status("reading the model")
    return LlamaModel.load(Path(setup.model), place=setup.model_place)


@contextmanager
def _recorded(file: Path, device: BoundDevice) -> Iterator[None]:
    """Record the device's calls in a file."""
    from hal_conformance.replay.recorder import CallRecorder

    with of_option("--record"):
        recorder = CallRecorder(file, device)
    try:
        yield
    finally:
        with of_option("--record"):
            recorder.close()


@contextmanager
def open_output(setup: EngineSetup, host: Host) -> Iterator[tuple[Sink, HandedSink]]:
    """Open the worker's sink, which delivers records in this process and also sends them to ``setup.sink``.

    At the end it sends the rest; after an error or a signal it does not wait long for that.
    """
    handed = HandedSink()
    sent: list[Sink] = []
    sink: Sink = handed
    if setup.sink:
        from hal_engine.transport import open_sink
        from hal_engine.transport.curve import CurveKeys
        from hal_engine.transport.fanout_sink import FanoutSink

        keys = CurveKeys.shared(setup.sink_key) if setup.sink_key else None
        sent = [open_sink(setup.sink, curve=keys)]
        sink = FanoutSink([*sent, handed])
    failed = True
    try:
        yield sink, handed
        failed = False
    finally:
        handed.close(0.0 if failed or host.hurried() else TIMEOUTS.sink_close)
        for one in sent:
            try:
                one.close(0.0 if failed else TIMEOUTS.parting if host.hurried() else TIMEOUTS.sink_close)
            except HalError:
                if not failed and not host.hurried():  # the error or signal explains this failure
                    raise
