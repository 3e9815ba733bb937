"""The text encoders of the official folder and of diffusers' pipeline.

Both official encoders are transformers' own formats but for one file. `text_encoder/llm` is Qwen2.5-VL with its vision
tower; a pipeline holds its language model alone, under shorter names. `text_encoder/byt5-small` gives sizes and
tokenizer of the glyph encoder, `Glyph-SDXL-v2/checkpoints/byt5_model.pt` its weights under the names of a bare T5Stack,
and `Glyph-SDXL-v2/assets` the colours and fonts, one added token each.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

from sage_ray.json_object import read_object
from sage_ray.models.tensor_files import write_tensors
from sage_ray.tensor_files import Shape, TensorFiles

GLYPH = "Glyph-SDXL-v2/checkpoints/byt5_model.pt"
COLORS, FONTS = "Glyph-SDXL-v2/assets/color_idx.json", "Glyph-SDXL-v2/assets/multilingual_10-lang_idx.json"
WRAPPED = "module.text_tower.encoder."
"""Prefix of the glyph encoder's keys where a training checkpoint's `state_dict` was saved around them."""
NOT_LANGUAGE = ("visual.", "model.visual.", "lm_head.")
LANGUAGE = ("model.language_model.", "model.")
"""Prefixes of Qwen2.5-VL's language model in newer and in published checkpoints, first match counts."""
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")
"""Names of T5EncoderModel's one embedding; a checkpoint may hold either or both."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "config.json")

Write = Callable[[Path], None]
"""Writes one part into the target folder; what it needs is checked already."""


def llm_to_diffusers(llm: Path) -> Write:
    """Qwen2.5-VL's language model and tokenizer as text_encoder/ and tokenizer/.

    Args: llm: text_encoder/llm. Raises: ValueError naming file and key; unknown keys too.
    """
    read_object(llm / "config.json")
    config = AutoConfig.from_pretrained(llm, local_files_only=True).get_text_config()
    if not isinstance(config, Qwen2_5_VLTextConfig):
        raise ValueError(f"{llm / 'config.json'}: must describe Qwen2.5-VL, describes {config.model_type!r}")
    config.architectures = [Qwen2_5_VLTextModel.__name__]
    with torch.device("meta"):
        expected = {key: tuple(value.shape) for key, value in Qwen2_5_VLTextModel(config).state_dict().items()}
    files = TensorFiles(llm, "model")
    names: dict[str, str] = {}
    for key in files.shapes:
        if not key.startswith(NOT_LANGUAGE):
            prefix = next((prefix for prefix in LANGUAGE if key.startswith(prefix)), "")
            name = key.removeprefix(prefix)
            if name in names:
                raise ValueError(f"{llm}: llm: keys {names[name]} and {key} are both {name}")
            names[name] = key
    _check_names({name: files.shapes[key] for name, key in names.items()}, expected, f"{llm}: llm")

    def write(target: Path) -> None:
        pieces = [(files.bytes[key], lambda name=name, key=key: {name: files.read(key)}) for name, key in names.items()]
        write_tensors(target / "text_encoder", "model", pieces)
        config.save_pretrained(target / "text_encoder")
        copy_small_files(llm, target / "tokenizer", WEIGHTS)

    return write


def byt5_to_diffusers(folder: Path) -> Write:
    """The glyph encoder and its tokenizer as text_encoder_2/ and tokenizer_2/.

    Args: folder: the official text_encoder/. Raises: ValueError naming file and key.
    """
    stack = read_glyph(folder / GLYPH)
    read_object(folder / "byt5-small" / "config.json")
    config = T5Config.from_pretrained(folder / "byt5-small", local_files_only=True)
    if "embed_tokens.weight" not in stack:
        raise ValueError(f"{folder / GLYPH}: byt5: missing key embed_tokens.weight")
    config.vocab_size, config.architectures = stack["embed_tokens.weight"].shape[0], [T5EncoderModel.__name__]
    state = {"shared.weight" if k == "embed_tokens.weight" else f"encoder.{k}": v for k, v in stack.items()}
    _check_names({key: tuple(v.shape) for key, v in state.items()}, _t5_shapes(config), f"{folder / GLYPH}: byt5")
    tokenizer = ByT5Tokenizer.from_pretrained(folder / "byt5-small", local_files_only=True)
    tokenizer.add_tokens(glyph_tokens(folder), special_tokens=True)
    if len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"{folder / GLYPH}: embed_tokens.weight has {config.vocab_size} rows, the tokenizer with the colours and "
            f"fonts of Glyph-SDXL-v2/assets has {len(tokenizer)} tokens"
        )

    def write(target: Path) -> None:
        pieces = [(v.nbytes, lambda key=key, v=v: {key: v.clone()}) for key, v in state.items()]
        write_tensors(target / "text_encoder_2", "model", pieces)
        config.save_pretrained(target / "text_encoder_2")
        tokenizer.save_pretrained(target / "tokenizer_2")

    return write


def text_to_official(pipeline: Path) -> Write:
    """What a pipeline knows of text_encoder/: llm/ (language model and tokenizer) and the glyph encoder's weights.

    byt5-small/ and Glyph-SDXL-v2/assets are downloads that a pipeline does not hold.
    Raises: ValueError naming file and key.
    """
    files = TensorFiles(pipeline / "text_encoder_2", "model")
    config = T5Config.from_pretrained(pipeline / "text_encoder_2", local_files_only=True)
    names = {key: key for key in files.shapes}
    if EMBEDDINGS[1] in names:
        if EMBEDDINGS[0] in names and not torch.equal(*map(files.read, EMBEDDINGS)):
            raise ValueError(f"{pipeline / 'text_encoder_2'}: byt5: {' and '.join(EMBEDDINGS)} must be equal")
        names.pop(EMBEDDINGS[0], None)
        names[EMBEDDINGS[1]] = EMBEDDINGS[0]
    _check_names(
        {name: files.shapes[key] for key, name in names.items()}, _t5_shapes(config), f"{pipeline}/text_encoder_2: byt5"
    )

    def write(target: Path) -> None:
        llm = target / "text_encoder" / "llm"
        copy_small_files(pipeline / "tokenizer", llm, ())
        copy_small_files(pipeline / "text_encoder", llm, ())
        glyph = target / "text_encoder" / GLYPH
        glyph.parent.mkdir(parents=True)
        stack = {name.removeprefix("encoder."): files.read(key) for key, name in names.items()}
        torch.save({"embed_tokens.weight": stack.pop("shared.weight"), **stack}, glyph)

    return write


def read_glyph(file: Path) -> dict[str, torch.Tensor]:
    """byt5_model.pt under the names of a bare T5Stack. Raises: ValueError naming file and key; no pickled code runs."""
    try:
        content = torch.load(file, "cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{file}: the file does not exist") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file}: must be a torch file of tensors only: {error}") from error
    wrapped = isinstance(content, dict) and "state_dict" in content
    state = content["state_dict"] if wrapped else content
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file}: must hold a dictionary of tensors")
    for key in state:
        if wrapped and not key.startswith(WRAPPED):
            raise ValueError(f"{file}: byt5: unknown key {key}; every key of state_dict must begin with {WRAPPED}")
    return {key.removeprefix(WRAPPED) if wrapped else key: value for key, value in state.items()}


def glyph_tokens(folder: Path) -> list[str]:
    """Added tokens in the official order: colours by number, then fonts as <LANGUAGE-font-NUMBER>."""
    colors, fonts = read_object(folder / COLORS), read_object(folder / FONTS)
    return [f"<color-{i}>" for i in range(len(colors))] + [f"<{code[:2]}-font-{fonts[code]}>" for code in fonts]


def copy_small_files(source: Path, target: Path, excluded: Iterable[str]) -> None:
    """Copy the files of a folder but for those that match a pattern or begin with a dot; links are followed."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not any(file.match(pattern) for pattern in excluded):
            shutil.copyfile(file, target / file.name)


def _t5_shapes(config: T5Config) -> dict[str, Shape]:
    """Of a T5EncoderModel; its embedding has two names there and is saved under one."""
    with torch.device("meta"):
        state = T5EncoderModel(config).state_dict()
    return {key: tuple(value.shape) for key, value in state.items() if key != EMBEDDINGS[1]}


def _check_names(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    for key in sorted(found.keys() | expected.keys()):
        if key not in expected:
            raise ValueError(f"{where}: unknown key {key}")
        if found.get(key) != expected[key]:
            raise ValueError(f"{where}: {key} is {found.get(key, 'missing')}, config.json makes it {expected[key]}")
