"""Seeded damage to checkpoints: what `file_mutations` does, and changes of headers, tensors and indices."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

from tests.config.file_mutations import FileMutator, replace

OTHER_DTYPES = ("F64", "I64", "F8_E4M3", "U8", "BOOL", "F7")


def read_parts(file: Path) -> tuple[dict, bytes]:
    """(header, data) of a safetensors file."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_parts(file: Path, header: dict | str, data: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    replace(file, struct.pack("<Q", len(text)) + text + data)


class Mutator(FileMutator):
    """Draws and makes one change in a folder with or without safetensors."""

    def kinds(self) -> list[Callable[[], str]]:
        kinds = super().kinds()
        if self.safe:
            kinds += [self.drop_tensor, self.rename_tensor, self.extra_tensor, self.swap_unlike, self.shape]
            kinds += [self.dtype, self.mixed, self.double_in_header, self.double_over_shards, self.offsets]
            kinds += [self.header_text, self.whole_dtype, self.pickled, self.index]
        return kinds

    def _tensors(self) -> tuple[Path, dict, bytes, list[str]]:
        file = self.random.choice(self.safe)
        header, data = read_parts(file)
        return file, header, data, sorted(key for key in header if key != "__metadata__")

    def _rewrite(self, file: Path, header: dict, data: bytes, drop: str | None = None) -> None:
        """Offsets anew, in order, so that the file is whole."""
        kept, parts, place = {}, [], 0
        for key, entry in header.items():
            if key == drop:
                continue
            if key != "__metadata__":
                start, end = entry["data_offsets"]
                parts.append(data[start:end])
                entry = {**entry, "data_offsets": [place, place + end - start]}
                place += end - start
            kept[key] = entry
        write_parts(file, kept, b"".join(parts))

    def drop_tensor(self) -> str:
        file, header, data, keys = self._tensors()
        key = self.random.choice(keys)
        self._rewrite(file, header, data, drop=key)
        self.keys = (key,)
        return f"{self._name(file)} {key}"

    def rename_tensor(self) -> str:
        file, header, data, keys = self._tensors()
        key = self.random.choice(keys)
        new = self.random.choice([f"module.{key}", key.upper(), f"{key}.old", "", "x" * 10_000])
        write_parts(file, {new if name == key else name: entry for name, entry in header.items()}, data)
        self.keys = (key, new)
        return f"{self._name(file)} {key} to {new[:80]!r}"

    def extra_tensor(self) -> str:
        file, header, data, keys = self._tensors()
        new = self.random.choice(["extra.weight", f"{keys[0]}_scale", "encoder.embed_tokens.weight"])
        if new in header:
            return self.drop_tensor()
        header[new] = {"dtype": "F32", "shape": [2], "data_offsets": [len(data), len(data) + 8]}
        write_parts(file, header, data + bytes(8))
        self.keys = (new,)
        return f"{self._name(file)} {new}"

    def swap_unlike(self) -> str:
        """Two tensors change names. Of like shapes no reader can notice it, so shapes differ."""
        file, header, data, keys = self._tensors()
        pairs = [(a, b) for a in keys for b in keys if a < b and header[a]["shape"] != header[b]["shape"]]
        if not pairs:
            return self.drop_tensor()
        a, b = self.random.choice(pairs)
        header[a], header[b] = header[b], header[a]
        write_parts(file, header, data)
        self.keys = (a, b)
        return f"{self._name(file)} {a} and {b}"

    def shape(self) -> str:
        file, header, data, keys = self._tensors()
        key = self.random.choice(keys)
        old = header[key]["shape"]
        options = [
            [*old, 1],
            [1, *old],
            old[::-1],
            [*old[:-1], old[-1] - 1],
            [-old[0], *old[1:]],
            [2**62, 4],
            "x",
            None,
        ]
        new = self.random.choice([shape for shape in options if shape != old])
        header[key]["shape"] = new
        write_parts(file, header, data)
        self.keys = (key,)
        return f"{self._name(file)} {key} {old} to {new}"

    def dtype(self) -> str:
        file, header, data, keys = self._tensors()
        key = self.random.choice(keys)
        header[key]["dtype"] = self.random.choice(OTHER_DTYPES)
        write_parts(file, header, data)
        self.keys = (key,)
        return f"{self._name(file)} {key} {header[key]['dtype']}"

    def _widened(self, header: dict, data: bytes, chosen: list[str]) -> tuple[dict, bytes]:
        """bfloat16 tensors as float32, which changes no number."""
        kept, parts, place = {}, [], 0
        for key, entry in header.items():
            if key == "__metadata__":
                kept[key] = entry
                continue
            part = data[slice(*entry["data_offsets"])]
            name = entry["dtype"]
            if key in chosen and name == "BF16":
                name, part = "F32", b"".join(b"\0\0" + part[i : i + 2] for i in range(0, len(part), 2))
            parts.append(part)
            kept[key] = {**entry, "dtype": name, "data_offsets": [place, place + len(part)]}
            place += len(part)
        return kept, b"".join(parts)

    def mixed(self) -> str:
        file, header, data, keys = self._tensors()
        small = [key for key in keys if header[key]["dtype"] == "BF16"]
        if len(small) < 2:
            return self.drop_tensor()
        key = self.random.choice(small)
        write_parts(file, *self._widened(header, data, [key]))
        self.keys = (key,)
        return f"{self._name(file)} {key}"

    def whole_dtype(self) -> str:
        """All files of a component in float32: the same numbers, so it must load."""
        chosen = self.random.choice(self.safe).parent
        for file in self.safe:
            if file.parent == chosen and file.stat().st_size < 4_000_000:
                header, data = read_parts(file)
                write_parts(file, *self._widened(header, data, list(header)))
        return self._name(chosen)

    def double_in_header(self) -> str:
        file, header, data, keys = self._tensors()
        key = self.random.choice(keys)
        text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(header[key])}}}"
        write_parts(file, text, data)
        self.keys = (key,)
        return f"{self._name(file)} {key}"

    def double_over_shards(self) -> str:
        """A tensor of one file is in another one too, with other numbers."""
        file, header, data, keys = self._tensors()
        others = [other for other in self.safe if other != file]
        key = self.random.choice(keys)
        other = self.random.choice(others or [file])
        header, data = read_parts(other)
        if key in header:
            return self.drop_tensor()
        header[key] = {"dtype": "BF16", "shape": [1], "data_offsets": [len(data), len(data) + 2]}
        write_parts(other, header, data + b"\1\2")
        return f"{key} in {self._name(other)}"

    def offsets(self) -> str:
        file, header, data, keys = self._tensors()
        key = self.random.choice(keys)
        start, end = header[key]["data_offsets"]
        options = [
            [start + 2, end + 2],
            [start, end - 2],
            [end, start],
            [start],
            [-2, end],
            ["a", "b"],
            [0, end - start],
        ]
        new = self.random.choice([option for option in options if option != [start, end]])
        header[key]["data_offsets"] = new
        write_parts(file, header, data)
        return f"{self._name(file)} {key} {new}"

    def header_text(self) -> str:
        file, header, data, _ = self._tensors()
        text = json.dumps(header)
        new = self.random.choice(["[]", "null", "{}", text[:-1], text[1:], "[" * 50_000, '{"__metadata__": 3}'])
        write_parts(file, new, data)
        return f"{self._name(file)} {new[:20]!r}"

    def pickled(self) -> str:
        """The weights by another name, as a library's old format has them."""
        file = self.random.choice(self.safe)
        file.rename(file.with_name(self.random.choice(["pytorch_model.bin", "diffusion_pytorch_model.bin", "w.pt"])))
        return self._name(file)

    def index(self) -> str:
        """An index where there is none, or one that points elsewhere."""
        file = self.random.choice(self.safe)
        found = sorted(file.parent.glob("*.index.json"))
        target = found[0] if found else file.with_name(f"{file.name}.index.json")
        names = sorted(key for key in read_parts(file)[0] if key != "__metadata__")
        content = json.loads(target.read_text()) if found else {"weight_map": dict.fromkeys(names, file.name)}
        key = self.random.choice(sorted(content["weight_map"]))
        content["weight_map"][key] = self.random.choice(
            ["none.safetensors", "../x", 3, None, f"{'n' * 300}.safetensors"]
        )
        replace(target, json.dumps(content))
        return f"{self._name(target)} {key}"
