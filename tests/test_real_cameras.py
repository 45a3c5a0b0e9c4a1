"""Cameras in processes of their own: the SDK's software device and recordings of it, files, and
what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from real_helpers import LIMITS

from benchmarks.robot.trials import Operator, driver
from real.body import Body, BodyConfig, StartError
from real.cameras.process import CameraConfig
from real.cameras.protocol import CameraLost, Changes, Grabbed, fitted
from real.journal import journals, read
from real.link import Client
from real.messages import Frame, Notice
from real.ring import Rings
from vla_rl.config.robot import compose
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage
from vla_rl.robot import session


def realsense():
    from real.cameras import realsense as module

    try:
        module.sdk()
    except (MissingPackage, MissingDependency) as error:
        pytest.skip(str(error))
    return module


def picture(number: int, height: int = 48, width: int = 84) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


WAITS = "camera wrist is gone"


class Scripted:
    """Numbered pictures at 50 a second; ``lost`` before the picture of that number, for as long
    as ``gone`` exists."""

    def __init__(self, lost: int = -1, gone: str = "", hang: int = -1):
        self.lost, self.gone, self.hang, self.number = lost, gone, hang, 0

    def open(self) -> None:
        if self.gone and Path(self.gone).exists():
            raise CameraLost("it is not plugged in")

    def grab(self, timeout_s: float) -> Grabbed:
        time.sleep(0.02)
        self.number += 1
        if self.number == self.lost:
            Path(self.gone).touch()
            raise CameraLost("somebody pulled the cable")
        if self.number == self.hang:
            time.sleep(60)
        return Grabbed(picture(self.number), self.number, 1000.0 + 0.02 * self.number)

    def close(self) -> None: ...


# ---------------------------------------------------------------------------------------- RealSense
def test_a_software_device_gives_its_numbers_stamps_and_pixels():
    device = realsense().SoftwareRealSense(48, 84)
    device.camera.open()
    for number in (3, 4, 7):
        device.show(picture(number), number, 0.5 * number)
        grabbed = device.camera.grab(2.0)
        assert (grabbed.device_no, grabbed.device_stamp) == (number, pytest.approx(0.5 * number))
        assert np.array_equal(grabbed.image, picture(number))
    assert device.camera.grab(0.01) is None, "nothing new"
    device.camera.close()


def test_depth_is_a_grey_picture_of_a_declared_range():
    module = realsense()
    device = module.SoftwareRealSense(48, 84, stream="depth")
    device.camera.open()
    millimetres = np.full((48, 84), 575, np.uint16)  # halfway of 0.15 to 1 m
    millimetres[0, :6] = [0, 40, 150, 1000, 1001, 65535]
    device.show(millimetres, 3, 1.5)
    grabbed = device.camera.grab(2.0)
    assert (grabbed.device_no, grabbed.device_stamp) == (3, pytest.approx(1.5))
    assert grabbed.image.shape == (48, 84, 3) and grabbed.image.dtype == np.uint8
    assert (grabbed.image == grabbed.image[..., :1]).all(), "three equal channels"
    assert grabbed.image[0, :6, 0].tolist() == [0, 255, 255, 1, 1, 1] and set(
        grabbed.image[1:].ravel()
    ) == {128}
    smaller = fitted(grabbed.image, 24, 42, grabbed.mixes)
    assert not grabbed.mixes and set(smaller.ravel()) <= {0, 1, 128, 255}, "no other shade"
    device.camera.close()
    with pytest.raises(
        ConfigError, match=r"no color pictures of stream_height=48 .*it offers no color stream"
    ):
        module.RealSenseCamera(stream_height=48, stream_width=84, device=device.device).open()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stream": "infrared"}, "stream=infrared: a RealSense camera gives color or depth"),
        ({"range_m": [1.0, 1.0]}, r"range_m=\[1\.0, 1\.0\]: give two distances in metres"),
        ({"range_m": [0.1, float("nan")]}, "nan"),
        ({"range_m": [-0.1, 0.5]}, "-0.1"),
        ({"range_m": 0.5}, "range_m=0.5"),
        ({"fps": "abc"}, r"options of cameras\.wrist \(realsense\) are wrong: .*'abc'"),
    ],
)
def test_a_stream_that_cannot_be_is_refused_without_a_device(wrong, said):
    with pytest.raises(ConfigError, match=said):
        CameraConfig.of("wrist", {"type": "realsense", **wrong}).make("wrist")


def test_a_recording_plays_what_was_recorded(tmp_path):
    module = realsense()
    device, path = module.SoftwareRealSense(48, 84), tmp_path / "seen.db3"
    recorder = module.sdk().recorder(str(path), device.device)
    device.camera._given = recorder
    device.camera.open()
    for number in range(5, 15):
        device.show(picture(number), number, 0.033 * number)
        assert device.camera.grab(2.0).device_no == number
        time.sleep(0.033)
    device.camera.close()
    del recorder, device.camera
    played = module.RealSenseCamera(file=str(path), stream_height=48, stream_width=84)
    played.open()
    seen = []
    while (grabbed := played.grab(1.0)) is not None:
        assert np.array_equal(grabbed.image, picture(grabbed.device_no))
        seen.append(grabbed.device_no)
    played.close()
    # two wait at most, so a busy machine may lose some; those that came are in order
    assert seen == sorted(set(seen)) and len(seen) >= 3 and set(seen) <= set(range(5, 15))
    with pytest.raises(
        ConfigError,
        match=r"no color pictures of stream_height=480 x stream_width=640 at fps=30.*48 x 84",
    ):
        module.RealSenseCamera(file=str(path)).open()


def test_cameras_that_are_not_there_are_named(tmp_path):
    module = realsense()
    with pytest.raises(CameraLost, match=r"there is no RealSense 000111: none is connected"):
        module.RealSenseCamera(serial="000111").open()
    with pytest.raises(ConfigError, match=r"recording .*nothing\.db3 cannot be played"):
        module.RealSenseCamera(file=str(tmp_path / "nothing.db3")).open()


def test_a_simulated_arms_pictures_can_take_the_way_of_a_real_cameras(tmp_path):
    realsense()
    config = BodyConfig(
        limits=str(LIMITS / "fake_point.yaml"),
        record=False,
        guard=False,
        camera_hz=20.0,
        camera_device="realsense",
    )
    with (
        Body(tmp_path, config) as body,
        contextlib.closing(Client(body.socket, "viewer")) as client,
    ):
        frames = watch(client, 5)
    assert len({frame.device_no for frame in frames}) == 5 and {
        frame.camera for frame in frames
    } == {"front"}


# ------------------------------------------------------------------------------------------- others
def test_a_video_through_opencv_repeats_no_number_but_for_a_frozen_picture(tmp_path):
    import cv2

    from real.cameras.opencv import OpenCVCamera

    path = tmp_path / "video.avi"
    # loses nothing
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"FFV1"), 20, (84, 48))
    for number in (1, 2, 2, 3):
        writer.write(picture(number)[..., ::-1])
    writer.release()
    camera = OpenCVCamera(str(path))
    camera.open()
    grabbed = [camera.grab(1.0) for _ in range(4)]
    assert [g.device_no for g in grabbed] == [0, 1, 1, 2]
    assert np.array_equal(grabbed[3].image, picture(3))
    with pytest.raises(CameraLost, match="gives no more pictures"):
        camera.grab(1.0)
    camera.close()
    with pytest.raises(CameraLost, match="cannot open the camera"):
        OpenCVCamera(str(tmp_path / "none.avi")).open()


def test_lerobots_cameras_are_known_by_their_names():
    pytest.importorskip("lerobot")
    from real.cameras.lerobot import LeRobotCamera

    with pytest.raises(ConfigError, match=r"lerobot knows no camera 'webcam': it knows .*opencv"):
        LeRobotCamera("webcam").open()
    with pytest.raises(ConfigError, match="options of lerobot's camera opencv are wrong"):
        LeRobotCamera("opencv", {"index": 0}).open()
    with pytest.raises(CameraLost, match="lerobot's camera opencv cannot be opened"):
        LeRobotCamera("opencv", {"index_or_path": "/dev/none"}).open()


def test_pictures_are_cut_to_the_shape_and_averaged_to_the_size():
    image = np.zeros((48, 84, 3), np.uint8)
    image[:, 18:66] = 200  # the middle 48 columns
    assert np.array_equal(fitted(image, 24, 24), np.full((24, 24, 3), 200))
    assert fitted(image, 48, 84) is image
    rows = np.arange(48, dtype=np.uint8)[:, None, None].repeat(84, 1).repeat(3, 2)
    assert fitted(rows, 24, 42)[:, 0, 0].tolist() == pytest.approx(
        [2 * i + 0.5 for i in range(24)], abs=0.5
    )
    changes = Changes()
    assert [changes.number(image), changes.number(image.copy()), changes.number(rows)] == [0, 0, 1]


# ---------------------------------------------------------------------------------------- processes
def watch(client: Client, count: int, seconds: float = 120.0) -> list[Frame]:
    """The next ``count`` frames."""
    found, deadline = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        message = client.receive(0.5)
        if isinstance(message, Frame):
            found.append(message)
    assert len(found) == count
    return found


def body(folder: Path, monkeypatch, record: bool = False, **options) -> Body:
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )
    camera = CameraConfig.of(
        "wrist", {"type": "test_real_cameras:Scripted", "height": 24, "width": 24, **options}
    )
    limits = str(LIMITS / "fake_point.yaml")
    return Body(
        folder,
        BodyConfig(
            limits=limits,
            guard=False,
            record=record,
            cameras={"wrist": camera},
            supervisor={"frame_age_s": 1.0},
        ),
    )


def test_a_cameras_pictures_reach_everybody_and_a_killed_one_is_started_again(
    tmp_path, monkeypatch
):
    with body(tmp_path, monkeypatch) as b:
        about = json.loads((b.run / "robot.json").read_text())
        assert {"name": "wrist", "height": 24, "width": 24}.items() <= about["embodiment"][
            "cameras"
        ][-1].items()
        assert about["supervisor"]["cameras"] == ["wrist"]
        client, rings = Client(b.socket, "viewer"), Rings()
        frame = watch(client, 3)[-1]
        assert np.array_equal(rings(frame), fitted(picture(frame.device_no), 24, 24))
        assert 0.0 <= time.monotonic() - frame.capture < 5.0
        first = b.processes["camera_wrist"]
        first.kill()
        first.wait()
        client.newest()
        time.sleep(2.1)  # before that it would not start anew
        assert b.ended() == "" and b.processes["camera_wrist"].pid != first.pid
        assert watch(client, 2)[0].ring != frame.ring
        client.close()


@contextlib.contextmanager
def led(b: Body) -> Iterator[None]:
    """As a launcher does: a camera whose process ended, of a busy machine maybe, starts again."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            b.ended()

    looks = threading.Thread(target=look)
    looks.start()
    try:
        yield
    finally:
        over.set()
        looks.join()


