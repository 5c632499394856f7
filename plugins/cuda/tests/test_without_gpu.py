"""The cuda device as far as testable without a GPU: unavailability, options, both locations of the bindings."""

import ctypes
import errno
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import hal_cuda
import pytest
from hal_core.devices import STEP_FIELDS
from hal_core.errors import DeviceClosed, HalError, InvalidValue, OutOfMemory, Unavailable
from hal_core.slots.fields import STATE_TABLE
from hal_cuda import CudaPlugin, compiling
from hal_cuda.context import Context, Options
from hal_cuda.driver import STICKY, CudaError, Driver, load_bindings


class FakeLibrary:
    """A stand-in for libcuda.so.1, with the functions that the probe calls. ``queues`` is what ``cuInit`` reads."""

    def __init__(self, devices=1, version=13000, init=0, used=True):
        self.devices, self.version, self.init, self.used = devices, version, init, used
        self.queues = ""

    def cuInit(self, flags):
        if not self.used:
            self.used, self.queues = True, os.environ.get(hal_cuda.QUEUES, "")
        return self.init

    def cuDeviceGetCount(self, place):
        if not self.used:
            return 3
        place._obj.value = self.devices
        return self.init

    def cuDriverGetVersion(self, place):
        place._obj.value = self.version
        return 0


def probe_with(monkeypatch, library):
    def load(name):
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    return CudaPlugin.probe()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine(*cards, nodes=())``: what sysfs and /dev show; a card is ``(vendor, class)``."""

    def show(*cards, nodes=()):
        for number, (vendor, kind) in enumerate(cards):
            folder = tmp_path / "pci" / f"0000:00:{number:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")
        (tmp_path / "dev").mkdir()
        for node in nodes:
            (tmp_path / "dev" / node).touch()
        monkeypatch.setattr(hal_cuda, "PCI", tmp_path / "pci")
        monkeypatch.setattr(hal_cuda, "NODES", tmp_path / "dev")

    return show


@pytest.mark.parametrize(
    ("used", "given", "read", "note"),
    [
        (False, "", "32", "32"),
        (False, "1", "1", r"CUDA_DEVICE_MAX_CONNECTIONS=1 \(.*set CUDA_DEVICE_MAX_CONNECTIONS=32"),
        (True, "", "", r"8, as CUDA was in use before hal \(.*set CUDA_DEVICE_MAX_CONNECTIONS=32"),
    ],
)
def test_g01_hal_asks_for_all_hardware_queues_before_the_first_use(monkeypatch, used, given, read, note):
    """With fewer, work of one stream waits for another stream that is held."""
    monkeypatch.setenv(hal_cuda.QUEUES, given)
    if not given:
        monkeypatch.delenv(hal_cuda.QUEUES)
    library = FakeLibrary(used=used)
    probe_with(monkeypatch, library)
    assert library.queues == read
    assert re.fullmatch(note + r"[^)]*\)?", hal_cuda.hardware_queues())


H200, NVSWITCH, SOUND = ("0x10de", "0x030200"), ("0x10de", "0x068000"), ("0x10de", "0x040300")
RADEON = ("0x1002", "0x030000")


def test_no_driver(monkeypatch, machine):
    machine(RADEON, H200)
    found = probe_with(monkeypatch, None)
    assert (found.available, found.present, found.reason) == (False, True, "no CUDA driver (libcuda.so.1)")
    assert found.cure


@pytest.mark.parametrize("library", [None, FakeLibrary(devices=0), FakeLibrary(init=100)])
@pytest.mark.parametrize("cards", [(), (RADEON, NVSWITCH, SOUND)])
def test_no_card(monkeypatch, machine, library, cards):
    """Also if the image has its own copy of the driver's library."""
    machine(*cards, nodes=("null", "dri"))
    found = probe_with(monkeypatch, library)
    assert (found.available, found.present) == (False, False)
    assert "CUDA" not in found.reason + found.cure


