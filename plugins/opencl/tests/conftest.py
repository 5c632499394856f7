"""The device under test, or the reason why the machine has no OpenCL device, with the cure."""

import pytest


@pytest.fixture(scope="session")
def runtime():
    """Skip a test on a machine without an OpenCL device."""
    plugin = pytest.importorskip(
        "hal_opencl", reason="paddle-hal-opencl is missing: pip install './plugins/opencl[pocl]'"
    )
    probe = plugin.OpenCLPlugin.probe()
    if not probe.available:
        pytest.skip(f"opencl: {probe.reason} ({probe.cure})")
    return plugin


@pytest.fixture
def opened(runtime):
    import hal

    with hal.open_device("opencl") as device:
        yield device
