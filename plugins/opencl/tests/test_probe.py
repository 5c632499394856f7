"""Finding an OpenCL driver: the message on a machine without one, and the imports of a probe."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("hal_opencl", reason="paddle-hal-opencl is missing: pip install './plugins/opencl[pocl]'")

from hal_core import DeviceClosed, InvalidValue, Unavailable
from hal_opencl import CURE, POCL, OpenCLPlugin, cl

import hal


@pytest.fixture
def forgotten(monkeypatch):
    """No loader and no driver is known, before the test and after it."""
    for name in ("library", "platform", "_function"):
        monkeypatch.setattr(cl, name, getattr(cl, name).__wrapped__)


class Loader:
    """A loader in place of the machine's: a platform for each of ``codes``, the status of listing its devices."""

    def __init__(self, *codes, broken=0):
        self.codes, self.broken = codes, broken

    def clGetPlatformIDs(self, entries, found, count):
        if self.broken:
            return self.broken
        if not self.codes:
            return cl.PLATFORM_NOT_FOUND
        if count is not None:
            count._obj.value = len(self.codes)
        for index in range(entries if isinstance(entries, int) else entries.value):
            found[index] = index + 1
        return 0

    def clGetDeviceIDs(self, platform, kind, entries, found, count):
        return self.codes[platform - 1]


def call(loader):
    def function(name):
        return getattr(loader, name)

    return function


def test_a_probe_imports_neither_numpy_nor_pyopencl():
    code = (
        "import sys, hal_opencl as o; o.OpenCLPlugin.probe(); print({'numpy', 'pyopencl', 'paddle'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_without_a_loader_the_probe_names_the_cure(monkeypatch, forgotten):
    monkeypatch.setattr(cl, "loaders", lambda: iter(()))
    found = OpenCLPlugin.probe()
    assert (found.available, found.present, found.cure) == (False, False, CURE)
    assert "no OpenCL loader" in found.reason
    with pytest.raises(Unavailable, match=r"no OpenCL loader.*pocl-opencl-icd"):
        hal.open_device("opencl")


@pytest.mark.parametrize("codes", [(), (cl.DEVICE_NOT_FOUND,), (cl.DEVICE_NOT_FOUND, cl.DEVICE_NOT_FOUND)])
def test_a_loader_without_devices_is_no_device(monkeypatch, forgotten, codes):
    monkeypatch.setattr(cl, "loaders", lambda: iter((Loader(*codes),)))
    monkeypatch.setattr(cl, "_function", call(Loader(*codes)))
    found = OpenCLPlugin.probe()
    assert (found.available, found.present, found.reason) == (False, False, "OpenCL has no devices")


def test_a_loader_that_fails_is_reported_with_its_status(monkeypatch, forgotten):
    monkeypatch.setattr(cl, "loaders", lambda: iter((Loader(broken=-6),)))
    monkeypatch.setattr(cl, "_function", call(Loader(broken=-6)))
    found = OpenCLPlugin.probe()
    assert (found.available, found.present) == (False, True)
    assert "clGetPlatformIDs gave the OpenCL status -6 (OUT_OF_HOST_MEMORY)" in found.reason


def test_a_loader_that_knows_no_driver_gives_way_to_the_next(monkeypatch, forgotten):
    first, second = Loader(), Loader(0)
    monkeypatch.setattr(cl, "loaders", lambda: iter((first, second)))
    assert cl.library() is second


def test_pocl_without_a_linker_is_refused_before_it_ends_the_process(runtime, monkeypatch, tmp_path):
    if cl.platform_name() != POCL:
        pytest.skip(f"opencl: the driver is {cl.platform_name()}, and this is about PoCL (install pocl-opencl-icd)")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = OpenCLPlugin.probe()
    assert (found.available, found.present) == (False, True)
    assert "the program ld" in found.reason
    assert "binutils" in found.cure


@pytest.mark.parametrize(
    ("version", "available"),
    [
        ("pthread-x86_64-unknown-linux-gnu-generic", False),
        ("x86_64-pc-linux-gnu-znver4", True),
        ("aarch64-generic", True),
    ],
)
def test_pocl_on_a_cpu_that_its_compiler_does_not_know_is_refused(monkeypatch, version, available):
    monkeypatch.setattr(cl, "devices", lambda: (1,))
    monkeypatch.setattr(cl, "platform_name", lambda: POCL)
    monkeypatch.setattr(cl, "device_name", lambda _: "a CPU")
    monkeypatch.setattr(cl, "device_version", lambda _: f"OpenCL 3.0 PoCL HSTR: {version}")
    monkeypatch.setattr("shutil.which", lambda _: "ld")
    found = OpenCLPlugin.probe()
    assert (found.available, found.present) == (available, True)
    assert available or "newer than its LLVM" in found.reason
    assert available or "./plugins/opencl[intel]" in found.cure


def test_the_device_is_opened_by_name_only(runtime):
    with hal.open_device() as device:
        assert not device.name.startswith("opencl")
    assert "PoCL" in OpenCLPlugin.probe().reason


def test_an_index_or_an_option_that_is_unknown_is_refused(runtime):
    with pytest.raises(InvalidValue, match=r"no device opencl:99: (indices go from 0|there is only opencl:0)"):
        hal.open_device("opencl:99")
    with pytest.raises(InvalidValue, match=r"opencl.*unknown options \['queue'\].*ring_start"):
        hal.open_device("opencl", options={"queue": 1})


FORK = """
import os, sys
import hal
from hal_core import HalError
hal.open_device("opencl").close()
child = os.fork()
if child == 0:
    try:
        hal.open_device("opencl")
    except HalError as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_child_of_a_process_that_used_opencl_is_refused(runtime):
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=os.environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"{DeviceClosed.__name__} opencl: OpenCL was used in the process that this one was forked from" in done.stdout
    )
