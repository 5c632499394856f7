"""Checkpoints of other kinds are refused by the name of their kind: formats of weights, encoder-decoders."""

import json
import shutil

import pytest
from hal_core import InvalidValue
from hal_engine.generation.plan import ModelPlan
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import parse_config
from hal_engine.model.hub import find_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    """The shipped checkpoint, without its weights."""
    shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.Q4_K_M.gguf", "GGUF"),
        ("pytorch_model.bin", "pickles of PyTorch"),
        ("pytorch_model-00001-of-00002.bin", "pickles of PyTorch"),
        ("consolidated.00.pth", "pickles of PyTorch"),
        ("tf_model.h5", "HDF5"),
    ],
)
def test_weights_in_another_format_are_named(checkpoint, name, kind):
    (checkpoint / name).write_bytes(b"x")
    with pytest.raises(InvalidValue) as caught:
        ModelPlan(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint}: weights are in a format that is not taken: {name} ({kind})")
    for other in ("config.json", "tokenizer.json"):  # as a folder with a GGUF file alone
        (checkpoint / other).unlink()
    with pytest.raises(InvalidValue, match="not taken"):
        ModelPlan(checkpoint)


def test_another_format_beside_safetensors_changes_nothing(checkpoint):
    shutil.copy(DEFAULT_CHECKPOINT / "model.safetensors", checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    ModelPlan(checkpoint)


@pytest.mark.parametrize(
    ("name", "told"), [("x.gguf", r"not taken \(GGUF\)"), ("x.safetensors", "is a file, no folder")]
)
def test_a_file_in_place_of_a_folder_is_named(tmp_path, monkeypatch, name, told):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(InvalidValue, match=f"--model: .*{told}"):
        ModelPlan(find_checkpoint(f"{tmp_path.name}/{name}"))  # which could be a model's name in the cache


def test_an_encoder_decoder_is_refused_and_false_is_no_news():
    fields = json.loads((DEFAULT_CHECKPOINT / "config.json").read_bytes())
    with pytest.raises(InvalidValue, match="is_encoder_decoder: True: must be False"):
        parse_config(fields | {"is_encoder_decoder": True})
    assert "is_encoder_decoder" not in "".join(parse_config(fields | {"is_encoder_decoder": False}).notes)
