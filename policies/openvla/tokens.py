"""Prompts and action tokens of OpenVLA, and the way between a token and a physical action.

Sources: openvla-oft `action_tokenizer.py`, `modeling_prismatic.py`, `openvla_utils.py` (arXiv
2406.09246, 2502.19645).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.errors import EmbodimentMismatch, UserError
from vla_rl.types import EmbodimentSpec

BOS_ID, STOP_ID, SPACE_ID = 1, 2, 29871  # 29871: the lone SentencePiece space
_FAR = 10.0
_ABSURD = 1e6  # no robot's metres, radians, degrees or encoder steps
LIBERO_GRIPPER = "-1 open, +1 close"  # of `vla_rl.specs.GRIPPERS`
_V01_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class PromptTokenizer:
    """Instructions → prompt ids, through the checkpoint's own ``tokenizer.json``. Ids are cached
    by instruction."""

    def __init__(self, tokenizer_json: str, *, prompt: str = "pure", dialect: str = "official"):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:
            raise UserError(
                f"the checkpoint's tokenizer.json cannot be read ({error}): copy it again from the "
                "published checkpoint"
            ) from error
        if self._tokenizer.token_to_id("▁") != SPACE_ID:
            raise UserError(
                "the checkpoint's tokenizer.json gives the lone space id "
                f"{self._tokenizer.token_to_id('▁')}, Llama-2's has {SPACE_ID}: it belongs to "
                "another model, copy it again from the published checkpoint"
            )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.json = tokenizer_json
        self._prompt, self._dialect = prompt, dialect
        self._known: dict[str, list[int]] = {}

    def text(self, instruction: str) -> str:
        """The prompt of an instruction. RLinf's dialect ends in a space, from which the last
        token arises by itself."""
        question = f"What action should the robot take to {instruction.lower()}?"
        if self._prompt == "vicuna":
            return f"{_V01_SYSTEM} USER: {question} ASSISTANT:"
        return f"In: {question}\nOut:{' ' if self._dialect == 'rlinf' else ''}"

    def encode(self, instruction: str) -> list[int]:
        """Prompt ids from BOS up to the space (id 29871) that is always last. `UserError` for an
        empty instruction."""
        if instruction not in self._known:
            if not instruction.strip():
                raise UserError(
                    f"the instruction is {instruction!r}: OpenVLA needs to be told what to do; "
                    "check the task's instructions"
                )
            ids = self._tokenizer.encode(self.text(instruction)).ids
            ids = ids if ids[:1] == [BOS_ID] else [BOS_ID, *ids]
            self._known[instruction] = ids if ids[-1] == SPACE_ID else [*ids, SPACE_ID]
        return self._known[instruction]

    def batch(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids int64 [b T], shorter rows filled with BOS, and the rows' lengths int64 [b]."""
        rows = [self.encode(text) for text in instructions]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.full((len(rows), int(lengths.max())), BOS_ID)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        return ids, lengths


def stand_in_tokenizer() -> str:
    """A ``tokenizer.json`` for random weights, one token a character; BOS, space and newline
    keep Llama's ids."""
    vocabulary = {"<unk>": 0, "<s>": BOS_ID, "</s>": STOP_ID, "▁": SPACE_ID, "\n": 13}
    vocabulary |= {chr(code): 1000 + code for code in range(33, 127)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"}
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    )


