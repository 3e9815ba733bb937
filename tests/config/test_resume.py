"""Whether a run may go on from a checkpoint: settings, models and folders that fit, and those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sage_ray.checkpoint_store import CheckpointStore, checkpoint_name
from sage_ray.config import Config, ConfigError, dotted_keys
from sage_ray.config_load import open_output, to_yaml
from sage_ray.data.prompts import read_prompts
from sage_ray.fingerprint import fingerprint
from sage_ray.resume import BY_CONTENT, FREE, LENGTH, cut_files, find_resume, identity
from tests.small import small_config


def config(tmp_path: Path, *overrides: str) -> Config:
    """Small stand-ins for policy and reward: only their files' content counts here."""
    for name in ("policy", "reward"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_text(name)
    paths = [f"model.path={tmp_path / 'policy'}", f"reward.path={tmp_path / 'reward'}"]
    return small_config(tmp_path, [*paths, "optimizer.schedule=constant", "num_iterations=9", *overrides])


def write_checkpoint(made: Config, iteration: int) -> str:
    """A complete checkpoint, without tensors."""
    store, name = CheckpointStore(Path(made.output_dir) / "checkpoints"), checkpoint_name(iteration)
    with store.folder_to_fill(name) as folder:
        (folder / "config.yaml").write_text(to_yaml(made))
    prompts = read_prompts(made.data.prompts)
    return store.complete(
        name, {"policy_version": iteration, "iteration": iteration, "identity": identity(made, prompts)}
    )


def resumed(changed: Config):
    return find_resume(changed, read_prompts(changed.data.prompts))


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """A run that was saved after iterations 2 and 4."""
    made = config(tmp_path)
    open_output(made)
    for iteration in (2, 4):
        write_checkpoint(made, iteration)
    return made


def test_auto_takes_the_newest_that_is_complete(tmp_path: Path, run: Config) -> None:
    changed = config(tmp_path, "resume=auto")
    assert resumed(changed).iteration == 4
    (Path(run.output_dir) / "checkpoints" / "version_000004" / "trainer.json").unlink()
    assert resumed(changed).iteration == 2


def test_auto_starts_anew_where_nothing_was_saved(tmp_path: Path) -> None:
    changed = config(tmp_path, "resume=auto")
    assert resumed(changed) is None
    open_output(config(tmp_path))
    found = resumed(changed)
    assert found is not None and found.checkpoint is None and found.iteration == 0
    with pytest.raises(ConfigError, match="optimizer.learning_rate=0.5 .was 0.0002"):
        resumed(config(tmp_path, "resume=auto", "optimizer.learning_rate=0.5"))


def test_without_resume_a_run_is_never_touched(run: Config) -> None:
    with pytest.raises(ConfigError, match="holds another run"):
        resumed(run)


def test_a_place_of_checkpoints_belongs_to_one_run(tmp_path: Path, run: Config) -> None:
    place = f"checkpoint.path={run.output_dir}/checkpoints"
    with pytest.raises(ConfigError, match="checkpoint.path=.*holds another run's .*version_000004"):
        resumed(config(tmp_path, place, f"output_dir={tmp_path}/new"))
    with pytest.raises(ConfigError, match="checkpoint.path='nothing://here'.*"):
        resumed(config(tmp_path, "checkpoint.path=nothing://here", f"output_dir={tmp_path}/new"))


def test_a_named_checkpoint(tmp_path: Path, run: Config) -> None:
    folder = Path(run.output_dir) / "checkpoints"
    assert resumed(config(tmp_path, f"resume={folder}/version_000004/")).iteration == 4
    with pytest.raises(ConfigError, match="version_000002.*version_000004 is there too"):
        resumed(config(tmp_path, f"resume={folder}/version_000002"))
    elsewhere = config(tmp_path, f"resume={folder}/version_000002", f"output_dir={tmp_path}/new")
    assert resumed(elsewhere).iteration == 2
    with pytest.raises(ConfigError, match="resume=.*version_000007.*trainer.json cannot be read"):
        resumed(config(tmp_path, f"resume={folder}/version_000007"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="must be new or empty, holds notes.txt"):
        resumed(elsewhere)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate=0.5 .was 0.0002."),
        ("sampling.eta=0.9", "sampling.eta=0.9 .was 0.7."),
        ("lora.rank=4", "lora.rank=4 .was 0."),
        ("seed=5", "seed=5 .was 0."),
        ("data.num_prompts=3", "num_prompts is 3, .* was made with 4"),
        ("num_iterations=3", "num_iterations=3: must be at least 4"),
        ("optimizer.schedule=cosine", "optimizer.schedule='cosine' .was 'constant'."),
    ],
)
def test_settings_that_make_another_run_are_named(tmp_path: Path, run: Config, override: str, words: str) -> None:
    before = sorted(Path(run.output_dir).rglob("*"))
    with pytest.raises(ConfigError, match=words):
        resumed(config(tmp_path, "resume=auto", override))
    assert sorted(Path(run.output_dir).rglob("*")) == before


