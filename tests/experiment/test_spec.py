"""What an experiment comes to: which runs, in which order, and which of them are shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_ray.config_load import load_config
from sage_ray.experiment.spec import BASE, FOLDER, Budget, Cell, Experiment, job_of, queue, read_budget, read_experiment

EXPERIMENTS = sorted(file.stem for file in FOLDER.glob("*.yaml"))
BUDGET = Budget("test", ("configs/shapes_cpu.yaml",), ("num_iterations=3",), (0, 1))


def experiment(name: str, *cells: Cell) -> Experiment:
    return Experiment(name, name, cells)


@pytest.mark.parametrize("budget", ["gpu", "smoke"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_shipped_cell_is_a_configuration_that_differs_from_the_others(name: str, budget: str) -> None:
    found = read_experiment(name)
    keys = [job_of(cell, read_budget(budget), 0).key for cell in found.cells]
    assert len(set(keys)) == len(keys)
    assert BASE in [cell.name for cell in found.cells]


def test_runs_come_tier_by_tier_then_seed_by_seed() -> None:
    dance, flow = (Cell(kind, kind, (f"sampling.sde_type={kind}_grpo",)) for kind in ("dance", "flow"))
    late = Cell("late", "late", ("sampling.sde_type=cps",), tier=2)
    base = Cell(BASE, BASE)
    jobs = queue([experiment("one", late, base, dance, flow)], BUDGET)
    assert [(job.wanted_by[0], job.key[-1]) for job in jobs[1:]] == [
        ("one/dance", "0"),
        ("one/flow", "0"),
        ("one/dance", "1"),
        ("one/flow", "1"),
        ("one/late", "0"),
        ("one/late", "1"),
    ]
    assert not jobs[0].trains and jobs[0].keep_videos
    assert [job.keep_videos for job in jobs[1:]] == [True, True, False, False, True, False]
    assert len(queue([experiment("one", late, base, dance, flow)], BUDGET, seeds=(5,), max_tier=1)) == 3


def test_cells_with_one_configuration_share_their_runs() -> None:
    explicit = Cell("explicit", "", ("kl.mode=dual_moving",))
    default = Cell("default", "", ())
    jobs = queue([experiment("one", explicit), experiment("two", default)], BUDGET, seeds=(0,))
    assert [job.wanted_by for job in jobs] == [("one/explicit", "two/default")]


def test_a_key_knows_what_changes_a_result_and_nothing_else() -> None:
    def key(*settings: str) -> str:
        return job_of(Cell("a", "", settings), BUDGET, 0).key

    same = key()
    for free in ("output_dir=elsewhere", "rollout.num_workers=4", "cluster.device=cpu", "save_interval=7"):
        assert key(free) == same
    for counted in ("loss.clip_range=0.02", "evaluation.num_steps=7", "num_iterations=4", "kl.weight=1"):
        assert key(counted) != same


def test_the_base_is_one_run_for_all_settings_of_training() -> None:
    def key(*settings: str) -> str:
        return job_of(Cell(BASE, "", settings), BUDGET, 3).key

    assert key() == key("reward.setting=A") == key("kl.mode=none")
    assert key() != key("evaluation.num_steps=7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title: x", "must hold title and cells"),
        ("title: x\ncells: [{name: a, label: b, colour: red}]", "unknown key 'colour' in a cell"),
        ("title: x\ncells: [{name: a, label: b}, {name: a, label: c}]", "names must differ"),
        (
            "title: x\ncells: [{name: a, label: b}]\n"
            "claims: [{text: t, source: s, measure: overall, better: a, worse: z}]",
            "cell 'z' must be one of a",
        ),
        ("title: x\ncells: [{label: b}]", "name"),
    ],
)
def test_a_faulty_file_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_experiment("bad", tmp_path)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="experiment 'tabel2': must be one of .*table2_a"):
        read_experiment("tabel2")


def test_table_2_differs_in_method_and_trust_region_only() -> None:
    """Nothing is tuned per method: every other setting is the same in all rows."""
    budget = read_budget("gpu")
    allowed = {"sampling.sde_type", "kl.mode", "loss.equalizer"}
    for name in ("table2_a", "table2_b"):
        for cell in read_experiment(name).cells:
            assert {word.partition("=")[0] for word in cell.settings} <= allowed | {"reward.setting"}
    config = load_config([Path(file) for file in job_of(Cell("a", ""), budget, 0).files], budget.settings)
    assert not {10, 11} & set(budget.seeds), "the learning rate was chosen on these"
    assert config.evaluation.sets == ["held_out"]
