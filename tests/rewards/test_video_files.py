"""read_video on real files of every kind: what is read is what was written, and nothing is shortened in silence."""

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from sage_ray.rewards import video_input
from sage_ray.rewards.video_input import read_video
from sage_ray.video import write_video

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (12, 96, 128, 3)).astype(np.uint8)


def smooth(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """uint8 [frames, height, width, 3]: a ramp downwards in red and to the right in blue; green rises by 8 a frame."""
    clip = np.zeros((frames, height, width, 3), np.uint8)
    clip[..., 0] = np.linspace(40, 220, height)[:, None]
    clip[..., 1] = 16 + 8 * np.arange(frames)[:, None, None]
    clip[..., 2] = np.linspace(40, 220, width)
    return clip


def write(path: Path, clip: np.ndarray, codec: str = "libx264", pixels: str = "yuv420p", **more) -> Path:
    """more: options of the container; pts_ms, one a frame; degrees of the display matrix; fps (8)."""
    pts_ms, degrees, fps = more.pop("pts_ms", None), more.pop("degrees", 0), more.pop("fps", 8)
    with av.open(str(path), "w", options=more) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = *clip.shape[1:3], pixels
        stream.codec_context.thread_count = 1
        if pts_ms:
            stream.codec_context.time_base = Fraction(1, 1000)
        if degrees:
            stream.set_display_rotation(degrees)
        for place, image in enumerate(clip):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if pts_ms:
                frame.pts, frame.time_base = pts_ms[place], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_audio(path: Path, cover: bool = False) -> Path:
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=16000)
        sound.layout = "mono"
        if cover:
            picture = container.add_stream("mjpeg", rate=1)
            picture.height, picture.width, picture.pix_fmt = 32, 32, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        for block in range(8):
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            samples.sample_rate, samples.pts = 16000, 1024 * block
            container.mux(sound.encode(samples))
        container.mux(sound.encode(None))
        if cover:
            image = av.VideoFrame.from_ndarray(smooth(1, 32, 32)[0], format="rgb24").reformat(format="yuvj420p")
            container.mux(picture.encode(image))
            container.mux(picture.encode(None))
    return path


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean absolute error; frames must be in their places, which their green tells: it differs by 8 a frame."""
    assert found.shape == expected.shape and found.dtype == np.uint8
    green, wanted = (clip[..., 1].mean((1, 2)) for clip in (found, expected))
    assert np.abs(green - green[0] - wanted + wanted[0]).max() < 4
    return float(np.abs(found.astype(int) - expected).mean())


@pytest.mark.parametrize(
    ("name", "codec", "pixels"),
    [
        ("a.mp4", "libx264", "yuv420p"),
        ("ten_bit.mp4", "libx264", "yuv420p10le"),
        ("a.mp4", "libx265", "yuv420p"),
        ("a.mp4", "mpeg4", "yuv420p"),
        ("a.mkv", "libx264", "yuv420p"),
        ("a.webm", "libvpx-vp9", "yuv420p"),
        ("a.avi", "mpeg4", "yuv420p"),
        ("a.ts", "libx264", "yuv420p"),
        ("a: 100%d.mp4", "libx264", "yuv420p"),
    ],
)
def test_what_is_read_is_what_was_written(tmp_path, name, codec, pixels):
    frames, fps = read_video(write(tmp_path / name, smooth(12), codec, pixels))
    assert fps == 8.0
    assert error(frames, smooth(12)) < (6 if codec == "mpeg4" else 4)


@pytest.mark.parametrize(("codec", "pixels"), [("libx264", "yuv444p"), ("mpeg4", "yuv420p")])
def test_odd_size(tmp_path, codec, pixels):
    frames, _ = read_video(write(tmp_path / "a.mp4", smooth(5, 33, 47), codec, pixels))
    assert error(frames, smooth(5, 33, 47)) < 6


def test_fragmented(tmp_path):
    file = write(tmp_path / "a.mp4", smooth(12), movflags="frag_keyframe+empty_moov")
    assert error(read_video(file)[0], smooth(12)) < 4


def test_one_frame(tmp_path):
    frames, fps = read_video(write(tmp_path / "a.mp4", smooth(1)))
    assert error(frames, smooth(1)) < 4 and fps == 8.0


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_rotated_clips_are_turned_upright(tmp_path, degrees):
    """The display matrix turns counterclockwise, as numpy.rot90 does."""
    upright = smooth(4)
    stored = np.ascontiguousarray(np.rot90(upright, -degrees // 90, axes=(1, 2)))
    frames, _ = read_video(write(tmp_path / "a.mp4", stored, degrees=degrees))
    assert error(frames, upright) < 4


def test_a_slanted_clip_is_refused(tmp_path):
    file = write(tmp_path / "a.mp4", smooth(2), degrees=45)
    with pytest.raises(ValueError, match=r"a\.mp4: frame 0 is turned by -?45 degrees"):
        read_video(file)


def test_variable_rate_gives_every_frame_once_and_the_average(tmp_path):
    pts = [0, 10, 500, 600, 1000, 1001, 1500, 1800, 1900, 2000]
    file = write(tmp_path / "a.mp4", smooth(10), pts_ms=pts)
    frames, fps = read_video(file)
    assert error(frames, smooth(10)) < 4
    with av.open(str(file)) as container:
        assert fps == float(container.streams.video[0].average_rate)
    assert 4 < fps < 5


def test_frames_hidden_by_an_edit_list_are_not_missed(tmp_path):
    source, file = write(tmp_path / "a.mp4", smooth(12)), tmp_path / "cut.mp4"
    with av.open(str(source)) as container, av.open(str(file), "w", options={"use_editlist": "1"}) as cut:
        stream = container.streams.video[0]
        copy = cut.add_stream_from_template(stream)
        for packet in container.demux(stream):
            if packet.size:
                packet.stream = copy
                packet.pts -= int(5 / 8 / packet.time_base)
                packet.dts -= int(5 / 8 / packet.time_base)
                cut.mux(packet)
    assert error(read_video(file)[0], smooth(12)[5:]) < 4


def test_the_longest_of_two_streams_does_not_make_a_clip_look_short(tmp_path):
    file = tmp_path / "a.mkv"
    with av.open(str(file), "w") as container:
        video, sound = container.add_stream("libx264", rate=8), container.add_stream("aac", rate=16000)
        video.height, video.width, video.pix_fmt, sound.layout = 48, 64, "yuv420p", "mono"
        for image in smooth(8):
            container.mux(video.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(video.encode(None))
        for block in range(64):
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            samples.sample_rate, samples.pts = 16000, 1024 * block
            container.mux(sound.encode(samples))
        container.mux(sound.encode(None))
    assert error(read_video(file)[0], smooth(8)) < 4


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.mp4", "libx264"), ("a.mp4", "libx265"), ("a.mp4", "mpeg4"), ("a.mkv", "libx264"), ("a.webm", "libvpx-vp9")],
)
def test_truncated(tmp_path, name, codec, share):
    more = {"movflags": "faststart"} if name == "a.mp4" else {}
    file = write(tmp_path / name, NOISE, codec, **more)
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(ValueError, match=rf"{name}: (truncated or damaged|not a readable video)"):
        read_video(file)


def test_truncated_before_the_index(tmp_path):
    file = write(tmp_path / "a.mp4", NOISE)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"a\.mp4: not a readable video"):
        read_video(file)


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.mp4", "mpeg4"), ("a.mkv", "libx264")])
def test_damaged_in_the_middle_never_loses_a_frame_in_silence(tmp_path, name, codec):
    """30 places; H.264's arithmetic code decodes some damage to other pixels, of all frames, without an error."""
    content = write(tmp_path / name, NOISE, codec).read_bytes()
    refused = 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        place = random.integers(len(content) // 10, len(content) * 8 // 10)
        damaged = tmp_path / f"damaged_{name}"
        damaged.write_bytes(content[:place] + random.bytes(2000) + content[place + 2000 :])
        try:
            assert len(read_video(damaged)[0]) == 12
        except ValueError as fault:
            refused += 1
            assert f"damaged_{name}: " in str(fault)
    assert refused >= (29 if codec == "mpeg4" else 15)


def test_no_frames(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        container.start_encoding()
    with pytest.raises(ValueError, match=r"a\.mp4: (holds 0 frames|not a readable video|holds no video)"):
        read_video(tmp_path / "a.mp4")


def test_sound_only(tmp_path):
    with pytest.raises(ValueError, match=r"a\.mp4: holds no video stream"):
        read_video(write_audio(tmp_path / "a.mp4"))
    with pytest.raises(ValueError, match=r"a\.m4a: (holds no video stream|not a readable)"):
        read_video(write_audio(tmp_path / "a.m4a"))


def test_a_cover_picture_is_no_video(tmp_path):
    with pytest.raises(ValueError, match=r"a\.mp4: holds no video stream"):
        read_video(write_audio(tmp_path / "a.mp4", cover=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.mp4", b""),
        ("a.mp4", b"\0" * 100_000),
        ("notes.txt", b"FFmpeg would render this text as frames\n" * 100),
        ("a.m3u8", b"#EXTM3U\n#EXTINF:1,\nb.ts\n"),
    ],
)
def test_not_a_video(tmp_path, name, content):
    write(tmp_path / "b.ts", smooth(8))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: not a readable video"):
        read_video(tmp_path / name)


def test_a_picture_is_not_a_video(tmp_path):
    from PIL import Image

    for name in ("a.png", "a.mp4"):
        Image.fromarray(smooth(1)[0]).save(tmp_path / name, format="PNG")
        with pytest.raises(ValueError, match=rf"{name}: not a readable video"):
            read_video(tmp_path / name)


def test_unknown_codec(tmp_path):
    file = write(tmp_path / "a.mp4", smooth(4))
    file.write_bytes(file.read_bytes().replace(b"avc1", b"xx99"))
    with pytest.raises(ValueError, match=r"a\.mp4: its video codec is unknown"):
        read_video(file)


def test_missing_folder_and_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in (tmp_path / "none.mp4", tmp_path, tmp_path / "pipe.mp4", "https://example.org/a.mp4"):
        with pytest.raises(ValueError, match=f"{path}: not a file"):
            read_video(path)


@pytest.mark.parametrize(("name", "told"), [("a.mp4", "states 6 frames, max_frames=5"), ("a.mkv", "more than max_fr")])
def test_more_frames_than_allowed(tmp_path, name, told):
    file = write(tmp_path / name, smooth(6))
    with pytest.raises(ValueError, match=rf"{name}: .*{told}"):
        read_video(file, max_frames=5)
    assert len(read_video(file, max_frames=6)[0]) == 6


class Clock:
    """time.monotonic, 40 seconds a look."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 40.0
        return self.now_s


def test_slow_decoding(tmp_path, monkeypatch):
    """40 s from frame to frame: the whole clip may take longer than timeout_s, one frame may not."""
    file = write(tmp_path / "a.mp4", smooth(6))
    monkeypatch.setattr(video_input, "time", Clock())
    assert len(read_video(file)[0]) == 6
    with pytest.raises(ValueError, match=r"a\.mp4: frame 0 took 40.0 s, timeout_s=30"):
        read_video(file, timeout_s=30)


def test_slow_reading(tmp_path):
    file = write(tmp_path / "a.mp4", smooth(6))
    with pytest.raises(ValueError, match=r"a\.mp4: nothing could be read within timeout_s=1e-09"):
        read_video(file, timeout_s=1e-9)
    with pytest.raises(ValueError, match="timeout_s=0: must be above 0"):
        read_video(file, timeout_s=0)


def test_what_write_video_writes(tmp_path):
    write_video(tmp_path / "a.mp4", smooth(9), 30000 / 1001)
    frames, fps = read_video(tmp_path / "a.mp4")
    assert error(frames, smooth(9)) < 4 and fps == pytest.approx(30000 / 1001)


def test_nothing_stays_open(tmp_path):
    good, cut = write(tmp_path / "a.mp4", NOISE), write(tmp_path / "b.mp4", NOISE, movflags="faststart")
    os.truncate(cut, cut.stat().st_size // 2)

    def use() -> tuple[int, int]:
        read_video(good)
        for fault in ({"path": cut}, {"path": good, "max_frames": 3}, {"path": tmp_path}):
            with pytest.raises(ValueError):
                read_video(**fault)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = use()
    for _ in range(5):
        after = use()
    assert after == before
