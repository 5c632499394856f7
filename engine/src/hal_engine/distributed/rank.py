"""One rank: follows the engine's messages and steps from its first message to its last."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
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
from hal_core.devices import HOST

from hal.local_rank import LocalRank, moved
from hal.opening import open_as_asked
from hal.selection import requested
from hal.unwritten import named_unwritten
from hal_engine.model.config import read_config
from hal_engine.model.digest import checkpoint_digest
from hal_engine.model.split import check_split
from hal_engine.options import PADDLE_MODEL
from hal_engine.proposers import NONE, make_proposer
from hal_engine.proposers import Setup as ProposerSetup
from hal_engine.steppers import open_runner
from hal_engine.stepping import Acceptance, Stepper, overlap_of
from hal_engine.timeouts import TIMEOUTS
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
    from hal_core import BoundDevice, Group, Sink

    from hal_engine.model.llama import LlamaModel
    from hal_engine.proposers import Proposer

_GOLDEN = 0x9E37_79B9_7F4A_7C15
"""Multiplier that spreads the ranks' numbers: 64 bits of the golden ratio (Knuth's multiplicative hashing)."""
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
    """Digest of hal's code, which must be equal on all hosts."""
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
        self._closing = contextlib.ExitStack()  # of the proposer

    def run(self, setup: Setup) -> None:
        """Load everything, then run steps until the engine's stop message."""
        layout = RankLayout(setup.tp, setup.dp)
        among = LocalRank.of(os.environ, share=setup.share_devices)
        with (
            open_as_asked(setup.device, setup.require, among=among) as device,
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
            runner, able = setup.named_runner or PADDLE_MODEL, device.capabilities
            overlap, why = overlap_of(setup.overlap, device, runner, worker.runner.needs_host)
            facts = dict(able.fallbacks), able.substituted, device.index, overlap, why
            peer = None if self._handover is None else self._handover.transfer.describe()
            self.channel.send(
                Up(self.rank, device.name, *facts, peer=peer, vocab_size=worker.vocab_size, chunk=worker.chunk)
            )
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
        """Open the groups with the other ranks, load this rank's part of the model or make its runner, and the
        state."""
        from .job_groups import open_job, open_on_place
        from .tensor_ranks import TensorRanks, library_of

        group = layout.group(self.rank)
        if layout.size > 1:
            open_job(device, layout.groups(), timeout=setup.timeout)
        if setup.named_runner:
            stepper = self._runner(setup, group, device)
            self._hands(setup, stepper, None)
            return stepper, None

        from hal_engine.model.llama import LlamaModel
        from hal_engine.worker import Worker

        ranks = None
        if group.size > 1:
            library = library_of(setup.model_place, device.capabilities.collective)
            if library != HOST:
                place = moved(setup.model_place, device.index - requested(setup.device).index)
                open_on_place(device, layout.groups(), place, library, timeout=setup.timeout)
            ranks = TensorRanks(group, backend=library, timeout=setup.timeout)
        place = moved(setup.model_place, device.index - requested(setup.device).index)
        model = LlamaModel.load(Path(setup.model), place=place, ranks=ranks, everywhere=setup.everywhere)
        assert self._sink is not None  # made before
        noise = ranks.index * _GOLDEN % (1 << 63) if setup.everywhere and ranks is not None else 0
        if (proposer := self._proposer(setup, group, model)) is not None:
            self._closing.callback(proposer.close)
        worker = Worker(
            device,
            model,
            setup.sizes,
            setup.blocks,
            self._sink,
            group=group,
            noise=noise,
            proposer=proposer,
            shares_drafts=group.size > 1 and setup.speculate != NONE,
            rejection=setup.rejection,
        )
        if self._first:
            worker.runner.on_drafts = lambda counts: self.channel.send(Counts(self.rank, drafted=counts), 0.0)
        device.open_group(state=worker.state, group=group)
        self._hands(setup, worker, proposer)
        return worker, StateCheck(worker, ranks) if setup.check and ranks is not None else None

    def _hands(self, setup: Setup, stepper: Stepper, proposer: Proposer | None) -> None:
        """Open the transfer of a rank with a role, and listen."""
        if setup.role is not SplitRole.MIXED:
            self._handover = open_kv_handover(setup, self.rank, stepper, proposer, self._send, self._keys)
            self._closing.callback(self._handover.close)

    def _send(self, message: Message) -> None:
        """Send a message that is not repeated. Raise if it cannot be sent, because the engine would wait for it for
        ever."""
        if not self.channel.send(message):
            what, cure = (
                f"rank {self.rank}: the engine takes no messages any more",
                "see why the engine stopped reading",
            )
            raise GroupLost(what, cure=cure, argument="engine")

    def _runner(self, setup: Setup, group: Group, device: BoundDevice) -> Stepper:
        """Return the named runner with a state of its own. It must support what every request asks for."""
        assert self._sink is not None  # made before
        place = moved(setup.model_place, device.index - requested(setup.device).index)
        stepper = open_runner(setup.named_runner, setup, device, self._sink, place=place, group=group)
        if setup.params is not None:
            stepper.runner.check(Request("every request", (0,), setup.params))
        device.open_group(state=stepper.state, group=group)
        return stepper

    def _proposer(self, setup: Setup, group: Group, model: LlamaModel) -> Proposer | None:
        """Return this rank's proposer. One on the host runs on the group's first rank alone, which sends its drafts to
        the others; one that runs the model's layers runs on every rank."""
        sizes = setup.sizes
        made = make_proposer(
            setup.speculate,
            ProposerSetup(
                sizes.max_draft_tokens,
                sizes.num_slots,
                sizes.max_model_len,
                model.config.vocab_size,
                model,
                rejection=setup.rejection,
            ),
        )
        if made is not None and not group.is_first and not made.wants_hidden:
            made.close()
            return None
        return made


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
