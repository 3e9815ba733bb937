"""The parts of `launch.py fetch`: the reward with its template, prompts, the official layout; options."""

import dataclasses
import hashlib
import io
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sage_ray.fetch import files as disk
from sage_ray.fetch import manifest
from tests.conftest import REWARD, ROOT
from tests.data_files.fake_hub import FakeHub, files, run


@pytest.fixture
def reward(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The small world's reward under the official names, with the hashes it has; what the folder must hold."""
    checkpoint = files(REWARD)
    weights = io.BytesIO()
    torch.save(safetensors.torch.load(checkpoint.pop("checkpoint-1/model.safetensors")), weights)
    base, template = checkpoint.pop("base_config.json"), checkpoint.pop("prompt_template.txt")
    own = {path.replace("checkpoint-1/", "checkpoint-11352/"): content for path, content in checkpoint.items()}
    own[manifest.WEIGHTS] = weights.getvalue()
    hub.repos[manifest.VIDEO_REWARD] = {**own, "optimizer.pt": b"not wanted"}
    hub.repos["Qwen/Qwen2-VL-2B-Instruct"] = {"config.json": base, "model.safetensors": b"not wanted"}
    for path in (manifest.WEIGHTS, manifest.TOKENIZER):
        known = len(own[path]), hashlib.sha256(own[path]).hexdigest()
        monkeypatch.setitem(manifest.KNOWN, (manifest.VIDEO_REWARD, path), known)
    name, source = (
        manifest.TEMPLATE_VARIABLE.name,
        f"A = 1\n{manifest.TEMPLATE_VARIABLE.name} = {template.decode()!r}\n",
    )
    variable = manifest.Variable(name, len(template), hashlib.sha256(template).hexdigest())
    code, *others = manifest.reward()
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    code = dataclasses.replace(code, num_bytes=len(source), sha256=sha256, variable=variable)
    monkeypatch.setattr(manifest, "TEMPLATE_VARIABLE", variable)
    monkeypatch.setattr(manifest, "reward", lambda: (code, *others))
    hub.raw[f"/raw/KwaiVGI/VideoAlign/{manifest.VIDEO_ALIGN_COMMIT}/prompt_template.py"] = source.encode()
    return {**own, "base_config.json": base, "prompt_template.txt": template}


def test_brings_a_reward_that_can_be_opened(hub: FakeHub, reward: dict[str, bytes], tmp_path: Path) -> None:
    """The template's repository was renamed: the second name answers."""
    run(tmp_path, "reward")
    assert files(tmp_path / "VideoReward") == reward
    hub.requests.clear()
    run(tmp_path, "reward")
    assert sum(request.sent for request in hub.requests) == 0 and len(hub.requests) == 2


def test_a_template_can_be_given(hub: FakeHub, reward: dict[str, bytes], tmp_path: Path) -> None:
    [(path, source)] = hub.raw.items()
    hub.raw.clear()
    with pytest.raises(
        ValueError, match="prompt_template.py: not found .404.; or give a copy of this file with --temp"
    ):
        run(tmp_path, "reward")
    for content in (source, reward["prompt_template.txt"]):
        (tmp_path / "given").write_bytes(content)
        run(tmp_path / "to", "reward", "--template", str(tmp_path / "given"))
        assert files(tmp_path / "to" / "VideoReward") == reward
        (tmp_path / "to" / "VideoReward" / "prompt_template.txt").unlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def", "given: is neither the text nor Python source"),
        (b"x = 1", "given: holds no DETAILED_PROMPT_WITH_SPECIAL_TOKEN"),
        (
            b"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = 'x'",
            "given: DETAILED_PROMPT_WITH_SPECIAL_TOKEN has sha256 2d71.*must",
        ),
        (None, "given: No such file or directory"),
    ],
)
def test_a_wrong_template(hub: FakeHub, tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "given").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "to", "reward", "--template", str(tmp_path / "given"))
    assert not hub.requests and not (tmp_path / "to").exists()