def test_the_arm_waits_for_a_camera_that_is_gone_and_the_record_has_its_pictures(
    tmp_path, monkeypatch
):
    with body(tmp_path, monkeypatch, record=True) as b:
        operator, policy = (
            Operator(b.socket),
            driver(b.socket, "fake", tmp_path / "driver.txt", "--sway"),
        )
        try:
            operator.watch(0.5)
            with led(b):
                operator.drive()
            operator.watch(1.0)
            b.processes["camera_wrist"].kill()
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not any(WAITS in str(m) for m in operator.seen):
                operator.watch(0.2)
            assert any(WAITS in m.value for m in operator.seen if isinstance(m, Notice)), (
                "it waits, and says for what"
            )
        finally:
            policy.kill()
            policy.wait()
            operator.client.close()
    (path,) = journals(tmp_path)
    assert len(read(path).frames["wrist"]) > 3


def test_an_unplugged_camera_is_opened_again_when_it_is_there(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    with body(tmp_path / "s", monkeypatch, lost=10, gone=str(gone)) as b:
        client = Client(b.socket, "viewer")
        watch(client, 3)
        while not gone.exists():
            time.sleep(0.05)
        time.sleep(1.5)
        gone.unlink()
        client.newest()
        assert watch(client, 2)
        log = (b.run / "camera_wrist.log.txt").read_text()
        assert "lost: somebody pulled the cable" in log and "there again" in log
        client.close()


def test_a_driver_that_hangs_ends_its_process_and_the_next_one_goes_on(tmp_path, monkeypatch):
    with body(tmp_path, monkeypatch, hang=20) as b:
        client, first = Client(b.socket, "viewer"), b.processes["camera_wrist"]
        first.wait(timeout=120)  # its own watchdog
        client.newest()
        assert b.ended() == "" and watch(client, 3)
        client.close()


def test_a_camera_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "gone").touch()
    with pytest.raises(StartError, match="camera_wrist did not start: it is not plugged in"):
        body(tmp_path / "a", monkeypatch, gone=str(tmp_path / "gone")).__enter__()
    with pytest.raises(StartError, match=r"options of cameras\.wrist .*fps"):
        body(tmp_path / "b", monkeypatch, fps=3).__enter__()


