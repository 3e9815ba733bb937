"""What the folders of model.path and reward.path are, what they lack and which command brings it; for `plan`.

Only names, JSON and headers are read. Whether a folder can be loaded is for the checks to say; this says what it is.
"""

from __future__ import annotations

import math
from pathlib import Path

from sage_ray.config_files import PIPELINE, WEIGHTS
from sage_ray.fetch import manifest
from sage_ray.json_object import read_object
from sage_ray.models.adapter_file import FILE, PREFIX, check_adapter
from sage_ray.models.official.layout import PROGRAM_ONLY, recognise
from sage_ray.rewards.checkpoint import newest_checkpoint
from sage_ray.rewards.weight_files import FILES, read_shapes
from sage_ray.tensor_files import TensorFiles, refuse_partial

LAUNCH = "python launch.py"
WORDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MAX_NAMED = 3


def describe_policy(folder: Path) -> str:
    """One line about a folder that should be a HunyuanVideo15Pipeline directory."""
    return _described(folder, "policy", _policy)


def describe_reward(folder: Path) -> str:
    """One line about a folder that should be a VideoAlign directory."""
    return _described(folder, "reward", _reward)


def _described(folder: Path, what: str, describe) -> str:
    if folder.is_file():
        return f"{folder} is a file; it must be a folder"
    if not folder.is_dir() or not any(folder.iterdir()):
        is_now = "is empty" if folder.is_dir() else "is not there"
        return f"{folder} {is_now}; get it: {_fetch(what, folder)}"
    try:
        refuse_partial(folder)
        return describe(folder)
    except ValueError as error:
        return f"cannot be told: {error}"


def _policy(folder: Path) -> str:
    layout = recognise(folder)
    if layout.kind == "official":
        lacks = [file for file in layout.missing if file not in PROGRAM_ONLY]
        if lacks:
            return f"official layout ({', '.join(layout.versions)}) without {_some(lacks)}; {_official(folder)}"
        version = f" --version {layout.versions[0]}" if len(layout.versions) > 1 else ""
        target = folder.with_name(f"{folder.name}-diffusers")
        return f"official layout; convert it: {LAUNCH} convert {folder} {target}{version}, then model.path={target}"
    if layout.kind == "diffusers":
        if layout.missing:
            return f"{PIPELINE} without {_some(list(layout.missing))}; {_whence('policy', folder)}"
        return f"{PIPELINE}, {_size(folder)}, {_task(folder / 'transformer')}"
    return _not_a_pipeline(folder)


def _not_a_pipeline(folder: Path) -> str:
    """Folders that people give instead, and what to do with them."""
    index = folder / "model_index.json"
    if index.is_file():
        return f"{read_object(index).get('_class_name')} of diffusers; only {PIPELINE} is supported"
    if (folder / "model_config.json").is_file():
        return f"a VideoAlign folder; it goes to reward.path. The policy: {_fetch('policy', folder)}"
    for inner in (folder / "adapter", folder):
        if (inner / FILE).is_file():
            said = check_adapter(inner)
            rank, alpha = (f"{said[PREFIX + key]:g}" for key in ("r", "lora_alpha"))
            return f"a LoRA adapter; model.path is its base, with lora.path={inner} lora.rank={rank} lora.alpha={alpha}"
    for inner in (folder / "transformer", folder):
        if (inner / "config.json").is_file():
            name = read_object(inner / "config.json").get("_class_name")
            if name != "HunyuanVideo15Transformer3DModel":
                return f"{name or 'a model'} alone; a {PIPELINE} is needed: {_fetch('policy', folder)}"
            made = folder.with_name(f"{folder.name}-pipeline")
            export = f"{LAUNCH} export --checkpoint {folder} --base PIPELINE --output {made}"
            return f"a transformer alone ({_task(inner)}); make a pipeline of it and its base: {export}"
    return f"nothing known, holds {_some(sorted(path.name for path in folder.iterdir()))}; {_fetch('policy', folder)}"


def _size(folder: Path) -> str:
    """Parameters and dtype of the transformer, and the parameters of the rest."""
    counts, dtypes = {}, {}
    for part, file in WEIGHTS.items():
        files = TensorFiles(folder / part, file.removesuffix(".safetensors"))
        counts[part], dtypes[part] = sum(map(math.prod, files.shapes.values())), set(files.dtypes.values())
    words = " and ".join(WORDS.get(dtype, dtype) for dtype in sorted(dtypes["transformer"]))
    rest = sum(counts.values()) - counts["transformer"]
    return f"{_count(counts['transformer'])} parameters in {words} (encoders and VAE {_count(rest)})"


def _task(transformer: Path) -> str:
    task = read_object(transformer / "config.json").get("task_type")
    return {"t2v": "text-to-video", "i2v": "image-to-video, which is not supported"}.get(task, f"task_type {task!r}")


def _reward(folder: Path) -> str:
    if not (folder / "model_config.json").is_file():
        if (folder / "model_index.json").is_file():
            return f"a pipeline of diffusers; it goes to model.path. The reward: {_fetch('reward', folder)}"
        kind = read_object(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
        if kind == "clip":
            return "a CLIP model; it goes to reward.extra, with kind clip_score or pick_score"
        held = _some(sorted(path.name for path in folder.iterdir()))
        return f"no VideoAlign folder, holds {held}; get one: {_fetch('reward', folder)}"
    checkpoint = newest_checkpoint(folder)
    weights = next((names for names in FILES if (checkpoint / names[0]).exists()), FILES[0])
    needed = [checkpoint / name for name in (*weights, "tokenizer/tokenizer.json")]
    needed.append(folder / manifest.TEMPLATE)
    if lacks := [str(file.relative_to(folder)) for file in needed if not file.is_file()]:
        return f"VideoAlign without {_some(lacks)}; {_whence('reward', folder)}"
    count = sum(map(math.prod, read_shapes(tuple(checkpoint / name for name in weights)).values()))
    dtype = read_object(folder / "model_config.json").get("model_config", {}).get("torch_dtype")
    return f"VideoAlign, {checkpoint.name}, {_count(count)} parameters, trained in {dtype}"


def _whence(what: str, folder: Path) -> str:
    """How to complete a folder. Fetching replaces files that differ, so it is named for fetched folders only."""
    names = {manifest.policy_folder("diffusers", version) for version in manifest.VERSIONS}
    if folder.name in (names if what == "policy" else {manifest.REWARD_FOLDER}):
        return f"get them: {_fetch(what, folder)}"
    return "copy them from where the folder came from"


def _official(folder: Path) -> str:
    return f"get them: {LAUNCH} fetch policy --layout official --to {folder.parent}"


def _fetch(what: str, folder: Path) -> str:
    """The command that fetches into the folder, or beside it under the name that it then has."""
    names = [manifest.policy_folder("diffusers", version) for version in manifest.VERSIONS]
    names = names if what == "policy" else [manifest.REWARD_FOLDER]
    command = f"{LAUNCH} fetch {what} --to {folder.parent}"
    if folder.name in names:
        return command + (
            f" --version {manifest.VERSIONS[names.index(folder.name)]}" if folder.name != names[0] else ""
        )
    key = {"policy": "model.path", "reward": "reward.path"}[what]
    return f"{command}, then {key}={folder.parent / names[0]}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _count(number: int) -> str:
    if number >= 10**8:
        return f"{number / 10**9:.1f} billion"
    return f"{number / 10**6:.1f} million" if number >= 10**5 else f"{number:,}"
