"""config_load: precedence, official flags, and the message of every bad input."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.config import Config, ConfigError, dotted_keys, type_words, value_at
from sage_ray.config_load import load_config, to_yaml
from sage_ray.config_official import ALIASES, BARE, CONVERTED, KNOWN, REFUSED, SWITCHES


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
    for flag, keys in ALIASES.items():
        value = samples[type_words(dotted_keys()[keys[0]]).removesuffix(" or null")]
        text = str(value)
        typed = load_config([], [f"--{flag}={text}"])
        assert typed == load_config([write(tmp_path, f"{flag}: {text}")], [])
        assert typed == load_config([], [f"{key}={text}" for key in keys])
        assert all(value_at(typed, key) == value for key in keys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--use_moving_KL True --use_dual_kl True", {"kl.mode": "dual_moving"}),
        ("--use_moving_KL --use_dual_kl false", {"kl.mode": "moving"}),
        ("--use_moving_KL false", {"kl.mode": "fixed"}),
        ("--use_lora --lora_r 4 --lora_alpha 8", {"lora.rank": 4, "lora.alpha": 8.0}),
        ("use_lora=true", {"lora.rank": 8}),
        ("use_lora=false", {"lora.rank": 0}),
        ("lora_target_modules=all-linear use_lora=1", {"lora.targets": None}),
        ("lora_target_modules=to_q,to_k use_lora=1", {"lora.targets": ["to_q", "to_k"]}),
        ("--dtype bf16 --use_muon false", {"model.dtype": "bfloat16", "optimizer.name": "adamw"}),
        (
            "--max_steps 12 --gradient_accumulation_steps 4",
            {"num_iterations": 3, "data.gradient_accumulation_steps": 4},
        ),
        ('reward_weights={"VQ":1,"MQ":2,"TA":3}', {"reward.weight_vq": 1.0, "reward.weight_ta": 3.0}),
        ("kl_compute_mode=rollout_phase", {"kl.previous": "rollout"}),
        ("--train_video_csv a.csv", {"data.prompts": ["a.csv"]}),
        ("--train_video_csv a.csv b.csv seed=3", {"data.prompts": ["a.csv", "b.csv"], "seed": 3}),
        ("data.gradient_accumulation_steps=4 --max_steps 8", {"num_iterations": 2}),
        ("max_steps=8 num_iterations=3", {"num_iterations": 3}),
        ("use_dual_kl=false kl.mode=none", {"kl.mode": "none"}),
        ("kl.mode=none use_dual_kl=false", {"kl.mode": "moving"}),
        ("--post_train_type grpo --enable_fsdp --dp_replicate 1 --reward_model videoalign_local", {}),
    ],
)
def test_converted_official_flags(words, expected):
    config = load_config([], words.split())
    assert {key: value_at(config, key) for key in expected} == expected
    if not expected:
        assert config == Config()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("use_moving_KL=0 use_dual_kl=1",
         "use_dual_kl='1' on the command line: needs use_moving_KL, there is no such kl.mode"),
        ("lora_r=4", "lora_r='4' on the command line: needs use_lora; without it the official program ignores it"),
        ("lora_r=x use_lora=1", "lora_r='x' on the command line: must be a whole number of at least 1"),
        ("use_lora=maybe", "use_lora='maybe' on the command line: must be true or false"),
        ("max_steps=10 data.gradient_accumulation_steps=4",
         "max_steps=10 on the command line: counts rollouts and must be a multiple of gradient_accumulation_steps=4"),
        ("enable_fsdp=false", "enable_fsdp='false' on the command line: can only be True: the learner is always FSDP2"),
        ("lora_dropout=0.1", "lora_dropout='0.1' on the command line: can only be 0: with dropout, rollout and learner "
         "would not compute the same policy"),
        ("reward_weights={1}", "reward_weights='{1}' on the command line: must be a JSON object as "
         '{"VQ": 0.5, "MQ": 0.5, "TA": 1.0}'),
        ("dtype=fp8", "dtype='fp8' on the command line: must be one of bf16, fp32"),
    ],
)  # fmt: skip
def test_official_values_that_cannot_be(words, message):
    assert refusal([], words.split()) == message


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_refused_official_flags_say_why(flag):
    assert refusal([], [f"{flag}=1"]) == f"{flag}='1' on the command line: is not taken: {REFUSED[flag]}"


def test_every_flag_of_the_official_program_is_known():
    """The complete list of post_train.py's flags."""
    flags = """pretrained_model_root pretrained_transformer_version post_train_type learning_rate weight_decay max_steps
    warmup_steps gradient_accumulation_steps max_grad_norm train_timestep_shift flow_snr_type batch_size num_workers
    prefetch_factor num_generations train_video_csv reward_model reward_weights reward_checkpoint_mode
    remote_reward_url kl_weight kl_coef kl_min_coef use_moving_KL update_ref_model_step use_dual_kl
    dual_kl_moving_weight dual_kl_step_weight sde_type use_grad_balancing enable_timestep_permutation debug_grad_flow
    debug_train_diagnostics_interval output_dir save_interval log_interval dtype master_weight_type seed
    validation_global_seed i2v_prob use_muon enable_fsdp enable_gradient_checkpointing sp_size dp_replicate
    validation_interval validate_at_step0 validation_prompts valid_video_csv validation_timestep_shift
    validation_fixed_size validate_video_length validation_video_length video_length reference_mode_offload
    resume_from_checkpoint use_lora lora_r lora_alpha lora_dropout lora_target_modules pretrained_lora_path""".split()
    assert set(flags) <= KNOWN
    assert not set(REFUSED) & (set(ALIASES) | set(CONVERTED) | set(SWITCHES))
    assert BARE <= set(CONVERTED) | set(SWITCHES)
    for keys in ALIASES.values():
        assert set(keys) <= dotted_keys().keys()


def test_official_sp_size_is_the_learners_and_the_rollouts():
    config = load_config([], ["sp_size=2"])
    assert (config.learner.sp_size, config.rollout.sp_size, config.rollout.gpus_per_group) == (2, 2, 2)


@pytest.mark.parametrize(
    ("override", "key", "closest"),
    [
        ("samplin.eta=1", "samplin.eta", "sampling.eta"),
        ("group_siz=1", "group_siz", "data.group_size"),
        ("num_generation=1", "num_generation", "data.group_size"),
        ("kl.kl_weight=1", "kl.kl_weight", "kl.weight"),
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
    if name in dotted_keys() or name in KNOWN or any(key.startswith(name + ".") for key in dotted_keys()):
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
