"""Damaged folders: each either loads the original's numbers or is refused by one clear error; none hangs.

1,000 by default, `SAGE_MUTATIONS=10000 pytest tests/config/test_mutated_folders.py` makes more. Left out, as no
reader can notice it: two tensors of one shape under each other's names, other values in JSON that no shape depends on,
shorter texts without a checksum (chat template, prompt template, vocabulary).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_ray.config import Config
from sage_ray.config_files import check_model
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.policy_folder import find_policy, load_policy
from sage_ray.models.tensor_files import write_tensors
from sage_ray.policies import check_evaluation
from sage_ray.rewards.videoalign import VideoAlign
from tests.config.file_mutations import link_tree
from tests.config.mutations import Mutator
from tests.conftest import POLICY, REWARD
from tests.models.test_lora import adapted
from tests.models.test_policy_folder import checkpoint

NUM = int(os.environ.get("SAGE_MUTATIONS", "1000"))
LIMIT_S = 20
PROMPTS = ('a small red circle moves left, "hello"', "")
State = dict[str, torch.Tensor]


class Subject(NamedTuple):
    """A folder, what checks it, and what loads everything that could have come out otherwise."""

    folder: Path
    check: Callable[[Path], object]
    load: Callable[[Path], State]


def sharded(folder: Path) -> Path:
    """The policy with every component's weights in two files."""
    shutil.copytree(POLICY, folder)
    for file in sorted(folder.rglob("*.safetensors")):
        state = load_file(file)
        file.unlink()
        half = sum(tensor.nbytes for tensor in state.values()) // 2
        pieces = [(tensor.nbytes, lambda key=key, tensor=tensor: {key: tensor}) for key, tensor in state.items()]
        write_tensors(file.parent, file.stem, pieces, shard_bytes=half + max(piece[0] for piece in pieces))
    return folder


def split_reward(folder: Path) -> Path:
    """The reward as PEFT saves it: an adapter and the rest."""
    shutil.copytree(REWARD, folder)
    weights = folder / "checkpoint-1" / "model.safetensors"
    state = load_file(weights)
    weights.unlink()
    adapter = {key.replace(".default", ""): value for key, value in state.items() if "lora_" in key}
    save_file(adapter, weights.with_name("adapter_model.safetensors"))
    rest = {key: value for key, value in state.items() if "lora_" not in key}
    torch.save(rest, weights.with_name("non_lora_state_dict.pth"))
    return folder


def check_policy(folder: Path) -> None:
    config = Config()
    config.model.path = str(folder)
    config.sampling.num_frames, config.sampling.height, config.sampling.width = 9, 32, 32
    check_model(config)


def policy_state(folder: Path) -> State:
    loaded = HunyuanVideo.load(folder)
    parts = {"vae": loaded.vae, "text": loaded.pipeline.text_encoder, "byt5": loaded.pipeline.text_encoder_2}
    parts["transformer"] = loaded.velocity.transformer
    state = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    state["scaling_factor"] = torch.tensor(loaded.vae.config.scaling_factor)
    for number, text in enumerate(PROMPTS):
        chat = [{"role": "user", "content": text}]
        ids = loaded.pipeline.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        state[f"ids.{number}"] = torch.tensor(ids)
        state[f"bytes.{number}"] = torch.tensor(loaded.pipeline.tokenizer_2(f"<extra_id_3>{text}").input_ids)
    return state


def reward_state(folder: Path) -> State:
    loaded = VideoAlign.load(folder)
    return loaded.official_state() | {"ids": loaded.prompts.encode("a red circle")[0]}


def check_trained(folder: Path) -> None:
    config = Config()
    config.model.path, config.evaluation.num_prompts = str(POLICY), 1
    check_evaluation(config, [str(folder)])


def policy_of(folder: Path) -> State:
    return load_policy(find_policy(folder), POLICY, torch.float32).state_dict()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    root = tmp_path_factory.mktemp("originals")
    whole, reward = root / "policy", root / "VideoReward"
    shutil.copytree(POLICY, whole)
    shutil.copytree(REWARD, reward)
    lora = checkpoint(root / "lora", adapted(rank=2).transformer) / "adapter"
    trained = root / "trained" / "transformer"
    shutil.copytree(POLICY / "transformer", trained)
    return {
        "policy": Subject(whole, check_policy, policy_state),
        "sharded": Subject(sharded(root / "sharded"), check_policy, policy_state),
        "reward": Subject(reward, VideoAlign.check, reward_state),
        "split reward": Subject(split_reward(root / "split"), VideoAlign.check, reward_state),
        "trained": Subject(trained, check_trained, policy_of),
        "lora": Subject(lora, check_trained, policy_of),
    }


@contextmanager
def no_hang(words: str) -> Iterator[None]:
    """Raises TimeoutError, which nothing catches, after LIMIT_S."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{words}: hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(subject: Subject, folder: Path, original: State, keys: tuple[str, ...]) -> str:
    """ "refused" by a ValueError that names file and key in one line, "loads", or what went wrong."""
    try:
        subject.check(folder)
    except ValueError as error:
        words = str(error)
        named = not keys or any(key.replace(".default", "") in words.replace(".default", "") for key in keys)
        return "refused" if named and str(folder) in words and "\n" not in words else f"unclear: {words}"
    except Exception as error:
        return f"check raised {error!r}"
    try:
        loaded = subject.load(folder)
    except Exception as error:
        return f"passed the check, loading raised {error!r}"
    if loaded.keys() != original.keys():
        return f"other keys: {sorted(loaded.keys() ^ original.keys())[:3]}"
    return next((f"other numbers: {key}" for key in loaded if not torch.equal(loaded[key], original[key])), "loads")


def test_each_damaged_folder_loads_right_or_gives_one_clear_error(subjects, tmp_path) -> None:
    originals = {name: subject.load(subject.folder) for name, subject in subjects.items()}
    wrong, counts = [], dict.fromkeys(("refused", "loads"), 0)
    for seed in range(NUM):
        name = list(subjects)[seed % len(subjects)]
        folder = link_tree(subjects[name].folder, tmp_path / f"{seed}" / subjects[name].folder.name)
        mutator = Mutator(folder, seed)
        what = f"{seed} {name} {mutator.mutate()}"
        with no_hang(what):
            result = outcome(subjects[name], folder, originals[name], mutator.keys)
        if result in counts:
            counts[result] += 1
        else:
            wrong.append(f"{what}: {result}")
        shutil.rmtree(folder.parent)
    print(counts)
    assert not wrong, f"{len(wrong)} of {NUM}:\n" + "\n".join(wrong)
    assert min(counts.values()) > 0


def test_the_originals_pass(subjects) -> None:
    for subject in subjects.values():
        subject.check(subject.folder)
