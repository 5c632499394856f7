"""config.json: used fields, ignored fields, and a refusal by name of any further one."""

import contextlib
import json
import math
import subprocess
import sys

import pytest
from hal_core.errors import InvalidValue
from hal_engine.model.config import parse_config, read_config
from hypothesis import given
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_fields_are_read(checkpoints):
    config = parse_config(checkpoints.llama)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (61, 16, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.heads_per_group) == (4, 2, 2)
    assert config.eos_token_ids == (2,)
    assert not config.qkv_bias


def test_qwen2_has_a_bias_on_query_key_and_value_only(checkpoints):
    config = parse_config(checkpoints.llama | checkpoints.variants["qwen2"])
    assert config.qkv_bias
    assert not config.output_bias
    assert config.tie_word_embeddings


def test_llama_attention_bias_is_on_all_four_projections(checkpoints):
    config = parse_config(checkpoints.llama | {"attention_bias": True})
    assert config.qkv_bias
    assert config.output_bias


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_cache": True, "initializer_range": 0.02, "transformers_version": "5.0", "pretraining_tp": 1},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None, "mlp_bias": False, "dtype": "bfloat16"},
        {"eos_token_id": [2, 3], "bos_token_id": None},
    ],
)
def test_fields_without_effect_are_accepted(checkpoints, harmless):
    parse_config(checkpoints.llama | harmless)


def test_newer_files_keep_the_rotary_base_in_an_object(checkpoints):
    fields = checkpoints.llama | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    with pytest.raises(InvalidValue, match="rope_theta"):  # the two differ
        parse_config(fields)
    del fields["rope_theta"]
    assert parse_config(fields).rope.theta == 77.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("architectures", "LlamaForCausalLM"),
        ("model_type", "qwen2"),
        ("model_type", ["llama"]),
        ("vocab_size", 0),
        ("vocab_size", True),
        ("vocab_size", None),
        ("hidden_size", 16.0),
        ("hidden_size", math.nan),
        ("intermediate_size", "24"),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("head_dim", 5),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 0),
        ("rope_theta", math.inf),
        ("rope_theta", "10000"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", "linear"),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("max_position_embeddings", None),
        ("tie_word_embeddings", 1),
        ("attention_bias", "yes"),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("eos_token_id", 61),
        ("eos_token_id", [2, -1]),
        ("bos_token_id", [1, 2]),
        ("num_nextn_predict_layers", 2),
        ("torch_dtype", "int8"),
        ("sliding_window", 8),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "own.py"}),
        ("partial_rotary_factor", 0.5),
        ("num_local_experts", 8),
    ],
)
def test_what_is_not_supported_is_refused_by_name(checkpoints, field, value):
    with pytest.raises(InvalidValue, match=field) as caught:
        parse_config(checkpoints.llama | {field: value}, source="some/config.json")
    assert caught.value.cure
    assert "some/config.json" in str(caught.value)


def test_qwen2_without_its_bias_is_refused(checkpoints):
    with pytest.raises(InvalidValue, match="attention_bias"):
        parse_config(checkpoints.llama | checkpoints.variants["qwen2"] | {"attention_bias": False})


@given(data=st.data())
def test_any_value_of_any_field_gives_a_config_or_a_clear_error(checkpoints, data):
    field = data.draw(st.sampled_from([*checkpoints.llama, "head_dim", "rope_scaling", "layer_types", "own"]))
    with contextlib.suppress(InvalidValue):
        parse_config(checkpoints.llama | {field: data.draw(JSON_VALUES)})


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", '"text"', "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused_with_its_path(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidValue, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_directory_or_file_is_named(tmp_path):
    with pytest.raises(InvalidValue, match="nowhere"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(InvalidValue, match=r"--model: no config\.json in "):
        read_config(tmp_path)


def test_end_ids_of_generation_config_are_read_and_checked(tmp_path, checkpoints):
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.llama))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    assert read_config(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(InvalidValue, match=r"generation_config\.json.*eos_token_id"):
        read_config(tmp_path)


def test_qwen2_uses_its_window_only_where_the_file_says_so(checkpoints):
    fields = checkpoints.llama | checkpoints.variants["qwen2"] | {"sliding_window": 8}
    parse_config(fields)  # Qwen2's own default
    parse_config(fields | {"use_sliding_window": True, "max_window_layers": 2})  # from the third of two layers
    for used in ({"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 1}):
        with pytest.raises(InvalidValue, match="sliding_window"):
            parse_config(fields | used)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ends"),
    [
        (2, {"eos_token_id": 7}, (7,)),
        ([2, 3], {"eos_token_id": [7, 2]}, (7, 2)),
        (2, {"eos_token_id": None}, (2,)),
        ([2, 3], {"bos_token_id": 1}, (2, 3)),
        (None, {"eos_token_id": 7}, (7,)),
    ],
)
def test_end_tokens_follow_the_generation_config_where_it_has_them(
    tmp_path, checkpoints, in_config, in_generation, ends
):
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.llama | {"eos_token_id": in_config}))
    (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert read_config(tmp_path).eos_token_ids == ends


def test_generation_defaults_that_would_matter_are_told_and_others_are_not(tmp_path, checkpoints):
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.llama))
    generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "repetition_penalty": 1.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).notes == ()
    generation |= {"do_sample": True, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (note,) = read_config(tmp_path).notes
    assert "do_sample = True, repetition_penalty = 1.1" in note


def test_importing_config_and_tokenizer_imports_no_framework():
    code = "import sys, hal_engine.model.config, hal_engine.model.tokenizer; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