@pytest.mark.parametrize("node", ["nvidia0", "nvidiactl", "nvgpu", "dxg"])
def test_a_card_that_only_its_device_file_shows(monkeypatch, machine, node):
    machine(nodes=(node,))
    assert probe_with(monkeypatch, None).present


def test_a_card_that_vanishes_while_it_is_looked_for(monkeypatch, machine, tmp_path):
    machine(H200)
    (tmp_path / "pci" / "0000:00:00.0" / "class").unlink()
    assert not probe_with(monkeypatch, None).present


@pytest.mark.parametrize("library", [FakeLibrary(devices=0), FakeLibrary(init=100)])
def test_no_device(monkeypatch, machine, library):
    machine(H200)
    found = probe_with(monkeypatch, library)
    assert (found.available, found.present) == (False, True)
    assert "sees no device" in found.reason
    assert "nvidia-smi" in found.cure


def test_cuda_core_missing(monkeypatch):
    monkeypatch.setattr(hal_cuda, "find_spec", lambda name: None if name == "cuda.core" else object())
    found = probe_with(monkeypatch, FakeLibrary())
    assert found.reason == "cuda-core is missing"
    assert "pip install" in found.cure


def test_driver_older_than_the_runtime(monkeypatch):
    monkeypatch.setattr(hal_cuda, "_bindings_major", lambda: 13)
    found = probe_with(monkeypatch, FakeLibrary(version=12040))
    assert "older than the runtime's 13" in found.reason
    assert "[cu12]" in found.cure


def test_paddle_without_cuda(monkeypatch):
    monkeypatch.setattr(hal_cuda, "find_spec", lambda name: None if name in ("torch", "cupy") else object())
    monkeypatch.setattr(hal_cuda, "_installed", lambda name: name == "paddlepaddle")
    found = probe_with(monkeypatch, FakeLibrary(version=99000))
    assert found.reason == "Paddle is installed without CUDA"
    assert "paddlepaddle-gpu" in found.cure


def test_a_gpu_and_all_it_needs(monkeypatch):
    monkeypatch.setattr(hal_cuda, "find_spec", lambda name: object())
    assert probe_with(monkeypatch, FakeLibrary(devices=2, version=99000)).reason == "2 device(s)"


def test_opening_says_the_same(monkeypatch):
    monkeypatch.setattr(CudaPlugin, "probe", lambda: hal_cuda.Probe.no("no CUDA driver (libcuda.so.1)", "install it"))
    with pytest.raises(Unavailable, match=r"no CUDA driver \(libcuda"):
        CudaPlugin.open(0, {})


@pytest.mark.parametrize("home", ["cuda.bindings.driver", "cuda.cuda"])
def test_the_bindings_are_found_in_both_their_homes(monkeypatch, home):
    """cuda.bindings.driver since 12.8, ``from cuda import cuda`` before."""
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    parts = home.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert load_bindings() is sys.modules[home]


def test_no_bindings_in_either_home(monkeypatch):
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    empty = ModuleType("cuda")
    empty.__path__ = []
    monkeypatch.setitem(sys.modules, "cuda", empty)
    with pytest.raises(Unavailable, match="cuda-bindings is missing"):
        load_bindings()


OK, NOT_READY = SimpleNamespace(name="CUDA_SUCCESS"), SimpleNamespace(name="CUDA_ERROR_NOT_READY")


