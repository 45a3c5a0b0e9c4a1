"""VLAC (arXiv 2509.15937): an InternVL-type chat model that judges how far the second of two frames
is ahead of the first.

The text-in, text-out part stands behind `_ChatBackend`; `InternVLBackend` runs a released checkpoint
through transformers, in the native layout (model type ``internvl``) or with its own code
(``internvl_chat``, which needs ``trust_remote_code``). Every template string is config. The
defaults are own words; ``texts=release`` (``reward=vlac_release``) reads those of the release from
the user's copy of it (`reward_models.vlac_texts`). Replies are parsed without ever raising; what
cannot be parsed counts as invalid and as no progress.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from reward_models.encoders import IMAGENET_MEAN, IMAGENET_STD
from reward_models.frames import frames_of, instruction_of
from reward_models.progress_math import accumulate, dead_zone, reference_indices
from reward_models.settings import VLACConfig
from reward_models.shaping import ShapedProgress
from reward_models.vlac_texts import IMAGE, release_texts
from vla_rl.devices import pick_device
from vla_rl.errors import ConfigError, MissingDependency, UserError
from vla_rl.types import Trajectory

# As float() reads them: 12, 12., .5, 1e2; ASCII digits alone. What follows must not go on as a
# number.
_NUMBER = r"(?:[0-9]{1,4}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?"
_NUMBER_ENDS = r"(?![\d.]|[eE](?![a-zA-Z]))"


# -------------------------------------------------------------------------------------- small parts
def parse_score(reply: object) -> float | None:
    """The signed percentage of a reply, within −100 … 100; None for anything else. Never raises.

    Reasoning up to ``</think>`` is skipped; a ``<score>`` tag may precede the number and text may
    follow it.
    """
    if not isinstance(reply, str):
        return None
    text = reply.rpartition("</think>")[2].rpartition("<score>")[2].strip().replace("\u2212", "-")
    found = re.match(rf"([+-]?)\s?({_NUMBER})\s*%?{_NUMBER_ENDS}", text)
    value = float(found[1] + found[2]) if found else math.inf
    return value if -100.0 <= value <= 100.0 else None


def parse_done(reply: object) -> float | None:
    """The probability-like answer 0 … 1 of a reply; None for anything else. Never raises."""
    if not isinstance(reply, str):
        return None
    text = reply.rpartition("</think>")[2].rpartition("<done>")[2].strip()
    found = re.match(rf"({_NUMBER}){_NUMBER_ENDS}", text)
    value = float(found[1]) if found else -1.0
    return value if 0.0 <= value <= 1.0 else None


@dataclass(frozen=True)
class Question:
    """Text with one ``<image>`` per image uint8 [H W 3]."""

    text: str
    images: tuple[Tensor, ...]


class _ChatBackend(Protocol):
    """Answers questions about images; a reply may be any text."""

    def reply(self, questions: Sequence[Question]) -> list[str]: ...


def pair_question(
    config: VLACConfig,
    task: str,
    before: Tensor,
    after: Tensor,
    reference: Sequence[Tensor] = (),
    first: Tensor | None = None,
) -> Question:
    """The pairwise question; with ``reference`` frames also the example and the ``first`` frame
    of the judged episode."""
    if not len(reference):
        return Question(config.pair_template.replace("{task}", task), (before, after))
    last = max(len(reference) - 1, 1)
    shown = "".join(
        config.reference_frame_template.replace("{percent}", str(int(i / last * 100)))
        for i in range(len(reference))
    )
    pair = config.reference_pair_template or config.pair_template
    text = (config.reference_template.replace("{frames}", shown) + pair).replace("{task}", task)
    # where the judged episode starts, if the text shows that
    beginnings = text.count(IMAGE) - len(reference) - 2
    start = [before if first is None else first] * beginnings
    return Question(text, (*reference, *start, before, after))


# ---------------------------------------------------------------------------------------- the model
class InternVLBackend:
    """An InternVL-type checkpoint through transformers. Greedy decoding; questions are padded on
    the left and batched.

    Raises `MissingDependency` for a folder that is none, `ConfigError` where its code would have to
    be trusted.
    """

    START, CONTEXT, END = "<img>", "<IMG_CONTEXT>", "</img>"

    def __init__(self, config: VLACConfig):
        from transformers.models.auto.modeling_auto import AutoModel, AutoModelForImageTextToText
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        path = Path(config.checkpoint)
        if not config.checkpoint or not (path / "config.json").is_file():
            raise MissingDependency(
                f"reward.checkpoint={config.checkpoint!r} is no model folder (no config.json). "
                "Download a released VLAC or InternVL checkpoint and give its folder"
            )
        self.config, self.device = config, pick_device(config.device, "reward.device")
        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type", "")
        dtype = getattr(torch, config.precision) if self.device.type == "cuda" else torch.float32
        remote = kind == "internvl_chat"
        if kind not in ("internvl", "internvl_chat"):
            raise ConfigError(
                f"reward.checkpoint={path} has model type {kind!r}, expected "
                "'internvl' or 'internvl_chat'"
            )
        if remote and not config.trust_remote_code:
            raise ConfigError(
                f"{path} brings its own model code (internvl_chat). Read that code, then set "
                "reward.trust_remote_code=true, or give a checkpoint in the native layout (model "
                "type internvl)"
            )
        options: dict[str, Any] = (
            {"trust_remote_code": True} if remote else {"attn_implementation": config.attention}
        )
        loader = AutoModel if remote else AutoModelForImageTextToText
        self.tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=remote, padding_side="left"
        )
        model = loader.from_pretrained(path, dtype=dtype, **options).eval().requires_grad_(False)
        self.model = model.to(self.device)  # type: ignore[arg-type] # its decorator in transformers hides that it is a method
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        context = self.tokenizer.convert_tokens_to_ids(self.CONTEXT)
        if remote:
            self.model.img_context_token_id = context
            self.tokens_per_image = int(self.model.num_image_token)
        else:
            self.tokens_per_image = int(self.model.config.image_seq_length)
        self.bos = self._own_start() if config.bos else ""
        self.dtype = dtype

    @torch.inference_mode()
    def reply(self, questions: Sequence[Question]) -> list[str]:
        """Replies without special tokens, in order."""
        if not questions:
            return []
        texts = [self._prompt(q) for q in questions]
        batch = self.tokenizer(
            texts, return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self.device)
        pixels = torch.cat([self.pixels(image) for q in questions for image in q.images]).to(
            self.device, self.dtype
        )
        stop: Any = self.tokenizer.convert_tokens_to_ids(self.config.stop)
        ends = [i for i in (stop, self.tokenizer.eos_token_id) if i is not None and i >= 0]
        out = self.model.generate(
            pixel_values=pixels,
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.config.max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=ends or None,
        )
        # The model's own code (internvl_chat) returns the new tokens alone, transformers' the
        # prompt as well.
        width = batch["input_ids"].shape[1]
        new = (
            out[:, width:]
            if out.shape[1] > width and torch.equal(out[:, :width], batch["input_ids"])
            else out
        )
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def _prompt(self, question: Question) -> str:
        if question.text.count(IMAGE) != len(question.images):
            raise UserError(
                f"a question has {question.text.count(IMAGE)} {IMAGE} slots and "
                f"{len(question.images)} images: check the templates of reward=vlac"
            )
        image = (
            self.START
            + self.CONTEXT * self.tokens_per_image
            + self.END
            + "\n" * self.config.image_newline
        )
        text = question.text.replace(IMAGE, image)
        return self.bos + self.config.chat_template.replace("{system}", self.config.system).replace(
            "{question}", text
        )

    def _own_start(self) -> str:
        """What the tokenizer by itself puts before a text; a tokenizer without such a habit adds
        nothing."""
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a")["input_ids"]
        return (
            str(self.tokenizer.decode(whole[: whole.index(plain[0])]))
            if plain and plain[0] in whole
            else ""
        )

    def pixels(self, image: Tensor) -> Tensor:
        """uint8 [H W 3] → float32 [1 3 S S], ImageNet-normalised; the aspect is not kept (as
        VLAC). Resized as PIL does."""
        from PIL import Image

        picture = Image.fromarray(image.cpu().numpy())
        for size, filter_ in (
            (self.config.lanczos_size, Image.Resampling.LANCZOS),
            (self.config.image_size, Image.Resampling.BICUBIC),
        ):
            picture = picture.resize((size, size), filter_) if size else picture
        x = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255.0
        mean, std = (x.new_tensor(v)[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
        return (x - mean) / std


class VLAC(ShapedProgress):
    """See the module. ``backend`` replaces the checkpoint (tests, or a server of one's own)."""

    judge_first = True  # its quality is checked before RL trains on it

    def __init__(self, config: VLACConfig, backend: _ChatBackend | None = None):
        super().__init__()
        if config.texts == "release":
            texts: dict[str, Any] = {**release_texts(config.release)}
            config = dataclasses.replace(config, **texts)
        self.config = config
        self.backend: _ChatBackend = backend or InternVLBackend(config)
        self.references: dict[str, list[Tensor]] = {}  # task → frames of a successful example
        self._asked = self._invalid = 0

    def set_references(self, trajectories: Sequence[Trajectory]) -> None:
        """Take the first successful trajectory of each task as its example. Raises
        `UserError` where there is none."""
        for t in trajectories:
            if t.success and t.episode.task_id not in self.references:
                frames = frames_of(t, self.config.camera)
                self.references[t.episode.task_id] = [
                    frames[i] for i in reference_indices(len(frames), self.config.reference_frames)
                ]
        if not self.references:
            raise UserError(
                f"reward.reference={self.config.reference!r} holds no successful demonstration to "
                "show as an example"
            )

    def _reference(self, trajectory: Trajectory) -> list[Tensor]:
        task = trajectory.episode.task_id
        if self.references and task not in self.references:
            raise UserError(
                f"the reference examples are of {', '.join(sorted(self.references))}, rollout "
                f"{trajectory.rollout_id} is of {task!r}: give a reference dataset with that task, "
                "or none (reward.reference='')"
            )
        return self.references.get(task, [])

    # -------------------------------------------------------------------------------------- judging
    def critics(self, trajectories: Sequence[Trajectory], reverse: bool = False) -> list[Tensor]:
        """Critic values (percent) float32 [k] between the compared frames of each trajectory, NaN
        for an invalid reply.

        In ``reverse`` the two images are swapped and the reply negated (VROC)."""
        questions, counts = [], []
        for t in trajectories:
            frames, reference, task = (
                frames_of(t, self.config.camera),
                self._reference(t),
                instruction_of(t),
            )
            at = self._compared(len(frames))
            for i, j in itertools.pairwise(at):
                pair = (frames[j], frames[i]) if reverse else (frames[i], frames[j])
                questions.append(pair_question(self.config, task, *pair, reference, frames[0]))
            counts.append(len(at) - 1)
        values = [parse_score(reply) for reply in self._ask(questions)]
        self._asked += len(values)
        self._invalid += sum(v is None for v in values)
        sign = -1.0 if reverse else 1.0
        numbers = torch.tensor([float("nan") if v is None else sign * v for v in values])
        return list(numbers.split(counts))

    def _compared(self, length: int) -> list[int]:
        """Frames that are looked at: every ``frame_skip``-th, and the last where
        ``compare_last`` says so."""
        at = list(range(0, length, self.config.frame_skip))
        return at if at[-1] == length - 1 or not self.config.compare_last else [*at, length - 1]

    def _ask(self, questions: Sequence[Question]) -> list[str]:
        size = self.config.batch_size
        return [
            r
            for i in range(0, len(questions), size)
            for r in self.backend.reply(questions[i : i + size])
        ]

    def done(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Whether each frame shows the task completed: float32 [t+1] in 0 … 1; 0 for an invalid
        reply and for one that is not above ``done_threshold``."""
        lengths = [len(t) + 1 for t in trajectories]
        questions = [
            Question(self.config.done_template.replace("{task}", instruction_of(t)), (frame,))
            for t in trajectories
            for frame in frames_of(t, self.config.camera)
        ]
        replies = [parse_done(r) or 0.0 for r in self._ask(questions)]
        return list(
            torch.tensor([r if r > self.config.done_threshold else 0.0 for r in replies]).split(
                lengths
            )
        )

    def _curves(self, trajectories: Sequence[Trajectory], reverse: bool) -> list[Tensor]:
        c, out = self.config, []
        judged = self.critics(trajectories, reverse)
        done = (
            self.done(trajectories)
            if c.done_weight
            else [torch.zeros(len(t) + 1) for t in trajectories]
        )
        for t, values, ends in zip(trajectories, judged, done):
            if float(values.isnan().float().mean()) > c.max_invalid:
                out.append(torch.full((len(t) + 1,), float("nan")))
                continue
            critics = dead_zone(
                values.nan_to_num(0.0).tolist(), c.positive_dead_zone, c.negative_dead_zone
            )
            at = self._compared(len(t) + 1)
            curve = torch.zeros(len(t) + 1)
            # held until the next frame that is looked at
            for i, v in zip(at, accumulate(critics, c.value_mode)):
                curve[i:] = min(max(v, 0.0), 100.0) / 100.0
            out.append((1.0 - c.done_weight) * curve + c.done_weight * ends)
        return out

    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Value curve float32 [t+1] in 0 … 1; NaN where too many replies were invalid."""
        return self._curves(trajectories, reverse=False)

    def reverse_progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        return self._curves(trajectories, reverse=True)

    def score_figures(
        self, trajectories: Sequence[Trajectory], curves: Sequence[Tensor]
    ) -> dict[str, float]:
        """Invalid replies are counted from the start."""
        return super().score_figures(trajectories, curves) | {
            "reward/invalid_replies": float(self._invalid),
            "reward/invalid_reply_share": self._invalid / max(1, self._asked),
        }