def test_a_known_hash_must_be_listed(hub: FakeHub, reward: dict[str, bytes], tmp_path: Path) -> None:
    hub.repos[manifest.VIDEO_REWARD][manifest.TOKENIZER] += b" "
    with pytest.raises(
        ValueError, match=r"VideoReward/\S+/tokenizer.json: is listed with 19466 bytes and sha256:\w+, mus"
    ):
        run(tmp_path, "reward")
    assert not list(tmp_path.iterdir())


def test_the_known_template_is_the_one_the_reward_asks_for() -> None:
    """The only copy of it lies outside the repository, where the tests of the scorer find it too."""
    copy = ROOT.parent / "shared" / "data" / "videoalign" / "prompt_template.txt"
    if not copy.is_file():
        pytest.skip(f"no {copy}")
    content = copy.read_bytes()
    assert len(content) == manifest.TEMPLATE_VARIABLE.num_bytes
    source = f"{manifest.TEMPLATE_VARIABLE.name} = {content.decode()!r}".encode()
    assert disk.take(source, manifest.TEMPLATE_VARIABLE, "copy") == content


def test_brings_prompts_and_the_official_layout(hub: FakeHub, tmp_path: Path, monkeypatch, capsys) -> None:
    """The first name of the code's repository answers; what the hub lacks is said."""
    csv = b"prompt,prompt_zh\na cat,x\n"
    sha256 = hashlib.sha256(csv).hexdigest()
    sources = [dataclasses.replace(source, num_bytes=len(csv), sha256=sha256) for source in manifest.prompts()]
    monkeypatch.setattr(manifest, "prompts", lambda: tuple(sources))
    for source in sources:
        hub.raw[f"/raw/KlingAIResearch/VideoAlign/{source.commit}/{source.path}"] = csv
    name, weights = "transformer/480p_t2v/config.json", "diffusion_pytorch_model.safetensors"
    own = {name: b'{"_class_name": "HunyuanVideo_1_5_DiffusionTransformer"}', f"transformer/480p_t2v/{weights}": b"x"}
    own |= {"vae/config.json": b"{}", f"vae/{weights}": b"x"}
    model = {"config.json": b"{}", "tokenizer_config.json": b"{}"}
    llm, byt5 = {**model, "model.safetensors": b"x"}, {**model, "pytorch_model.bin": b"x"}
    hub.repos["tencent/HunyuanVideo-1.5"] = {**own, "transformer/720p_i2v/x": b"not wanted"}
    hub.repos["Qwen/Qwen2.5-VL-7B-Instruct"] = llm
    hub.repos["google/byt5-small"] = {**byt5, "flax_model.msgpack": b"not wanted"}
    run(tmp_path, "prompts", "policy", "--layout", "official")
    text = "HunyuanVideo-1.5/text_encoder"
    assert {path: content for path, content in files(tmp_path).items() if path != ".fetch/lock"} == {
        **{f"prompts/{name}.csv": csv for name in ("TA_hard", "vbench", "videogen_eval")},
        **{f"HunyuanVideo-1.5/{path}": content for path, content in own.items()},
        **{f"{text}/llm/{path}": content for path, content in llm.items()},
        **{f"{text}/byt5-small/{path}": content for path, content in byt5.items()},
    }
    assert "3 prompts, for data.prompts" in (out := capsys.readouterr().out) and "Glyph-SDXL-v2" in out
    del hub.repos["tencent/HunyuanVideo-1.5"][f"vae/{weights}"]
    (tmp_path / "HunyuanVideo-1.5" / "vae" / weights).unlink()
    with pytest.raises(ValueError, match=f"HunyuanVideo-1.5: holds no vae/{weights}"):
        run(tmp_path, "policy", "--layout", "official")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all", "--revision", "x"), "--revision 'x': goes with policy or reward alone"),
        (("prompts", "--revision", "x"), "--revision 'x': goes with policy or reward alone"),
        (("policy", "--revision", ""), "--revision '': goes with"),
        (("policy", "--template", "x"), "--template x: goes with reward"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *arguments)


def test_a_target_that_is_a_file(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="file/.fetch: Not a directory|file: "):
        run(tmp_path / "file")
