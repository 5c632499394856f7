"""The tables of served names are what is done: each of their names is written, set or called, and no other."""

import random
from dataclasses import replace

import pytest
from hal_fastdeploy.names import KNOWN, PROPOSED
from hal_fastdeploy.runners import GpuRunner, XpuRunner

import hal

from . import test_insertion as shared

BY_WRITES = (
    "self.proposer.insert_tasks_v1()",
    "share_inputs.get_index_by_batch_id()",
    "share_inputs.index_to_batch_id",
)
"""Served where tensors are written, or slots are looked up."""


@pytest.fixture(scope="module")
def device():
    with hal.open_device("cpu") as opened:
        yield opened


class Watched:
    """An object of which every attribute and entry that is set, and every call, is kept by its name."""

    _prefix = ""

    def __init__(self, inner, prefix, names):
        vars(self).update(_inner=inner, _prefix=prefix, _names=names)

    def __getattr__(self, name):
        if name == "index_to_batch_id":  # looking a batch id up may change it
            self._names.add(f"{self._prefix}.{name}")
        return self._of(getattr(self._inner, name), f"{self._prefix}.{name}")

    def __setattr__(self, name, value):
        self._names.add(f"{self._prefix}.{name}")
        setattr(self._inner, name, value)

    def __getitem__(self, name):
        found = self._inner[name]
        by_name = self._prefix.endswith("_inputs")
        return self._of(found, f"{self._prefix}.{name}" if by_name else self._prefix)

    def __setitem__(self, name, value):
        self._names.add(f"{self._prefix}.{name}" if self._prefix.endswith("_inputs") else self._prefix)
        self._inner[name] = value

    def __contains__(self, name):
        return name in self._inner

    def __call__(self, *given):
        if not self._prefix.endswith(".values"):
            self._names.add(f"{self._prefix}()")
        return self._inner(*given)

    def _of(self, found, name):
        plain = found is None or isinstance(found, int | str | range) or hasattr(found, "memory")
        return found if plain else Watched(found, name, self._names)


@pytest.mark.parametrize("kind", ["gpu", "xpu"])
def test_each_served_name_is_written_and_no_other(device, kind):
    """The tables against what is done: attributes and entries are watched, tensors by their writes."""
    draw, found, own = random.Random(kind), set(), set()
    for _ in range(60):
        method = draw.choice([one for of, one in shared.RUNNERS if of == kind])
        role = draw.choice(shared.ROLES)
        pair = shared.drawn_pair(device, draw, kind, method, role)
        insertion = pair.insertion
        insertion.hosts = [watched(one, found, "share_inputs") for one in insertion.hosts]
        insertion.proposer_hosts = [watched(one, own, "model_inputs") for one in insertion.proposer_hosts]
        before = [tensors.read() for tensors in (pair.tensors, pair.own)]
        shared.sequence(pair, draw, role, reorders=False)
        for had, tensors, names, batch in zip(
            before, (pair.tensors, pair.own), (found, own), ("share_inputs", "model_inputs"), strict=True
        ):
            now = tensors.read()
            names |= {f"{batch}.{name}" for name, array in had.items() if (now[name] != array).any()}
    served = KNOWN[{"gpu": GpuRunner, "xpu": XpuRunner}[kind]].served
    assert served - set(BY_WRITES) <= found <= served
    alone = {"model_inputs.get_index_by_batch_id()"} if kind == "gpu" else set()  # its map has every batch id
    assert own == PROPOSED.served - alone


def watched(one, names, batch):
    def act(call):
        one.act(replace(call, holder=Watched(call.holder, "self", names), batch=Watched(call.batch, batch, names)))

    return replace(one, act=act)
