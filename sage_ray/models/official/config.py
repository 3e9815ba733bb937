"""The official configuration files of HunyuanVideo-1.5 and what they are called in diffusers.

The official program takes flow shift and guidance from the name of a transformer's folder, never from its
scheduler's file; its refiner depth (2) and byT5 width (1472) are constants. Here the last two are read from the
weights, so that small models convert too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version as installed
from typing import Any

from sage_ray.models.official.keys import TRANSFORMER, VAE
from sage_ray.models.official.rows import Shape

OFFICIAL_TRANSFORMER = "HunyuanVideo_1_5_DiffusionTransformer"
OFFICIAL_VAE = "AutoencoderKLConv3D"
TARGET_SIZES = {"360p": 480, "480p": 640, "720p": 960, "1080p": 1440}
"""ideal_resolution -> diffusers' target_size; the official table of bucket sizes."""

VERSIONS = {
    "480p_t2v": (5.0, 6.0),
    "720p_t2v": (9.0, 6.0),
    "480p_t2v_distilled": (5.0, 1.0),
    "720p_t2v_distilled": (9.0, 1.0),
}
"""Folder of a text-to-video transformer -> (flow shift, guidance scale), from the official PIPELINE_CONFIGS."""

FIXED = {
    "concat_condition": True,
    "glyph_byT5_v2": True,
    "guidance_embed": False,
    "is_reshape_temporal_channels": False,
    "mlp_act_type": "gelu_tanh",
    "mm_single_blocks_depth": 0,
    "qk_norm": True,
    "qk_norm_type": "rms",
    "qkv_bias": True,
    "text_pool_type": None,
    "text_projection": "single_refiner",
    "use_attention_mask": True,
    "use_cond_type_embedding": True,
    "vision_projection": "linear",
}
"""Keys of the official transformer whose other values diffusers' class cannot express."""

RENAMED = {
    "heads_num": "num_attention_heads",
    "mm_double_blocks_depth": "num_layers",
    "out_channels": "out_channels",
    "rope_theta": "rope_theta",
    "text_states_dim": "text_embed_dim",
    "use_meanflow": "use_meanflow",
    "vision_states_dim": "image_embed_dim",
    "mlp_width_ratio": "mlp_ratio",
    "rope_dim_list": "rope_axes_dim",
}
DERIVED = ("hidden_size", "in_channels", "patch_size", "ideal_resolution", "ideal_task")
RUNTIME = {"attn_mode": "flash", "attn_param": None, "text_states_dim_2": None}
"""Keys that change no number of ours, with the published values."""

VAE_RENAMED = {
    "block_out_channels": "block_out_channels",
    "downsample_match_channel": "downsample_match_channel",
    "ffactor_spatial": "spatial_compression_ratio",
    "ffactor_temporal": "temporal_compression_ratio",
    "in_channels": "in_channels",
    "latent_channels": "latent_channels",
    "layers_per_block": "layers_per_block",
    "out_channels": "out_channels",
    "scaling_factor": "scaling_factor",
    "upsample_match_channel": "upsample_match_channel",
}
VAE_RUNTIME = {"sample_size": 256, "sample_tsize": 64}
"""Sizes of the official VAE's tiles, with the published values; diffusers has its own."""


