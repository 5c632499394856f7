"""config.json: what is used, what is ignored, and that anything else is refused with its name."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hal_core.errors import InvalidValue
from hypothesis import given
from hypothesis import strategies as st

from hal.model.config import parse_config, read_config

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
    with pytest.raises(InvalidValue, match=r"config\.json.*no such file"):
        read_config(tmp_path)


def test_end_ids_of_generation_config_are_read_and_checked(tmp_path, checkpoints):
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.llama))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    assert read_config(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(InvalidValue, match=r"generation_config\.json.*eos_token_id"):
        read_config(tmp_path)


OLD_DUMP = {
    # transformers' PretrainedConfig.to_dict of 4.x, as old files have it, with the values that a Llama has
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "torchscript": False,
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "return_dict_in_generate": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "finetuning_task": None,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "num_labels": 2,
    "tokenizer_class": None,
    "prefix": None,
    "pad_token_id": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "task_specific_params": None,
    "problem_type": None,
    "gradient_checkpointing": False,
    "xla_device": None,
    "_commit_hash": "abc",
    "_name_or_path": "x",
}


def test_an_old_dump_of_all_defaults_loads_and_is_told_in_one_line(checkpoints):
    config = parse_config(checkpoints.llama | OLD_DUMP)
    assert replace(config, notes=()) == parse_config(checkpoints.llama)
    (note,) = config.notes
    assert "\n" not in note
    assert all(name in note for name in ("_commit_hash", "output_scores", "repetition_penalty", "torchscript"))


@pytest.mark.parametrize(
    "idle",
    [
        {"is_llama_config": True, "rope_interleaved": False},
        {"unsloth_fixed": True, "unsloth_version": "2024.9"},
        {"use_sdpa": False},
        {"_commit_hash": None, "output_scores": True, "num_labels": 7},
        {"hidden_act": "swish"},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 1}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 1.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"sliding_window": 64},
        {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},  # tokens are drawn if the request says so
        {"num_beams": 1, "length_penalty": 2.0, "stop_strings": []},
        {"logit_scale": 1.0, "use_qk_norm": False},
    ],
)
def test_what_changes_nothing_loads_and_gives_the_same_model(checkpoints, idle):
    config = parse_config(checkpoints.llama | idle)
    assert replace(config, notes=()) == parse_config(checkpoints.llama)
    told = "".join(config.notes)
    for name, value in idle.items():
        quiet = value is None or name in ("use_sliding_window", "layer_types")
        assert quiet or name in told or value == {"rope_type": "default", "partial_rotary_factor": 1.0}


def test_fields_that_every_file_has_are_not_told(checkpoints):
    assert parse_config(checkpoints.llama | {"use_cache": True, "initializer_range": 0.02}).notes == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.2),
        ("do_sample", True),
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("no_repeat_ngram_size", 3),
        ("min_length", 10),
        ("suppress_tokens", [5]),
        ("bad_words_ids", [[5]]),
        ("forced_eos_token_id", 2),
        ("exponential_decay_length_penalty", [1, 1.1]),
        ("pruned_heads", {"0": [1]}),
        ("prefix", "Say: "),
        ("rope_interleaved", True),
        ("use_qk_norm", True),
        ("logits_scaling", 8.0),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"type": "linear", "factor": "1"}),
        ("rope_scaling", {"type": "yarn", "factor": 1.0, "attention_factor": 1.2}),
        ("rope_scaling", {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 16}),
        ("rope_scaling", {"type": "default", "factor": 2.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}),
        ("rope_scaling", {"rope_type": "linear", "type": "yarn", "factor": 1.0}),
        ("rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("sliding_window", 63),
        ("layer_types", ["sliding_attention", "full_attention"]),
    ],
)
def test_the_same_fields_with_a_value_that_changes_the_result_are_refused(checkpoints, field, value):
    with pytest.raises(InvalidValue, match=field) as caught:
        parse_config(checkpoints.llama | OLD_DUMP | {field: value})
    assert caught.value.cure


def test_qwen2_uses_its_window_only_where_the_file_says_so(checkpoints):
    fields = checkpoints.llama | checkpoints.variants["qwen2"] | {"sliding_window": 8}
    parse_config(fields)  # Qwen2's own default
    parse_config(fields | {"use_sliding_window": True, "max_window_layers": 2})  # from the third of two layers on
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
    code = "import sys, hal.model.config, hal.model.tokenizer; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
