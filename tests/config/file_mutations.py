"""Seeded damage to folders of files: one small change each, over hard links, so that a thousand cost little."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

JSON_DAMAGE = ("", "{", "[]", "null", "nonsense", "[" * 100_000, '{"a": 1', '"text"', "\ufeff{}")
ODD_VALUES = (None, "x", -1, 10**9, 10**30, 0.5, [], {}, True, "../x", float("inf"))


def link_tree(source: Path, target: Path) -> Path:
    """A copy of hard links; a changed file must be replaced, never written into."""
    for file in sorted(source.rglob("*")):
        new = target / file.relative_to(source)
        if file.is_file():
            new.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, new)
    return target


def replace(file: Path, content: bytes | str) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


class FileMutator:
    """Draws and makes one change of files or JSON. `keys`: names of which an error must hold one."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.keys: tuple[str, ...] = ()
        self.files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.json = [path for path in self.files if path.suffix == ".json"]
        self.safe = [path for path in self.files if path.suffix == ".safetensors"]

    def kinds(self) -> list[Callable[[], str]]:
        """The changes that this folder allows, each as often as it is drawn."""
        kinds: list[Callable[[], str]] = [
            *(self.remove, self.remove, self.rename, self.truncate, self.truncate, self.truncate),
            *(self.empty, self.directory, self.loop, self.pipe, self.extra_file, self.remove_folder, self.bytes_before),
        ]
        if self.json:
            kinds += [self.swap_files, self.break_json, self.drop_json_key, self.odd_json_value, self.other_class]
        return kinds

    def mutate(self) -> str:
        """Make one change; returns it in words."""
        kind = self.random.choice(self.kinds())
        return f"{kind.__name__}: {kind()}"

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self.folder))

    def _any(self) -> Path:
        """A file; weights as often as small files."""
        return self.random.choice(self.safe if self.safe and self.random.random() < 0.4 else self.files)

    # files

    def remove(self) -> str:
        file = self._any()
        file.unlink()
        return self._name(file)

    def remove_folder(self) -> str:
        inside = sorted({file.parent for file in self.files} - {self.folder})
        if not inside:
            return self.remove()
        chosen = self.random.choice(inside)
        chosen.rename(chosen.with_name(f"{chosen.name}.partial"))
        return self._name(chosen)

    def rename(self) -> str:
        file = self._any()
        new = self.random.choice([f"{file.stem}.fp16{file.suffix}", f"{file.name}.partial", f"old_{file.name}"])
        file.rename(file.with_name(new))
        return f"{self._name(file)} to {new}"

    def truncate(self) -> str:
        texts = ("template", "merges", "vocab")  # text without checksum: a shorter one is another valid one
        file = self.random.choice([file for file in self.files if not any(text in file.name for text in texts)])
        content = file.read_bytes()
        ends = [0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1, self.random.randrange(len(content))]
        end = min(self.random.choice(ends), len(content) - 1)
        if content[end:].strip():
            replace(file, content[:end])
        else:
            replace(file, content[: max(0, end - 2)])
        return f"{self._name(file)} at {end} of {len(content)}"

    def bytes_before(self) -> str:
        file = self.random.choice(self.safe or self.json)
        content = file.read_bytes()
        more = bytes(self.random.randrange(256) for _ in range(self.random.choice([1, 8, 64])))
        replace(file, self.random.choice([more + content, content + more]) if self.safe else more + content)
        return f"{self._name(file)} {len(more)}"

    def swap_files(self) -> str:
        a, b = self.random.sample([file for file in self.files if "tokenizer/" not in str(file)], 2)
        if a.read_bytes() == b.read_bytes():
            return self.remove()
        first, second = a.read_bytes(), b.read_bytes()
        replace(a, second)
        replace(b, first)
        return f"{self._name(a)} and {self._name(b)}"

    def empty(self) -> str:
        file = self._any()
        replace(file, b"")
        return self._name(file)

    def directory(self) -> str:
        file = self._any()
        file.unlink()
        file.mkdir()
        return self._name(file)

    def loop(self) -> str:
        file = self._any()
        file.unlink()
        file.symlink_to(file.name)
        return self._name(file)

    def pipe(self) -> str:
        file = self._any()
        file.unlink()
        os.mkfifo(file)
        return self._name(file)

    def extra_file(self) -> str:
        where = self.random.choice(self.files).parent
        source = self._any()
        names = ["README.md", "notes.txt", ".DS_Store", "copy.safetensors", "pytorch_model.bin", "old.json"]
        names += ["adapter_config.json", "model.fp16.safetensors", "generation_config.json", "training_args.bin"]
        new = where / self.random.choice(names)
        replace(new, source.read_bytes() if self.random.random() < 0.5 else b"anything")
        return self._name(new)

    # JSON

    def break_json(self) -> str:
        file, content = self.random.choice(self.json), self.random.choice(JSON_DAMAGE)
        replace(file, content)
        return f"{self._name(file)} is {content[:9]!r}"

    def _config(self) -> tuple[Path, dict]:
        """A JSON file that describes a model, and its content; vocabularies are text (see `truncate`)."""
        names = ("config.json", "base_config.json", "model_config.json", "model_index.json", "scheduler_config.json")
        files = [file for file in self.json if file.name in names or file.name.endswith(".index.json")]
        file = self.random.choice(files or self.json)
        return file, json.loads(file.read_text())

    def drop_json_key(self) -> str:
        file, content = self._config()
        inner = self.random.choice(
            [content, *(value for value in content.values() if isinstance(value, dict) and value)]
        )
        key = self.random.choice(sorted(inner))
        del inner[key]
        replace(file, json.dumps(content))
        return f"{self._name(file)} {key}"

    def other_class(self) -> str:
        """The folder says that it is something else."""
        files = {file: json.loads(file.read_text()) for file in self.json}
        keys = ("_class_name", "model_type")
        found = [(file, key) for file, content in files.items() for key in keys if key in content]
        if not found:
            return self.break_json()
        file, key = self.random.choice(found)
        files[file][key] = self.random.choice(["WanPipeline", "AutoencoderKL", "llama", "", 3])
        replace(file, json.dumps(files[file]))
        return f"{self._name(file)} {key}={files[file][key]!r}"

    def odd_json_value(self) -> str:
        file, content = self._config()
        inner = self.random.choice(
            [content, *(value for value in content.values() if isinstance(value, dict) and value)]
        )
        key = self.random.choice(sorted(inner))
        inner[key] = self.random.choice([value for value in ODD_VALUES if value != inner[key]])
        replace(file, json.dumps(content))
        return f"{self._name(file)} {key}={inner[key]!r}"