@dataclass(frozen=True)
class ActionCodec:
    """256 action tokens ↔ physical actions, by the checkpoint's statistics and the embodiment's
    conventions.

    A token is given by its index in the slice of action ids: id = ``first_action_id`` + index.
    ``low``, ``high`` and ``mask`` [a] are the statistics: dimensions outside the mask (the gripper)
    pass as they are.
    """

    embodiment: EmbodimentSpec
    bins: int
    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray
    gripper: str
    unit: bool

    @classmethod
    def from_statistics(
        cls,
        statistics: Mapping[str, Any],
        embodiment: EmbodimentSpec,
        bins: int,
        normalization: str,
        gripper: str,
        unit: bool,
        where: str = "the checkpoint's action statistics",
    ) -> ActionCodec:
        """``statistics`` is the "action" entry of ``norm_stats``, ``where`` says whose.
        `EmbodimentMismatch` for another number of dimensions."""
        keys = ("q01", "q99") if normalization == "q99" else ("min", "max")
        low, high, mask = read_range(statistics, keys, where)
        if len(low) != embodiment.action_dim:
            raise EmbodimentMismatch(
                f"{where} are for {len(low)} action dimensions, embodiment {embodiment.name} has "
                f"{embodiment.action_dim} ({', '.join(embodiment.action_names)}): use an env of "
                "the checkpoint's robot, or another policy.unnorm_key"
            )
        codec = cls(embodiment, bins, low, high, mask, gripper, unit)
        codec._check_reach(where)
        return codec

    def _check_reach(self, where: str) -> None:
        """Refuse what sends actions to `_FAR` times the robot's bounds: another robot's, in
        other units, or damaged."""
        sent = np.abs([self.to_physical(np.full(len(self.low), end)) for end in (-1.0, 1.0)]).max(0)
        bounds = np.abs([self.embodiment.action_low, self.embodiment.action_high]).max(0)
        for i in np.flatnonzero(sent > _FAR * bounds)[:1]:
            raise EmbodimentMismatch(
                f"{where} send {self.embodiment.action_names[i]} of embodiment "
                f"{self.embodiment.name} as far as {sent[i]:g}, its bound is {bounds[i]:g}: they "
                "are of another robot, in other units, or damaged. Choose another "
                "policy.unnorm_key or policy.action_space, or copy the file again from the "
                "published checkpoint"
            )

    @property
    def centers(self) -> np.ndarray:
        """The 255 mid-points between 256 even points on [-1, 1]."""
        edges = np.linspace(-1.0, 1.0, self.bins)
        return (edges[:-1] + edges[1:]) / 2

    def normalized_of_index(self, index: np.ndarray) -> np.ndarray:
        """Normalised value of token indices: index 0 and 1 share the last centre, the highest
        index is the lowest value."""
        return self.centers[np.clip(self.bins - 1 - np.asarray(index), 0, self.bins - 2)]

    def table(self) -> Tensor:
        """Physical value float32 [a bins] of every token in every action dimension."""
        normalized = np.repeat(
            self.normalized_of_index(np.arange(self.bins))[:, None], len(self.low), 1
        )
        return torch.tensor(self.to_physical(normalized).T.copy(), dtype=torch.float32)

    def encode(self, actions: Tensor) -> Tensor:
        """Token index int64 [... a] of physical actions."""
        normalized = self.to_normalized(actions.detach().cpu().double().numpy())
        digit = np.digitize(np.clip(normalized, -1.0, 1.0), np.linspace(-1.0, 1.0, self.bins))
        return torch.from_numpy(self.bins - digit)

    def to_physical(self, normalized: np.ndarray) -> np.ndarray:
        """Un-normalise: 0.5 (x + 1)(q99 - q01 + 1e-8) + q01 where the mask is set; then gripper
        and units."""
        x = np.where(
            self.mask, 0.5 * (normalized + 1) * (self.high - self.low + 1e-8) + self.low, normalized
        )
        if self.gripper == "libero":
            dims = gripper_dims(self.embodiment)
            x[..., dims] = -np.sign(2 * x[..., dims] - 1)
        if self.unit:
            low, high = (
                np.asarray(self.embodiment.action_low),
                np.asarray(self.embodiment.action_high),
            )
            x = low + (x + 1) / 2 * (high - low)
        return x

    def to_normalized(self, actions: np.ndarray) -> np.ndarray:
        """The inverse: 2 (x - q01) / (q99 - q01 + 1e-8) - 1, clipped to ±1, where the mask is
        set; 0 where q99 = q01."""
        x = np.array(actions, dtype=np.float64)
        if self.unit:
            low, high = (
                np.asarray(self.embodiment.action_low),
                np.asarray(self.embodiment.action_high),
            )
            x = 2 * (x - low) / (high - low) - 1
        if self.gripper == "libero":
            dims = gripper_dims(self.embodiment)
            x[..., dims] = np.clip((1 - x[..., dims]) / 2, 0.0, 1.0)
        scaled = np.clip(2 * (x - self.low) / (self.high - self.low + 1e-8) - 1, -1.0, 1.0)
        return np.where(self.mask, np.where(self.low == self.high, 0.0, scaled), x)


