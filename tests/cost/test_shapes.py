"""Parameter counts to the digit: against transformers' own models, published counts, and themselves when split."""

import json

import pytest

from labkit.cost import config, named, shapes

SHAPES = {shape.name: shape for shape in named.models()}
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
}


def kind_of(shape):
    """transformers' model type whose layers are built this way."""
    if shape.positions:
        return "gpt2"
    if shape.experts:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    if shape.qk_norm:
        return "qwen3"
    return "qwen2" if shape.qkv_biases else "mistral" if shape.name.startswith("mistral") else "llama"


def settings(shape, kind):
    """config.json of this shape."""
    if kind == "gpt2":
        given = {"n_embd": shape.hidden, "n_head": shape.heads, "n_layer": shape.layers, "n_inner": shape.ffn}
        return given | {"vocab_size": shape.vocab, "n_positions": shape.positions, "model_type": kind}
    given = {
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_seq,
    }
    if kind != "qwen2":
        given["head_dim"] = shape.head_dim
    if kind == "mixtral":
        given |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.active_experts}
    if kind == "qwen3_moe":
        given |= {"num_experts": shape.experts, "num_experts_per_tok": shape.active_experts}
        given["moe_intermediate_size"] = shape.ffn
    return given


def built(given):
    """Parameters of transformers' own model of these settings, made without memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = dict(given)
    made = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_model_has_as_many_parameters_as_transformers_builds(name):
    shape = SHAPES[name]
    # One layer and two differ by a layer: the rest of a deep model would only take time.
    one, two = (built(settings(shape, kind_of(shape)) | depth(shape, layers)) for layers in (1, 2))
    assert shapes.parameters(shape) == one + (shape.layers - 1) * (two - one)


def depth(shape, layers):
    return {"n_layer" if shape.positions else "num_hidden_layers": layers}


@pytest.mark.parametrize("name", COUNTS)
def test_a_named_model_has_the_known_count_to_the_digit(name):
    assert shapes.parameters(named.named(name)) == COUNTS[name]


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b"])
def test_small_gpt3s_have_the_count_in_their_name(name):
    figure = name.split("-")[1]
    size = float(figure[:-1]) * {"m": 1e6, "b": 1e9}[figure[-1]]
    assert shapes.parameters(named.named(name)) == pytest.approx(size, rel=0.02)


def test_names_differ_and_every_model_says_where_its_sizes_come_from():
    assert len(SHAPES) == len(named.models())
    assert all(shape.source and shape.max_seq for shape in SHAPES.values())


@pytest.mark.parametrize("name", SHAPES)
def test_a_config_json_of_a_named_model_gives_the_same_count(name, tmp_path):
    shape = SHAPES[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings(shape, kind_of(shape))))
    read = config.model(str(tmp_path))
    assert shapes.parameters(read) == shapes.parameters(shape)
    assert config.model(str(file)) == read and read.max_seq == shape.max_seq


@pytest.mark.parametrize(
    "kind, more",
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": None}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("mistral", {"head_dim": 24}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
        ("gpt2", {"n_inner": 100}),
    ],
)
def test_unusual_settings_are_counted_as_transformers_builds_them(kind, more):
    shape = shapes.Shape("odd", 2, 96, 6, 3, 16, 200, 300, 50 if kind == "gpt2" else 0, max_seq=64)
    given = settings(shape, kind) | more
    counted = shapes.parameters(config.shape_of(given))
    assert counted == built({key: value for key, value in given.items() if value is not None})


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt3-175b", "qwen2.5-7b", "mixtral-8x7b", "qwen3-4b"])
def test_stages_of_a_pipeline_hold_the_model_once_but_for_a_tied_head(name):
    shape = SHAPES[name]
    for pp in (1, 2, 3, 7):
        held = sum(shapes.stage_parameters(shape, 1, pp, stage) for stage in range(pp))
        second = shape.vocab * shape.hidden if shape.tied and pp > 1 else 0
        assert held == shapes.parameters(shape) + second


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-xl", "mixtral-8x7b"])
def test_ranks_of_tensor_parallelism_share_matrices_and_copy_norms(name):
    shape = SHAPES[name]
    tp = 5 if name == "gpt2-xl" else 4
    whole, part = shapes.layer_parameters(shape), shapes.rank_layer_parameters(shape, tp)
    copied = 2 * shapes.norm_parameters(shape) + shape.experts * shape.hidden
    copied += 2 * shape.hidden if shape.biases else 0
    assert tp * part == whole + (tp - 1) * copied


def test_fewer_kv_heads_than_ranks_are_copied():
    shape = SHAPES["qwen2.5-0.5b"]
    assert shapes.rank_kv_heads(shape, 2) == 1 and shapes.rank_kv_heads(shape, 7) == 1


@pytest.mark.parametrize(
    "layers, pp, want", [(126, 16, (7, *[8] * 14, 7)), (5, 2, (2, 3)), (7, 3, (2, 3, 2)), (4, 1, (4,))]
)
def test_layers_left_over_go_to_the_middle_stages(layers, pp, want):
    assert shapes.stage_layers(layers, pp) == want


@pytest.mark.parametrize(
    "name, want",
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("LLAMA3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("gpt-2", "gpt2"),
        ("gpt3-1.3b", "gpt3-1.3b"),
        ("gpt3-13b", "gpt3-13b"),
    ],
)
def test_a_model_is_found_by_the_names_it_goes_by(name, want):
    assert config.model(name).name == want


def test_no_two_names_are_alike():
    assert len({named.plain(name) for name in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("name, near", [("llama-3.1-8", "llama-3.1-8b"), ("qwen3-9b", "qwen3-8b"), ("xyz", "gpt2")])
def test_an_unknown_model_is_told_which_are_near(name, near):
    with pytest.raises(ValueError, match=near) as error:
        config.model(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, want",
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", "is an object"),
        ("{}", "model_type None is not one of gpt2, llama"),
        ('{"model_type": "t5"}', "'t5' is not one of gpt2, llama"),
        ('{"model_type": ["llama"]}', "is not one of gpt2, llama"),
        ('{"model_type": "llama"}', "has no hidden_size"),
        ('{"model_type": "llama", "hidden_size": "4096"}', "hidden_size must be a whole number"),
        ('{"model_type": "llama", "hidden_size": -1}', "hidden_size must be a whole number of 1 or more, not -1"),
        ('{"model_type": "llama", "hidden_size": true}', "hidden_size must be a whole number"),
        ('{"model_type": "gpt2", "n_embd": 10, "n_head": 3, "n_positions": 4, "n_layer": 1}', "3 heads do not divide"),
        (
            '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 3, '
            '"intermediate_size": 9, "num_hidden_layers": 1, "vocab_size": 7}',
            "3 kv heads do not divide 4 heads",
        ),
        ('{"model_type": "mistral", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 9}', "num_key_"),
    ],
)
def test_a_malformed_config_is_one_clear_line(text, want, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=want) as error:
        config.model(str(file))
    assert "\n" not in str(error.value) and "config.json" in str(error.value)


def test_a_missing_config_is_one_clear_line():
    with pytest.raises(ValueError, match="there is no file no/config.json"):
        config.model("no/config.json")


def test_heads_must_divide(tmp_path):
    with pytest.raises(ValueError, match="3 kv heads do not divide 4 heads"):
        shapes.Shape("odd", 1, 8, 4, 3, 2, 8, 8)
