"""Starts ranks as Ray actors, on one host or several. Ray decides where each rank runs and detects dead ranks.

Step messages and records use hal's own connections, encrypted. Each actor makes a key pair, and only public keys go
through Ray. So the Ray cluster is the trust boundary (docs/ranks.md).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hal_core import InvalidValue, Unavailable

from hal.selection import plugin_of
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.curve import CurveKeys

from .rank_executor import RankExecutor
from .ray_rank import Prepared, RayRank

if TYPE_CHECKING:
    from .control_messages import Setup

_LOG = logging.getLogger("hal")
_PASSED_ON = ("HAL_", "OMP_", "MKL_", "OPENBLAS_", "FLAGS_")
"""Prefixes of the engine's environment variables that ranks get."""


class RayCluster:
    """Connection to a Ray cluster, for one command; a context manager.

    ``address``: the cluster's, as ``ray.init`` takes it; None starts a cluster on this host, for this command alone.
    """

    def __init__(self, address: str | None, size: int) -> None:
        """``size``: number of ranks, for which a new cluster gets enough CPUs."""
        self._address, self._size = address, size
        self.own = address is None
        self._quiet = contextlib.ExitStack()

    def __enter__(self) -> RayCluster:
        """Connect. Until the end ``sys.stdout`` is hal's log, because Ray prints errors of its nodes there."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if self.own:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray's own default, but without its warning
        import ray

        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "hal"}
        if self.own:
            options |= {"include_dashboard": False, "num_cpus": max(self._size, os.cpu_count() or 1)}
        host, _, port = (self._address or "").rpartition(":")
        try:
            if host and port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host.rpartition("/")[2], int(port)), TIMEOUTS.greeting).close()
            ray.init(address=self._address or "local", **options)
        except Exception as error:  # Ray raises plain exceptions too, for example if a node does not start in time
            where = self._address or "this host"
            cure = "start the cluster (ray start --head), or see --ray-address and RAY_ADDRESS"
            why = _first_line(error)
            raise Unavailable(f"no Ray cluster at {where}: {why}", cure=cure, argument="--ray-address") from error
        self._quiet.enter_context(contextlib.redirect_stdout(_ToLog()))
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()
        self._quiet.close()

    def rank_executor(
        self,
        setup: Setup,
        bundle: Mapping[str, float],
        strategy: str,
        *,
        look: Callable[[], None],
    ) -> RankExecutor:
        """Begin to start the ranks of ``setup`` on this cluster. ``bundle``: the resources of each rank."""
        import ray

        starter = RayLaunch(setup.tp, setup.dp, bundle, strategy, starting=TIMEOUTS.starting, grows=not self.own)
        url = f"tcp://{ray.util.get_node_ip_address()}:*"
        more: dict[str, Any] = {"look": look, "name_of": starter.name_of, "key_of": starter.key_of}
        return RankExecutor(setup, starter, url=url, keys=starter.keys, **more)


def bundle_of(device: str | None) -> dict[str, float]:
    """Return the resources that Ray reserves for each rank: a CPU, and the named device.

    Without a name the device is chosen on the rank's host, where Ray hides GPUs that it has not assigned.
    """
    bundle = {"CPU": 1.0}
    if device is None:
        return bundle
    plugin = plugin_of(device)
    if plugin.resource:
        return bundle | {plugin.resource: 1.0}
    if plugin.kind:
        raise InvalidValue(
            f"Ray does not assign devices of kind {plugin.name}: its plugin names no resource",
            cure="use the ranks of one host (leave --launcher out), or another device",
            argument="--launcher",
        )
    return bundle


class _ToLog(io.TextIOBase):
    """Standard output for Ray: each line is a record of hal's log."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                _LOG.info("ray: %s", line.strip())
        return len(text)