def read_range(
    statistics: Mapping[str, Any], keys: tuple[str, str], where: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper bound float64 [n] and mask bool [n] (default: all) of an "action" or
    "proprio" entry.

    `UserError` that names ``where`` for bounds that are no numbers, not finite, of different
    lengths, or the wrong way round in a dimension that the mask leaves in use: these would become
    actions without any sign of it.
    """
    missing = [key for key in keys if key not in statistics]
    if missing:
        raise UserError(
            f"{where} lack {', '.join(missing)} (they have {', '.join(sorted(statistics))}): set "
            "policy.normalization to q99 or minmax, as the checkpoint was trained"
        )
    remedy = "copy the file again from the published checkpoint"
    low, high = (_numbers(statistics[key], key, where, remedy) for key in keys)
    mask = statistics.get("mask")
    mask = [True] * len(low) if mask is None else mask
    if not isinstance(mask, list) or not all(value in (False, True) for value in mask):
        raise UserError(
            f"{where} have mask {mask!r}, it should be a list of true and false: {remedy}"
        )
    if not len(low) == len(high) == len(mask):
        raise UserError(
            f"{where} have {len(low)} numbers in {keys[0]}, {len(high)} in {keys[1]} and "
            f"{len(mask)} in mask: {remedy}"
        )
    used = np.array(mask, dtype=bool)
    for key, bound in zip(keys, (low, high)):
        for i in np.flatnonzero(used & (np.abs(bound) > _ABSURD))[:1]:
            raise UserError(
                f"{where} have {key} {bound[i]:g} in dimension {i}, which is no robot's: {remedy}"
            )
    for i in np.flatnonzero(used & (low > high))[:1]:
        raise UserError(
            f"{where} have {keys[0]} {low[i]:g} above {keys[1]} {high[i]:g} in "
            f"dimension {i}: {remedy}"
        )
    return low, high, used


def _numbers(values: Any, key: str, where: str, remedy: str) -> np.ndarray:
    if not isinstance(values, list) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    ):
        raise UserError(
            f"{where} have {key} {str(values)[:80]}, it should be a list of numbers: {remedy}"
        )
    array = np.array(values, dtype=np.float64)
    if not np.isfinite(array).all():
        dim = int(np.flatnonzero(~np.isfinite(array))[0])
        raise UserError(
            f"{where} are not finite ({key} is {array[dim]} in dimension {dim}), nor "
            f"would actions be: {remedy}"
        )
    return array


def gripper_dims(embodiment: EmbodimentSpec) -> list[int]:
    """The action dimensions whose name says gripper, for ``policy.gripper=libero``: openvla-oft's
    LIBERO evaluation takes the sign of 2 g - 1 and turns it around, since the model says 1 open, 0
    closed, and the env -1 open, +1 closed.

    `EmbodimentMismatch` where there is no gripper, or one that means something else.
    """
    dims = list(embodiment.gripper_dims)
    if not dims:
        raise EmbodimentMismatch(
            "policy.gripper=libero turns the gripper's action around, but embodiment "
            f"{embodiment.name} has only {', '.join(embodiment.action_names)}: set "
            "policy.gripper=none"
        )
    if embodiment.gripper != LIBERO_GRIPPER:
        raise EmbodimentMismatch(
            f"policy.gripper=libero sends {LIBERO_GRIPPER}, but the gripper of embodiment "
            f"{embodiment.name} is {embodiment.gripper!r}: set policy.gripper=none, which sends "
            "what the statistics say"
        )
    return dims


def normalize_proprio(proprio: Tensor, low: Tensor, high: Tensor, mask: Tensor) -> Tensor:
    """2 (x - low) / (high - low + 1e-8) - 1 clipped to ±1 where ``mask`` [p] is set, else x
    clipped; [b p]."""
    return torch.where(mask, 2 * (proprio - low) / (high - low + 1e-8) - 1, proprio).clamp(
        -1.0, 1.0
    )
