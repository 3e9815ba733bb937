"""Convert a whole HunyuanVideo-1.5 folder between the official layout and diffusers'.

    official (ckpts/)                                      diffusers (HunyuanVideo15Pipeline)
    transformer/480p_t2v/                          <->     transformer/
    vae/                                           <->     vae/
    scheduler/, the version's name                 <->     scheduler/, guider/
    text_encoder/llm/                              <->     text_encoder/, tokenizer/
    text_encoder/{byt5-small, Glyph-SDXL-v2}/      <->     text_encoder_2/, tokenizer_2/
    vision_encoder/siglip/, upsampler/             left    (text-to-video needs none)
    VideoReward/                                   left    reward.path takes it as it is

Weights are read one tensor and written one file at a time, without changing a number. Everything is checked before a
byte is written; the output is written under a temporary name beside it and renamed.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sage_ray.config_files import CONFIG_FILES, PIPELINE, WEIGHTS
from sage_ray.json_object import read_object
from sage_ray.models.official import config as configs
from sage_ray.models.official.parts import STEM, to_diffusers_steps, to_official_steps
from sage_ray.models.official.text import COLORS, FONTS, GLYPH

NEEDED = (
    "vae/config.json",
    f"vae/{STEM}.safetensors",
    "text_encoder/llm/config.json",
    "text_encoder/llm/tokenizer_config.json",
    "text_encoder/llm/model.safetensors",
    "text_encoder/byt5-small/config.json",
    "text_encoder/byt5-small/tokenizer_config.json",
    *(f"text_encoder/{file}" for file in (COLORS, FONTS, GLYPH)),
)
"""Official files that a pipeline is made of, beside the transformer's; weights may be sharded."""
PROGRAM_ONLY = ("scheduler/scheduler_config.json", "vision_encoder/siglip")
"""What the official program also opens; a pipeline takes nothing from them."""
DIRECTIONS = ("diffusers", "official")
CARD = """# {name}

Converted from {source} to the {direction} layout by sage-ray; no number of the weights was changed.
{notes}
The licences of the source's weights apply to these too.
"""


@dataclass(frozen=True)
class Layout:
    """kind: "official", "diffusers" or "neither". missing: what the layout asks for and the folder lacks.

    versions: transformers of an official folder, by folder name.
    """

    kind: str
    missing: tuple[str, ...]
    versions: tuple[str, ...] = ()


def recognise(folder: Path) -> Layout:
    """Which layout a folder has. Only names and JSON are read. Raises: ValueError for JSON that is not readable."""
    folder = Path(folder)
    index = folder / "model_index.json"
    if index.is_file() and read_object(index).get("_class_name") == PIPELINE:
        files = [f"{component}/{file}" for part in (CONFIG_FILES, WEIGHTS) for component, file in part.items()]
        return Layout("diffusers", _missing(folder, files))
    found = [
        file.parent.name
        for file in sorted(folder.glob("transformer/*/config.json"))
        if read_object(file).get("_class_name") == configs.OFFICIAL_TRANSFORMER
    ]
    if found:
        weights = [f"transformer/{version}/{STEM}.safetensors" for version in found]
        return Layout("official", _missing(folder, [*weights, *NEEDED, *PROGRAM_ONLY]), tuple(found))
    needed = (
        f"model_index.json of a {PIPELINE}",
        f"transformer/VERSION/config.json of a {configs.OFFICIAL_TRANSFORMER}",
    )
    return Layout("neither", needed)


def convert(source: Path, target: Path, direction: str, version: str | None = None) -> Path:
    """Write `source` in the other layout as `target`, a new folder, and return it.

    Args:
        source: only read. direction: "diffusers" or "official", the layout of the target.
        version: name of the official transformer's folder. To diffusers it chooses one (default: the only one). To
            official it names one (default: the name whose flow shift and guidance are the pipeline's).
    Raises: ValueError naming file, key and rule; nothing is written then.
    """
    source, target = Path(source), Path(target)
    layout = recognise(source)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} must be one of {', '.join(DIRECTIONS)}")
    if layout.kind == "neither":
        raise ValueError(f"{source}: is in neither layout, holds no {' and no '.join(layout.missing)}")
    if layout.kind == direction:
        raise ValueError(f"{source}: is in the {direction} layout already")
    if version not in (None, *configs.VERSIONS):
        raise ValueError(f"version={version!r} must be one of {', '.join(configs.VERSIONS)} (text-to-video)")
    _check_target(target, source)
    version = version or (_only(source, layout) if direction == "diffusers" else None)
    if direction == "diffusers" and version not in layout.versions:
        raise ValueError(f"{source}: holds no transformer/{version}, holds {', '.join(layout.versions)}")
    unused = [f"transformer/{name}/{STEM}.safetensors" for name in layout.versions if name != version]
    if lacks := [name for name in layout.missing if name not in (*PROGRAM_ONLY, *unused)]:
        raise ValueError(f"{source}: is in the {layout.kind} layout but lacks {', '.join(lacks)}")
    steps = to_diffusers_steps(source, str(version)) if direction == "diffusers" else to_official_steps(source, version)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.partial.", dir=target.parent) as beside:
        folder = Path(beside) / target.name
        folder.mkdir()
        for write in steps:
            write(folder)
        (folder / "README.md").write_text(_card(source, target.name, direction, folder), "utf-8")
        folder.rename(target)
    return target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `launch.py convert`."""
    parser.add_argument("source", type=Path, help="an official folder (ckpts/) or a HunyuanVideo15Pipeline directory")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--to", choices=DIRECTIONS, help="layout of the target (default: the other one)")
    parser.add_argument(
        "--version",
        choices=tuple(configs.VERSIONS),
        help="the official transformer's folder; its name sets the official program's flow shift and guidance",
    )


def run(arguments: argparse.Namespace) -> Path:
    """Convert as parsed by `add_arguments`; returns the target. Raises: ValueError as `convert`."""
    kind = recognise(arguments.source).kind
    direction = arguments.to or ("official" if kind == "diffusers" else "diffusers")
    return convert(arguments.source, arguments.target, direction, arguments.version)


def _only(source: Path, layout: Layout) -> str:
    usable = [version for version in layout.versions if version in configs.VERSIONS]
    if len(usable) != 1:
        names = ", ".join(layout.versions)
        raise ValueError(f"{source}: holds transformer/{{{names}}}; --version must name one of {[*configs.VERSIONS]}")
    return usable[0]


def _missing(folder: Path, files: list[str]) -> tuple[str, ...]:
    return tuple(
        file for file in files if not (folder / file).exists() and not (folder / f"{file}.index.json").exists()
    )


def _check_target(target: Path, source: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target}: is there already; the target must be a new folder")
    for parent in target.absolute().parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"{target}: cannot be made, as {parent} is a file")
        if parent.resolve() == source.resolve():
            raise ValueError(f"{target}: must not lie inside the source {source}")


def _card(source: Path, name: str, direction: str, folder: Path) -> str:
    """The README; an official folder's says what is still to be added and what the official program cannot open."""
    notes = ""
    if lacks := recognise(folder).missing:
        notes += "\nThe official program also needs, from the official downloads:\n\n"
        notes += "".join(f"- {file}\n" for file in lacks)
    if direction == "official":
        limits = configs.official_limits(read_object(source / "transformer" / "config.json"))
        notes += "".join(f"\nThe official program cannot open this: {limit}.\n" for limit in limits)
    return CARD.format(name=name, source=source.resolve().name, direction=direction, notes=notes)
