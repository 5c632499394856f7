"""Loading: straight to the device in the file's type, within bounds of host memory; and refusals before it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import InvalidValue, OutOfMemory, Request, SamplingParams, Unavailable
from hal_engine.model.config import parse_config, read_config
from hal_engine.model.loading import read_tensors
from hal_engine.model.split import Shard, part_of

from tests.model.conftest import LLAMA, VARIANTS, tensors, write

from .served import by_torch, torch_stepper

torch = pytest.importorskip("torch")
from hal_torch import RUNNER, support  # noqa: E402
from hal_torch.loading import load  # noqa: E402
from hal_torch.support import check_room, check_sees, computing_dtype  # noqa: E402

CPU = torch.device("cpu")
WIDE = LLAMA | {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
"""Some 8 million weights: 16 MB in half the precision."""
COUNTED = """
import json, sys
from pathlib import Path
import torch
import hal_torch.loading as loading
from hal_engine.model.config import read_config

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

directory, real, seen = Path(sys.argv[1]), loading.to_device, []
config, made = read_config(directory), loading.allocate
torch.ones(8).isfinite().all()  # what torch allocates by itself

def allocated(*arguments):
    weights = made(*arguments)
    for tensor in weights.tensors.values():
        tensor.fill_(0)  # the device's memory, which is the host's here
    global before
    before = anonymous()
    return weights

def counted(mapped, device):
    seen.append((mapped.numel() * mapped.element_size(), str(mapped.dtype)))
    placed = real(mapped, device)
    peaks.append(anonymous() - before)
    return placed

peaks = []
loading.to_device, loading.allocate = counted, allocated
loading.load(directory, config, torch.device("cpu"), getattr(torch, sys.argv[2]))
peaks.append(anonymous() - before)
print(json.dumps({"largest": max(size for size, _ in seen), "sum": sum(size for size, _ in seen),
    "types": sorted({kind for _, kind in seen}), "peak": max(peaks)}))
"""


@pytest.fixture
def saved(tmp_path):
    def make(fields=LLAMA, values=None, **options):
        return write(tmp_path, fields, tensors(parse_config(fields)) if values is None else values, **options)

    return make


@pytest.mark.parametrize(("stored", "computed"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_the_host_holds_no_copy_of_the_checkpoint(saved, stored, computed):
    """By counters: anonymous memory of the process beside the weights' own, as each tensor goes to the device."""
    directory = saved(WIDE, dtype=stored, shards=3)
    command = [sys.executable, "-c", COUNTED, str(directory), computed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    files = [path.stat().st_size for path in directory.glob("*.safetensors")]
    assert report["types"] == [f"torch.{stored}"]
    assert report["sum"] > 14e6
    assert report["peak"] < max(files) + 2**30  # the requested elements
    assert report["peak"] < 2 * report["largest"] + 2**23 < report["sum"], "more than a tensor or two was copied"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["whole", "a part"])
