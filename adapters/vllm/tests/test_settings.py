"""Settings, and vLLM's look by inspection: what is taken, and what is refused by name."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from hal_core import InvalidValue, Unavailable
from hal_vllm import figures
from hal_vllm.buffers import CLASSES, UvaBackedTensor
from hal_vllm.kernels import GPU, KERNELS, lacking, refusing
from hal_vllm.settings import Settings
from hal_vllm.signatures import (
    check_known,
    check_unreplaced,
    differences_of_class,
    differences_of_function,
)


def test_the_environment_sets_all():
    assert Settings.of({}) == Settings()
    given = {"HAL_VLLM": "Kernels", "HAL_VLLM_DEVICE": "cuda:1", "HAL_VLLM_REQUIRE": "1", "HAL_VLLM_UNTESTED": "1"}
    assert Settings.of(given | {"HAL_VLLM_UVA": "0"}) == Settings("kernels", "cuda:1", True, True, False)


@pytest.mark.parametrize(
    ("name", "text", "cure"), [("HAL_VLLM", "maybe", "kernels"), ("HAL_VLLM_UVA", "no", "give 1 or 0")]
)
def test_a_wrong_setting_is_named(name, text, cure):
    with pytest.raises(InvalidValue, match=f"{name}: '{text}'.*{cure}"):
        Settings.of({name: text})


@pytest.mark.parametrize("name", CLASSES)
def test_hals_own_classes_are_known(name):
    assert differences_of_class(name, CLASSES[name]) == []


def test_another_signature_is_refused_by_name():
    class Changed(UvaBackedTensor):
        def __init__(self, size, dtype, max_concurrency=2):
            pass

        def copy_to_uva(self, n=None):
            pass

        def copy_rows(self, rows):
            pass

    lines = differences_of_class("UvaBackedTensor", Changed)
    assert lines == [
        "UvaBackedTensor.copy_rows: hal has none",
        "UvaBackedTensor.__init__(self, size, dtype, max_concurrency=2): "
        "hal knows (self, size, dtype, max_concurrency=None)",
    ]
    with pytest.raises(Unavailable, match=r"vLLM 9.9 differs .*copy_rows: hal has none.*HAL_VLLM_UNTESTED=1"):
        check_known(lines, Settings(), "9.9")
    check_known(lines, Settings(untested=True), "9.9")


def test_figures_of_every_worker_are_shown_once(monkeypatch, tmp_path):
    metrics = pytest.importorskip("prometheus_client")
    registry = metrics.CollectorRegistry()
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(figures.FOLDER, "unset below, and put back at the end")
    monkeypatch.delenv(figures.FOLDER)
    figures.show()
    figures.show()
    Path(os.environ[figures.FOLDER], "7").touch()  # of a worker that is about to write
    assert registry.get_sample_value("hal_vllm_tensors_total", {"worker": "7"}) == 0
    counts = Counter(steps=3, submissions=2, tensors=7)
    write = figures.writer(counts)
    write()
    counts["steps"] = 2**40
    write()
    worker = {"worker": str(os.getpid())}
    assert registry.get_sample_value("hal_vllm_steps_total", worker) == 2**40
    assert registry.get_sample_value("hal_vllm_tensors_total", worker) == 7
    monkeypatch.delenv(figures.FOLDER)
    figures.writer(counts)()


def test_a_kernel_of_other_parameters_is_named():
    def _post_update_kernel(idx_mapping_ptr, more):
        pass

    ours = KERNELS[f"{GPU}.input_batch._post_update_kernel"]
    (line,) = differences_of_function("_post_update_kernel", _post_update_kernel, ours)
    assert line.startswith("_post_update_kernel(idx_mapping_ptr, more): hal knows (idx_mapping_ptr, num_computed")


def test_a_class_that_another_plugin_replaced_is_named():
    with pytest.raises(Unavailable, match=r"vllm.x.UvaBackedTensor is hal_vllm.buffers.UvaBackedTensor already"):
        check_unreplaced("vllm.x", {"UvaBackedTensor": UvaBackedTensor})


def test_a_kernel_that_hal_lacks_is_refused_by_its_name():
    module = type(pytest)("vllm.v1.worker.gpu.other")
    exec("def _other_kernel(x_ptr): pass\ndef helper(): pass", vars(module))
    (name,) = lacking({module.__name__: module})
    assert name == "vllm.v1.worker.gpu.other._other_kernel"
    with pytest.raises(Unavailable, match=r"vllm.v1.worker.gpu.other._other_kernel: there is no Triton"):
        refusing(name)(1, num_warps=2)
