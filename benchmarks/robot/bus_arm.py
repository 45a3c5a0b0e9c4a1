"""A session in virtual time with an SO-101 behind its serial bus: lerobot's own follower and its
maker's SDK, unchanged, on the pty of `sim.so101.bus`; only the clock of the SDK is another, and its
bytes take no pty's time (`_Line`).

Whenever the SDK looks at that clock, half a millisecond has passed: for the arm, and for an answer
that is on its way. So what a call costs is counted, a packet that is lost costs its time-out, and
what this machine is busy with changes nothing. The supervisor waits for the bus, as it does without
a process of the arm's own: the ticks that it misses meanwhile are left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from real.body import BodyConfig
from real.lockstep import Lockstep
from real.robots.guarded import Guarded
from real.robots.simulated import Picture
from real.so101 import FIRST, FOLLOWER, SO101Arm
from real.sweep import as_file, downwards, upwards
from real.tasks import parse
from sim.so101 import servos
from sim.so101.bus import Bus
from sim.so101.joints import NAMES
from sim.so101.model import STEP_S
from sim.so101.serve import MOUNTED
from sim.so101.simulator import CAMERAS
from sim.so101.tasks import TASKS, place_cube
from sim.so101.world import Judge, Scene, World
from vla_rl.specs import CameraSpec

LOOK_S = 0.0005  # between two looks at the clock
LATENCY_S = 0.001  # of a USB adapter


class BusArm:
    """The arm in ``scene`` at its table, on a bus in ``folder``, as a `Robot` that a simulator's
    session can reset; it starts connected. ``cameras``: pixels a side (0: blank)."""

    def __init__(self, folder: Path, scene: Scene, cameras: int):
        folder.mkdir(parents=True, exist_ok=True)
        # the arm's own time, ahead of the session's while a call lasts
        self.now = self.session_now = 1.0
        self._due = 0.0  # physics (s)
        self.late_s = LATENCY_S  # of every answer
        self.heard = self.now  # when it answered last
        self.world = World(scene)
        self.world.begin(place_cube(0, "held_out"))
        self.bus = Bus(folder / "follower", MOUNTED["follower"], pace=STEP_S, world=self.world)
        self.bus.pace = 0.0  # (time passes here alone)
        self.bus.cable.plug()
        # (a policy acts on pictures: without any they are blank)
        self.size, self.cameras = cameras or 8, CAMERAS if cameras else CAMERAS[:1]
        self._blank, self._number = not cameras, -1
        calibrated(self.bus, folder / "follower.json")
        options = {"port": str(folder / "follower"), "id": "follower", "use_degrees": True,
                   "cameras": {}, "calibration_dir": str(folder)}  # fmt: skip
        self.own = SO101Arm(FOLLOWER, options, clock=lambda: self.session_now)
        self._wired(self.own.device.bus.port_handler)
        self._robot = Guarded(self.own)
        self._robot.connect()
        self.limits = self.own.limits
        self.name, self.begun = self._robot.name, 0
        seen = tuple(CameraSpec(name, self.size, self.size) for name in self.cameras)
        self.embodiment = dataclasses.replace(self._robot.embodiment, cameras=seen)
        self.capabilities = dataclasses.replace(self._robot.capabilities, resets=True)
        self.tasks = {
            name: {"instruction": task.spec.instructions[0], "horizon": task.spec.horizon}
            for name, task in TASKS.items()
        }
        self._judge: Judge | None = None

    # ------------------------------------------------------------------------------------- its time
    def _look(self) -> float:
        """The clock that lerobot's SDK has (ms)."""
        self._pass(LOOK_S)
        return 1e3 * self.now

    def _wired(self, port: Any) -> None:
        """``port`` of lerobot's SDK has that clock, and a `_Line` whenever it is opened."""
        setup = port.setupPort

        def opened(speed: int) -> Any:
            done = setup(speed)
            port.ser = self._line = _Line(port.ser, self)
            return done

        port.getCurrentTime, port.setupPort = self._look, opened

    def unplug(self) -> None:
        self.bus.cable.unplug()
        self._line.out = True

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self._due += seconds
        steps = int(self._due / STEP_S + 1e-6)
        if steps > 0:
            self._due -= steps * STEP_S
            self.bus.advance(steps * STEP_S)

    def advance_to(self, now: float) -> None:
        self.session_now = max(now, self.now)
        if now > self.now:
            self._pass(now - self.now)

    # ----------------------------------------------------------------------------------- as a robot
    def observe(self) -> Any:
        seen = self._robot.observe()
        self.heard = self.now
        return seen

    def command(self, reference: Any) -> None:
        self._robot.command(reference)

    def hold(self) -> None:
        self._robot.hold()

    def stop(self) -> bool:
        return self._robot.stop()

    def clear(self) -> None:
        self._robot.clear()

    def close(self) -> None:
        """Of the session: the bus stays as it is."""

    def connect(self) -> None:
        """It is."""

    def begin(self, episode: dict[str, Any]) -> None:
        """The arm stands where episodes begin, the cube where the held-out state of that number has
        it."""
        task = parse(episode["task"])
        self.world.begin(place_cube(max(task.number, 0), "held_out"))
        self.bus.feel()
        for servo in self.bus.servos:
            servo.set_word(servos.GOAL, servo.word(servos.POSITION))
        self._judge, self.begun = Judge(TASKS[task.name], self.world), self.begun + 1

    def success(self) -> bool:
        if self._judge is None:
            return False
        self._judge.tracker.update(opening=False)
        return self._judge.success()

    def pictures(self) -> list[Picture]:
        if self._blank:
            seen = dict.fromkeys(self.cameras, np.zeros((self.size, self.size, 3), np.uint8))
        else:
            seen = self.world.scene.render(self.world.data, self.cameras, self.size)
        self._number += 1
        return [Picture(name, self._number, self.now, image) for name, image in seen.items()]