def test_every_tensor_is_where_the_decoder_reads_it(saved, variant, shard):
    fields = LLAMA | VARIANTS[variant]
    if shard.size > 1 and fields["num_key_value_heads"] == 1:
        pytest.skip("one head cannot be shared out")
    directory = saved(fields, shards=2)
    config, full = read_config(directory), read_tensors(directory, read_config(directory))
    given = load(directory, config, CPU, torch.float32, shard)

    def part(name):
        cut = () if name.endswith(("embed_tokens.weight", "lm_head.weight")) else part_of(name, full[name].shape, shard)
        return full[name][cut]

    layer = "model.layers.1."
    rows = np.concatenate([part(f"{layer}self_attn.{name}_proj.weight") for name in "qkv"])
    assert np.array_equal(given[f"{layer}self_attn.qkv.weight"].numpy(), rows)
    rows = np.concatenate([part(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")])
    assert np.array_equal(given[f"{layer}mlp.gate_up.weight"].numpy(), rows)
    for name in ("model.norm.weight", f"{layer}mlp.down_proj.weight", f"{layer}self_attn.o_proj.weight"):
        assert np.array_equal(given[name].numpy(), part(name))
    if config.output_bias:
        added = part(f"{layer}self_attn.o_proj.bias") * (shard.index == 0)  # once, by the first rank
        assert np.array_equal(given[f"{layer}self_attn.o_proj.bias"].numpy(), added)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite_is_named(saved, value):
    values = tensors(parse_config(LLAMA))
    values["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    directory = saved(values=values)
    wanted = r"'model\.layers\.1\.mlp\.up_proj\.weight' \(F32\) holds NaN or infinity in float32 \(restore the file\)"
    with pytest.raises(InvalidValue, match=wanted):
        load(directory, read_config(directory), CPU, torch.float32)


@pytest.mark.parametrize(("dtype", "fits", "beyond"), [("float16", 65519.0, 1e9), ("bfloat16", 3e38, 3.4e38)])
def test_a_number_beyond_the_type_of_the_computations_is_refused_and_not_infinite(saved, dtype, fits, beyond):
    values = tensors(parse_config(LLAMA))
    values["model.norm.weight"][3] = -fits
    directory = saved(values=values)
    computed = getattr(torch, dtype)
    assert load(directory, read_config(directory), CPU, computed)["model.norm.weight"].isfinite().all()
    values["model.norm.weight"][3] = -beyond
    saved(values=values)
    wanted = rf"'model\.norm\.weight' \(F32\) holds NaN or infinity in {dtype} \(.*give --dtype float32\)"
    with pytest.raises(InvalidValue, match=wanted):
        load(directory, read_config(directory), CPU, computed)
    load(directory, read_config(directory), CPU, torch.float32)


def test_a_tied_head_that_differs_is_named(saved):
    fields = LLAMA | {"tie_word_embeddings": True}
    values = tensors(parse_config(fields))
    values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()
    directory = saved(fields, values)
    load(directory, read_config(directory), CPU, torch.float32)
    values["lm_head.weight"][0, 0] += 1
    saved(fields, values)
    with pytest.raises(InvalidValue, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        load(directory, read_config(directory), CPU, torch.float32)


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_read(saved, monkeypatch):
    directory = saved()
    config = read_config(directory)
    weights = sum(tensor.size for tensor in read_tensors(directory, config).values()) * 4
    cache = 64 * 4 * 2 * 2 * 4 * 2 * 4  # blocks, their tokens, keys and values, heads, width, layers, bytes
    monkeypatch.setattr("hal_torch.model.load", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(support, "free_bytes", lambda device: weights + cache - 1)
    with pytest.raises(OutOfMemory) as caught, torch_stepper(directory):
        pass
    needed = f"{weights + cache:,} bytes are needed ({weights:,} for weights and {cache:,} for the cache of 256 tokens)"
    assert caught.value.what == f"{needed}, {weights + cache - 1:,} are free on cpu"
    monkeypatch.setattr(support, "free_bytes", lambda device: weights + cache)
    check_room(config, torch.float32, 256, CPU)


def test_free_memory_of_the_host_is_what_it_could_give():
    assert 2**20 < support.free_bytes(CPU) < 2**50


class TestSees:
    """The dtypes that torch can compute on, with a torch whose answers the test chooses."""

    @pytest.fixture
    def card(self, monkeypatch):
        def is_there(**changed):
            report = {
                "is_available": True, "device_count": 1, "get_device_capability": (9, 0), "get_device_name": "a card",
                "get_arch_list": ["sm_80", "sm_90", "compute_90"],
            } | changed  # fmt: skip
            for name, value in report.items():
                monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
            monkeypatch.setattr(torch.version, "cuda", "13.0")

        return is_there

    def why(self, name="cuda:0", index=0):
        return RUNNER.why_not(SimpleNamespace(name=name, index=index), Path())

    def test_a_build_without_cuda_is_named(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert self.why() == f"torch {torch.__version__} is built without CUDA"
        with pytest.raises(Unavailable) as caught:
            check_sees(SimpleNamespace(name="cuda:0", index=0))
        assert "install a build of torch for the driver and the card" in caught.value.cure

    def test_a_torch_that_hides_its_graphs_is_named(self, card, monkeypatch):
        card()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        assert self.why() == f"torch {torch.__version__} does not expose the handles of its CUDA graphs, as 2.11 does"

    def test_a_build_for_another_driver_is_named(self, card, monkeypatch):
        def fails():
            raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020).")

        card(is_available=False)
        monkeypatch.setattr(torch.cuda, "init", fails)
        assert self.why() == (
            f"torch {torch.__version__}, built for CUDA 13.0, cannot use the GPU: The NVIDIA driver on your system is "
            "too old (found version 12020)."
        )

    @pytest.mark.parametrize(
        ("built", "capability", "runs"),
        [
            (["sm_80", "sm_90"], (9, 0), True),
            (["sm_80"], (8, 9), True),
            (["sm_86"], (8, 0), False),
            (["sm_80"], (9, 0), False),
            (["sm_80", "compute_80"], (10, 0), True),
            (["sm_90a"], (9, 0), True),
            (["sm_75", "sm_120"], (12, 0), True),
        ],
    )
    def test_a_build_for_other_cards_is_named(self, card, built, capability, runs):
        card(get_arch_list=built, get_device_capability=capability)
        assert self.why() == (
            "" if runs else f"torch {torch.__version__} is built for {' '.join(built)}, and a card is sm_"
            f"{capability[0]}{capability[1]}"
        )  # fmt: skip

    def test_a_gpu_that_torch_does_not_see_is_named(self, card):
        card()
        assert self.why() == ""
        assert self.why(index=1) == "torch sees 1 GPU(s), so none of index 1"

    def test_other_devices_are_refused(self):
        assert self.why("cpu:0") == ""
        assert self.why("xpu (substituted: cpu):0") == "torch does not compute on device xpu (substituted: cpu)"

    def test_a_type_that_the_card_lacks_is_refused(self, card):
        card(get_device_capability=(7, 5))
        device = torch.device("cuda", 0)
        with pytest.raises(InvalidValue, match="the checkpoint is bfloat16, which a card lacks") as caught:
            computing_dtype("auto", "BF16", device)
        assert (caught.value.argument, caught.value.cure) == ("--dtype", "give --dtype float32")
        assert computing_dtype("float32", "BF16", device) == torch.float32
        assert computing_dtype("auto", "F16", device) == torch.float16
        card(get_device_capability=(8, 0))
        assert computing_dtype("auto", "BF16", device) == torch.bfloat16


def test_a_broken_checkpoint_is_named(saved):
    directory = saved()
    (directory / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidValue, match="not a whole safetensors file"):
        by_torch(directory, [Request("r", [5], SamplingParams(max_tokens=1))])
