"""Robustness evaluation on LIBERO after LIBERO-Plus: seven factors, applied to loaded scenes,
episode by episode.

`PerturbedLibero` is `LiberoSimulator` for episodes without a ``perturbation``, byte for byte. With
one ("camera:3": factor and level) it starts the same initial state changed by that factor; no scene
is rebuilt, and slots with other factors share it. What is drawn at random follows from task, split,
initial state and factor, so an episode repeats exactly, and the levels of one episode push in the
same direction. docs/how_to/robustness.md says what each level does and what differs from the
benchmark.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sim import perturb_image
from sim.libero.perturb_language import paraphrase
from sim.libero.settings import LiberoConfig
from sim.libero.simulator import LiberoSimulator, official_state
from sim.libero.tasks import suite_tasks
from vla_rl import splits
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec, Perturbation, SlotObservation, SlotStep

if TYPE_CHECKING:
    from sim.libero.backend import Snapshot, TaskScene

CAMERA = "agentview"  # what LIBERO-Plus moves and blurs; the wrist camera stays as it is
_ON_PICTURES = ("camera", "noise")
_log = logging.getLogger(__name__)


class PerturbedLibero(LiberoSimulator):
    """See the module's text."""

    perturbations: ClassVar[dict[str, Perturbation]] = {
        "camera": Perturbation("agent view from elsewhere: turned, farther away, tilted"),
        "robot": Perturbation("arm starts elsewhere, at rest"),
        "language": Perturbation("instruction in other words"),
        "light": Perturbation("lights dimmer or brighter, coloured, turned; shadows"),
        "background": Perturbation("table, floor and walls in other colours or textures"),
        "noise": Perturbation("agent view blurred or in fog"),
        "layout": Perturbation("objects elsewhere"),
        "robot_benchmark": Perturbation(
            "robot as LIBERO-Plus runs it: largely undone by its reset", control=True
        ),
        "no_instruction": Perturbation("empty instruction", (1,), control=True),
        "other_instruction": Perturbation("instruction of another task", (1,), control=True),
    }

    def __init__(self, config: LiberoConfig) -> None:
        super().__init__(config)
        self._postures: dict[int, np.ndarray] = {}

    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """As `LiberoSimulator.start`. `ConfigError` for a perturbation that does not exist or
        cannot show here."""
        self._check(episode)
        self._postures.pop(slot, None)
        observation = super().start(slot, episode)
        factor, scene = episode.perturbed[0], self.scene(episode.task_id)
        if factor == "robot":  # the arm is drawn towards where it starts, as in LIBERO-Plus
            self._postures[slot] = self.slot(slot).data.qpos[scene.controller.qpos_index].copy()
        elif factor == "robot_benchmark":
            self._postures[slot] = self._benchmark_posture(episode, scene)
        return observation

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        if slot not in self._postures:
            return super().step(slot, actions)
        with self.scene(self.slot(slot).episode.task_id).posture(self._postures[slot]):
            return super().step(slot, actions)

    def edit_initial_state(
        self, episode: EpisodeSpec, scene: TaskScene, snapshot: Snapshot
    ) -> Snapshot:
        """The snapshot under the episode's perturbation."""
        from sim.libero import perturb_scene

        factor, level = episode.perturbed
        rng = self._rng(episode)
        scene.world.apply(snapshot.edits)  # else the model may hold what another slot has edited
        if factor == "camera":
            targets = perturb_scene.target_positions(scene, snapshot)
            edits = perturb_scene.camera_edits(scene.model, CAMERA, level, rng, targets)
        elif factor == "light":
            edits = perturb_scene.light_edits(scene.model, level, rng)
        elif factor == "background":
            edits = perturb_scene.background_edits(scene, level, rng)
        elif factor == "robot":
            return perturb_scene.displaced_arm(scene, snapshot, level, rng)
        elif factor == "robot_benchmark":
            with scene.posture(self._benchmark_posture(episode, scene)):
                return official_state(self.config, scene, episode)
        elif factor == "layout":
            return perturb_scene.displaced_objects(
                scene, snapshot, level, rng
            ) or self._unperturbed(episode, snapshot)
        else:
            return snapshot
        if edits is None:
            return self._unperturbed(episode, snapshot)
        return replace(snapshot, edits={**snapshot.edits, **edits})

    @staticmethod
    def _unperturbed(episode: EpisodeSpec, snapshot: Snapshot) -> Snapshot:
        _log.warning(
            "%s: nothing suitable was found for initial state %d (%s) of %s, which runs "
            "unperturbed",
            episode.perturbation,
            episode.init_state_id,
            episode.split,
            episode.task_id,
        )
        return snapshot

    def instruction_of(self, episode: EpisodeSpec) -> str:
        instruction = super().instruction_of(episode)
        factor, level = episode.perturbed
        if factor == "language":
            problem = self.task(episode.task_id).problem
            things = {*problem.objects.values(), *problem.fixtures.values()}
            return paraphrase(instruction, level, self._rng(episode), things)
        if factor == "no_instruction":
            return ""
        if factor == "other_instruction":
            others = sorted(
                {task.instruction for task in suite_tasks(self.config.suite, self.config.files)}
                - {instruction}
            )
            return others[self._rng(episode).integers(len(others))]
        return instruction

    def picture_of(self, slot: int, images: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        s = self.slot(slot)
        factor, level = s.episode.perturbed
        if factor != "noise":
            return images
        kind = perturb_image.KINDS[self._rng(s.episode).integers(len(perturb_image.KINDS))]
        severity = level * perturb_image.SEVERITIES / len(self.perturbations[factor].levels)
        return {
            **images,
            CAMERA: perturb_image.corrupt(
                images[CAMERA], kind, severity, self._rng(s.episode, s.elapsed)
            ),
        }

    def _benchmark_posture(self, episode: EpisodeSpec, scene: TaskScene) -> np.ndarray:
        from sim.libero.perturb_scene import arm_offset

        return scene.controller.rest + arm_offset(episode.perturbed[1], self._rng(episode))

    def _rng(self, episode: EpisodeSpec, control_step: int = -1) -> np.random.Generator:
        parts = (
            episode.perturbed[0],
            episode.task_id,
            episode.split,
            episode.init_state_id,
            control_step,
        )
        return np.random.default_rng(splits.stable_seed("perturb", *parts))

    def _check(self, episode: EpisodeSpec) -> None:
        if not episode.perturbation:
            return
        factor, level = episode.perturbed
        if factor not in self.perturbations or level not in self.perturbations[factor].levels:
            known = ", ".join(
                f"{name} ({min(p.levels)} to {max(p.levels)})"
                for name, p in self.perturbations.items()
            )
            raise ConfigError(
                f"perturbation {episode.perturbation!r} of libero is unknown: use "
                f"name:level, one of {known}."
            )
        if factor in _ON_PICTURES and CAMERA not in self.config.cameras:
            raise ConfigError(
                f"perturbation {factor!r} of libero changes the camera {CAMERA}, which is not "
                f"among {self.config.cameras}: leave it out, or set env.cameras=[{CAMERA}]."
            )
        if factor == "robot_benchmark" and not self.config.is_official(episode.split):
            raise ConfigError(
                f"perturbation {factor!r} of libero is about official initial states, but those of "
                f"split {episode.split!r} are sampled: evaluate with --split held_out, or set "
                "env.init_states=official."
            )
