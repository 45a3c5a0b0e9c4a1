"""A policy that another program serves (``policy=remote``), as a policy of this project.

The server is of openpi's protocol. One of this project says which robot it is for, and gets a whole
batch in one message, with what fixes its sampling noise: its decisions are those that it would make
in this process. Any other is asked row by row; what it cannot say is taken from its first answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.config.serving import RemoteConfig
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.interfaces import Policy
from vla_rl.serving import rows
from vla_rl.serving.connection import Connections
from vla_rl.serving.packing import WireError
from vla_rl.specs import EmbodimentSpec, SlotObservation
from vla_rl.types import ActionChunk, Observation, PolicyOutput

_FIRST_SECONDS = 300.0  # a server may compile its policy when it is first asked
_MOST_STEPS = 4096  # of a chunk


class WirePolicy(Policy):
    """`vla_rl.interfaces.Policy`; ``version`` names the server's. It learns nothing: its decisions
    have no `replay`.

    A lost connection raises `PolicyLost`; the next decision connects anew, to the same policy or it
    is refused.
    """

    policy_type = "remote"

    def __init__(self, config: RemoteConfig, embodiment: EmbodimentSpec) -> None:
        self.config, self.embodiment = config, embodiment
        self._wire = Connections(config.url, config.timeout)
        weakref.finalize(self, self._wire.close)
        self._met: dict[str, Any] | None = None  # the metadata that were looked at
        self._about: dict[str, Any] = {}  # what a server of this project says of itself
        self._wire.open()
        self._meet()
        self._own_keys = rows.camera_keys(embodiment)
        self._images = {**self._own_keys, **config.images}
        if unknown := sorted(set(config.images) - set(embodiment.camera_names)):
            raise ConfigError(
                f"policy.images names the camera {unknown[0]!r}, and the env shows "
                f"{', '.join(embodiment.camera_names)}"
            )
        self.chunk_length = self._about["chunk_length"] if self._about else self._probed()
        self._executed = self._about["executed_steps"] if self._about else self.chunk_length
        self.version = f"{config.url}#{self._about.get('policy', 'openpi')}"

    @property
    def executed_steps(self) -> int:
        return self._executed

    def to(self, device: Any) -> WirePolicy:
        """Itself: where it computes is the server's business."""
        return self

    def _meet(self) -> None:
        """Look at who answers, where a connection is new. Raises where it is another's policy, or
        not the one before."""
        url, metadata, first = self.config.url, self._wire.metadata, self._met is None
        if metadata is self._met:
            return
        found = metadata.get(rows.ABOUT)
        about: dict[str, Any] = found if isinstance(found, dict) else {}
        if about and about.get("protocol") != rows.PROTOCOL:
            raise WireError(
                f"{url} is a vla-rl {about.get('version')} that speaks version "
                f"{about.get('protocol')!r} of the wire, this one {rows.PROTOCOL}: use the same "
                "version on both sides"
            )
        if about:
            self._check_own(about)
        if not first and about.get("policy") != self._about.get("policy"):
            raise WireError(
                f"{url} serves another policy now: {about.get('policy')}, before "
                f"{self._about.get('policy')}"
            )
        self._met, self._about = metadata, about

    def _check_own(self, about: Mapping[str, Any]) -> None:
        url, wanted = (
            self.config.url,
            {"policy": str, "chunk_length": int, "executed_steps": int, "rows": int},
        )
        try:
            theirs = EmbodimentSpec.from_dict(about["embodiment"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError(f"{url} describes no robot in its metadata ({error})") from None
        self.embodiment.require(theirs, "the env or robot here", f"the policy at {url}")
        for name, kind in wanted.items():
            value = about.get(name)
            if not isinstance(value, kind) or (
                isinstance(value, int) and not 0 < value <= _MOST_STEPS
            ):
                raise WireError(f"{url} says {name}={value!r} in its metadata")

    def _probed(self) -> int:
        """How many steps a chunk of a server has that does not say so: it is asked once, about a
        blank picture."""
        blank = {
            c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in self.embodiment.cameras
        }
        seen = SlotObservation(blank, np.zeros(self.embodiment.proprio_dim, np.float32), "wait")
        [answer] = self._wire.ask([self._row(seen)], _FIRST_SECONDS)
        return self._actions(answer, None).shape[0]

    # ----------------------------------------------------------------------------------------------
    # acting
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row. A server of openpi knows neither ``deterministic`` nor ``seeds``, and
        no log-prob is known of its actions (0). Raises `PolicyLost`, and `WireError` for an answer
        that is no chunk of this robot."""
        self._wire.open(self.config.reconnect)
        seen = [self._slot(observation, i) for i in range(len(observation))]
        if not self._about:
            answers = self._wire.ask([self._row(row) for row in seen])
            self._meet()
            found = torch.from_numpy(
                np.stack([self._actions(answer, self.chunk_length) for answer in answers])
            )
            valid = torch.ones(found.shape[:2], dtype=torch.bool)
            return PolicyOutput(ActionChunk(found, valid), torch.zeros(len(found)), {})
        most = self._about["rows"]
        parts = [
            self._own(
                seen[i : i + most], deterministic, None if seeds is None else seeds[i : i + most]
            )
            for i in range(0, len(seen), most)
        ]
        found, valid, log_prob = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return PolicyOutput(ActionChunk(found, valid), log_prob, {})

    def _own(
        self, seen: Sequence[SlotObservation], deterministic: bool, seeds: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, valid, log-probs of a server of this project."""
        asked = [self._row(row) for row in seen]
        if seeds is not None:
            asked = [row | {rows.SEED: int(seed)} for row, seed in zip(asked, seeds, strict=True)]
        [answer] = self._wire.ask(
            [{rows.ROWS: asked, rows.SAMPLE: not deterministic, rows.LOG_PROB: True}]
        )
        self._meet()
        found = self._actions(answer, len(seen), self.chunk_length)
        valid, log_prob = answer.get("valid"), answer.get("log_prob")
        if (
            not isinstance(valid, np.ndarray)
            or valid.dtype != bool
            or valid.shape != found.shape[:2]
        ):
            raise WireError(f"{self.config.url} does not say which of its steps are meant")
        if (
            not isinstance(log_prob, np.ndarray)
            or log_prob.dtype != np.float32
            or log_prob.shape[:1] != found.shape[:1]
        ):
            raise WireError(f"{self.config.url} sends no log-probs")
        return torch.from_numpy(found), torch.from_numpy(valid), torch.from_numpy(log_prob)

    def _row(self, seen: SlotObservation) -> dict[str, Any]:
        c = self.config
        if self._about:  # (whose robot is this one)
            return rows.written_row(seen, self._own_keys, rows.STATE, rows.PROMPT)
        return rows.written_row(seen, self._images, c.state, c.prompt, c.resize)

    @staticmethod
    def _slot(observation: Observation, i: int) -> SlotObservation:
        images = {name: pictures[i].cpu().numpy() for name, pictures in observation.images.items()}
        return SlotObservation(
            images, observation.proprio[i].cpu().numpy(), observation.instruction[i]
        )

    def _actions(self, answer: Mapping[str, Any], *leading: int | None) -> np.ndarray:
        """Finite float32 [*leading a] of an answer; None stands for any number."""
        url, a, found = self.config.url, self.embodiment.action_dim, answer.get("actions")
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
            raise WireError(
                f"{url} answers without actions: it has {', '.join(sorted(answer)) or 'nothing'}"
            )
        whole = found.ndim == len(leading) + 1
        if whole and found.shape[-1] != a:
            raise EmbodimentMismatch(
                f"{url} answers with {found.shape[-1]} numbers for each step, and the robot here "
                f"({self.embodiment.name}) takes {a}: {', '.join(self.embodiment.action_names)}. "
                "Ask a server for this robot"
            )
        if (
            not whole
            or not all(want in (None, n) for want, n in zip(leading, found.shape))
            or not found.size
        ):
            wanted = ", ".join("steps" if n is None else str(n) for n in (*leading, a))
            raise WireError(
                f"{url} answers with actions {list(found.shape)}, and [{wanted}] are needed"
            )
        if found.shape[-2] > _MOST_STEPS:
            raise WireError(f"{url} answers with {found.shape[-2]} steps, of at most {_MOST_STEPS}")
        if not np.isfinite(found).all():
            raise WireError(
                f"{url} answers with actions that are not finite: its policy, or what it reads, is "
                "broken"
            )
        return found.astype(np.float32, copy=False)
