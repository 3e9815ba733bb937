"""config_load: precedence, official flags, and the message of every bad input."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.config import Config, ConfigError, dotted_keys, type_words, value_at
from sage_ray.config_load import OFFICIAL, load_config, to_yaml


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def refusal(files: list[Path], overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return str(caught.value)


def test_nothing_given_gives_the_defaults():
    assert load_config([], []) == Config()


def test_later_files_win_and_the_command_line_wins_over_files(tmp_path):
    first = write(tmp_path, "seed: 1\nsampling: {eta: 0.1, num_steps: 5}\n", "a.yaml")
    second = write(tmp_path, "sampling:\n  eta: 0.2\nkl.mode: none\n", "b.yaml")
    config = load_config([first, second], ["sampling.eta=0.3"])
    assert (config.seed, config.sampling.num_steps, config.sampling.eta, config.kl.mode) == (1, 5, 0.3, "none")


def test_an_empty_file_changes_nothing(tmp_path):
    assert load_config([write(tmp_path, "# nothing\n")], []) == Config()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
        ("sampling.shift=null", "sampling.shift", None),
        ("sampling.shift=5", "sampling.shift", 5.0),
        ("data.prompts=[a.csv, b.txt]", "data.prompts", ["a.csv", "b.txt"]),
        ("sampling.negative_prompt=blurry: [bad", "sampling.negative_prompt", "blurry: [bad"),
        ("sampling.negative_prompt=a=b", "sampling.negative_prompt", "a=b"),
        ("sampling.negative_prompt=", "sampling.negative_prompt", ""),
        ("output_dir=2024", "output_dir", "2024"),
        ("evaluation.seed=${seed}", "evaluation.seed", 42),
        ("--kl.weight=1e-6", "kl.weight", 1e-6),
    ],
)
def test_override(override, key, value):
    found = value_at(load_config([], [override]), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("1", True), ("yes", True), ("on", True), ("ON", True)]
    + [("false", False), ("0", False), ("no", False), ("off", False)],
)
def test_booleans_as_the_official_program_writes_them(tmp_path, word, value):
    assert load_config([], [f"--use_grad_balancing={word}"]).loss.equalizer is value
    assert load_config([write(tmp_path, f"loss: {{equalizer: {word}}}")], []).loss.equalizer is value


def test_official_command_line_with_two_words_and_a_bare_flag():
    words = "--sde_type flow_grpo --num_generations 8 --enable_gradient_checkpointing --use_grad_balancing false"
    config = load_config([], [*words.split(), "--kl_weight=1e-6", "--enable_gradient_checkpointing"])
    assert config.sampling.sde_type == "flow_grpo" and config.data.group_size == 8
    assert config.model.gradient_checkpointing and not config.loss.equalizer and config.kl.weight == 1e-6


def test_every_official_flag_reaches_known_keys_from_yaml_and_command_line(tmp_path):
    samples = {"int": 7, "float": 0.25, "str": "word", "bool": False, "list of str": ["x.csv"]}
    for flag, keys in OFFICIAL.items():
        value = samples[type_words(dotted_keys()[keys[0]]).removesuffix(" or null")]
        text = str(value)
        typed = load_config([], [f"--{flag}={text}"])
        assert typed == load_config([write(tmp_path, f"{flag}: {text}")], [])
        assert typed == load_config([], [f"{key}={text}" for key in keys])
        assert all(value_at(typed, key) == value for key in keys)


def test_official_sp_size_is_the_learners_and_the_rollouts():
    config = load_config([], ["sp_size=2"])
    assert (config.learner.sp_size, config.rollout.sp_size) == (2, 2)


@pytest.mark.parametrize(
    ("override", "key", "closest"),
    [
        ("samplin.eta=1", "samplin.eta", "sampling.eta"),
        ("group_siz=1", "group_siz", "data.group_size"),
        ("num_generation=1", "num_generation", "data.group_size"),
        ("kl.kl_weight=1", "kl.kl_weight", "kl.weight"),
        ("dtype=bf16", "dtype", "model.dtype"),
        ("--use_dual_kl=True", "use_dual_kl", "kl.mode"),
        ("sampling.eta.x=1", "sampling.eta.x", "sampling.eta"),
    ],
)
def test_unknown_key_names_key_place_and_closest_key(tmp_path, override, key, closest):
    message = f"unknown key '{key}' %s; the closest known key is '{closest}'"
    assert refusal([], [override]) == message % "on the command line"
    name, _, value = override.removeprefix("--").partition("=")
    parts = name.split(".")
    file = write(tmp_path, "{" + ": {".join(parts) + f": {value}" + "}" * len(parts))
    if not name.startswith("sampling.eta."):
        assert refusal([file], []) == message % f"in {file}"


@given(st.text(st.characters(codec="ascii", exclude_characters="=-"), min_size=1).map(str.strip).filter(bool))
def test_any_unknown_key_is_refused_with_a_known_one(name):
    if name in dotted_keys() or name in OFFICIAL or any(key.startswith(name + ".") for key in dotted_keys()):
        return
    closest = re.search(r"the closest known key is '(.*)'$", refusal([], [f"{name}=1"]))
    assert closest and closest[1] in dotted_keys()


@pytest.mark.parametrize(
    ("override", "key", "value", "expected"),
    [
        ("eta=x", "sampling.eta", "'x'", "float"),
        ("sampling.eta=true", "sampling.eta", "True", "float"),
        ("sampling.eta=[1", "sampling.eta", "'[1'", "float"),
        ("sampling.eta=${", "sampling.eta", "'${'", "float"),
        ("seed=1.5", "seed", "1.5", "int"),
        ("seed=null", "seed", "None", "int"),
        ("seed=true", "seed", "True", "int"),
        ("sampling.shift=x", "sampling.shift", "'x'", "float or null"),
        ("data.num_prompts=1.5", "data.num_prompts", "1.5", "int or null"),
        ("loss.equalizer=2", "loss.equalizer", "2", "bool"),
        ("loss.equalizer=maybe", "loss.equalizer", "'maybe'", "bool"),
        ("data.prompts=a.csv", "data.prompts", "'a.csv'", "list of str, as in [first, second]"),
        ("data.prompts=[[a]]", "data.prompts", "[['a']]", "list of str, as in [first, second]"),
    ],
)
def test_wrong_type_names_key_value_and_type(override, key, value, expected):
    assert refusal([], [override]) == f"{key}={value} on the command line: must be of type {expected}"


def test_wrong_type_in_a_file_names_the_file(tmp_path):
    file = write(tmp_path, "seed: {a: 1}")
    assert refusal([file], []) == f"seed={{'a': 1}} in {file}: must be of type int"


def test_a_section_is_not_a_value(tmp_path):
    message = "data=3 in {}: data is a section, set a key inside it: data.prompts, data.held_out_prompts"
    file = write(tmp_path, "data: 3")
    assert refusal([file], []).startswith(message.format(file))


def test_missing_interpolation_names_key_and_target():
    assert refusal([], ["sampling.eta=${nowhere}"]) == "sampling.eta: Interpolation key 'nowhere' not found"


@pytest.mark.parametrize("word", ["sampling.eta", "=3", "", "eta =3", "--kl_weight"])
def test_malformed_override_is_quoted(word):
    rule = "must have the form key=value, without blanks around ="
    assert refusal([], [word]) == f"{word!r} on the command line: {rule}"


def test_missing_file(tmp_path):
    file = tmp_path / "none.yaml"
    assert refusal([file], []) == f"{file}: the configuration file does not exist"


def test_a_folder_is_not_readable(tmp_path):
    assert refusal([tmp_path], []).startswith(f"{tmp_path}: cannot be read: ")


@pytest.mark.parametrize("content", [b"a: [1", b"a: 1\na: 2", b"\xff\xfe\x00", b"a: b: c", b"seed: '${'"])
def test_invalid_yaml_names_the_file(tmp_path, content):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    assert refusal([file], []).startswith(f"{file}: ")


def test_text_is_an_unknown_key(tmp_path):
    file = write(tmp_path, "just text")
    assert refusal([file], []).startswith(f"unknown key 'just text' in {file}; ")


@pytest.mark.parametrize("text", ["samplin: {}", "data: {}\nsamplin: {}"])
def test_an_empty_unknown_section_is_refused(tmp_path, text):
    file = write(tmp_path, text)
    assert refusal([file], []).startswith(f"unknown key 'samplin' in {file}; ")


def test_a_list_is_no_configuration(tmp_path):
    file = write(tmp_path, "- seed\n")
    assert refusal([file], []) == f"{file}: must hold keys and values, holds a list"


@given(st.floats(1e-9, 1e9), st.text(st.characters(exclude_categories=["C"], exclude_characters="$"), max_size=30))
def test_yaml_round_trip(tmp_path_factory, eta, negative_prompt):
    config = Config(seed=7)
    config.sampling.eta, config.sampling.negative_prompt = eta, negative_prompt
    config.data.num_prompts = 3
    file = write(tmp_path_factory.getbasetemp(), to_yaml(config), "round_trip.yaml")
    assert load_config([file], []) == config


def test_yaml_is_complete_and_resolved():
    text = to_yaml(load_config([], ["evaluation.seed=${seed}"]))
    assert "seed: 42" in text and "${" not in text
    assert all(f"{key.rpartition('.')[2]}:" in text for key in dotted_keys())
