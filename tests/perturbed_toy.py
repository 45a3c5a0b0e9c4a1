"""A toy env that declares perturbations, for tests of the evaluation loop:
env.type=perturbed_toy:PerturbedToy."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sim import toy
from vla_rl.specs import EpisodeSpec, Perturbation, SlotObservation


class PerturbedToy(toy.ToyReach):
    """``grey`` hides the image at level 2, ``mute`` says nothing; ``wrong`` is a control."""

    Config = toy.ToyConfig

    perturbations: ClassVar[dict[str, Perturbation]] = {
        "grey": Perturbation("grey image", (1, 2)),
        "mute": Perturbation("no words", (1, 2, 3)),
        "wrong": Perturbation("other words", (1,), control=True),
    }

    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        return _perturbed(super().start(slot, episode), episode)

    def step(self, slot: int, actions):
        episode = self._slots[slot].episode
        step = super().step(slot, actions)
        return replace(step, observation=_perturbed(step.observation, episode))


def _perturbed(seen: SlotObservation, episode: EpisodeSpec) -> SlotObservation:
    name, level = episode.perturbed
    if name == "grey" and level == 2:
        return replace(
            seen, images={camera: 0 * image + 128 for camera, image in seen.images.items()}
        )
    words = {"mute": "", "wrong": "go to the green"}.get(name, seen.instruction)
    return replace(seen, instruction=words)