def test_options_of_cameras():
    given = [
        "cameras.wrist=realsense",
        "cameras.wrist.serial=017322071142",
        "cameras.wrist.height=84",
    ]
    settings = compose(["robot=fake", *given])
    config = session.body_config(settings).cameras["wrist"]
    assert (config.type, config.height, config.width) == ("realsense", 84, 640)
    assert dict(config.options) == {"serial": "017322071142"}, "as it stands on the camera"
    for wrong, said in (
        (
            "cameras.wrist=webcam",
            r"cameras\.wrist=webcam: there is no such camera, use one of realsense, opencv, lerobot",
        ),
        ("cameras.wrist={type: opencv, height: 0}", r"cameras\.wrist\.height=0: give pixels"),
    ):
        with pytest.raises(ConfigError, match=said):
            session.body_config(compose(["robot=fake", wrong]))
    with pytest.raises(ConfigError, match="only a simulated arm has that"):
        session.possible(
            compose(["robot=fake", "cameras.wrist=opencv"]),
            session.SessionRequest(lockstep=True, episodes=1),
        )


def test_a_name_that_the_robot_has_itself_is_refused(tmp_path, monkeypatch):
    camera = CameraConfig.of("front", {"type": "opencv"})
    config = BodyConfig(
        limits=str(LIMITS / "fake_point.yaml"), record=False, cameras={"front": camera}
    )
    with pytest.raises(StartError, match=r"cameras\.front: .* has a camera of that name itself"):
        Body(tmp_path, config).__enter__()
