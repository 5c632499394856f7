"""Checkpoint files: every stored type, shards, and that no broken file gets through or causes another error."""

import contextlib
import json

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_engine.model.config import parse_config, read_config
from hal_engine.model.loading import read_tensors
from hypothesis import given
from hypothesis import strategies as st


def read(directory):
    return read_tensors(directory, read_config(directory))


@pytest.fixture
def saved(tmp_path, checkpoints):
    """Write a changed set of tensors: ``saved(change)`` with ``change`` working on the dict in place."""

    def make(change=lambda values: None, **fields):
        fields = checkpoints.llama | fields
        values = checkpoints.tensors(parse_config(fields))
        change(values)
        return checkpoints.write(tmp_path, fields, values)

    return make


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_stored_type_is_widened_exactly(tmp_path, checkpoints, dtype, shards):
    values = checkpoints.tensors(parse_config(checkpoints.llama))
    if dtype == "bfloat16":
        stored = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in values.items()}
    else:
        stored = {name: value.astype(dtype).astype(np.float32) for name, value in values.items()}
    loaded = read(checkpoints.write(tmp_path, checkpoints.llama, values, dtype=dtype, shards=shards))
    assert loaded.keys() == values.keys()
    for name, value in loaded.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, stored[name])


def test_a_missing_tensor_is_named(saved):
    with pytest.raises(InvalidValue, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        read(saved(lambda values: values.pop("model.layers.1.mlp.up_proj.weight")))


def test_a_huge_layer_count_ends_at_the_first_missing_tensor(saved):
    directory = saved()
    fields = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 2**31 - 1}
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidValue, match=r"model\.layers\.2\."):
        read(directory)


def test_an_unknown_tensor_is_named(saved):
    with pytest.raises(InvalidValue, match=r"model\.layers\.7\.own"):
        read(saved(lambda values: values.update({"model.layers.7.own": np.ones(2, np.float32)})))


def test_computed_tables_of_old_files_are_ignored(saved):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert name not in read(saved(lambda values: values.update({name: np.ones(2, np.float32)})))


@pytest.mark.parametrize("shape", [(61, 17), (61 * 16,), (16, 61)])
def test_a_wrong_shape_is_named_with_both_shapes(saved, shape):
    wrong = {"model.embed_tokens.weight": np.ones(shape, np.float32)}
    with pytest.raises(InvalidValue, match=r"embed_tokens.*\[61, 16\]"):
        read(saved(lambda values: values.update(wrong)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_named(saved, bad):
    def change(values):
        values["model.norm.weight"][3] = bad

    with pytest.raises(InvalidValue, match=r"model\.norm\.weight.*NaN or infinity"):
        read(saved(change))


def test_an_unsupported_stored_type_is_named(tmp_path, checkpoints):
    values = checkpoints.tensors(parse_config(checkpoints.llama))
    with pytest.raises(InvalidValue, match="F64"):
        read(checkpoints.write(tmp_path, checkpoints.llama, values, dtype="float64"))


def test_a_tied_head_may_be_stored_again_but_not_differ(saved):
    def repeat(values):
        values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()

    assert "lm_head.weight" not in read(saved(repeat, tie_word_embeddings=True))

    def differ(values):
        repeat(values)
        values["lm_head.weight"][0, 0] += 1

    with pytest.raises(InvalidValue, match="lm_head"):
        read(saved(differ, tie_word_embeddings=True))


def test_a_missing_file_is_named(tmp_path, checkpoints):
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.llama))
    with pytest.raises(InvalidValue, match=r"model\.safetensors.*no such file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
        ({"model.norm.weight": "../model.safetensors"}, "weight_map"),
        ({"model.norm.weight": 3}, "weight_map"),
        ({"model.norm.weight": "absent.safetensors"}, "absent"),
        ({"own": "model-00001-of-00002.safetensors"}, "does not place"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, checkpoints, weight_map, message):
    values = checkpoints.tensors(parse_config(checkpoints.llama))
    checkpoints.write(tmp_path, checkpoints.llama, values, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidValue, match=message):
        read(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path, checkpoints):
    values = checkpoints.tensors(parse_config(checkpoints.llama))
    checkpoints.write(tmp_path, checkpoints.llama, values, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["own"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InvalidValue, match="'own' is not in"):
        read(tmp_path)


@pytest.fixture(scope="session")
def file_on_disk(tmp_path_factory, checkpoints):
    """A checkpoint whose tensor file the property tests overwrite, and its good content."""
    directory = checkpoints.make(tmp_path_factory.mktemp("file"))
    return directory, (directory / "model.safetensors").read_bytes()


@given(data=st.data())
def test_a_truncated_file_is_refused_with_its_path(file_on_disk, data):
    directory, good = file_on_disk
    (directory / "model.safetensors").write_bytes(good[: data.draw(st.integers(0, len(good) - 1), label="length")])
    with pytest.raises(InvalidValue, match=r"model\.safetensors"):
        read(directory)


@given(garbage=st.binary(min_size=1, max_size=40))
def test_trailing_bytes_are_refused(file_on_disk, garbage):
    directory, good = file_on_disk
    (directory / "model.safetensors").write_bytes(good + garbage)
    with pytest.raises(InvalidValue, match=r"model\.safetensors"):
        read(directory)


@given(data=st.data())
def test_a_changed_header_loads_or_gives_a_clear_error(file_on_disk, data):
    directory, good = file_on_disk
    header = 8 + int.from_bytes(good[:8], "little")
    content = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=3), label="changed bytes"):
        content[at] = data.draw(st.integers(0, 255), label="to")
    (directory / "model.safetensors").write_bytes(content)
    with contextlib.suppress(InvalidValue):
        read(directory)
