"""Opens an engine: its steps run in this process, or on ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core import HalError, InvalidValue, OutputRecord, Sink

from hal.cli.failures import of_option
from hal.opening import open_for_command
from hal_engine.engine import Engine, Limits
from hal_engine.engine.handed import HandedSink
from hal_engine.model.config import read_config
from hal_engine.model.split import check_split
from hal_engine.options import CHECK_RANKS, EngineOptions, EngineSetup
from hal_engine.proposers import NONE
from hal_engine.proposers.checks import no_drafts, refused_with_runner
from hal_engine.steppers import open_runner
from hal_engine.stepping import AUTO, DEFAULT, Acceptance, check_runs, choose_runner, needs_host, overlap_of, title_of
from hal_engine.timeouts import TIMEOUTS
from hal_engine.tracing import begin_trace, traced

if TYPE_CHECKING:
    from hal_core import BoundDevice


@dataclass(frozen=True, kw_only=True)
class Host:
    """Callbacks of the process that opens an engine; the defaults do nothing.

    ``status``: is given a line for each part that takes long. ``check``: is called from time to time while ranks start;
    what it raises ends the start. ``hurried``: whether the end must not wait for readers of records. ``importing``:
    encloses a framework's import. ``loading``: encloses the loading of a model; it is given what closes the device.
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
    ``no_overlap``, ``why_default``: why steps do not overlap, and why ``auto`` took the default runner, or "".
    ``drafter``: what drafts, or "". ``drafted``: drafts by request; None if they stay on the device. ``details``:
    further lines.
    """

    engine: Engine
    device: Any
    place: str
    no_overlap: str = ""
    why_default: str = ""
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
        check_runner(setup)
    begin_trace(setup.trace)
    with _ranks(setup, on_record, host, note) if setup.several else _here(setup, on_record, host, record) as opened:
        yield opened
        opened.engine.stop()


def check_runner(setup: EngineOptions) -> None:
    """Raise if the options name the default runner, and it cannot run in this process. A proposer is refused first
    where another runner would run."""
    alone = setup.runner == AUTO and setup.why_default and setup.speculate == NONE
    if setup.runner == DEFAULT or alone:
        check_runs(DEFAULT)


@contextmanager
def _here(
    setup: EngineSetup, on_record: Callable[[OutputRecord], object], host: Host, record: Path | None
) -> Iterator[Opened]:
    with open_for_command(setup.device, setup.require) as device, ExitStack() as stack:
        if record is not None:
            stack.enter_context(_recorded(record, device))
        stack.enter_context(traced(setup.trace, device, "engine"))
        name, why_default = _choose(setup, device)
        check_runs(name)
        overlap_of(setup.overlap, device, title_of(name), needs_host(name))  # before the model is loaded
        sink, handed = stack.enter_context(open_output(setup, host))
        handed.to = on_record
        drafted = Counter[str]()
        with host.loading(device.close):  # it may take long, and only the device needs cleaning up
            host.status(f"preparing runner {name}")
            opened = open_runner(
                name,
                setup,
                device,
                sink,
                place=setup.model_place,
                on_drafts=drafted.update,
                status=host.status,
                importing=host.importing,
            )
            worker = stack.enter_context(opened)
        overlap, no_overlap = overlap_of(setup.overlap, device, title_of(name), worker.runner.needs_host)
        if setup.timed:
            worker.measure()
        engine = Engine(worker, Limits.of(setup), overlap=overlap, on_record=handed.take)
        own = getattr(worker.runner, "note", "")
        yield Opened(
            engine=engine,
            device=device,
            place=_place(name, setup),
            no_overlap=no_overlap,
            why_default=why_default,
            drafter=name if setup.asks_runner else setup.drafter,
            drafted=drafted if setup.speculate != NONE else None,
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
        overlap_of(setup.overlap, None, title_of(DEFAULT), needs_host(DEFAULT))
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
        place = _place(setup.named_runner or DEFAULT, setup)
        devices = f" on devices {', '.join(map(str, able.indices))}" if len(set(able.indices)) > 1 else ""
        yield Opened(
            engine=engine,
            device=able,
            place=f"{place}, {_counted(setup)}{devices}",
            no_overlap=able.no_overlap,
            why_default=setup.why_default if setup.runner == AUTO else "",
            drafter=setup.drafter,
            drafted=None if setup.asks_runner else engine.drafted,
            acceptance=lambda: Acceptance(*engine.drafts),
        )


def _place(name: str, setup: EngineSetup) -> str:
    """Return what runs the steps as the closing line names it."""
    return f"model on {setup.model_place}" if name == DEFAULT else f"runner {name}"


def _counted(setup: EngineSetup) -> str:
    """Return the ranks as the closing line names them."""
    if setup.split is None:
        return f"tp {setup.tp} x dp {setup.dp}"
    return f"split {setup.split[0]},{setup.split[1]}{f' of tp {setup.tp}' * (setup.tp > 1)}"


def _choose(setup: EngineSetup, device: BoundDevice) -> tuple[str, str]:
    """Return the runner's name, and why ``auto`` chose the default one."""
    name, why = choose_runner(setup.runner, device, Path(setup.model))
    if setup.runner == AUTO and setup.speculate != NONE and name != DEFAULT:
        raise refused_with_runner(setup.speculate, name)
    if setup.runner == AUTO and setup.why_default:
        name, why = DEFAULT, setup.why_default
    elif name == DEFAULT and setup.asks_runner:
        raise no_drafts(why)
    return name, why


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
