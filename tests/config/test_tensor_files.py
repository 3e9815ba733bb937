"""The reader of safetensors: reads what the library writes, and names file and key of what does not agree."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_ray.models.tensor_files import write_tensors
from sage_ray.tensor_files import TensorFiles, only_dtype, read_header, refuse_partial
from tests.conftest import POLICY

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(2.5)}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def refusal(make) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


def write(file, header, data=b"") -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_header_and_tensors_are_what_was_written(folder) -> None:
    header = read_header(folder / "model.safetensors")
    assert header.metadata == {"format": "pt"} and header.tensors.keys() == TENSORS.keys()
    files = TensorFiles(folder, "model")
    assert files.shapes == {"a": (2, 3), "b": (4,), "c": ()} and files.dtypes == {"a": "F32", "b": "BF16", "c": "F32"}
    assert files.bytes == {"a": 24, "b": 8, "c": 4} and files.main == folder / "model.safetensors"
    assert all(torch.equal(files.read(key), tensor) for key, tensor in TENSORS.items())
    assert torch.equal(files.read("a", slice(1, 2)), TENSORS["a"][1:2])


def test_shipped_headers_are_the_library_s() -> None:
    for file in POLICY.rglob("*.safetensors"):
        state = load_file(file)
        assert {key: entry.shape for key, entry in read_header(file).tensors.items()} == {
            key: tuple(tensor.shape) for key, tensor in state.items()
        }


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a": ["F32", [2], [0, 4]]}, "key a has 4 bytes, F32 of [2] needs 8"),
        ({"a": ["F32", [1], [4, 8]]}, "key a starts at byte 4, the tensors before it end at 0"),
        (
            {"a": ["F32", [1], [0, 4]], "b": ["F32", [1], [0, 4]]},
            "key b starts at byte 0, the tensors before it end at 4",
        ),
        ({"a": ["F32", [-1], [0, 4]]}, "key a has shape [-1]"),
        ({"a": ["F32", None, [0, 4]]}, "key a has shape None"),
        ({"a": ["F7", [1], [0, 4]]}, "key a has dtype F7"),
    ],
)
def test_entries_that_do_not_agree_are_named(tmp_path, entries, words) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {k: dict(zip(("dtype", "shape", "data_offsets"), entry)) for k, entry in entries.items()}, bytes(8))
    assert f"{file}: the safetensors header is not readable: {words}" in refusal(lambda: read_header(file))


def test_a_giant_header_is_not_read(tmp_path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((2 * 10**8).to_bytes(8, "little"))
        stream.truncate(3 * 10**8)
    assert "200000000 bytes are too many" in refusal(lambda: read_header(file))


def test_pickled_weights_are_named_and_not_opened(tmp_path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    words = refusal(lambda: TensorFiles(tmp_path, "model"))
    assert words.startswith(f"{tmp_path / 'model.safetensors'}: the file does not exist")
    assert "pytorch_model.bin" in words and "never opened" in words


def test_index_and_shards_must_agree(tmp_path) -> None:
    pieces = [(tensor.nbytes, lambda k=k, tensor=tensor: {k: tensor}) for k, tensor in TENSORS.items()]
    write_tensors(tmp_path, "model", pieces, shard_bytes=24)
    index = tmp_path / "model.safetensors.index.json"
    assert TensorFiles(tmp_path, "model").shapes.keys() == TENSORS.keys()
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))

    def named(weight_map: dict, **more: object) -> str:
        index.write_text(json.dumps({**content, "weight_map": weight_map, **more}))
        return refusal(lambda: TensorFiles(tmp_path, "model"))

    weight_map = content["weight_map"]
    assert f"{tmp_path / second}: must hold a, as {index.name} says" in named({**weight_map, "a": second})
    assert f"{index}: key b is not listed" in named({k: v for k, v in weight_map.items() if k != "b"})
    assert "weight_map.a='../x' must be the name of a file" in named({**weight_map, "a": "../x"})
    assert f"{index}: must hold metadata" in named(weight_map, metadata=None)
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert f"{index}: lies beside model.safetensors; remove the one" in named(weight_map)


def test_dtypes_must_be_one(folder) -> None:
    assert refusal(TensorFiles(folder, "model").only_dtype) == f"{folder}: must be of one dtype, a is F32 and b is BF16"
    assert only_dtype(folder, {"a": "F16"}) == "F16"
    assert "key a is F64, must be one of F32, BF16, F16" in refusal(lambda: only_dtype(folder, {"a": "F64"}))
    assert "holds no tensor" in refusal(lambda: only_dtype(folder, {}))


def test_folders_that_are_still_written_are_refused(tmp_path) -> None:
    for folder in (tmp_path / "a.partial", tmp_path / "a.partial.x7" / "a"):
        assert "half written" in refusal(lambda folder=folder: refuse_partial(folder))
    refuse_partial(tmp_path / "partial")
