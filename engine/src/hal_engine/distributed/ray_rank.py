"""One rank in a Ray worker process (:mod:`hal_engine.distributed.ray_launch` starts it)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's report before it serves: its host and a free port there, its public key, its Ray node, and the file with
    its standard error."""

    host: str
    port: int
    public_key: str
    node: str
    log: str


class RayRank:
    """A rank. Ray creates it in a process of its own, and calls each method once."""

    def prepare(self, environment: Mapping[str, str]) -> Prepared:
        """Set the environment before any framework is imported. Make the keys; the secret key stays here."""
        import ray

        os.environ.update(environment)
        from hal_core.devices import HeldPort

        from hal_engine.transport.curve import CurveKeys

        handle, log = tempfile.mkstemp(prefix="hal-rank-", suffix=".err")
        os.dup2(handle, sys.stderr.fileno())
        os.close(handle)
        self._keys, self._port = CurveKeys.new(), HeldPort()
        node = ray.get_runtime_context().get_node_id()
        return Prepared(ray.util.get_node_ip_address(), self._port.number, self._keys.public, node, log)

    def serve(self, url: str, key: str, rank: int, ranks: Sequence[Prepared], own_device: bool) -> str:
        """Run as rank ``rank`` of ``ranks`` until the engine at ``url`` ends the run. Return why it ended early, or "".

        ``key``: the engine's public key. ``own_device``: whether Ray has assigned a device to this rank.
        """
        from hal_core import HalError

        from hal.local_rank import AMONG, OWN_DEVICE

        from .rank import serve

        ends = [f"{one.host}:{one.port}" for one in ranks]
        os.environ |= {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(ends)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
            "PADDLE_CURRENT_ENDPOINT": ends[rank],
        }
        if own_device:
            os.environ[AMONG] = OWN_DEVICE
        try:
            serve(url, rank, len(ends), keys=self._keys.knowing(key), host=ranks[rank].host)
        except HalError as error:
            return str(error)
        finally:
            os.unlink(ranks[rank].log)
        return ""