def test_settings_that_may_differ(tmp_path: Path, run: Config) -> None:
    words = """num_iterations=20 save_interval=1 learner.num_ranks=2 rollout.num_workers=3 evaluation.interval=5
    cluster.num_cpus=1 checkpoint.keep_last=1 reward.num_workers=2 loss.max_disagreement=1""".split()
    found = resumed(config(tmp_path, "resume=auto", *words))
    assert found.iteration == 4 and found.same_evaluation
    assert not resumed(config(tmp_path, "resume=auto", "evaluation.seed=1")).same_evaluation


def test_a_cosine_schedule_has_a_length(tmp_path: Path) -> None:
    made = config(tmp_path, "optimizer.schedule=cosine")
    open_output(made)
    write_checkpoint(made, 2)
    assert resumed(config(tmp_path, "resume=auto", "optimizer.schedule=cosine")).iteration == 2
    with pytest.raises(ConfigError, match="num_iterations=20 .was 9.; the cosine schedule depends on"):
        resumed(config(tmp_path, "resume=auto", "optimizer.schedule=cosine", "num_iterations=20"))


def test_models_and_prompts_may_move_but_not_change(tmp_path: Path, run: Config) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "model.safetensors").write_text("policy")
    assert resumed(config(tmp_path, "resume=auto", f"model.path={moved}")).iteration == 4
    (moved / "model.safetensors").write_text("polity")
    with pytest.raises(ConfigError, match="model.path=.*moved.*another model"):
        resumed(config(tmp_path, "resume=auto", f"model.path={moved}"))
    with pytest.raises(ConfigError, match="reward.path=.*moved.*another model"):
        resumed(config(tmp_path, "resume=auto", f"reward.path={moved}"))
    (tmp_path / "prompts.txt").write_text("\n".join(["a dog"] * 9))
    with pytest.raises(ConfigError, match="data.prompts=.*prompts.txt.*prompts_sha256"):
        resumed(config(tmp_path, "resume=auto", f"data.prompts=[{tmp_path / 'prompts.txt'}]"))


def test_every_key_that_may_differ_is_a_key() -> None:
    for key in (*FREE, *BY_CONTENT, LENGTH):
        assert key in dotted_keys() or any(known.startswith(key) for known in dotted_keys() if key.endswith(".")), key


def test_a_fingerprint_sees_one_changed_weight_in_a_sample(tmp_path: Path) -> None:
    file = tmp_path / "large.safetensors"
    file.write_bytes(bytes(3_000_000))
    first = fingerprint(tmp_path)
    (tmp_path / "notes.md").write_text("not of the model")
    assert fingerprint(tmp_path) == first
    file.write_bytes(bytes(2_999_999) + b"x")
    assert fingerprint(tmp_path) != first


def test_what_was_written_after_the_checkpoint_is_cut(tmp_path: Path) -> None:
    lines = [{"step": 0, "evaluation/x": 1}, {"step": 1}, {"step": 2}, {"step": 2, "evaluation/x": 2}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 4, "rew')
    for folder, suffix in (("rollouts", ".parquet"), ("evaluations", ".parquet"), ("videos", "")):
        for number in (0, 2, 3, 11):
            path = tmp_path / folder / f"iteration_{number:06d}{suffix}"
            path.parent.mkdir(exist_ok=True)
            path.mkdir() if not suffix else path.write_text("rows")
    (tmp_path / "rollouts" / "iteration_000004.partial").write_text("half")
    cut_files(tmp_path, 2)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == lines[:4]
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    kept = [f"{folder}/iteration_00000{n}" for folder in ("rollouts", "evaluations", "videos") for n in (0, 2)]
    assert {name.removesuffix(".parquet") for name in names} == set(kept)
