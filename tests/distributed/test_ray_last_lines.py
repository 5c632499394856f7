"""The last lines of dead ranks are read on their Ray nodes within one limit, with a stand-in for Ray."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from hal_engine.distributed import ray_launch
from hal_engine.distributed.ray_rank import Prepared
from hal_engine.timeouts import TIMEOUTS


class Errors:
    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        pass


class SilentRay(ModuleType):
    """Ray after a node was lost and before it is reported: each wait for a task there lasts as long as it may."""

    exceptions = Errors

    def __init__(self):
        super().__init__("ray")
        self.now = 100.0

    def wait(self, refs, *, num_returns, timeout):
        return refs, []

    def get(self, ref, timeout=None):
        if timeout is not None:
            self.now += timeout
        raise Errors.RayError("no answer")

    def nodes(self):
        return [{"NodeID": "lost", "Alive": True}]

    def remote(self, function):
        task = SimpleNamespace(remote=lambda log: ("reading", log))
        return SimpleNamespace(options=lambda **given: task)


@pytest.fixture
def silent(monkeypatch):
    ray, scheduling = SilentRay(), ModuleType("ray.util.scheduling_strategies")
    scheduling.NodeAffinitySchedulingStrategy = lambda node, soft: node
    for name, module in (
        ("ray", ray), ("ray.util", ModuleType("ray.util")), ("ray.util.scheduling_strategies", scheduling)
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_launch, "time", SimpleNamespace(monotonic=lambda: ray.now))
    return ray


def test_dead_ranks_of_a_silent_node_share_one_limit(silent):
    launch = ray_launch.RayLaunch(8, 1, {"CPU": 1.0}, "strict-pack", starting=300.0, grows=True)
    launch._ranks = [Prepared("host", 1, "", "lost", "") for _ in range(8)]
    launch._serving, launch._actors = {rank: rank for rank in range(8)}, [None] * 8
    begin = silent.now
    how = launch.ended()
    assert how.count("its process ended: its last lines cannot be read: no answer") == 8
    assert silent.now - begin <= TIMEOUTS.ray_last_line
