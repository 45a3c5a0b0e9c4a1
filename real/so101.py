"""A person's SO-101: what lerobot needs to know of it, in a folder, and what that folder lacks.

``arm.yaml`` is the robot's config (``robot=FOLDER/arm.yaml``), ``leader.yaml`` the leader's, where
there is one, ``limits.yaml`` the arm's limits, ``calibration/`` what lerobot calibrated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from real.kit import ArmKit, Row, cameras_row
from real.robots import lerobot
from real.robots.servos import reported
from real.sweep import as_file, downwards, upwards
from real.teleop import leader
from vla_rl.errors import ConfigError, UserError, first_line, install_command

FOLLOWER, LEADER = "so101_follower", "so101_leader"
_WHAT = {FOLLOWER: "robot", LEADER: "leader arm"}
FIRST = {  # limits before somebody has found better ones (degrees and shares a second)
    "joint_speed": 60.0,
    "joint_acceleration": 600.0,
    "joint_jerk": 30_000.0,
    "joint_step": 10.0,
    "joint_margin": 1.0,
    "observation_age": 0.3,
}
# What an action may ask for, of any SO-101 (degrees from the middle of a joint's range, percent).
_HIGH = (110.0, 100.0, 96.0, 95.0, 160.0, 100.0)
_LOW = (*(-high for high in _HIGH[:5]), 0.0)


class SO101Arm(lerobot.LeRobotArm):
    """An action may ask for the same of every arm, however it is calibrated, and so policies and
    recordings go from one to another, and from `env=so101` to all. Where an arm may go is still its
    own limits."""

    def __init__(self, type: str = FOLLOWER, *more: Any, **options: Any):
        super().__init__(type, *more, **options)
        self.embodiment = dataclasses.replace(self.embodiment, action_low=_LOW, action_high=_HIGH)


class Kit(ArmKit):
    what, setup = "SO-101", "vla-rl robot so101 setup --port PORT"

    @property
    def leader(self) -> Path:
        return self.folder / "leader.yaml"

    @property
    def calibration(self) -> Path:
        return self.folder / "calibration"

    def overrides(self) -> list[str]:
        """Its files' places are those of the folder, wherever that is now."""
        found = [
            *super().overrides(),
            f"robot.options.options.calibration_dir={self.calibration}",
        ]
        if self.leader.is_file():
            found += ["teleop=lerobot", f"teleop.calibration_dir={self.calibration}"]
            found += [f"teleop.{key}={value}" for key, value in self.read(self.leader).items()]
        return found

    def options(self, kind: str) -> dict[str, Any]:
        """lerobot's own config of the follower or the leader."""
        if kind == FOLLOWER:
            given = dict(self.read(self.arm)["options"]["options"])
        else:
            given = {key: self.read(self.leader)[key] for key in ("port", "id")}
        return {**given, "calibration_dir": str(self.calibration)}


# -------------------------------------------------------------------------------------------- setup
def setup(
    folder: Path,
    port: str,
    leader_port: str,
    motors: bool,
    again: bool,
    say: Callable[[str], None],
) -> Kit:
    """Write the kit, calibrate what is not, with lerobot's own dialogue on the terminal.
    ``motors``: number them first; ``again``: calibrate anew. Raises `UserError`."""
    kit = Kit(folder)
    own = {"port": port, "id": "follower", "use_degrees": True, "cameras": {}}
    arm: dict[str, Any] = {
        "driver": "real.so101:SO101Arm",
        "options": {
            "type": FOLLOWER,
            # (for a session that names this file alone)
            "options": {**own, "calibration_dir": str(kit.calibration.resolve())},
        },
        "short": {"port": "options.options.port"},
        "limits": str(kit.limits.resolve()),
        "supervisor": {"required": ["guard", "recorder", "console", "launcher"]},
    }
    files: dict[Path, dict[str, Any]] = {kit.arm: arm}
    if leader_port:
        files[kit.leader] = {
            "type": LEADER,
            "port": leader_port,
            "id": "leader",
            "use_degrees": True,
            "follows": True,
        }
    for path, values in files.items():
        kit.write(path, values)
    kit.calibration.mkdir(exist_ok=True)
    _calibrate(kit, FOLLOWER, motors, again, say)
    if leader_port:
        _calibrate(kit, LEADER, motors, again, say)
    if not kit.limits.exists() or again:
        follower = lerobot.LeRobotArm(FOLLOWER, kit.options(FOLLOWER))
        first = {
            "joint_low": upwards(follower.limits.joint_low),
            "joint_high": downwards(follower.limits.joint_high),
            **FIRST,
        }
        about = "first limits of this SO-101, from its calibration; better: vla-rl robot limits"
        kit.write(kit.limits, as_file(first, follower.embodiment.action_units, (), about))
    return kit


def _device(kit: Kit, kind: str) -> Any:
    options = kit.options(kind)
    if kind == FOLLOWER:
        return lerobot.build(kind, options)
    return leader.build(leader.LeaderConfig(kind, options))


