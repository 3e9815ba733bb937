"""Whether a HunyuanVideo15Pipeline directory will load as what it says it is; neither numbers nor a GPU are touched.

Component by component: the class that model_index.json names is the one this package runs, the weights are what the
class asks for (`components`), and scheduler, guider and tokenizers are made, as they cost milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
from diffusers.utils import logging as verbosity
from jinja2 import TemplateError
from transformers import ByT5Tokenizer, Qwen2Tokenizer

from sage_ray.from_settings import MISFITS, made_from
from sage_ray.json_object import read_object
from sage_ray.models.components import COMPONENTS, check_component

CLASSES = {
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "tokenizer_2": ("ByT5Tokenizer",),
    **{name: (component.model.__name__,) for name, component in COMPONENTS.items()},
}
"""Component -> class names that model_index.json may give it. The guider may be any of diffusers': none is run."""
TOKENIZERS = {"tokenizer": (Qwen2Tokenizer, "text_encoder"), "tokenizer_2": (ByT5Tokenizer, "text_encoder_2")}
"""Component -> (its class, the encoder whose embedding has a row for every token)."""
CHAT = [{"role": "system", "content": "Describe the video."}, {"role": "user", "content": "A circle."}]


def check_components(folder: Path) -> None:
    """Raises ValueError naming file, key and rule for the first component that would not load, or not as it was saved.

    Args: folder: whose files are there (`config_files.check_pipeline`).
    """
    index = folder / "model_index.json"
    listed = read_object(index)
    for name, value in listed.items():
        if not name.startswith("_"):
            _check_class(index, name, value)
    for name in COMPONENTS:
        check_component(folder / name, name)
    for name in ("scheduler", "guider"):
        _check_settings(folder / name / f"{name}_config.json", listed[name][1])
    for name in TOKENIZERS:
        _check_tokenizer(folder, name)


def _check_class(index: Path, name: str, value: Any) -> None:
    library = "transformers" if name.startswith(("text_encoder", "tokenizer")) else "diffusers"
    if name == "guider":
        base = diffusers.ClassifierFreeGuidance.__mro__[1]
        known = isinstance(value, list) and len(value) == 2 and value[0] == "diffusers"
        found = getattr(diffusers, str(value[1]), None) if known else None
        if not isinstance(found, type) or not issubclass(found, base):
            raise ValueError(f"{index}: guider is {value!r}, must be a guider of diffusers")
        return
    if name not in CLASSES:
        raise ValueError(f"{index}: {name} is no component of a text-to-video pipeline")
    if value not in [[library, known] for known in CLASSES[name]]:
        raise ValueError(f"{index}: {name} is {value!r}, must be {[library, CLASSES[name][0]]}")


def _check_settings(file: Path, name: str) -> None:
    """A scheduler or guider is made from its file as loading does it."""
    config = read_object(file)
    if config.get("_class_name") != name:
        raise ValueError(f"{file}: _class_name is {config.get('_class_name')!r}, model_index.json says {name}")
    before = verbosity.get_verbosity()
    verbosity.set_verbosity_error()  # every guider warns that guiders are new
    try:
        made_from(file, name, lambda: getattr(diffusers, name).from_config(config))
    finally:
        verbosity.set_verbosity(before)


def _check_tokenizer(folder: Path, name: str) -> None:
    """transformers makes a tokenizer of one token out of nothing, so files, size and template are checked."""
    made, encoder = TOKENIZERS[name]
    where = folder / name
    if made is Qwen2Tokenizer:
        _check_vocabulary(where)
    try:
        tokenizer = made.from_pretrained(where, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a file of another format
        raise ValueError(f"{where}: the tokenizer files are not readable: {' '.join(str(error).split())}") from None
    rows = read_object(folder / encoder / "config.json")
    rows = rows.get("text_config", rows)["vocab_size"]
    if len(tokenizer) > rows:
        raise ValueError(f"{where}: has {len(tokenizer)} tokens, {encoder}/config.json has vocab_size={rows}")
    if made is Qwen2Tokenizer:
        _check_template(where, tokenizer)


def _check_vocabulary(where: Path) -> None:
    file = where / "tokenizer.json"
    if file.exists() or not (where / "vocab.json").exists():
        model = read_object(file).get("model")
        if not isinstance(model, dict) or not model.get("vocab"):
            raise ValueError(f"{file}: model.vocab must hold tokens")
    elif not read_object(where / "vocab.json") or not (where / "merges.txt").is_file():
        raise ValueError(f"{where / 'merges.txt'}: the file does not exist, nor does tokenizer.json")


def _check_template(where: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Prompts go through the chat template."""
    if not tokenizer.chat_template:
        raise ValueError(f"{where / 'chat_template.jinja'}: the file does not exist; prompts need a chat template")
    try:
        text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    except (TemplateError, *MISFITS) as error:
        raise ValueError(f"{where / 'chat_template.jinja'}: cannot be applied: {error}") from error
    if CHAT[1]["content"] not in text:
        raise ValueError(f"{where / 'chat_template.jinja'}: leaves out the prompt")
