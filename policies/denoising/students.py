"""Students of a policy that denoises: how one starts, beside RL and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from torch import Tensor

from policies.denoising.consistency import ConsistencyVLA, Grid
from policies.denoising.settings import ConsistencyConfig, DenoisingConfig

if TYPE_CHECKING:
    from policies.denoising.policy import DenoisingVLA


def prediction_beside(teacher: str) -> str:
    """What a student's output stands for that learns from the same first noise as a ``teacher``
    who predicts this."""
    return "velocity" if teacher == "velocity" else "sample"


def starting_weights(
    expert: Mapping[str, Tensor], teacher: str, prediction: str
) -> dict[str, Tensor]:
    """The teacher's expert; where the student's output stands for something else, its last layer
    starts at 0."""
    weights = {name: tensor.clone() for name, tensor in expert.items()}
    if prediction != teacher:
        for name in ("action_out.weight", "action_out.bias"):
            weights[name].zero_()
    return weights


def make_student(teacher: DenoisingVLA, steps: int, method: str) -> ConsistencyVLA:
    """See `DenoisingVLA.make_student`."""
    same_noise = method == "same_noise"
    grid = Grid.straight(steps, teacher.device) if same_noise else Grid.of_chain(teacher, steps)
    own_prediction = teacher.config.prediction
    shared = {f.name: getattr(teacher.config, f.name) for f in fields(DenoisingConfig)}
    config = ConsistencyConfig(
        **{**shared, **grid.lists(), "denoising_steps": steps, "value_head": False},
        prediction=prediction_beside(own_prediction) if same_noise else "sample",
        method=method,
    )
    student = ConsistencyVLA(
        config, teacher.embodiment, teacher.action_stats, teacher.proprio_stats, teacher.tokenizer
    )
    own = teacher.state_dict()
    student.load_state_dict(
        {n: own[n] for n in student.state_dict() if not n.startswith("expert.")}, strict=False
    )
    learnt = teacher.config.student_steps == steps and same_noise
    student.expert.load_state_dict(
        teacher.student.state_dict()
        if learnt
        else starting_weights(teacher.expert.state_dict(), own_prediction, config.prediction)
    )
    student.requires_grad_(False)
    student.expert.requires_grad_(True)
    return student.to(teacher.device)
