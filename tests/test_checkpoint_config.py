"""Quantization configs: block shapes, schemes by module, exclusion lists."""

import pytest

from jaxtp.checkpoint.config import parse
from jaxtp.checkpoint.patterns import NamePatterns, canonical
from jaxtp.errors import CheckpointError

DOWN = "model.layers.3.mlp.down_proj"
NVFP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16}
FP8_GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [128, 128],
}


def quantization(section=None, hf_quant=None):
    config = {} if section is None else {"quantization_config": section}
    return parse(config, {} if hf_quant is None else {"quantization": hf_quant})


def groups(**schemes):
    """A compressed-tensors config from (weights, targets) pairs."""
    table = {n: {"weights": w, "targets": t} for n, (w, t) in schemes.items()}
    return {"quant_method": "compressed-tensors", "config_groups": table}


def test_no_config_says_nothing() -> None:
    found = parse({}, {})
    assert found.method is None
    assert found.scheme(DOWN, "e4m3") is None
    assert not found.excluded(DOWN)


def test_the_block_shape_comes_from_weight_block_size() -> None:
    found = quantization({"quant_method": "fp8", "weight_block_size": [64, 256]})
    scheme = found.scheme(DOWN, "e4m3")
    assert scheme is not None
    assert scheme.block_shape == (64, 256)


def test_the_section_may_stand_in_text_config() -> None:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = parse({"text_config": {"quantization_config": section}}, {})
    assert found.scheme(DOWN, "e4m3").block_shape == (128, 128)
    both = {"text_config": {"quantization_config": section}}
    assert parse({**both, "quantization_config": section}, {}).method == "fp8"
    other = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    with pytest.raises(CheckpointError, match="the two differ"):
        parse({**both, "quantization_config": other}, {})


def test_fp8_without_a_block_size_is_per_tensor_and_not_read() -> None:
    found = quantization({"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"FP8 per tensor .*weight_block_size"):
        found.scheme(DOWN, "e4m3")


@pytest.mark.parametrize(
    "block", [[128], [128, 0], [128, -1], [128.0, 128], [True, 128], "128", 128, "axb"]
)
def test_a_malformed_block_shape_is_named(block) -> None:
    section = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(CheckpointError, match=r"weight_block_size: expected \[rows"):
        quantization(section)


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo", "FP8_BLOCK_SCALES"])
def test_modelopt_block_fp8_stands_for_128_by_128(algorithm: str) -> None:
    for found in (
        quantization({"quant_method": "modelopt", "quant_algo": algorithm}),
        quantization(None, {"quant_algo": algorithm}),
    ):
        assert found.scheme(DOWN, "e4m3").block_shape == (128, 128)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "nvfp4"])
def test_modelopt_nvfp4_is_read_from_either_file(algorithm: str) -> None:
    hf_quant = {"quant_algo": algorithm, "group_size": 16}
    for found in (
        quantization({"quant_method": "modelopt", "quant_algo": algorithm}),
        quantization(None, hf_quant),
        quantization({"quant_method": "modelopt", **hf_quant}, hf_quant),
    ):
        assert found.scheme(DOWN, "nvfp4").format == "nvfp4"
        with pytest.raises(CheckpointError, match=rf"{DOWN}: .*e4m3.*nvfp4"):
            found.scheme(DOWN, "e4m3")


def test_nvfp4_has_groups_of_sixteen() -> None:
    with pytest.raises(CheckpointError, match="group_size 16; got 32"):
        quantization(None, {"quant_algo": "NVFP4", "group_size": 32})


def test_the_two_files_must_agree() -> None:
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a"]}
    with pytest.raises(CheckpointError, match=r"config\.json says .*hf_quant_config"):
        quantization(section, {"quant_algo": "FP8_PB_WO"})
    found = quantization(section, {"quant_algo": "NVFP4", "exclude_modules": ["b"]})
    assert found.excluded("a")
    assert found.excluded("b")
    assert found.sources == ("config.json", "hf_quant_config.json")


def test_mixed_precision_gives_each_module_its_algorithm() -> None:
    layers = {
        "model.layers.1.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.10.mlp.down_proj": {"quant_algo": "FP8_PB_WO"},
        "model.layers.11.mlp.down_proj": {"quant_algo": "FP8"},
    }
    hf_quant = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = quantization(None, hf_quant)
    assert found.scheme("model.layers.1.mlp.down_proj", "nvfp4").format == "nvfp4"
    fp8 = found.scheme("model.layers.10.mlp.down_proj", "e4m3")
    assert fp8.block_shape == (128, 128)
    with pytest.raises(CheckpointError, match=r"layers\.10.*nvfp4.*e4m3"):
        found.scheme("model.layers.10.mlp.down_proj", "nvfp4")
    with pytest.raises(CheckpointError, match=r"layers\.11.*says FP8 "):
        found.scheme("model.layers.11.mlp.down_proj", "e4m3")
    with pytest.raises(CheckpointError, match="says nothing"):
        found.scheme("model.layers.12.mlp.down_proj", "nvfp4")


