"""NCCL before a group exists: where the library is searched, the error without it, ranks that do not come."""

import sys
from time import monotonic
from types import SimpleNamespace

import pytest
from hal_core import TIMEOUTS
from hal_core.errors import GroupLost, Unavailable
from hal_cuda import collectives, nccl

PATIENCE = 20.0


def test_a_library_that_is_missing_or_too_old_is_named_with_the_cure(library, monkeypatch, tmp_path):
    assert nccl.described().startswith("NCCL 2.28.99 (")
    for version, message in ((21703, "NCCL 2.17.3"), (0, "NCCL 0.0.0")):
        loaded = SimpleNamespace(_handle=library._handle)
        for name in ("GetUniqueId", "CommInitRankConfig", "Broadcast", "CommAbort", "CommDestroy"):
            setattr(loaded, f"nccl{name}", SimpleNamespace())
        loaded.ncclGetErrorString = loaded.ncclGetLastError = SimpleNamespace()
        loaded.ncclGetVersion = lambda number, version=version: setattr(number._obj, "value", version)
        with pytest.raises(Unavailable, match=message):
            nccl.Library(loaded, "it")
    nccl.library.cache_clear()
    monkeypatch.setenv(nccl.VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(Unavailable, match=r"none\.so") as raised:
        nccl.library()
    assert "nvidia-nccl" in raised.value.cure
    assert nccl.VARIABLE in raised.value.cure
    assert nccl.described().startswith("no ranks: ")


def test_the_packages_library_comes_before_that_of_the_path(monkeypatch, tmp_path):
    """torch and Paddle load their package's library by name, and would get an older one if that were loaded first."""
    file = tmp_path / "nvidia/nccl/lib" / nccl.NAME
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.delenv(nccl.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert nccl._places() == [str(file), nccl.NAME]
    monkeypatch.setenv(nccl.VARIABLE, "/elsewhere.so")
    assert nccl._places() == ["/elsewhere.so"]


def test_g16_a_rank_that_never_comes_to_the_opening_is_an_error_in_time(opened, library, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "connecting", 0.3)
    library.nccl_hang(1)
    began = monotonic()
    with pytest.raises(GroupLost, match=r"did not find each other within 0\.3 s") as raised:
        opened().device.make_group((0, 1), 0, lambda data: data, 0.1)
    assert monotonic() - began < PATIENCE / 2
    assert "its own GPU" in raised.value.cure
    library.nccl_hang(0)


def test_what_nccl_says_of_the_opening_is_passed_on(opened, library):
    with pytest.raises(GroupLost, match="ncclCommInitRankConfig: internal error: what ranks were given") as raised:
        opened().device.make_group((0, 1), 1, lambda data: data, 5.0)  # an id that no rank has made
    assert "NCCL_DEBUG=INFO" in raised.value.cure


def test_what_does_not_fit_a_broadcast_is_refused_by_the_native_call(opened):
    call = opened().device.driver.native.calls.broadcast
    fixed, rest = collectives.FIXED.pack(1, 0, 0, 0, 0, 64, 0, 0), (0,) * 6
    for given in ((), (fixed, b""), (b"short", b"", *rest), (fixed, b"x" * 65, *rest), (bytes(64), b"", *rest)):
        with pytest.raises((TypeError, ValueError)):
            call(*given)
    for given in ((fixed, "text", *rest), (None, b"", *rest), (fixed, b"", -1, *rest[1:])):
        with pytest.raises((TypeError, OverflowError)):
            call(*given)
