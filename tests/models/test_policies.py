"""Names and folders of the policies that an evaluation compares."""

import shutil
from pathlib import Path

import pytest

from sage_ray.policies import check_evaluation, folder_name, short_names
from tests.conftest import POLICY
from tests.small import small_config


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> list[Path]:
    """The base's transformer as checkpoints of two runs of two versions."""
    folder = tmp_path_factory.mktemp("runs")
    made = [folder / run / "checkpoints" / f"version_{v}" for run in ("a", "b") for v in (1, 2)]
    for checkpoint in made:
        shutil.copytree(POLICY / "transformer", checkpoint / "transformer")
    return made


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path, ["evaluation.num_prompts=2"])


def names(found) -> list[str]:
    return [policy.name for policy in found]


def test_names_are_run_and_version(config, copies):
    found = check_evaluation(config, [str(path) for path in copies])
    assert names(found) == ["base", "a/version_1", "a/version_2", "b/version_1", "b/version_2"]
    assert names(check_evaluation(config, [str(path) for path in copies[:2]])) == ["base", "a/version_1", "a/version_2"]
    assert names(check_evaluation(config, [str(copies[3])])) == ["base", "b/version_2"]
    assert short_names([Path("/a/b"), Path("/a/b/transformer")]) == ["a/b", "b/transformer"]
    assert short_names([Path("/x/a/b/c"), Path("/y/a/b/c"), Path("/d")]) == ["x/a/b/c", "y/a/b/c", "d"]


def test_a_name_that_several_share_makes_them_runs_of_one_kind(config, copies):
    given = [f"sage={copies[0]}", f"dance={copies[1]}", f"sage={copies[2]}"]
    found = check_evaluation(config, given)
    assert names(found) == ["base", "sage 1", "dance", "sage 2"]
    assert [policy.group for policy in found] == ["base", "sage", "dance", "sage"]
    assert found[3].folder.path == copies[2] / "transformer"


def test_a_path_may_hold_an_equals_sign(config, copies, tmp_path):
    shutil.copytree(copies[0], tmp_path / "lr=1" / "version_1")
    assert names(check_evaluation(config, [str(tmp_path / "lr=1" / "version_1")])) == ["base", "lr=1/version_1"]


def test_refusals(tmp_path, config, copies):
    for given, message in [
        ([], "--checkpoint: must be given at least once"),
        ([str(tmp_path / "none")], "must be a checkpoint"),
        (["=x"], "'=x': must be PATH or NAME=PATH"),
        ([f"base={copies[0]}"], "base comes 2 times"),
        ([str(copies[0]), f"again={copies[0] / 'transformer'}"], "comes 2 times"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_evaluation(config, given)
    with pytest.raises(ValueError, match="evaluation.num_prompts=0: must be at least 1"):
        check_evaluation(small_config(tmp_path), [str(copies[0])])


def test_a_policy_of_another_architecture_is_refused(tmp_path, config, copies):
    """Its own files agree with each other; only the base says otherwise."""
    folder = shutil.copytree(copies[0], tmp_path / "other")
    file = folder / "transformer" / "config.json"
    file.write_text(file.read_text().replace('"rope_theta": 256', '"rope_theta": 512'))
    with pytest.raises(ValueError, match="rope_theta=512.*, the base has 256"):
        check_evaluation(config, [str(folder)])


def test_folder_names_are_plain():
    assert folder_name(3, "../a b/<c>") == "03_.._a_b_c_"
