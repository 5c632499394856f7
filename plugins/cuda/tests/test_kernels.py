"""The kernels compile for their supported GPUs, where NVRTC is installed; that needs no GPU."""

import pytest
from hal_core.errors import Unavailable
from hal_cuda.compiling import SOURCES, compile_source, cubin, source


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        compile_source('extern "C" __global__ void nothing() {}', "sm_90")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.conform), "sm_90"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_kernels_compile(name, arch):
    assert compile_source(source(name), arch)[:4] == b"\x7fELF"


def test_what_was_compiled_is_kept_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE", str(tmp_path))
    made = cubin("writes.cu", "sm_90")
    (kept,) = (tmp_path / "paddle-hal" / "cuda").iterdir()
    assert kept.read_bytes() == made
    kept.write_bytes(b"found again")
    assert cubin("writes.cu", "sm_90") == b"found again"
