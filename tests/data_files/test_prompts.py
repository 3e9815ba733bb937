"""read_prompts on real files of every kind, each defect with its message; PromptCursor by its properties."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.data.prompts import PromptCursor, read_prompts
from sage_ray.types import Prompt


def write(folder: Path, name: str, content: str | bytes | dict) -> Path:
    file = folder / name
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "prompt\na cat\n\na dog\n", [Prompt(0, "a cat"), Prompt(1, "a dog")]),
        ("a.csv", '\ufeffprompt,x\r\n"a, b",1\r\n', [Prompt(0, "a, b")]),
        ("a.csv", 'prompt\n"two\nlines"\nlast', [Prompt(0, "two\nlines"), Prompt(1, "last")]),
        (
            "a.CSV",
            "index,prompt,prompt_cn,seed\n7,a cat,猫,42\n9,a dog,狗,\n3,é,,43.0\n",
            [Prompt(7, "a cat", 42), Prompt(9, "a dog"), Prompt(3, "é", 43)],
        ),
        ("a.txt", "\ufeffa cat \r\n\n  \n a dog", [Prompt(0, "a cat"), Prompt(1, "a dog")]),
        ("a.txt", "one\u2028line\x0bstill\n", [Prompt(0, "one\u2028line\x0bstill")]),
        (
            "a.jsonl",
            '{"prompt": "a cat", "seed": 1, "other": []}\n\n{"prompt": "a dog", "index": 5, "seed": null}\n',
            [Prompt(0, "a cat", 1), Prompt(5, "a dog")],
        ),
        (
            "a.parquet",
            {"prompt": ["a cat", "a dog"], "seed": [1.0, float("nan")], "other": [b"x", b"y"]},
            [Prompt(0, "a cat", 1), Prompt(1, "a dog")],
        ),
    ],
)
def test_reads(tmp_path, name, content, expected):
    assert read_prompts([write(tmp_path, name, content)]) == expected


def test_several_files_are_concatenated_with_distinct_indices(tmp_path):
    files = [write(tmp_path, "a.txt", "x\ny\n"), write(tmp_path, "b.csv", "prompt\nz\n")]
    assert read_prompts(list(map(str, files))) == [Prompt(0, "x"), Prompt(1, "y"), Prompt(2, "z")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "x", ": unknown kind of prompt file, must end in one of .csv, .txt, .jsonl, .parquet"),
        ("a.csv", "", ": holds no prompts"),
        ("a.csv", "prompt\n", ": holds no prompts"),
        ("a.csv", "text,seed\nx,1\n", ": must have a column named prompt, has text, seed"),
        ("a.csv", "prompt,seed\nx,1\n ,2\n", ", line 3: the prompt is empty"),
        ("a.csv", "seed,prompt\n1\n", ", line 2: the prompt is empty"),
        ("a.csv", "prompt,seed\nx,1.5\n", ", line 2: seed='1.5' must be a whole number"),
        ("a.csv", "prompt,index\nx,one\n", ", line 2: index='one' must be a whole number"),
        ("a.csv", "prompt\na cat, a dog\n", ", line 2: 2 cells under 1 columns; quote a prompt that has commas"),
        ("a.csv", 'prompt\nx\n"open\ny\n', ", line 4: not valid CSV: unexpected end of data"),
        ("a.csv", b"prompt\nx\ncaf\xe9\n", ", line 3: must be UTF-8, has byte 0xe9"),
        ("a.txt", b"x\ny\xff\n", ", line 2: must be UTF-8, has byte 0xff"),
        ("a.txt", "\n \n", ": holds no prompts"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', ", line 2: not valid JSON: "),
        ("a.jsonl", '["x"]\n', ", line 1: must be a JSON object with the key prompt"),
        ("a.jsonl", '{"text": "x"}\n', ", line 1: must be a JSON object with the key prompt"),
        ("a.jsonl", '{"prompt": 3}\n', ", line 1: prompt=3 must be text"),
        ("a.jsonl", '{"prompt": null}\n', ", line 1: the prompt is empty"),
        ("a.jsonl", '{"prompt": "x", "seed": true}\n', ", line 1: seed=True must be a whole number"),
        ("a.jsonl", '{"prompt": "x", "seed": 1e999}\n', ", line 1: seed=inf must be a whole number"),
        ("a.jsonl", '{"prompt": "x", "index": [1]}\n', ", line 1: index=[1] must be a whole number"),
        ("a.parquet", "not parquet", ": not a readable parquet file: "),
        ("a.parquet", {"text": ["x"]}, ": must have a column named prompt, has text"),
        ("a.parquet", {"prompt": ["x", None]}, ", row 2: the prompt is empty"),
        ("a.parquet", {"prompt": [1]}, ", row 1: prompt=1 must be text"),
        ("a.parquet", {"prompt": ["x"], "seed": [0.5]}, ", row 1: seed=0.5 must be a whole number"),
    ],
)
def test_defect_names_file_place_and_rule(tmp_path, name, content, message):
    good, bad = write(tmp_path, "good.txt", "fine\n"), write(tmp_path, name, content)
    with pytest.raises(ValueError) as caught:
        read_prompts([good, bad])
    assert str(caught.value).startswith(f"{bad}{message}")


def test_missing_file_and_no_file(tmp_path):
    with pytest.raises(ValueError) as caught:
        read_prompts([tmp_path / "none.csv"])
    assert str(caught.value) == f"{tmp_path / 'none.csv'}: the prompt file does not exist"
    with pytest.raises(ValueError, match="prompts: no prompt file is named"):
        read_prompts([])


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, f"prompt {index}") for index in range(count)]


@given(st.integers(1, 20), st.integers(0, 2**63 - 1), st.integers(1, 30))
def test_every_epoch_is_a_permutation(count, seed, num_prompts):
    """The steps read one after the other are whole permutations, whatever the size of a step."""
    cursor = PromptCursor(prompts(count), seed, num_prompts)
    order = [prompt.index for step in range(3 * count) for prompt in cursor.at(step)]
    for epoch in range(3):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 8), st.lists(st.integers(0, 1000), max_size=8))
def test_a_step_depends_on_nothing_but_itself(count, seed, num_prompts, earlier):
    used = PromptCursor(prompts(count), seed, num_prompts)
    for step in earlier:
        used.at(step)
    assert used.at(17) == PromptCursor(prompts(count), seed, num_prompts).at(17)
    assert len(used.at(17)) == num_prompts


def test_order_changes_with_epoch_and_seed():
    first, other = PromptCursor(prompts(50), 1, 50), PromptCursor(prompts(50), 2, 50)
    assert first.at(0) != first.at(1) != other.at(1) and first.at(0) != other.at(0)


def test_order_is_the_same_on_every_machine_and_version():
    """A resumed run must meet the same prompts; the numbers are frozen."""
    assert [prompt.index for prompt in PromptCursor(prompts(6), 42, 6).at(0)] == [0, 1, 4, 2, 5, 3]


def test_state_tells_cursors_apart():
    cursor = PromptCursor(prompts(3), 1, 2)
    assert cursor.state == PromptCursor(prompts(3), 1, 2).state
    for other in (PromptCursor(prompts(4), 1, 2), PromptCursor(prompts(3), 2, 2), PromptCursor(prompts(3), 1, 3)):
        assert cursor.state != other.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0, 1), "prompts: must hold at least one prompt"),
        ((prompts(1), 0, 0), "num_prompts=0: must be at least 1"),
        ((prompts(1), -1, 1), "seed=-1: must be at least 0"),
    ],
)
def test_cursor_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptCursor(*arguments)


def test_negative_step_is_refused():
    with pytest.raises(ValueError, match="step=-1: must be at least 0"):
        PromptCursor(prompts(1), 0, 1).at(-1)