class _Line:
    """An open serial port whose bytes are at the servos at once, and whose answers come when they
    are due in ``arm``'s time: a pty takes as long as this machine is busy. ``out``: it is the
    real one, which has hung up."""

    def __init__(self, port: Any, arm: BusArm):
        self._port, self._arm = port, arm
        self._coming: deque[tuple[float, bytes]] = deque()
        self._came, self.out = b"", False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def write(self, packet: Any) -> Any:
        if self.out:
            return self._port.write(packet)
        answer = self._arm.bus.answer(bytes(packet))
        self._coming.append((self._arm.now + self._arm.late_s, answer))
        return len(packet)

    def read(self, length: int) -> Any:
        if self.out:
            return self._port.read(length)
        self._arrive()
        found, self._came = self._came[:length], self._came[length:]
        return found

    def reset_input_buffer(self) -> None:
        self._port.reset_input_buffer()
        self._arrive()
        self._came = b""

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self._arm.now:
            self._came += self._coming.popleft()[1]


def calibrated(bus: Bus, file: Path) -> None:
    """lerobot's ``file`` of an arm that was calibrated by its whole range, and the same numbers in
    its servos."""
    rows = {}
    for motor, servo, (low, high) in zip(NAMES, bus.servos, bus.arm.joints.ranges):
        half = servos.STEPS // 2
        if motor != "wrist_roll":
            half = round((high - low) * servos.STEPS / (4 * np.pi))
        middle = servo.mounted + round((low + high) * servos.STEPS / (4 * np.pi))
        row = {"id": servo.id, "drive_mode": 0, "homing_offset": middle - 2047}
        row |= {"range_min": max(2047 - half, 0), "range_max": min(2047 + half, 4095)}
        rows[motor] = row
        servo.write(servos.LOCK, b"\x00")
        servo.set_word(servos.OFFSET, row["homing_offset"], 11)
        servo.write(servos.OFFSET, bytes(servo.memory[servos.OFFSET : servos.OFFSET + 2]))
        for place, key in ((servos.MIN, "range_min"), (servos.MAX, "range_max")):
            servo.write(place, row[key].to_bytes(2, "little"))
    file.write_text(json.dumps(rows), encoding="utf-8")


class BusSession(Lockstep):
    """`Lockstep` with that arm, by the first limits of a kit. ``frozen_until``: what tells the bus
    anything stands still."""

    def __init__(self, folder: Path, scene: Scene, cameras: int = 0, thinking_s: float = 0.0):
        self.frozen_until = 0.0
        self._place, self._scene, self._cameras = folder, scene, cameras
        supervisor: dict[str, Any] = {"required": ["guard", "recorder"]}
        if cameras:
            supervisor["cameras"] = list(CAMERAS)
        file = folder / "limits.yaml"
        super().__init__(
            folder / "session", BodyConfig(str(file), supervisor=supervisor), thinking_s
        )

    def _made(self, config: BodyConfig) -> tuple[Any, Any]:
        arm = BusArm(self._place, self._scene, self._cameras)
        ends = {
            "joint_low": upwards(arm.limits.joint_low),
            "joint_high": downwards(arm.limits.joint_high),
        }
        text = as_file({**ends, **FIRST}, arm.embodiment.action_units, (), "first limits of a kit")
        Path(config.limits).write_text(text, encoding="utf-8")
        return arm, arm

    def _step(self, conductor: Any, policy: Any) -> None:
        """Ticks that the bus took are left out."""
        hz = self.supervisor.session.config.hz
        self._tick = max(self._tick, int((self.robot.now - 1.0) * hz) - 1)
        if self.now < self.frozen_until:
            self._tick += 1
            self.now = 1.0 + self._tick / hz
            self.robot.advance_to(self.now)
            return
        super()._step(conductor, policy)