def test_a_compressed_tensors_group_gives_its_block_structure() -> None:
    for block in ([128, 128], "128x128"):
        section = groups(a=({**FP8_GROUP, "block_structure": block}, ["Linear"]))
        assert quantization(section).scheme(DOWN, "e4m3").block_shape == (128, 128)


def test_other_group_strategies_are_named_not_guessed() -> None:
    channel = {"num_bits": 8, "type": "float", "strategy": "channel"}
    with pytest.raises(CheckpointError, match="8-bit float, strategy channel"):
        quantization(groups(a=(channel, ["Linear"]))).scheme(DOWN, "e4m3")
    mxfp4 = {"num_bits": 4, "type": "float", "group_size": 32}
    with pytest.raises(CheckpointError, match="group_size 32"):
        quantization(groups(a=(mxfp4, ["Linear"]))).scheme(DOWN, "nvfp4")


def test_a_scheme_that_names_the_module_outweighs_one_for_a_class() -> None:
    small = {**FP8_GROUP, "block_structure": [64, 64]}
    section = groups(a=(FP8_GROUP, ["Linear"]), b=(small, ["re:.*down_proj$"]))
    found = quantization(section)
    assert found.scheme(DOWN, "e4m3").block_shape == (64, 64)
    assert found.scheme("model.layers.3.mlp.up_proj", "e4m3").block_shape == (128, 128)


def test_two_block_shapes_for_one_module_are_an_error() -> None:
    small = {**FP8_GROUP, "block_structure": [64, 64]}
    section = groups(a=(FP8_GROUP, ["re:.*down.*"]), b=(small, ["re:.*proj$"]))
    with pytest.raises(CheckpointError, match="several block shapes"):
        quantization(section).scheme(DOWN, "e4m3")


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": 3},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "fp8", "ignored_layers": [1]},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 4}}},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": "NVFP4"},
        },
        {"quant_method": "fp8", "ignore": ["re:("]},
        [1],
        "fp8",
    ],
)
def test_a_malformed_section_is_a_typed_error(section) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        quantization(section)


NAMES = [
    # pattern, modules it names, modules it does not name
    ("lm_head", ["lm_head"], ["lm_head_2", "model.lm"]),
    ("gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
    ("mlp.gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.up_proj"]),
    (
        "model.layers.1",
        ["model.layers.1.mlp.up_proj"],
        ["model.layers.10.mlp.up_proj", "model.vision.layers.1.up_proj"],
    ),
    (
        "model.language_model.layers.1.*",
        ["model.language_model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"],
        ["model.language_model.layers.10.mlp.up_proj", "model.layers.11.mlp.up_proj"],
    ),
    (
        "model.language_model.layers.0*",
        ["model.language_model.layers.0", "model.layers.0.mlp.up_proj"],
        ["model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"],
    ),
    ("*.mlp.gate", ["model.layers.7.mlp.gate"], ["model.layers.7.mlp.gate_proj"]),
    ("model.*", ["model.layers.7.mlp.up_proj"], ["lm_head"]),
    ("re:.*mlp.gate$", ["model.layers.7.mlp.gate"], ["model.layers.7.mlp.gate_proj"]),
    ("re:layers", ["layers.0.wq"], ["vision.layers.0.wq"]),
]


@pytest.mark.parametrize(("pattern", "named", "others"), NAMES)
def test_a_pattern_names_modules_whole(pattern, named, others) -> None:
    patterns = NamePatterns([pattern])
    assert all(patterns.matches(name) for name in named)
    assert not any(patterns.matches(name) for name in others)


def test_prefixes_of_the_text_model_make_no_difference() -> None:
    assert canonical("model.language_model.layers.1.a") == ("layers", "1", "a")
    assert canonical("layers.1.a") == ("layers", "1", "a")
    assert canonical("model") == ("model",)


def test_a_fused_module_is_excluded_if_all_its_parts_are() -> None:
    attn = "model.layers.0.self_attn"
    all_three = NamePatterns([f"{attn}.{p}_proj" for p in "qkv"])
    assert all_three.matches(f"{attn}.qkv_proj")
    assert not NamePatterns([f"{attn}.q_proj"]).matches(f"{attn}.qkv_proj")
    fused = NamePatterns([f"{attn}.qkv_proj"])
    assert fused.matches(f"{attn}.k_proj")
    assert not fused.matches(f"{attn}.o_proj")
    assert NamePatterns(["gate_proj", "up_proj"]).matches("model.mlp.gate_up_proj")


def test_patterns_that_match_nothing_are_no_error() -> None:
    patterns = NamePatterns(["qkv_proj", "vision_model*", "re:nothing"])
    assert not patterns.matches(DOWN)


def test_long_lists_are_fast() -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{e}.gate_proj"
        for i in range(20)
        for e in range(100)
    ]
    patterns = NamePatterns([*names, *(f"model.layers.{i}.x*" for i in range(60))])
    assert all(patterns.matches(name) for name in names)
    assert not any(patterns.matches(f"{name}_2") for name in names)
