"""What `launch.py fetch` brings: repositories, files and the sizes and hashes that are known.

A hub repository lists sizes and hashes of its files itself; KNOWN holds those that are also known from elsewhere and
must agree. Files of Git repositories have fixed commits, sizes and hashes, taken from a copy of that commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sage_ray.config_files import CONFIG_FILES
from sage_ray.rewards.checkpoint import OFFICIAL_TEMPLATE_SHA256, OFFICIAL_WEIGHTS_BYTES

WHAT = ("policy", "reward", "prompts")
LAYOUTS = ("diffusers", "official")
VERSIONS = ("480p_t2v", "720p_t2v")
REWARD_FOLDER = "VideoReward"
TEMPLATE = "prompt_template.txt"
PAPERS = ("README*", "LICENSE*", "NOTICE*")

VIDEO_REWARD = "KlingTeam/VideoReward"
WEIGHTS, TOKENIZER = "checkpoint-11352/model.pth", "checkpoint-11352/tokenizer/tokenizer.json"
KNOWN = {
    (VIDEO_REWARD, WEIGHTS): (
        OFFICIAL_WEIGHTS_BYTES,
        "48375908e6112de9f0248402db156a23b480709a6960b091c598c6f4c88d21b9",
    ),
    (VIDEO_REWARD, TOKENIZER): (
        11_420_941,
        "a05e80818b958b49531b8e1f758c4ae65f090fdec80e6d8408963f70ae3f737d",
    ),
}
"""(repository, path) -> bytes and sha256, as several third parties state them."""

VIDEO_ALIGN = ("KlingAIResearch/VideoAlign", "KwaiVGI/VideoAlign")
VIDEO_ALIGN_COMMIT = "219ab9db64c045e5181a2202d11f686439351292"
GLYPH_NOTE = (
    "not on the hub, to be added by hand: text_encoder/Glyph-SDXL-v2/ with assets/color_idx.json, "
    "assets/multilingual_10-lang_idx.json and checkpoints/byt5_model.pt, from ModelScope's AI-ModelScope/Glyph-SDXL-v2"
)


@dataclass(frozen=True)
class HubFiles:
    """Files of one repository of the hub.

    patterns: shell patterns of their paths, in which * also matches /. needed: paths without which nothing works.
    folder: where they go, below --to. renamed: (path, other name in the folder).
    """

    repo: str
    folder: str
    patterns: tuple[str, ...]
    needed: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Variable:
    """A text of a Python source file that is kept instead of the file."""

    name: str
    num_bytes: int
    sha256: str


TEMPLATE_VARIABLE = Variable("DETAILED_PROMPT_WITH_SPECIAL_TOKEN", 3997, OFFICIAL_TEMPLATE_SHA256)


@dataclass(frozen=True)
class CodeFile:
    """A file of a Git repository at one commit. repos: the names it has had, tried in turn. file: below --to."""

    repos: tuple[str, ...]
    commit: str
    path: str
    file: str
    num_bytes: int
    sha256: str
    variable: Variable | None = None


@dataclass(frozen=True)
class Wanted:
    """One file to bring. file: below --to. source: for messages. urls: tried in turn after 404.

    digest: "sha256:HEX", or "git:HEX", the hash of Git's blob, which the hub lists for small files.
    with_token: whether HF_TOKEN goes along. variable: the part of the file that is kept.
    """

    file: str
    source: str
    urls: tuple[str, ...]
    num_bytes: int
    digest: str
    with_token: bool
    variable: Variable | None = None


Source = HubFiles | CodeFile


def policy_folder(layout: str, version: str) -> str:
    """The folder of a policy below --to; the recipes under configs/ name the first."""
    return f"HunyuanVideo-1.5-Diffusers-{version}" if layout == "diffusers" else "HunyuanVideo-1.5"


def policy_repo(layout: str, version: str) -> str:
    """The hub's repository of a policy; in diffusers' layout every version has its own."""
    return ("hunyuanvideo-community/" if layout == "diffusers" else "tencent/") + policy_folder(layout, version)


def policy(layout: str, version: str) -> tuple[Source, ...]:
    """A HunyuanVideo15Pipeline, or the official checkpoint folder but for GLYPH_NOTE and the image encoder."""
    repo, folder = policy_repo(layout, version), policy_folder(layout, version)
    if layout == "diffusers":
        components = tuple(f"{component}/*" for component in CONFIG_FILES)
        needed = ("model_index.json", *(f"{component}/{file}" for component, file in CONFIG_FILES.items()))
        patterns = ("model_index.json", *components, *PAPERS)
        return (HubFiles(repo, folder, patterns, needed),)
    config, text = f"transformer/{version}/config.json", f"{folder}/text_encoder"
    own = ("config.json", "scheduler/*", "vae/*", f"transformer/{version}/*", *PAPERS)
    model = ("config.json", "tokenizer_config.json")
    return (
        HubFiles(repo, folder, own, ("vae/config.json", config)),
        HubFiles("Qwen/Qwen2.5-VL-7B-Instruct", f"{text}/llm", ("*.json", "*.txt", "*.safetensors", "LICENSE*"), model),
        HubFiles("google/byt5-small", f"{text}/byt5-small", ("*.json", "pytorch_model.bin"), model),
    )


def reward() -> tuple[Source, ...]:
    """VideoReward, its prompt template first (a second's work that can fail), and its base model's config.json."""
    return (
        CodeFile(
            VIDEO_ALIGN,
            VIDEO_ALIGN_COMMIT,
            "prompt_template.py",
            f"{REWARD_FOLDER}/{TEMPLATE}",
            10_760,
            "8fb42f91fd7440a1c9a377e78f36d67da6132eb348f402eecbeb57e41f138ae9",
            TEMPLATE_VARIABLE,
        ),
        HubFiles(
            "Qwen/Qwen2-VL-2B-Instruct",
            REWARD_FOLDER,
            ("config.json",),
            ("config.json",),
            (("config.json", "base_config.json"),),
        ),
        HubFiles(
            VIDEO_REWARD,
            REWARD_FOLDER,
            ("model_config.json", WEIGHTS, "checkpoint-11352/tokenizer/*", *PAPERS),
            ("model_config.json", WEIGHTS, TOKENIZER),
        ),
    )


def prompts() -> tuple[Source, ...]:
    """The three public prompt files of VideoAlign's authors (column prompt)."""
    files = (
        ("TA_hard", 29_478, "5d8974121b4535a94eb5857b60c473d889d75060c0006617b5316020d1840a84"),
        ("vbench", 679_039, "7fd7466b3ac4b84d1d016ee0e12ee075bfbc66ba40a55dda63bde8b3a968129c"),
        ("videogen_eval", 413_933, "c791a00ccdbcfc734421876998a3bb47a1e92bbe9d85b32b080c2cd09f832f78"),
    )
    return tuple(
        CodeFile(
            VIDEO_ALIGN,
            VIDEO_ALIGN_COMMIT,
            f"datasets/video_eval_prompts/{name}.csv",
            f"prompts/{name}.csv",
            num_bytes,
            sha256,
        )
        for name, num_bytes, sha256 in files
    )
