"""`QuantMode`, `QuantAlgo` and `QuantConfig`: flags, schemes, excluded modules."""

import json
from functools import reduce
from operator import or_

import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.quantization import QuantAlgo, QuantConfig, QuantMode

# algorithm | its flags (SQ: two) | irc's scheme, or the start of the reason why there is none
TABLE = """\
NO_QUANT |  | None
W8A16 | INT8_WEIGHTS | w8a16
W4A16 | INT4_WEIGHTS | w4a16
W4A16_AWQ | INT4_WEIGHTS PER_GROUP | w4a16_awq
W4A8_AWQ | INT4_WEIGHTS PER_GROUP | w4a8_awq
W4A16_GPTQ | INT4_WEIGHTS PER_GROUP | w4a16_gptq
W8A16_GPTQ | INT8_WEIGHTS PER_GROUP | w8a16_gptq
W8A8_SQ_PER_CHANNEL | SQ PER_CHANNEL | w8a8_sq_per_channel
W8A8_SQ_PER_TENSOR_PLUGIN | SQ | w8a8_sq
W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN | SQ PER_CHANNEL | w8a8_sq_per_channel
W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN | SQ PER_TOKEN | w8a8_sq_per_token
W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN | SQ PER_CHANNEL PER_TOKEN | w8a8_sq_per_channel_per_token
W4A8_QSERVE_PER_GROUP | INT4_WEIGHTS ACTIVATIONS PER_GROUP W4A8_QSERVE | QServe's two-level int4
W4A8_QSERVE_PER_CHANNEL | INT4_WEIGHTS ACTIVATIONS W4A8_QSERVE | QServe's two-level int4
FP8 | FP8_QDQ | fp8
FP8_PER_CHANNEL_PER_TOKEN | FP8_ROWWISE PER_TOKEN PER_CHANNEL | fp8_rowwise
INT8 |  | it is for caches
MIXED_PRECISION |  | give a table of scopes
"""
TABLE = TABLE.replace(" SQ", " INT8_WEIGHTS ACTIVATIONS")
ALGOS = {name: own for name, *own in (row.split(" | ") for row in TABLE.splitlines())}


def flags(names: str) -> QuantMode:
    """A mode from the names of its flags."""
    return reduce(or_, (QuantMode[name] for name in names.split()), QuantMode(0))


def test_the_table_has_every_algorithm() -> None:
    assert set(ALGOS) == set(QuantAlgo.__members__)


@pytest.mark.parametrize("name", ALGOS)
def test_algorithms_mean_flags_and_schemes(name: str) -> None:
    names, scheme = ALGOS[name]
    assert QuantMode.from_quant_algo(name) == flags(names)
    if " " not in scheme:
        assert str(QuantConfig(name).scheme()) == scheme
        return
    with pytest.raises(Error, match=f"{name}: {scheme}"):
        QuantConfig(name).scheme()


@pytest.mark.parametrize(("cache", "flag"), [("INT8", "INT8_KV_CACHE"), ("FP8", "FP8_KV_CACHE")])
def test_caches_add_a_flag(cache: str, flag: str) -> None:
    mode = QuantMode.from_quant_algo("W8A16", cache)
    assert mode == flags(f"INT8_WEIGHTS {flag}") and mode.has_kv_cache_quant()
    assert QuantMode.from_quant_algo(None, cache) == flags(flag)
    assert not QuantMode.from_quant_algo(None, cache).has_any_quant(exclude_kv_cache=True)
    with pytest.raises(ValueError, match="cannot be quantized as W8A16; expected FP8, INT8"):
        QuantMode.from_quant_algo(None, "W8A16")


@pytest.mark.parametrize("names", ["quantize_activations", "per_token", "per_channel"])
def test_contradictions_are_a_value_error(names: str) -> None:
    with pytest.raises(ValueError, match="need both"):
        QuantMode.from_description(**{names: True}, quantize_weights=names == "per_channel")


def test_descriptions() -> None:
    description = {"quantize_weights": True, "use_int4_weights": True, "use_fp8_rowwise": True}
    names = "INT4_WEIGHTS FP8_ROWWISE PER_TOKEN PER_CHANNEL FP8_KV_CACHE"
    assert QuantMode.from_description(**description, use_fp8_kv_cache=True) == flags(names)
    assert QuantMode.use_smooth_quant(True) == flags("INT8_WEIGHTS ACTIVATIONS PER_TOKEN")
    assert not QuantMode.use_smooth_quant(True).has_act_static_scaling()
    assert QuantMode.use_smooth_quant(per_channel=True).has_act_static_scaling()
    assert QuantMode.use_weight_only(True, True) == flags("INT4_WEIGHTS PER_GROUP")