class RayLaunch:
    """``dp`` groups of ``tp`` ranks, each an actor in a bundle of its group's placement group.

    Call :meth:`ended` often: each call continues the start as far as Ray has come. ``starting``: seconds in which the
    ranks must be placed. ``grows``: the cluster may still get nodes, so the start waits for missing resources.
    """

    def __init__(
        self, tp: int, dp: int, bundle: Mapping[str, float], strategy: str, *, starting: float, grows: bool
    ) -> None:
        self._tp, self._dp, self._bundle, self._strategy = tp, dp, dict(bundle), strategy.upper().replace("-", "_")
        self._starting, self._grows = starting, grows
        self._known: set[str] = set()
        self.keys = CurveKeys.new(admits=self._known.__contains__)
        self._groups: list[Any] = []
        self._actors: list[Any] = []
        self._preparing: list[Any] = []
        self._serving: dict[Any, int] = {}
        self._ranks: list[Prepared] = []
        self._url, self._end, self._next_look, self._read_until, self._how = "", 0.0, 0.0, 0.0, ""

    def start(self, url: str) -> None:
        """Request the bundles and the actors from Ray, without waiting."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._url, self._end = url, time.monotonic() + self._starting
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        resources = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        needs = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0), "resources": resources}
        for _ in range(self._dp):
            group = placement_group([self._bundle] * self._tp, strategy=self._strategy)
            self._groups.append(group)
            for place in range(self._tp):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
                self._actors.append(ray.remote(RayRank).options(scheduling_strategy=where, **needs).remote())
        self._preparing = [actor.prepare.remote(environment) for actor in self._actors]

    def ended(self) -> str:
        """Continue the start. Return how ranks have ended, or "" while they run."""
        now = time.monotonic()
        if not self._how and self._actors and now >= self._next_look:
            self._next_look = now + TIMEOUTS.look
            self._how = self._ends() if self._serving else self._placed(now)
        return self._how

    def name_of(self, rank: int) -> str:
        """Return a rank's number and, once Ray has placed it, its node."""
        return f"{rank} (node {self._ranks[rank].host} {self._ranks[rank].node[:12]})" if self._ranks else str(rank)

    def key_of(self, rank: int) -> str:
        """Return a rank's public key, "" for a number that is no rank's."""
        return self._ranks[rank].public_key if 0 <= rank < len(self._ranks) else ""

    def _placed(self, now: float) -> str:
        """Make the ranks serve once all are prepared. Return why they cannot, or ""."""
        import ray

        done, missing = ray.wait(self._preparing, num_returns=len(self._preparing), timeout=0)
        if missing:
            failed = [text for ref in done if (text := self._failure(self._preparing.index(ref), ref))]
            if not failed and (now > self._end or not self._grows):
                failed = self._lacking() or ([self._late(len(missing))] if now > self._end else [])
            return "; ".join(failed)
        failed = [text for rank, ref in enumerate(self._preparing) if (text := self._failure(rank, ref))]
        if failed:
            return "; ".join(failed)
        self._ranks = ray.get(self._preparing)
        self._known.update(one.public_key for one in self._ranks)
        address = self._url, self.keys.public
        own = any(name != "CPU" for name in self._bundle)
        self._serving = {
            actor.serve.remote(*address, rank, self._ranks, own): rank for rank, actor in enumerate(self._actors)
        }
        return ""

    def _late(self, missing: int) -> str:
        """Return the needs of each group and the resources of the nodes, if the cluster as a whole has enough."""
        import ray

        names = list(self._bundle)
        has = [[node["Resources"].get(name, 0.0) for name in names] for node in ray.nodes() if node["Alive"]]
        nodes = "; ".join(
            ", ".join(f"{amount:g} {name}" for amount, name in zip(row, names, strict=True)) for row in has
        )
        needs = " and ".join(f"{self._tp} times {amount:g} {name}" for name, amount in self._bundle.items())
        return (
            f"{missing} of {len(self._actors)} rank(s) were not placed within {self._starting:g} s: "
            f"a group needs {needs} ({self._strategy}), and the nodes have {nodes}"
        )

    def _lacking(self) -> list[str]:
        """Return the resources that the whole cluster lacks, as text."""
        import ray

        has, found = ray.cluster_resources(), []
        for name, amount in self._bundle.items():
            wanted = amount * len(self._actors)
            if has.get(name, 0.0) < wanted:
                found.append(f"the Ray cluster has {has.get(name, 0.0):g} {name}, and the ranks need {wanted:g}")
        return found

    def _ends(self) -> str:
        """Return how ranks that serve no more have ended."""
        import ray

        done, _ = ray.wait(list(self._serving), num_returns=len(self._serving), timeout=0)
        found, self._read_until = [], time.monotonic() + TIMEOUTS.ray_last_line
        for ref in done:
            rank = self._serving[ref]
            if text := self._failure(rank, ref):
                found.append(text)
                continue
            if why := ray.get(ref):
                found.append(f"rank {rank}: {why}")
        return "; ".join(found) or ("all ranks have ended" if len(done) == len(self._serving) else "")

    def _failure(self, rank: int, ref: Any) -> str:  # noqa: ANN401 (Ray's reference)
        """Return why a call of a rank's actor failed, or "" if it did not: the lost node, else its last line."""
        import ray

        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # raised in the actor
            return f"rank {rank}: {str(error.cause or error).strip().splitlines()[-1]}"
        except ray.exceptions.RayError as error:
            if not self._ranks:
                return f"rank {rank}'s actor was lost: {_first_line(error)}"
            lost = self._ranks[rank]
            if lost.node not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
                return f"rank {rank}: its node {lost.host} {lost.node[:12]} is lost"
            last = self._last_line(lost)
            return f"rank {rank} on {lost.host}: its process ended" + (f": {last}" if last else "")
        return ""

    def _last_line(self, lost: Prepared) -> str:
        """Return the last line that a dead rank wrote to its standard error, read on its node. All dead ranks share one
        limit, because meanwhile the engine does nothing else."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(lost.node, soft=False)
        reading = ray.remote(_tail).options(num_cpus=0, scheduling_strategy=there).remote(lost.log)
        try:
            lines: list[str] = ray.get(reading, timeout=max(0.0, self._read_until - time.monotonic()))
        except ray.exceptions.RayError as error:
            return f"its last lines cannot be read: {_first_line(error)}"
        return lines[-1] if lines else ""

    def end(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for their end, then end them by force. Idempotent."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._serving:
            ray.wait(list(self._serving), num_returns=len(self._serving), timeout=patience)
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        groups, self._groups = self._groups, []
        for group in groups:
            remove_placement_group(group)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _tail(log: str) -> Sequence[str]:
    """Return the last lines of a rank's standard error, and remove the file."""
    try:
        with open(log, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        os.unlink(log)
    except OSError:  # the rank removed it when it ended in order
        return []
    return lines[-5:]
