"""Intel RealSense colour and depth streams through pyrealsense2: the device's own frame numbers and
hardware stamps.

The sensor is opened itself, without a pipeline, since recorded files and software devices have
sensors too, and two cameras of a session may share a device: one takes its colour, one its depth.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from real.cameras.protocol import CameraLost, Grabbed
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage

_WAITING = 2  # pictures between the driver and whoever grabs; older ones go
_FORMATS = {"color": "rgb8", "depth": "z16"}  # by stream


class RealSenseCamera:
    """``serial`` chooses one of several (empty: the first). ``stream_height`` × ``stream_width`` at
    ``fps`` is what the device is asked for. ``file`` plays a recording (.db3, or .bag of an SDK
    that wrote those) instead. ``device`` is an `rs.device` that the caller has. ``stream`` depth
    gives grey pictures: 255 at the first of ``range_m`` (m) and closer, 1 at the second and beyond,
    0 where the device measured nothing. Raises `ConfigError` for a stream or range that cannot
    be."""

    def __init__(
        self,
        serial: str = "",
        stream_height: int = 480,
        stream_width: int = 640,
        fps: int = 30,
        file: str = "",
        device: Any = None,
        stream: str = "color",
        range_m: Sequence[float] = (0.15, 1.0),
    ):
        if stream not in _FORMATS:
            raise ConfigError(f"stream={stream}: a RealSense camera gives {' or '.join(_FORMATS)}")
        if not is_range(range_m):
            raise ConfigError(f"range_m={range_m}: give two distances in metres, as [0.15,1.0]")
        self.stream, self.range_m = stream, (float(range_m[0]), float(range_m[1]))
        self.serial, self.file, self.fps = str(serial), file, int(fps)
        self.size = (int(stream_height), int(stream_width))
        self._given, self._sensor, self._queue = device, None, None  # type: Any, Any, Any
        self._context: Any = None

    def open(self) -> None:
        rs = sdk()
        device = self._given or self._find(rs)
        self._sensor, profile = self._stream(rs, device)
        self._queue = rs.frame_queue(_WAITING)
        try:
            self._sensor.open(profile)
            self._sensor.start(self._queue)
        except RuntimeError as error:
            raise CameraLost(f"{self._name} does not start: {error}") from None

    @property
    def _name(self) -> str:
        return f"RealSense {self.file or self.serial or 'camera'}"

    def _find(self, rs: Any) -> Any:
        self._context = rs.context()
        if self.file:
            try:
                return self._context.load_device(self.file)
            except RuntimeError as error:
                raise ConfigError(f"the recording {self.file} cannot be played: {error}") from None
        found = {d.get_info(rs.camera_info.serial_number): d for d in self._context.query_devices()}
        if self.serial not in found and (self.serial or not found):
            known = f"connected are {', '.join(found)}" if found else "none is connected"
            raise CameraLost(f"there is no {self._name}: {known}")
        return found[self.serial] if self.serial else next(iter(found.values()))

    def _stream(self, rs: Any, device: Any) -> tuple[Any, Any]:
        """(sensor, profile) of the stream that is asked for."""
        kind, form, offered = (
            getattr(rs.stream, self.stream),
            getattr(rs.format, _FORMATS[self.stream]),
            [],
        )
        for sensor in device.query_sensors():
            for profile in sensor.get_stream_profiles():
                if profile.stream_type() != kind or profile.format() != form:
                    continue
                video = profile.as_video_stream_profile()
                if (video.height(), video.width(), video.fps()) == (*self.size, self.fps):
                    return sensor, profile
                offered.append(f"{video.height()} x {video.width()} at {video.fps()}")
        kinds = ", ".join(dict.fromkeys(offered)) or f"no {self.stream} stream"
        raise ConfigError(
            f"{self._name} has no {self.stream} pictures of stream_height={self.size[0]} x "
            f"stream_width={self.size[1]} at fps={self.fps}: it offers {kinds}"
        )

    def grab(self, timeout_s: float) -> Grabbed | None:
        there, frame = self._queue.try_wait_for_frame(int(1000 * timeout_s))
        if not there:
            self._still_there()
            return None
        image = np.array(frame.get_data())
        if self.stream == "depth":
            image = grey(image * np.float32(frame.as_depth_frame().get_units()), *self.range_m)
        return Grabbed(
            image,
            frame.get_frame_number(),
            frame.get_timestamp() / 1000.0,
            mixes=self.stream == "color",
        )

    def _still_there(self) -> None:
        if self._given is None and not self.file:
            serials = [
                d.get_info(sdk().camera_info.serial_number) for d in self._context.query_devices()
            ]
            if not serials or (self.serial and self.serial not in serials):
                raise CameraLost(f"{self._name} was unplugged")

    def close(self) -> None:
        if self._sensor is not None:
            with contextlib.suppress(RuntimeError):
                self._sensor.stop()
                self._sensor.close()
        self._sensor = self._queue = None


def is_range(value: object) -> bool:
    """Two distances, the nearer first."""
    numbers = (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(v, (int, float)) for v in value)
    )
    return numbers and 0.0 <= value[0] < value[1] < math.inf  # type: ignore[index]


def grey(depth: np.ndarray, near: float, far: float) -> np.ndarray:
    """``depth`` float32 [H W] (m, 0: not measured) as a picture, uint8 [H W 3]: 255 at ``near``,
    evenly to 1 at ``far``."""
    shade = np.rint(255.0 - 254.0 * np.clip((depth - near) / (far - near), 0.0, 1.0)).astype(
        np.uint8
    )
    return np.repeat(np.where(depth > 0.0, shade, np.uint8(0))[..., None], 3, axis=-1)


class SoftwareRealSense:
    """A RealSense that exists in memory (the SDK's software device): pictures that are shown to it
    come out of ``camera``. For tests, and for a simulated arm whose pictures are to take the way of
    a real one's."""

    def __init__(self, height: int, width: int, fps: int = 30, stream: str = "color"):
        rs = self._rs = sdk()
        self.device = rs.software_device()
        self.sensor = self.device.add_sensor(stream)
        video, form = rs.video_stream(), getattr(rs.format, _FORMATS[stream])
        video.type, video.fmt, video.bpp, video.fps = (
            getattr(rs.stream, stream),
            form,
            3 if stream == "color" else 2,
            fps,
        )
        video.index, video.uid, video.width, video.height = 0, 0, width, height
        lens = rs.intrinsics()
        lens.width, lens.height, lens.ppx, lens.ppy, lens.fx, lens.fy = (
            width,
            height,
            width / 2,
            height / 2,
            width,
            width,
        )
        lens.model, lens.coeffs = rs.distortion.none, [0.0] * 5
        video.intrinsics = lens
        self._profile = self.sensor.add_video_stream(video).as_video_stream_profile()
        self.camera = RealSenseCamera(
            stream_height=height, stream_width=width, fps=fps, device=self.device, stream=stream
        )

    def show(self, image: np.ndarray, number: int, stamp: float) -> None:
        """``image`` uint8 [H W 3] RGB, or uint16 [H W] mm of depth, with the device's number and
        its stamp (s)."""
        frame = self._rs.software_video_frame()
        frame.pixels, frame.bpp, frame.depth_units = (
            np.ascontiguousarray(image),
            image[0, 0].nbytes,
            0.001,
        )
        frame.stride = frame.bpp * image.shape[1]
        frame.timestamp, frame.frame_number = 1000.0 * stamp, number
        frame.domain, frame.profile = self._rs.timestamp_domain.hardware_clock, self._profile
        self.sensor.on_video_frame(frame)


def sdk() -> Any:
    """pyrealsense2. Raises `MissingPackage` or `MissingDependency`."""
    try:
        import pyrealsense2
    except ModuleNotFoundError as error:
        raise MissingPackage("pyrealsense2", "real", "A RealSense camera") from error
    except ImportError as error:  # its own libraries
        raise MissingDependency(
            f"pyrealsense2 cannot be loaded ({error}). On Debian: apt-get install -y libusb-1.0-0 "
            "libudev1"
        ) from None
    return pyrealsense2