SQ = " ".join(algo for algo in ALGOS if "_SQ_" in algo)
WEIGHTS = " ".join(algo for algo in ALGOS if "_WEIGHTS" in ALGOS[algo][0])
# predicate -> the algorithms for which it holds
PREDICATES = {
    "is_weight_only": "W8A16 W4A16 W4A16_AWQ W4A8_AWQ W4A16_GPTQ W8A16_GPTQ",
    "is_int8_weight_only": "W8A16 W8A16_GPTQ",
    "is_int4_weight_only": "W4A16 W4A16_AWQ W4A8_AWQ W4A16_GPTQ",
    "is_int4_weight_only_per_group": "W4A16_AWQ W4A8_AWQ W4A16_GPTQ",
    "is_int8_weight_only_per_group": "W8A16_GPTQ",
    "is_qserve_w4a8": "W4A8_QSERVE_PER_GROUP W4A8_QSERVE_PER_CHANNEL",
    "has_act_and_weight_quant": SQ,
    "has_per_token_dynamic_scaling": " ".join(algo for algo in ALGOS if "PER_TOKEN" in algo),
    "has_per_channel_scaling": " ".join(
        algo for algo in ALGOS if "PER_CHANNEL" in algo and "QSERVE" not in algo
    ),
    "has_act_or_weight_quant": WEIGHTS,
    "has_weight_quant": WEIGHTS,
    "has_per_group_scaling": "W4A16_AWQ W4A8_AWQ W4A16_GPTQ W8A16_GPTQ W4A8_QSERVE_PER_GROUP",
    "has_fp8_qdq": "FP8",
    "has_fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
}


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(name: str) -> None:
    holds = [a for a in ALGOS if getattr(QuantMode.from_quant_algo(a), name)()]
    assert sorted(holds) == sorted(PREDICATES[name].split())


def test_any_quantization() -> None:
    plain = {algo for algo in ALGOS if not QuantMode.from_quant_algo(algo).has_any_quant()}
    assert plain == {"NO_QUANT", "INT8", "MIXED_PRECISION"}
    assert not QuantMode.PER_CHANNEL.has_any_quant()
    assert QuantMode.INT8_KV_CACHE.has_any_quant()


def test_numbers_are_those_of_0_16() -> None:
    names = "INT4_WEIGHTS INT8_WEIGHTS ACTIVATIONS PER_CHANNEL PER_TOKEN PER_GROUP INT8_KV_CACHE "
    names += "FP8_KV_CACHE FP8_QDQ FP8_ROWWISE W4A8_QSERVE"
    assert [QuantMode[name].value for name in names.split()] == [1 << i for i in range(11)]
    mode = QuantMode(0).set_int8_kv_cache().set_fp8_qdq()
    assert mode == QuantMode.INT8_KV_CACHE | QuantMode.FP8_QDQ
    assert mode._any(QuantMode.FP8_QDQ) and not mode._all(QuantMode.FP8_QDQ)
    assert mode._all(QuantMode(0), QuantMode.WEIGHTS_AND_ACTIVATIONS)
    assert QuantMode(0).set_fp8_kv_cache().has_fp8_kv_cache()
    assert QuantMode(0).set_fp8_rowwise() == QuantMode.from_quant_algo("FP8_PER_CHANNEL_PER_TOKEN")


@pytest.mark.parametrize(("version", "flags"), [("0.7.1", 9), ("0.12", 10), ("0.16", 11)])
def test_the_count_is_that_of_the_release(version: str, flags: int) -> None:
    with new_session(version):
        assert QuantMode.COUNT.value == 1 << flags
        assert QuantMode.VALID_FLAGS.value == (1 << flags) - 1


def test_to_dict() -> None:
    table = QuantMode.from_quant_algo("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "INT8").to_dict()
    on = {name for name, value in table.items() if value is True}
    assert on == {"use_smooth_quant", "per_channel", "per_token", "int8_kv_cache"}


def test_a_string_is_no_list_of_modules() -> None:
    """Each character would be a pattern: the first, `*`, would exclude every layer."""
    with pytest.raises(ValueError, match=r"expected a list .* found the string '\*lm_head'"):
        QuantConfig("W8A16", exclude_modules="*lm_head")  # pyright: ignore[reportArgumentType]


def test_config_files() -> None:
    config = QuantConfig("W4A16", "INT8", group_size=64, exclude_modules=[])
    text = json.dumps(config.to_dict() | {"unknown": 1})
    assert QuantConfig.from_dict(json.loads(text)) == config
    assert json.loads(text)["quant_algo"] == "W4A16"
    assert QuantConfig("W4A16", has_zero_point=True).scheme() == "w4a16_asym"
    assert config.layer_quant_mode == QuantMode.INT4_WEIGHTS | QuantMode.INT8_KV_CACHE
    needed = {algo for algo in ALGOS if QuantConfig(algo).requires_calibration}
    assert needed == set(ALGOS) - {"NO_QUANT", "W8A16", "W4A16", "FP8_PER_CHANNEL_PER_TOKEN"}
    assert config.requires_calibration and not config.use_plugin_sq  # of its caches
    assert QuantConfig("W8A8_SQ_PER_TENSOR_PLUGIN").use_plugin_sq
    with pytest.raises(ValueError, match="no QuantAlgo 'W4A16_AQW'; did you mean 'W4A16_AWQ'"):
        QuantConfig("W4A16_AQW")
