"""The official key map: total, exact both ways, and right where a round trip would not notice."""

import re

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray.models.official.config import transformer_to_official
from sage_ray.models.official.keys import check_keys, rules
from tests.models import official_forward
from tests.models.official_states import to_diffusers, to_official

SMALL = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "patch_size": 2,
    "text_embed_dim": 12,
    "text_embed_2_dim": 10,
    "image_embed_dim": 6,
    "rope_axes_dim": (4, 6, 6),
}
SMALL_VAE = {
    "latent_channels": 4,
    "block_out_channels": (8, 16, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}


def blank(cls, **settings) -> tuple[torch.nn.Module, dict]:
    """A model without storage and its config.json."""
    with torch.device("meta"):
        model = cls(**settings)
    return model, {**model.config, "_class_name": cls.__name__}


def random_state(config: dict, side: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    """Random weights of a model in the names of one side, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in ((k, s) for rule in rules(config) for k, s in rule.keys(side).items()):
        noise = torch.randn(shape, generator=generator)
        is_scale = len(shape) == 1 and key.endswith("weight") or key.endswith("gamma")
        fan = noise[0].numel() if noise.ndim > 1 else 10
        state[key] = (1 + 0.2 * noise if is_scale else noise / fan**0.5).to(dtype)
    return state


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (HunyuanVideo15Transformer3DModel, {}),  # the published 8.3 B model
        (HunyuanVideo15Transformer3DModel, {**SMALL, "use_meanflow": True, "patch_size_t": 2, "mlp_ratio": 3.0}),
        (AutoencoderKLHunyuanVideo15, {}),  # the published VAE
        (AutoencoderKLHunyuanVideo15, SMALL_VAE),
        (AutoencoderKLHunyuanVideo15, {**SMALL_VAE, "downsample_match_channel": False}),
        (AutoencoderKLHunyuanVideo15, {**SMALL_VAE, "upsample_match_channel": False}),
    ],
)
def test_the_map_holds_every_key_of_diffusers_class_once_in_its_shape(cls, settings) -> None:
    model, config = blank(cls, **settings)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    listed = [item for rule in rules(config) for item in rule.keys("diffusers").items()]
    assert len(listed) == len(expected) and dict(listed) == expected


def test_official_names_and_shapes_are_the_published_ones() -> None:
    """Names from the official modules, shapes of the 480p model; one block of each kind."""
    _, config = blank(HunyuanVideo15Transformer3DModel)
    shapes = {key: shape for rule in rules(config) for key, shape in rule.keys("official").items()}
    h, mlp = 2048, 8192
    for key, shape in {
        "img_in.proj.weight": (h, 65, 1, 1, 1),
        "time_in.mlp.0.weight": (h, 256),
        "time_in.mlp.2.bias": (h,),
        "txt_in.input_embedder.weight": (h, 3584),
        "txt_in.t_embedder.mlp.2.weight": (h, h),
        "txt_in.c_embedder.linear_1.weight": (h, 3584),
        "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight": (3 * h, h),
        "txt_in.individual_token_refiner.blocks.1.self_attn_proj.bias": (h,),
        "txt_in.individual_token_refiner.blocks.0.mlp.fc1.weight": (mlp, h),
        "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight": (2 * h, h),
        "byt5_in.layernorm.weight": (1472,),
        "byt5_in.fc1.weight": (2048, 1472),
        "byt5_in.fc3.weight": (h, 2048),
        "vision_in.proj.1.weight": (1152, 1152),
        "vision_in.proj.3.weight": (h, 1152),
        "vision_in.proj.4.weight": (h,),
        "cond_type_embedding.weight": (3, h),
        "double_blocks.53.img_mod.linear.weight": (6 * h, h),
        "double_blocks.53.txt_attn_q.weight": (h, h),
        "double_blocks.53.img_attn_k_norm.weight": (128,),
        "double_blocks.53.txt_attn_proj.weight": (h, h),
        "double_blocks.53.txt_mlp.fc2.weight": (h, mlp),
        "final_layer.adaLN_modulation.1.weight": (2 * h, h),
        "final_layer.linear.weight": (32, h),
    }.items():
        assert shapes[key] == shape, key
    kinds = {re.sub(r"\.\d+\.", ".N.", key) for key in shapes}
    assert {key for key in kinds if key.startswith("double_blocks")} == {
        f"double_blocks.N.{stream}_{layer}"
        for stream in ("img", "txt")
        for layer in (
            *(f"{name}.{p}" for name in ("mod.linear", "mlp.fc1", "mlp.fc2") for p in ("weight", "bias")),
            *(f"attn_{name}.{p}" for name in ("q", "k", "v", "proj") for p in ("weight", "bias")),
            *("attn_q_norm.weight", "attn_k_norm.weight"),
        )
    }
    _, config = blank(AutoencoderKLHunyuanVideo15)
    shapes = {key: shape for rule in rules(config) for key, shape in rule.keys("official").items()}
    for key, shape in {
        "encoder.conv_in.conv.weight": (128, 3, 3, 3, 3),
        "encoder.down.0.block.1.norm2.gamma": (128, 1, 1, 1),
        "encoder.down.0.downsample.conv.conv.weight": (64, 128, 3, 3, 3),
        "encoder.down.2.downsample.conv.conv.weight": (128, 512, 3, 3, 3),
        "encoder.mid.attn_1.q.weight": (1024, 1024, 1, 1, 1),
        "encoder.conv_out.conv.weight": (64, 1024, 3, 3, 3),
        "decoder.conv_in.conv.weight": (1024, 32, 3, 3, 3),
        "decoder.up.0.block.2.conv1.conv.weight": (1024, 1024, 3, 3, 3),
        "decoder.up.1.upsample.conv.conv.weight": (4096, 1024, 3, 3, 3),
        "decoder.up.3.upsample.conv.conv.weight": (512, 256, 3, 3, 3),
        "decoder.up.4.block.0.conv2.conv.bias": (128,),
        "decoder.norm_out.gamma": (128, 1, 1, 1),
    }.items():
        assert shapes[key] == shape, key


sizes = st.fixed_dictionaries(
    {
        "num_attention_heads": st.integers(1, 3),
        "attention_head_dim": st.sampled_from([4, 6]),
        "num_layers": st.integers(0, 3),
        "num_refiner_layers": st.integers(0, 3),
        "patch_size": st.integers(1, 2),
        "mlp_ratio": st.sampled_from([2.0, 4.0]),
        "use_meanflow": st.booleans(),
    }
)


@settings(max_examples=8)
@given(sizes, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9))
def test_a_round_trip_changes_no_bit_in_either_direction(sizes, dtype, seed) -> None:
    config = {**blank(HunyuanVideo15Transformer3DModel, **SMALL)[1], **sizes}
    official, diffusers = random_state(config, "official", seed, dtype), random_state(config, "diffusers", seed, dtype)
    there, back = to_diffusers(official, config), to_official(diffusers, config)
    assert same_bits(to_official(there, config), official) and same_bits(to_diffusers(back, config), diffusers)
    assert sum(x.numel() for x in there.values()) == sum(x.numel() for x in official.values())


@settings(max_examples=6)
@given(
    st.lists(st.sampled_from([8, 16]), min_size=3, max_size=4),
    st.integers(1, 2),
    st.sampled_from([(4, 2), (4, 4), (2, 2), (4, 1)]),
    st.booleans(),
)
def test_a_vae_round_trip_changes_no_bit(widths, layers, ratios, match) -> None:
    config = {**blank(AutoencoderKLHunyuanVideo15, **SMALL_VAE)[1], "block_out_channels": widths}
    config |= {"layers_per_block": layers, "spatial_compression_ratio": ratios[0]}
    config |= {"temporal_compression_ratio": ratios[1], "downsample_match_channel": match}
    official, diffusers = random_state(config, "official"), random_state(config, "diffusers")
    assert same_bits(to_official(to_diffusers(official, config), config), official)
    assert same_bits(to_diffusers(to_official(diffusers, config), config), diffusers)


def forwards(official: dict, config: dict, converted: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(the published description over official names, diffusers' forward over converted weights)."""
    generator = torch.Generator().manual_seed(5)
    x, text, byt5, vision = (
        torch.randn(shape, generator=generator) for shape in ((2, 9, 3, 4, 6), (2, 5, 12), (2, 3, 10), (2, 2, 6))
    )
    t = torch.tensor([900.0, 37.5])
    t_r = torch.tensor([850.0, 0.0]) if config["use_meanflow"] else None
    model, _ = blank(HunyuanVideo15Transformer3DModel, **{**SMALL, "use_meanflow": config["use_meanflow"]})
    model.load_state_dict(converted, assign=True)
    ones = [torch.ones(y.shape[:2], dtype=torch.int64) for y in (text, byt5)]
    with torch.no_grad():
        found = model(x, t, text, ones[0], t_r, byt5, ones[1], vision, return_dict=False)[0]
        theirs = transformer_to_official(config, "")
        expected = official_forward.transformer(official, theirs, x, t, text, byt5, vision, t_r)
    return expected, found


@pytest.mark.parametrize("meanflow", [False, True])
def test_converted_transformer_computes_what_the_description_says_of_official_weights(meanflow: bool) -> None:
    config = {**blank(HunyuanVideo15Transformer3DModel, **SMALL)[1], "use_meanflow": meanflow}
    official = random_state(config, "official")
    expected, found = forwards(official, config, to_diffusers(official, config))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", ["halves not swapped", "q and k exchanged", "streams exchanged"])
def test_that_check_notices_what_a_round_trip_does_not(wrong: str) -> None:
    config = blank(HunyuanVideo15Transformer3DModel, **SMALL)[1]
    official = random_state(config, "official")
    converted = to_diffusers(official, config)
    if wrong == "halves not swapped":
        converted["norm_out.linear.weight"] = official["final_layer.adaLN_modulation.1.weight"]
    else:
        block = "context_embedder.token_refiner.refiner_blocks.0.attn."
        pairs = {
            "q and k exchanged": (f"{block}to_q.weight", f"{block}to_k.weight"),
            "streams exchanged": (
                "transformer_blocks.0.attn.to_k.weight",
                "transformer_blocks.0.attn.add_k_proj.weight",
            ),
        }
        one, other = pairs[wrong]
        converted[one], converted[other] = converted[other], converted[one]
    expected, found = forwards(official, config, converted)
    assert (found - expected).abs().max() > 1e-3


@pytest.mark.parametrize("match", [True, False])
def test_converted_vae_computes_what_the_description_says_of_official_weights(match: bool) -> None:
    settings = {**SMALL_VAE, "downsample_match_channel": match, "upsample_match_channel": match}
    model, config = blank(AutoencoderKLHunyuanVideo15, **settings)
    official = random_state(config, "official")
    assert match or any("nin_shortcut" in key for key in official)
    model.load_state_dict(to_diffusers(official, config), assign=True)
    generator = torch.Generator().manual_seed(3)
    video, latents = torch.randn(1, 3, 5, 8, 12, generator=generator), torch.randn(1, 4, 3, 2, 3, generator=generator)
    with torch.no_grad():
        encoded, decoded = (
            official_forward.encode(official, video, [1, 2]),
            official_forward.decode(official, latents, [2, 1]),
        )
        torch.testing.assert_close(model.encode(video).latent_dist.parameters, encoded, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.decode(latents, return_dict=False)[0], decoded, rtol=1e-5, atol=1e-5)
    assert encoded.std() > 0.1 and decoded.std() > 0.1


@pytest.mark.parametrize("side", ["official", "diffusers"])
def test_unknown_missing_and_misshaped_keys_are_named(side: str) -> None:
    config = blank(HunyuanVideo15Transformer3DModel, **SMALL)[1]
    found = rules(config)
    shapes = {key: shape for rule in found for key, shape in rule.keys(side).items()}
    check_keys(found, shapes, side, "here")
    block = "double_blocks.1.img_attn_q" if side == "official" else "transformer_blocks.1.attn.to_q"
    rule = "double_blocks.1.img_attn_q.weight = rename = transformer_blocks.1.attn.to_q.weight"
    beyond = block.replace("1.", "7.", 1)
    for changed, words in (
        (
            {**shapes, f"{beyond}.weight": (32, 32)},
            f"here: transformer: unknown key {beyond}.weight; the nearest rule is",
        ),
        ({k: s for k, s in shapes.items() if k != f"{block}.weight"}, f"here: transformer: missing key {block}.weight"),
        ({**shapes, f"{block}.weight": (32, 31)}, f"{block}.weight is (32, 31), must be (32, 32) (rule: {rule})"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            check_keys(found, changed, side, "here")


def test_errors_reach_the_converter_and_name_split_rules() -> None:
    config = blank(HunyuanVideo15Transformer3DModel, **SMALL)[1]
    state = random_state(config, "diffusers")
    key = "context_embedder.token_refiner.refiner_blocks.0.attn.to_k.weight"
    with pytest.raises(ValueError, match="differ in dtype .*self_attn_qkv.weight = split in 3"):
        to_official({**state, key: state[key].double()}, config)
    with pytest.raises(ValueError, match=f"missing key {key} .*self_attn_qkv.weight = split in 3"):
        to_official({k: v for k, v in state.items() if k != key}, config)
    with pytest.raises(ValueError, match="unknown key single_blocks.0.linear2.fc.weight"):
        to_diffusers({**to_official(state, config), "single_blocks.0.linear2.fc.weight": torch.zeros(1)}, config)


def test_models_without_a_verified_map_are_refused() -> None:
    config = blank(HunyuanVideo15Transformer3DModel, **SMALL)[1]
    with pytest.raises(ValueError, match="_class_name='HunyuanVideoTransformer3DModel': there is a key map for"):
        rules({**config, "_class_name": "HunyuanVideoTransformer3DModel"})
    with pytest.raises(ValueError, match="qk_norm='layer_norm'"):
        rules({**config, "qk_norm": "layer_norm"})
    with pytest.raises(ValueError, match="the configuration must hold 'num_layers'"):
        rules({k: v for k, v in config.items() if k != "num_layers"})