def transformer_from_official(config: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """diffusers' config.json of an official transformer.

    Args: config: the official one. shapes: official key -> shape of its weights. where: for the message.
    Raises: ValueError naming the key that is missing, unknown or of a value that cannot be expressed.
    """
    _check_official(config, OFFICIAL_TRANSFORMER, {*FIXED, *RENAMED, *DERIVED}, {*RUNTIME}, FIXED, where)
    if config.get("attn_mode") == "flex-block-attn":
        raise ValueError(f"{where}: attn_mode='flex-block-attn': diffusers has no sparse attention")
    if config["ideal_resolution"] not in TARGET_SIZES:
        raise ValueError(f"{where}: ideal_resolution={config['ideal_resolution']!r} must be one of {[*TARGET_SIZES]}")
    sizes = config["patch_size"]
    if not isinstance(sizes, list) or len(sizes) != 3 or sizes[1] != sizes[2]:
        raise ValueError(f"{where}: patch_size={sizes!r} must be [time, space, space]")
    if config["hidden_size"] % config["heads_num"]:
        raise ValueError(f"{where}: hidden_size={config['hidden_size']} must be a multiple of heads_num")
    refiners = {
        m.group(1) for key in shapes if (m := re.match(r"txt_in\.individual_token_refiner\.blocks\.(\d+)", key))
    }
    if "byt5_in.layernorm.weight" not in shapes:
        raise ValueError(f"{where}: transformer: missing key byt5_in.layernorm.weight, whose length is the byT5 width")
    return {
        **_head(TRANSFORMER),
        **{theirs: config[ours] for ours, theirs in RENAMED.items()},
        "in_channels": 2 * config["in_channels"] + 1,  # latents, condition, mask
        "attention_head_dim": config["hidden_size"] // config["heads_num"],
        "patch_size": sizes[1],
        "patch_size_t": sizes[0],
        "qk_norm": "rms_norm",
        "num_refiner_layers": len(refiners),
        "text_embed_2_dim": shapes["byt5_in.layernorm.weight"][0],
        "target_size": TARGET_SIZES[config["ideal_resolution"]],
        "task_type": config["ideal_task"],
    }


def transformer_to_official(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The official config.json of a diffusers transformer. Raises: ValueError naming the key without counterpart."""
    known = {*RENAMED.values(), "in_channels", "attention_head_dim", "patch_size", "patch_size_t", "qk_norm"}
    known |= {"num_refiner_layers", "text_embed_2_dim", "target_size", "task_type"}
    _check_keys(config, known - {"use_meanflow"}, {"use_meanflow"}, TRANSFORMER, where)
    resolutions = {size: name for name, size in TARGET_SIZES.items()}
    if config["target_size"] not in resolutions:
        raise ValueError(f"{where}: target_size={config['target_size']} must be one of {[*resolutions]}")
    latents = config["out_channels"]
    if config["in_channels"] != 2 * latents + 1:
        raise ValueError(
            f"{where}: in_channels={config['in_channels']} must be 2 * out_channels + 1 = {2 * latents + 1}"
        )
    return {
        **_head(OFFICIAL_TRANSFORMER),
        **FIXED,
        **RUNTIME,
        **{ours: config.get(theirs, False) for ours, theirs in RENAMED.items()},
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "in_channels": latents,
        "patch_size": [config["patch_size_t"], config["patch_size"], config["patch_size"]],
        "ideal_resolution": resolutions[config["target_size"]],
        "ideal_task": config["task_type"],
    }


def vae_from_official(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """diffusers' config.json of an official VAE. Raises: ValueError naming the key."""
    _check_official(config, OFFICIAL_VAE, {*VAE_RENAMED}, {*VAE_RUNTIME, "shift_factor"}, {}, where)
    if not config["scaling_factor"]:
        raise ValueError(f"{where}: scaling_factor={config['scaling_factor']!r} must be a number")
    if config.get("shift_factor"):
        raise ValueError(f"{where}: shift_factor={config['shift_factor']!r}: diffusers' class has none, must be null")
    return {**_head(VAE), **{theirs: config[ours] for ours, theirs in VAE_RENAMED.items()}}


def vae_to_official(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The official config.json of a diffusers VAE. Raises: ValueError naming the key."""
    _check_keys(config, {*VAE_RENAMED.values()}, set(), VAE, where)
    named = {ours: config[theirs] for ours, theirs in VAE_RENAMED.items()}
    return {**_head(OFFICIAL_VAE), **named, **VAE_RUNTIME, "shift_factor": None}


def scheduler_to_official(shift: float) -> dict[str, Any]:
    """The official scheduler_config.json: Euler steps from noise to data, other keys at their defaults."""
    return {
        **_head("FlowMatchDiscreteScheduler"),
        "num_train_timesteps": 1000,
        "shift": shift,
        "reverse": True,
        "solver": "euler",
    }


def version_of(config: Mapping[str, Any], shift: float, guidance: float, where: str) -> str:
    """The official folder name whose flow shift and guidance are these. config: the official transformer's.

    Raises: ValueError when there is none: the official program would use other values.
    """
    for name, values in VERSIONS.items():
        if values == (shift, guidance) and name.startswith(f"{config['ideal_resolution']}_{config['ideal_task']}"):
            return name
    raise ValueError(
        f"{where}: shift={shift} and guidance_scale={guidance} are those of no official {config['ideal_resolution']} "
        f"version, whose name sets them ({VERSIONS}); give --version to accept a name's values"
    )


def official_limits(config: Mapping[str, Any]) -> list[str]:
    """Sizes of a diffusers transformer that the official program, where they are constants, cannot open."""
    constants = {"num_refiner_layers": 2, "text_embed_2_dim": 1472}
    return [f"{key} is {config[key]}, must be {value}" for key, value in constants.items() if config[key] != value]


def _head(name: str) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": installed("diffusers")}


def _check_official(config, name: str, needed: set[str], optional: set[str], fixed: Mapping, where: str) -> None:
    _check_keys(config, needed, optional, name, where)
    for key, value in fixed.items():
        if config[key] != value:
            raise ValueError(f"{where}: {key}={config[key]!r} has no counterpart in diffusers, must be {value!r}")


def _check_keys(config: Mapping[str, Any], needed: set[str], optional: set[str], name: str, where: str) -> None:
    if config.get("_class_name") != name:
        raise ValueError(f"{where}: _class_name={config.get('_class_name')!r} must be {name}")
    for key in sorted(needed - config.keys()):
        raise ValueError(f"{where}: key {key} is missing")
    for key in sorted(key for key in config.keys() - needed - optional if not key.startswith("_")):
        raise ValueError(f"{where}: key {key} is unknown")
