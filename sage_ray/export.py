"""Write a trained policy as something that plain diffusers opens.

Three forms: "pipeline" is a whole HunyuanVideo15Pipeline directory, "transformer" the transformer's folder alone and
"lora" an adapter as it was trained. An adapter is merged to become one of the first two. Everything is checked before a
byte is written; the output is written under a temporary name beside it and renamed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sage_ray.config_files import check_pipeline
from sage_ray.config_load import load_config
from sage_ray.json_object import read_object
from sage_ray.models.lora import FILE
from sage_ray.models.packed_velocity import TORCH_DTYPES
from sage_ray.models.policy_folder import PolicyFolder, check_fits, find_policy, load_policy

FORMS = ("pipeline", "transformer", "lora")
NOT_COPIED = ("transformer", "README.md")
"""Of the base; names that begin with a dot (a clone's or a download's records) neither."""

LOADING = {
    "pipeline": """from diffusers import HunyuanVideo15Pipeline

pipeline = HunyuanVideo15Pipeline.from_pretrained("this folder", torch_dtype=torch.{dtype})""",
    "transformer": """from diffusers import HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel

transformer = HunyuanVideo15Transformer3DModel.from_pretrained("this folder", torch_dtype=torch.{dtype})
pipeline = HunyuanVideo15Pipeline.from_pretrained("the base", transformer=transformer, torch_dtype=torch.{dtype})""",
    "lora": """from diffusers import HunyuanVideo15Pipeline

pipeline = HunyuanVideo15Pipeline.from_pretrained("the base", torch_dtype=torch.{dtype})
pipeline.transformer.load_lora_adapter("this folder", weight_name="pytorch_lora_weights.safetensors")""",
}

CARD = """---
library_name: diffusers
pipeline_tag: text-to-video
---

# {name}

A text-to-video policy trained with SAGE-GRPO by sage-ray.

| | |
|---|---|
| base | {base} |
| form | {form}{merged} |
| dtype of the trained weights | {dtype} |
| checkpoint | {checkpoint} |
| policy version | {version} |

```python
import torch
{loading}
```

Written for diffusers {diffusers}. The licence of the base applies to these weights too.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `launch.py export`."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a checkpoint, or a transformer or adapter folder in it"
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument(
        "--base",
        type=Path,
        help="the HunyuanVideo15Pipeline directory that was trained; default: model.path of the run's config.yaml",
    )
    parser.add_argument(
        "--form", choices=FORMS, help="default: lora for an adapter, else pipeline; an adapter is merged into others"
    )
    parser.add_argument(
        "--dtype", choices=tuple(TORCH_DTYPES), default="float32", help="of the policy's weights (default: float32)"
    )


def run(arguments: argparse.Namespace) -> Path:
    """Export as parsed by `add_arguments`; returns the output folder. Raises: ValueError as `export`."""
    base = arguments.base or default_base(find_policy(arguments.checkpoint))
    return export(
        arguments.checkpoint, base, arguments.output, form=arguments.form, dtype=TORCH_DTYPES[arguments.dtype]
    )


def default_base(policy: PolicyFolder) -> Path:
    """model.path of the run that wrote a checkpoint: OUTPUT_DIR/checkpoints/VERSION/transformer -> config.yaml.

    Raises: ValueError when the checkpoint does not lie in a run's folder.
    """
    places = [folder / "config.yaml" for folder in policy.path.resolve().parents[:3]]
    file = next((file for file in places if file.is_file()), None)
    if file is None:
        raise ValueError(f"--base: must be given, as {policy.path} does not lie in a run's folder (no {places[2]})")
    return Path(load_config([file], []).model.path)


def export(checkpoint: Path, base: Path, output: Path, *, form: str | None, dtype: torch.dtype) -> Path:
    """Write `checkpoint` as `output`, a new folder, and return it.

    Args:
        checkpoint: what `find_policy` takes. base: the HunyuanVideo15Pipeline directory that was trained; only read.
        form: one of FORMS; None for "lora" from an adapter, else "pipeline".
        dtype: of the policy's weights; float32 loses nothing. The rest of a pipeline keeps the base's.
    Raises: ValueError naming file and rule; nothing is written then.
    """
    policy = find_policy(checkpoint)
    form = form or ("lora" if policy.kind == "adapter" else "pipeline")
    if form not in FORMS:
        raise ValueError(f"form: {form!r} must be one of {', '.join(FORMS)}")
    if form == "lora" and policy.kind != "adapter":
        raise ValueError(f"form='lora': {policy.path} is a whole transformer; only an adapter can be written as LoRA")
    check_pipeline(base)
    _check_output(output, base)
    model = None
    if form == "lora":
        check_fits(policy.path, find_policy(base).path)
    else:
        model = load_policy(policy, base, dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.partial.", dir=output.parent) as beside:
        folder = Path(beside) / output.name
        folder.mkdir()
        if model is None:
            _copy_adapter(policy.path / FILE, folder / FILE, dtype)
        else:
            if form == "pipeline":
                _copy_base(base, folder)
            model.save_pretrained(folder / "transformer" if form == "pipeline" else folder)
        (folder / "README.md").write_text(_card(policy, base, output.name, form, dtype), "utf-8")
        folder.rename(output)
    return output


def _check_output(output: Path, base: Path) -> None:
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output}: is there already; the output must be a new folder")
    parents = output.absolute().parents
    for parent in parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"{output}: cannot be made, as {parent} is a file")
    if base.resolve() in [parent.resolve() for parent in parents]:
        raise ValueError(f"{output}: must not lie inside the base {base}")


def _copy_base(base: Path, folder: Path) -> None:
    """Everything of a pipeline but its transformer, symbolic links followed.

    Weights are hard-linked where the file system can; what an editor may write in place is always copied.
    """
    for entry in sorted(base.iterdir()):
        if entry.name in NOT_COPIED or entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.copytree(entry, folder / entry.name, copy_function=_link_or_copy)
        else:
            _link_or_copy(entry, folder / entry.name)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    if Path(source).suffix == ".safetensors":
        try:
            os.link(os.path.realpath(source), target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, target)


def _copy_adapter(source: Path, target: Path, dtype: torch.dtype) -> None:
    """A and B in `dtype`, with the header that carries rank and alpha."""
    with safe_open(source, framework="pt") as file:
        state = {key: file.get_tensor(key).to(dtype) for key in file.keys()}
        save_file(state, target, metadata=file.metadata())


def _card(policy: PolicyFolder, base: Path, name: str, form: str, dtype: torch.dtype) -> str:
    """The README; names of folders, never where they lie on this machine."""
    trainer, path = policy.path.parent / "trainer.json", policy.path.resolve()
    word = str(dtype).removeprefix("torch.")
    return CARD.format(
        name=name,
        base=_base_name(base),
        form=form,
        merged=", adapter merged" if policy.kind == "adapter" and form != "lora" else "",
        dtype=word,
        checkpoint=f"{path.parent.name}/{path.name}",
        version=read_object(trainer).get("policy_version", "unknown") if trainer.is_file() else "unknown",
        loading=LOADING[form].format(dtype=word),
        diffusers=version("diffusers"),
    )


def _base_name(base: Path) -> str:
    """OWNER/NAME of a folder in a Hugging Face cache, else the folder's name."""
    hub = [part for part in base.resolve().parts if part.startswith("models--")]
    return hub[-1].removeprefix("models--").replace("--", "/") if hub else base.resolve().name