class FakeApi:
    """Driver calls with results set by the test."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK, CUDA_ERROR_NOT_READY=NOT_READY)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, gpus=2):
        self.gpus = gpus

    def cuInit(self, flags):
        return (OK,)

    def cuDeviceGetCount(self):
        return OK, self.gpus

    def cuDeviceGet(self, index):
        return OK, index

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, 700 + device

    def cuCtxSetCurrent(self, handle):
        return (OK,)

    def cuDeviceGetAttribute(self, attribute, device):
        return OK, (9, 0)[attribute]

    def cuStreamGetCtx(self, handle):
        return OK, handle // 10


def test_a_failed_call_names_itself_the_error_and_the_cure():
    driver = Driver(FakeApi())
    with pytest.raises(CudaError, match="cuStreamCreate: CUDA_ERROR_INVALID_VALUE"):
        driver.ok((SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),), "cuStreamCreate")
    with pytest.raises(OutOfMemory, match="ring_limit"):
        driver.ok((SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),), "cuMemHostAlloc")
    driver.check_sound()


@pytest.mark.parametrize(
    "name", ["ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_PC", "HARDWARE_STACK_ERROR"]
)
def test_after_a_sticky_error_every_call_says_so_and_how_to_recover(name):
    driver = Driver(FakeApi())
    with pytest.raises(CudaError, match=name):
        driver.ok((SimpleNamespace(name=f"CUDA_ERROR_{name}"),), "cuEventQuery")
    for _ in range(2):
        with pytest.raises(DeviceClosed, match=r"spoilt by an earlier error: cuEventQuery.*restart the process"):
            driver.check_sound()


def test_every_error_after_which_a_process_must_end_is_sticky():
    results = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed").CUresult
    if not (results.CUDA_ERROR_ILLEGAL_ADDRESS.__doc__ or "").strip():
        pytest.skip("these cuda-bindings describe no error")
    fatal = {
        one.name for one in results if "must be terminated and relaunched" in " ".join((one.__doc__ or "").split())
    }
    assert "CUDA_ERROR_MISALIGNED_ADDRESS" in fatal
    assert fatal <= STICKY


def test_a_context_knows_its_chip_and_refuses_streams_of_others():
    context = Context.open(Driver(FakeApi()), 1)
    assert context.arch == "sm_90"
    context.check_stream(7010)
    context.check_stream(0)
    with pytest.raises(InvalidValue, match="another context"):
        context.check_stream(7000)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_that_is_not_there(index):
    with pytest.raises(InvalidValue, match="there are 2 GPUs"):
        Context.open(Driver(FakeApi()), index)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rings": 1}, "unknown options"),
        ({"ring_start": 0}, "ring_start"),
        ({"ring_limit": 1.5}, "ring_limit"),
        ({"ring_start": 1 << 20, "ring_limit": 1 << 19}, "ring_start is larger than ring_limit"),
        ({"deadline": float("nan")}, "deadline"),
    ],
)
def test_senseless_options_are_refused(given, complaint):
    with pytest.raises(HalError, match=complaint):
        Options.of("cuda", given)


def test_the_kernel_of_a_step_reads_its_fields_in_the_cores_order():
    """The struct ``State`` of kernels/update.cu has the core's fields in their order, each of its own type."""
    source = (Path(hal_cuda.__file__).parent / "kernels/update.cu").read_text()
    body = re.search(r"struct State \{(.*?)\};", source, re.DOTALL)[1]
    declared = {}
    for line in re.findall(r"(\w+)\s*(\*[^;]*|[^;*]*\*[^;]*);", re.sub(r"//.*", "", body)):
        declared |= {name.strip(" *"): line[0] for name in line[1].split(",")}
    fields = {field.name: field for field in STATE_TABLE}
    types = {"i64": "int64", "i32": "int32", "u8": "bool"}
    assert list(declared) == list(STEP_FIELDS)
    assert {name: types[kind] for name, kind in declared.items()} == {
        name: fields[name].dtype.name for name in STEP_FIELDS
    }


def test_what_could_not_be_stored_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    compiling._keep(tmp_path / "kernels" / "a.cubin", b"stored")
    monkeypatch.setattr("os.fsync", full)
    compiling._keep(tmp_path / "kernels" / "b.cubin", b"not stored")
    assert {path.name: path.read_bytes() for path in (tmp_path / "kernels").iterdir()} == {"a.cubin": b"stored"}


def test_without_a_home_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("HAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~no-such-user").expanduser())
    with pytest.raises(Unavailable, match="set HAL_CACHE"):
        compiling.cache_folder()
