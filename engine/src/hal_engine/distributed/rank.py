"""One rank: follows the engine's messages and steps from its first message to its last."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from hal_core import (
    GroupLost,
    HalError,
    MemorySink,
    Request,
    SplitRole,
    Undelivered,
    lay_out,
)

from hal.local_rank import LocalRank, moved
from hal.opening import open_for_command
from hal.selection import requested
from hal.unwritten import named_unwritten
from hal_engine.model.config import read_config
from hal_engine.model.digest import checkpoint_digest
from hal_engine.model.split import check_split
from hal_engine.steppers import open_runner
from hal_engine.stepping import DEFAULT, Acceptance, Stepper, overlap_of, title_of
from hal_engine.timeouts import TIMEOUTS
from hal_engine.tracing import traced
from hal_engine.transport import open_sink
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.fanout_sink import FanoutSink, close_all

from .control_channel import RankChannel
from .control_messages import (
    Agreed,
    Counts,
    Delivery,
    Hello,
    Left,
    Message,
    Raised,
    Setup,
    Stop,
    Up,
)
from .errors import error_of, failed_message, short_trace
from .kv_handover import KvHandover, open_kv_handover
from .layout import RankLayout
from .loop import StepLoop
from .record_sink import RecordSink
from .state_check import StateCheck

if TYPE_CHECKING:
    from hal_core import BoundDevice, Sink

_Wanted = TypeVar("_Wanted", Setup, Agreed)


def serve(
    url: str,
    rank: int,
    size: int,
    *,
    keys: CurveKeys | None = None,
    host: str | None = None,
) -> None:
    """Run as rank ``rank`` of ``size`` for the engine at ``url`` until its stop message.

    The process has joined no job yet, or is in a job of these ranks already (``PADDLE_TRAINER_*``). ``host``: an
    address of this host that the other ranks reach.

    Raises the engine's verdict, the same on every rank: :class:`InvalidValue` if the start is refused,
    :class:`hal_engine.distributed.errors.RankLost` if a rank was lost. :class:`GroupLost` if the engine has gone.
    """
    channel = RankChannel(url, rank, keys)
    serving = _Serving(channel, rank, keys)
    try:
        with serving.reporting():
            channel.send(Hello(rank, size, versions()))
            setup = serving.wait(Setup)
            serving.run(msgspec.structs.replace(setup, host=host) if host else setup)
    finally:
        channel.close()


def versions() -> dict[str, str]:
    """Return the versions of hal's distributions, which must be equal on all hosts."""
    found = {}
    for name in ("paddle-hal-engine", "paddle-hal", "paddle-hal-core"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # a source tree on the path
            found[name] = metadata.version(name)
    return found


class _Serving:
    """One rank at work."""

    def __init__(self, channel: RankChannel, rank: int, keys: CurveKeys | None) -> None:
        self.channel, self.rank, self._keys = channel, rank, keys
        self.step = 0
        self._patience = TIMEOUTS.starting
        self._decided = False  # whether a verdict came
        self._again = False  # whether the verdict announces a restart
        self._sink: Sink | None = None
        self._acceptance, self._reported, self._first = Acceptance(), 0, False
        self._timed: Stepper | None = None  # if its time is reported
        self._began: float | None = None
        self._due = 0.0
        self._handover: KvHandover | None = None
        self._closing = contextlib.ExitStack()  # of the runner

    def run(self, setup: Setup) -> None:
        """Load everything, then run steps until the engine's stop message."""
        layout = RankLayout(setup.tp, setup.dp)
        among = LocalRank.of(os.environ, share=setup.share_devices)
        with (
            open_for_command(setup.device, setup.require, among=among) as device,
            traced(setup.trace, device, f"rank {self.rank}"),
            self._closing,
            self._sending(setup, layout),
            self.reporting(),  # first, whatever else has to be closed
            named_unwritten(device),  # before the error is sent
        ):
            self.channel.send(Hello(self.rank, layout.size, _shared_facts(setup, layout)))
            self.wait(Agreed)
            self._patience = 2 * setup.timeout
            worker, check = self._worker(setup, layout, device)
            self._acceptance = worker.acceptance
            if setup.timed and self._first:
                worker.measure()
                self._timed = worker
            worker.on_raised = self._raised
            runner, able = title_of(setup.named_runner or DEFAULT), device.capabilities
            overlap, why = overlap_of(setup.overlap, device, runner, worker.runner.needs_host)
            facts = dict(able.fallbacks), able.substituted, device.index, overlap, why
            peer = None if self._handover is None else self._handover.transfer.describe()
            of_runner = worker.vocab_size, worker.chunk, tuple(worker.runner.supports)
            self.channel.send(Up(self.rank, device.name, *facts, peer, *of_runner))
            loop = StepLoop(self.channel, worker, layout.number_of(self.rank), check, self._handover)
            loop.run(overlap=overlap, begins=self._begins, verdict=self._verdict)

    def _raised(self, method: str, error: Exception) -> bool:
        """Report a runner's exception. Return whether all ranks of the group raised so in this step. Raises a verdict
        that comes instead."""
        self.channel.send(Raised(self.rank, self.step, method, type(error).__name__, short_trace(error)), 0.0)
        answer = self.channel.answer(TIMEOUTS.raised)
        if isinstance(answer, Stop):
            raise self._verdict(answer)
        return answer is not None and answer.alike and answer.step == self.step

    def _begins(self, step: int) -> None:
        """Begin a step. Report the drafts of earlier steps first, because a killed rank cannot report them later."""
        self.step = step
        self._report_drafts()
        if self._timed is not None and (now := time.monotonic()) >= self._due:
            host, self._due = time.thread_time(), now + TIMEOUTS.stats
            self._began = host if self._began is None else self._began
            counts = Counts(self.rank, host=host - self._began, device=self._timed.device_seconds)
            self.channel.send(counts, 0.0)

    def _report_drafts(self) -> None:
        """Report new draft counts, on the one rank of a group that sends."""
        found = self._acceptance
        if self._first and found.drafted != self._reported:
            self._reported = found.drafted
            self.channel.send(Counts(self.rank, (found.drafted, found.accepted, found.turns)), 0.0)

    def wait(self, wanted: type[_Wanted]) -> _Wanted:
        """Wait for that message. Raises a verdict that comes instead."""
        starting = TIMEOUTS.starting
        while True:
            message = self.channel.receive(starting)
            if isinstance(message, wanted):
                return message
            if isinstance(message, Stop) and message.what:
                raise self._verdict(message)
            if message is None:
                raise GroupLost(
                    f"rank {self.rank} got no {wanted.__name__} message within {starting:g} s", argument="engine"
                )

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error to the engine, once, and raise its verdict, which is the same on every rank."""
        try:
            yield
        except Exception as error:
            if not self._decided:
                self._decided = True
                self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        from hal_core.devices import close_groups

        if isinstance(error, GroupLost) and error.argument == "engine":  # no engine is left to report to
            close_groups()
            return
        sent = self.channel.send(failed_message(error, self.rank, self.step), TIMEOUTS.parting)
        close_groups()  # ranks that wait for this one in a collective end before its timeout
        end = time.monotonic() + self._patience
        while sent and (left := end - time.monotonic()) > 0:
            try:
                message = self.channel.receive(left)
            except GroupLost:
                return
            if isinstance(message, Stop) and message.what:
                raise self._verdict(message) from error

    def _verdict(self, stop: Stop) -> HalError:
        self._decided, self._again = True, stop.again
        return error_of(stop)

    @contextlib.contextmanager
    def _sending(self, setup: Setup, layout: RankLayout) -> Iterator[None]:
        """Yield the sink of a group's first rank. At the end, report to the engine what another reader has not
        acknowledged; the engine itself needs no report."""
        if not layout.group(self.rank).is_first:
            self._sink = MemorySink()  # the policy keeps unsent data out of it (G17)
            yield
            return
        self._first = True
        number, undelivered = layout.number_of(self.rank), list[Delivery]()
        sinks: list[Sink] = [RecordSink(self.channel.end)]
        try:
            if setup.sink:
                keys = CurveKeys.shared(setup.sink_key) if setup.sink_key else None
                sinks.append(open_sink(setup.sink, sender=setup.number + number, curve=keys))
            self._sink = sinks[0] if len(sinks) == 1 else FanoutSink(sinks)
            yield
        finally:
            with contextlib.suppress(Undelivered):
                close_all(sinks[:1], TIMEOUTS.ranks_end / 2, again=self._again)
            try:
                close_all(sinks[1:], TIMEOUTS.ranks_end / 2, again=self._again)
            except Undelivered as error:
                undelivered += error.records
            self._reported = -1  # also of turns without drafts
            self._report_drafts()
            self.channel.send(Left(self.rank, undelivered), 0.0)

    def _worker(self, setup: Setup, layout: RankLayout, device: BoundDevice) -> tuple[Stepper, StateCheck | None]:
        """Open the groups with the other ranks, make this rank's runner and its state. It must support what every
        request asks for."""
        from .job_groups import open_job

        group = layout.group(self.rank)
        if layout.size > 1:
            open_job(device, layout.groups(), timeout=setup.timeout)
        assert self._sink is not None  # made before
        opened = open_runner(
            setup.named_runner or DEFAULT,
            setup,
            device,
            self._sink,
            place=moved(setup.model_place, device.index - requested(setup.device).index),
            group=group,
            groups=layout.groups(),
            timeout=setup.timeout,
            on_drafts=self._drafted,
        )
        worker = self._closing.enter_context(opened)
        if setup.params is not None:
            worker.runner.check(Request("every request", (0,), setup.params))
        device.open_group(state=worker.state, group=group)
        if setup.role is not SplitRole.MIXED:
            self._handover = open_kv_handover(setup, self.rank, worker, self._send, self._keys)
            self._closing.callback(self._handover.close)
        return worker, StateCheck(worker) if setup.check and group.size > 1 else None

    def _drafted(self, counts: Mapping[str, int]) -> None:
        """Report the drafts of each request, on the one rank of a group that sends."""
        if self._first:
            self.channel.send(Counts(self.rank, drafted=dict(counts)), 0.0)

    def _send(self, message: Message) -> None:
        """Send a message that is not repeated. Raise if it cannot be sent, because the engine would wait for it for
        ever."""
        if not self.channel.send(message):
            what, cure = (
                f"rank {self.rank}: the engine takes no messages any more",
                "see why the engine stopped reading",
            )
            raise GroupLost(what, cure=cure, argument="engine")


def _shared_facts(setup: Setup, layout: RankLayout) -> dict[str, str]:
    """Return the values that must be equal on every rank before any group is opened."""
    if not setup.named_runner:
        check_split(read_config(Path(setup.model)), setup.tp)
    table = lay_out(setup.sizes)
    return {
        "checkpoint": checkpoint_digest(Path(setup.model)),
        "slot table": table.digest.hex(),
        "groups": " ".join(map(str, layout.groups())) or "none",
    }
