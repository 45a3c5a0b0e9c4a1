"""What the trunk makes of pictures: vision tower, projector, standardising."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policies.tokenizer import PAD_ID
from policies.trunk.instructions import Instructions
from policies.trunk.llama import mlp
from policies.trunk.modules import Modules
from policies.trunk.vision import FeatureNorm, VisionTower, conditioned, merge_tokens
from vla_rl.errors import EmbodimentMismatch
from vla_rl.types import CameraSpec, EmbodimentSpec, Observation


class PictureEncoder:
    """Pictures to image tokens. It makes its modules, of which the policy is to take those of
    `named_modules` as its own, under the names that checkpoints know."""

    def __init__(
        self,
        config: Any,
        embodiment: EmbodimentSpec,
        cameras: Sequence[CameraSpec],
        instructions: Instructions,
        words: int,
    ):
        self.config, self.cameras, self.instructions = config, cameras, instructions
        self.embodiment_name = embodiment.name
        d = config.llm_width
        sizes = [(camera.height, camera.width) for camera in cameras]
        self.shared = config.share_vision and len(set(sizes)) == 1
        self.vision: Modules[VisionTower] = Modules(
            VisionTower(config, *size) for size in (sizes[:1] if self.shared else sizes)
        )
        self.grids = [config.grid(*size) for size in sizes]
        for camera in cameras:
            config.check_camera(camera.name, camera.height, camera.width)
        self.film_words: nn.Embedding | None = None
        if config.film:  # from 0, so that words which no demonstration had say nothing
            self.film_words = nn.Embedding(words, d, padding_idx=PAD_ID)
            nn.init.zeros_(self.film_words.weight)
        self.tokens = [g[0] * g[1] // config.merge**2 for g in self.grids]  # of each camera
        features = config.vit_width * config.merge**2
        self.projector = nn.ModuleList(mlp(features, d, d) for _ in self.vision)
        self.norms: Modules[FeatureNorm] = Modules()
        if config.feature_norm != "none":
            self.norms.extend(FeatureNorm(n, d, config.feature_norm) for n in self.tokens)

    def named_modules(self) -> dict[str, nn.Module]:
        """What has weights, and the statistics, in the order in which optimisers number them."""
        words = {} if self.film_words is None else {"film_words": self.film_words}
        return {
            "vision": self.vision,
            **words,
            "projector": self.projector,
            "feature_norms": self.norms,
        }

    def freeze(self) -> None:
        """What learns here stays as it is."""
        for part in self.named_modules().values():
            part.requires_grad_(False)

    def learn_together(self, total: Callable[[Tensor], Tensor]) -> None:
        """Image tokens are standardised over the rows of all ranks."""
        for norm in self.norms:
            norm.total = total

    @contextlib.contextmanager
    def learning(self, valid: Tensor, training: bool) -> Iterator[None]:
        """Within the block, with ``training``, image tokens are standardised by the batch, and the
        statistics are kept.

        ``valid`` bool [b h]: where several ranks learn together, a row without any control step
        only fills up a share.
        """
        for norm in self.norms:
            norm.learning, norm.counted = training, valid.any(1)
        try:
            yield
        finally:
            for norm in self.norms:
                norm.learning, norm.counted = False, None

    def projected(self, observation: Observation, dtype: torch.dtype) -> list[Tensor]:
        """Each camera's image tokens [b N d] as the projector gives them, from pixels in
        ``dtype``."""
        images = self._images(observation)
        groups = [torch.cat(images)] if self.shared else images
        said = None
        if self.film_words is not None:
            ids, rows = self.instructions.ids(observation.instruction, self._device)
            repeats = len(images) if self.shared else 1
            said = self.film_words(ids).sum(1)[rows].repeat(repeats, 1)
        outputs = []
        for tower, projector, pixels, grid in zip(
            self.vision, self.projector, groups, self.grids, strict=False
        ):
            with conditioned(tower, said):
                x = tower(_normalized(pixels, dtype))
            outputs.append(projector(merge_tokens(x, grid, self.config.merge)))
        return list(outputs[0].chunk(len(images))) if self.shared else outputs

    def standardized(self, outputs: list[Tensor]) -> Tensor:
        """Image tokens float32 [b N d] of all cameras, from what the projector gave."""
        if self.norms:
            outputs = [norm(x) for norm, x in zip(self.norms, outputs, strict=True)]
        return torch.cat(outputs, dim=1).float()

    def mean_token(self, frames: Tensor, dtype: torch.dtype) -> Tensor:
        """The vision tower's mean token float32 [n vit_width] for frames uint8 [n H W 3] of the
        first camera."""
        camera = self.cameras[0]
        if tuple(frames.shape[1:]) != (camera.height, camera.width, 3):
            raise EmbodimentMismatch(
                f"the policy reads images of {camera.height}x{camera.width}x3, got "
                f"{tuple(frames.shape[1:])}: encode frames of camera {camera.name}"
            )
        pixels = _normalized(frames.to(self._device).permute(0, 3, 1, 2), dtype)
        return self.vision[0](pixels).float().mean(1)

    @property
    def _device(self) -> torch.device:
        return next(self.vision.parameters()).device

    def _images(self, observation: Observation) -> list[Tensor]:
        """The chosen cameras' images uint8 [b 3 H W] (channels-last in memory) on the policy's
        device."""
        images = []
        for camera in self.cameras:
            image = observation.images.get(camera.name)
            if image is None or tuple(image.shape[1:]) != (camera.height, camera.width, 3):
                got = {name: tuple(value.shape[1:]) for name, value in observation.images.items()}
                raise EmbodimentMismatch(
                    f"the policy reads camera {camera.name} at {camera.height}x{camera.width}x3, "
                    f"but the observation has {got}: use an env with the cameras of embodiment "
                    f"{self.embodiment_name}, or make the policy for the cameras of this env"
                )
            images.append(image.to(self._device, non_blocking=True).permute(0, 3, 1, 2))
        return images


def _normalized(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 → [-1, 1]. Integers up to 255 and their distance to 127.5 are exact in bfloat16."""
    return pixels.to(dtype).sub_(127.5).mul_(1 / 127.5)