@contextlib.contextmanager
def _opened(kit: Kit, kind: str) -> Iterator[Any]:
    """lerobot's device with its bus open and nothing written; closed with torque as it is. Raises
    `ConfigError` where a motor does not answer."""
    what, device = _WHAT[kind], _device(kit, kind)
    try:
        device.bus.connect(handshake=False)
        silent = [name for name, motor in device.bus.motors.items() if not _answers(device, motor)]
    except Exception as error:  # whatever the vendor's SDK raises
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"the {what} at {device.bus.port} cannot be opened: {lines[0] if lines else error!r} "
            "Check its port (lerobot-find-port)"
        ) from None
    try:
        if silent:
            raise ConfigError(
                f"the {what} at {device.bus.port}: {', '.join(silent)} did not answer as an "
                "STS3215. Check power and cables; new motors have no numbers yet: add --motors"
            )
        yield device
    finally:
        with contextlib.suppress(Exception):
            device.bus.disconnect(disable_torque=False)


def _answers(device: Any, motor: Any) -> bool:
    """Also with an error in its answer, which lerobot takes for none."""
    bus = device.bus
    for _ in range(3):
        model, sound, _error = bus.packet_handler.ping(bus.port_handler, motor.id)
        if sound == 0:
            return bool(model == bus.model_number_table[motor.model])
    return False


def _calibrate(kit: Kit, kind: str, motors: bool, again: bool, say: Callable[[str], None]) -> None:
    what = _WHAT[kind]
    if motors:
        say(f"the motors of the {what}, one after the other")
        _device(kit, kind).setup_motors()
    with _opened(kit, kind) as device:
        lerobot.require_limp(device, f"the {what}")
        if device.is_calibrated and not again:
            return say(f"the {what} is calibrated: {device.calibration_fpath}")
        try:
            device.calibrate()
        except (Exception, EOFError) as error:
            raise ConfigError(
                f"the {what} was not calibrated: {type(error).__name__}: {first_line(error)}"
            ) from None
        return say(f"the {what} is calibrated now: {device.calibration_fpath}")


# ------------------------------------------------------------------------------------------- doctor
def examine(folder: Path) -> list[Row]:
    """What this arm lacks for a session. Its ports are opened and read; nothing is written."""
    kit, rows = Kit(folder), []
    for package in ("lerobot", "scservo_sdk"):
        there = importlib.util.find_spec(package) is not None
        extra = "lerobot" if package == "lerobot" else "so101"
        fix = install_command(extra, package)
        rows.append((package, there, "installed" if there else "not installed", fix))
    fix = f"vla-rl robot so101 setup --arm {folder} --port PORT"
    rows.append(("set-up", kit.arm.is_file(), str(kit.arm), fix))
    if not all(good for _, good, _, _ in rows):
        return rows
    rows += _examined(kit, FOLLOWER, "follower")
    if kit.leader.is_file():
        rows += _examined(kit, LEADER, "leader")
    try:
        limits = kit.limits_row(lerobot.LeRobotArm(FOLLOWER, kit.options(FOLLOWER)))
    except UserError as error:
        limits = "limits", False, str(error), "see there"
    return [*rows, limits, cameras_row(kit.options(FOLLOWER).get("cameras") or ())]


def _examined(kit: Kit, kind: str, name: str) -> Iterator[Row]:
    port, id = (str(kit.options(kind).get(key, "")) for key in ("port", "id"))
    if not os.path.exists(port):
        yield f"{name}'s port", False, f"{port} is not there", "connect it; lerobot-find-port"
        return
    if not os.access(port, os.R_OK | os.W_OK):
        fix = "sudo usermod -aG dialout $USER, then log in again"
        yield f"{name}'s port", False, f"no permission for {port}", fix
        return
    yield f"{name}'s port", True, port, ""
    setup = f"vla-rl robot so101 setup --arm {kit.folder} --again ..."
    file = kit.calibration / f"{id}.json"
    yield f"{name}'s calibration", file.is_file(), str(file), setup
    try:
        with _opened(kit, kind) as device:
            yield f"{name}'s motors", True, f"{len(device.bus.motors)} answer", ""
            same = bool(device.is_calibrated)
            said = "as in the file" if same else "their motors hold another calibration"
            yield f"{name}'s zeros", same, said, setup
            yield _health(device, name)
    except UserError as error:
        yield f"{name}'s motors", False, str(error), "see there"
    except Exception as error:  # its bus, meanwhile
        yield f"{name}'s motors", False, first_line(error), "try again; check cable and power"


def _health(device: Any, name: str) -> Row:
    status = device.bus.sync_read("Status", normalize=False)
    volts = device.bus.sync_read("Present_Voltage", normalize=False)
    wrong = list(reported(status.items()))
    said = f"{min(volts.values()) / 10:.1f} V" + (f"; {'; '.join(wrong)}" if wrong else "")
    return f"{name}'s power", not wrong, said, "check the power supply; let hot motors cool down"
