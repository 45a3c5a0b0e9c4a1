"""What ``vla-rl robot so101`` and ``vla-rl robot franka`` have in common: the files of one arm in a
folder stand in front of the overrides of any session."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Adds = Sequence[Callable[[Any], argparse.ArgumentParser]]  # of `vla_rl.commands.robot`


@dataclass(frozen=True)
class OwnArm:
    """``module`` of `real` has its ``Kit`` and what ``examine`` finds of it. A session goes without
    what is in ``spare``."""

    name: str
    module: str
    spare: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path("outputs") / self.name

    def add(self, kinds: Any, text: str, adds: Adds) -> Any:
        """``doctor``, ``limits``, and what ``adds`` add to `kinds`, with the arm's own overrides in
        front. Returns where further steps are added."""
        parser = kinds.add_parser(self.name, help=text, description=text)
        steps = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
        self.step(steps, "doctor", self.run_doctor, "what this arm lacks, and how to get it")
        limits = self.step(steps, "limits", self.run_limits, "its limits, from a sweep by hand")
        limits.add_argument(
            "--seconds",
            type=float,
            default=0.0,
            metavar="S",
            help="default: until Enter is pressed",
        )
        for add_step in adds:
            step = add_step(steps)
            self.add_folder(step)
            step.set_defaults(function=self._with_arm(step.get_default("function")))
        return steps

    def step(
        self, steps: Any, name: str, function: Callable[..., Any], said: str
    ) -> argparse.ArgumentParser:
        step: argparse.ArgumentParser = steps.add_parser(name, help=said, description=said)
        step.set_defaults(function=function)
        self.add_folder(step)
        return step

    def add_folder(self, step: argparse.ArgumentParser) -> None:
        words = f"its files; default: {self.folder}"
        step.add_argument("--arm", type=Path, default=self.folder, metavar="FOLDER", help=words)

    def _kit(self, folder: Path) -> Any:
        from vla_rl import build

        return build.attribute(f"{self.module}:Kit")(folder)

    def _with_arm(self, function: Callable[[argparse.Namespace], Any]) -> Callable[..., Any]:
        """The command, with the arm's overrides before the person's."""

        def command(arguments: argparse.Namespace) -> Any:
            own = list(self._kit(arguments.arm).overrides())
            if "robot" in arguments:  # of learn
                arguments.robot, own = own[0].removeprefix("robot="), own[1:]
            arguments.overrides = [*own, *arguments.overrides]
            return function(arguments)

        return command

    def run_doctor(self, arguments: argparse.Namespace) -> int:
        """Exit status 1 where the arm cannot be driven yet."""
        from vla_rl import build
        from vla_rl.doctor.machine import FAIL, MISSING, OK, Check, listed

        rows = build.attribute(f"{self.module}:examine")(arguments.arm)
        checks = [
            Check(
                what, OK if good else MISSING if what in self.spare else FAIL, said,
                "" if good else fix,
            )
            for what, good, said, fix in rows
        ]  # fmt: skip
        print("\n".join(listed(checks)))
        return int(any(check.status == FAIL for check in checks))

    def run_limits(self, arguments: argparse.Namespace) -> None:
        from vla_rl.config.robot import compose
        from vla_rl.robot.limits import find

        kit = self._kit(arguments.arm)
        own = [o for o in kit.overrides() if not o.startswith("teleop")]
        find(compose(own, moves=False), kit.limits, arguments.seconds, print)
