"""SFT: augmentation on hand-made images, schedule, learning, accumulation, resume, bad numbers,
filtered BC."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from vla_rl.algorithms import augmentation
from vla_rl.algorithms import imitation as im
from vla_rl.algorithms.validation import derangement, described, first_loss, input_use, verdict
from vla_rl.config.imitation import AugmentConfig
from vla_rl.errors import ConfigError, TrainingDiverged
from vla_rl.mirror import mirrored
from vla_rl.specs import CameraSpec, EmbodimentSpec, EpisodeSpec, Mirror
from vla_rl.types import Observation, Trajectory

torch.set_num_threads(1)
H, A, P = 3, 2, 4


def images(b: int = 5, height: int = 7, width: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(
        0,
        256,
        (b, height, width, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )


# ------------------------------------------------------------------------------------- augmentation
def test_shift_moves_pixels_and_repeats_edges():
    x = torch.arange(12, dtype=torch.uint8).view(1, 3, 4, 1).expand(-1, -1, -1, 3)
    out = augmentation.random_shift(x, torch.tensor([[1, -2]]))[0, :, :, 0]  # down 1, left 2
    assert out.tolist() == [[2, 3, 3, 3], [2, 3, 3, 3], [6, 7, 7, 7]]
    assert torch.equal(augmentation.random_shift(x, torch.zeros(1, 2, dtype=torch.long)), x)


def test_shift_equals_an_index_per_row():
    x, offsets = images(), torch.tensor([[0, 0], [3, -1], [-2, 2], [1, 1], [-3, -3]])
    out = augmentation.random_shift(x, offsets)
    for i, (down, right) in enumerate(offsets.tolist()):
        rows, columns = (torch.arange(7) - down).clamp(0, 6), (torch.arange(9) - right).clamp(0, 8)
        assert torch.equal(out[i], x[i][rows][:, columns])


def test_crop_of_everything_is_the_identity_and_half_of_a_gradient_is_its_half():
    x = images()
    assert torch.equal(augmentation.random_crop(x, torch.ones(5), torch.rand(5, 2)), x)
    ramp = torch.arange(0, 160, 10, dtype=torch.uint8).view(1, 1, 16, 1).expand(1, 16, 16, 3)
    left = augmentation.random_crop(ramp, torch.tensor([0.5]), torch.tensor([[0.5, 0.0]]))
    right = augmentation.random_crop(ramp, torch.tensor([0.5]), torch.tensor([[0.5, 1.0]]))
    assert int(left.max()) <= 75 and int(right.min()) >= 75
    assert left.shape == ramp.shape and left.dtype == torch.uint8


def test_jitter_by_hand():
    x = (
        torch.tensor([50, 100, 150], dtype=torch.uint8)
        .view(1, 1, 3, 1)
        .expand(1, 1, 3, 3)
        .contiguous()
    )

    def shown(brightness, contrast):
        return augmentation.color_jitter(x, torch.tensor([brightness]), torch.tensor([contrast]))[
            0, 0, :, 0
        ].tolist()

    assert shown(0.0, 0.0) == [50, 100, 150]
    assert shown(0.2, 0.0) == [60, 120, 180]
    assert shown(0.0, -0.5) == [75, 100, 125]
    assert shown(0.0, 0.5) == [25, 100, 175]
    assert shown(1.0, 0.0) == [100, 200, 255]  # clipped, not wrapped around
    assert shown(0.0, -1.0) == [100, 100, 100]


def test_augment_is_seeded_draws_per_row_and_leaves_the_input_alone():
    x = images(1).expand(6, -1, -1, -1).contiguous()
    seen = Observation({"front": x, "wrist": x.clone()}, torch.zeros(6, P), ("go",) * 6)
    config = AugmentConfig(shift=2, crop=0.2, brightness=0.3, contrast=0.3)
    a = augmentation.augment(seen, config, torch.Generator().manual_seed(0))
    b = augmentation.augment(seen, config, torch.Generator().manual_seed(0))
    assert all(torch.equal(a.images[k], b.images[k]) for k in a.images)
    assert a.images["front"].dtype == torch.uint8 and a.images["front"].shape == x.shape
    assert len({tuple(row.flatten().tolist()) for row in a.images["front"]}) == 6
    assert not torch.equal(a.images["front"], a.images["wrist"])
    assert torch.equal(seen.images["front"], images(1).expand(6, -1, -1, -1))
    off = augmentation.augment(seen, AugmentConfig(0, 0.0, 0.0, 0.0), torch.Generator())
    assert torch.equal(off.images["front"], x)


def test_hidden_proprioception_is_the_batches_mean():
    proprio = torch.arange(4000.0).view(1000, 4)
    seen = Observation({}, proprio, ("go",) * 1000)
    config = AugmentConfig(0, 0.0, 0.0, 0.0, proprio=0.3)
    shown = augmentation.augment(seen, config, torch.Generator().manual_seed(0)).proprio
    hidden = (shown == torch.tensor([1998.0, 1999.0, 2000.0, 2001.0])).all(1)
    assert torch.equal(shown[~hidden], proprio[~hidden]) and 250 < int(hidden.sum()) < 350
    assert torch.equal(seen.proprio, torch.arange(4000.0).view(1000, 4))
    assert torch.equal(
        augmentation.augment(seen, AugmentConfig(), torch.Generator()).proprio, proprio
    )


TWO_ARMS = EmbodimentSpec(
    name="two_arms",
    action_names=("left_y", "left_grip", "right_y", "right_grip"),
    action_units=("m", "1", "m", "1"),
    action_low=(-1.0, 0.0, -1.0, 0.0),
    action_high=(1.0, 1.0, 1.0, 1.0),
    frame="world",
    rotation="none",
    gripper="0 open, 1 close",
    control_hz=10.0,
    cameras=(
        CameraSpec("head", 7, 9),
        CameraSpec("left_hand", 5, 6),
        CameraSpec("right_hand", 5, 6),
    ),
    proprio_names=("left_q", "right_q", "height"),
    mirror=Mirror(
        negated=("left_y", "right_y", "left_q", "right_q"),
        exchanged=(
            ("left_y", "right_y"),
            ("left_grip", "right_grip"),
            ("left_q", "right_q"),
            ("left_hand", "right_hand"),
            ("left", "right"),
        ),
    ),
)


def test_in_the_mirror_arms_cameras_and_words_change_places():
    seen = Observation(
        {
            "head": images(2),
            "left_hand": images(2, 5, 6, seed=1),
            "right_hand": images(2, 5, 6, seed=2),
        },
        torch.tensor([[1.0, 2.0, 3.0]] * 2),
        ("lift the left cup, leftmost", "lift the left cup"),
    )
    actions = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(2, 3, 4).contiguous()
    got, acted = mirrored(seen, actions, TWO_ARMS, torch.tensor([True, False]))
    assert acted[0, 0].tolist() == pytest.approx([-0.3, 0.4, -0.1, 0.2]) and torch.equal(
        acted[1], actions[1]
    )
    assert got.proprio.tolist() == [[-2.0, -1.0, 3.0], [1.0, 2.0, 3.0]]
    assert got.instruction == ("lift the right cup, leftmost", "lift the left cup")
    assert torch.equal(got.images["left_hand"][0], seen.images["right_hand"][0].flip(1)), (
        "columns turn around, not rows"
    )
    assert torch.equal(got.images["head"][0, :, 0], seen.images["head"][0, :, -1])
    assert all(torch.equal(got.images[name][1], seen.images[name][1]) for name in seen.images)
    back, forth = mirrored(got, acted, TWO_ARMS, torch.tensor([True, False]))
    assert torch.equal(back.images["right_hand"], seen.images["right_hand"]) and torch.equal(
        back.proprio, seen.proprio
    )
    assert torch.equal(forth, actions) and back.instruction == seen.instruction


def test_a_mirror_is_kept_in_files_and_tells_no_robots_apart():
    again = EmbodimentSpec.from_dict(json.loads(json.dumps(TWO_ARMS.to_dict())))
    assert again.mirror == TWO_ARMS.mirror
    plain = dataclasses.replace(TWO_ARMS, mirror=None)
    assert (
        plain == TWO_ARMS and plain.differences(TWO_ARMS) == [] and "mirror" not in plain.to_dict()
    )


@pytest.mark.parametrize(
    ("mirror", "named"),
    [
        (Mirror(negated=("left_grip",)), "'left_grip', which is no number around 0"),
        (Mirror(negated=("elbow",)), "'elbow'"),
        (
            Mirror(exchanged=(("left_y", "right_grip"),)),
            "'left_y' and 'right_grip', which do not match",
        ),
        (Mirror(exchanged=(("head", "left_hand"),)), "'head' and 'left_hand'"),
        (Mirror(exchanged=(("left_q", "gone"),)), "'left_q' and 'gone'"),
    ],
)
def test_a_mirror_that_does_not_fit_its_robot_is_refused(mirror, named):
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(TWO_ARMS, mirror=mirror)


def test_sft_learns_from_mirrored_rows_and_asks_for_a_mirror():
    class Copy(Regressor):
        embodiment = TWO_ARMS
        shown: list[Tensor]

        def imitation_loss(self, observation, actions, valid):
            self.shown.append(torch.cat([observation.proprio[:, :1], actions[:, 0, :1]], 1))
            return self.net.weight.sum() * 0.0 + self.net.bias.square().sum(), {}

    policy = Copy()
    policy.shown = []
    seen = Observation({"head": images(64)}, torch.tensor([[1.0, 2.0, 3.0]] * 64), ("go",) * 64)
    valid, own = torch.ones(64, 3, dtype=torch.bool), torch.zeros(64, dtype=torch.bool)
    data = im.DecisionSamples(seen, torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(64, 3, 4), valid, own)
    config = im.ImitationConfig(
        updates=2, warmup_updates=0, augment=AugmentConfig(0, 0.0, 0.0, 0.0, mirror=0.5)
    )
    im.Imitation(config, policy, im.DecisionSampler(data, 64)).update()
    rows = {tuple(round(x, 3) for x in row) for row in policy.shown[0].tolist()}
    assert rows == {(1.0, 0.1), (-2.0, -0.3)}, "what is seen and what is done turn around together"
    policy.embodiment = dataclasses.replace(TWO_ARMS, mirror=None)
    with pytest.raises(ConfigError, match="two_arms declares no mirror"):
        im.Imitation(config, policy, im.DecisionSampler(data, 64))


# ----------------------------------------------------------------------------------------- schedule
def test_schedule_by_hand():
    factors = [im.learning_rate_factor(i, 4, 12, 0.1) for i in (0, 1, 3, 4, 8, 12, 100)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert im.learning_rate_factor(0, 0, 10, 0.0) == 1.0


# ----------------------------------------------------------------------------------------- training
class Regressor(nn.Module):
    """Predicts chunks from proprio; the loss is the mean squared error over valid control steps."""

    embodiment = None
    chunk_length = H

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(P, H * A)
        nn.init.zeros_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.poison = False

    def act(self, observation, *, deterministic=False, seeds=None):
        raise AssertionError("training never acts")

    def imitation_loss(self, observation, actions, valid):
        assert observation.privileged is None
        error = (self.net(observation.proprio).view(-1, H, A) - actions).square().mean(-1)
        loss = (error * valid).sum() / valid.sum()
        loss = loss * float("nan") if self.poison else loss
        return loss, {"error": float(loss.detach())}


TRUTH = torch.randn(P, H * A, generator=torch.Generator().manual_seed(3))


def samples(n: int = 64) -> im.DecisionSamples:
    g = torch.Generator().manual_seed(0)
    proprio = torch.randn(n, P, generator=g)
    seen = Observation({"front": images(n)}, proprio, ("go",) * n, torch.zeros(n, 1))
    valid = torch.rand(n, H, generator=g) < 0.8
    valid[:, 0] = True
    return im.DecisionSamples(
        seen, (proprio @ TRUTH).view(n, H, A), valid, torch.zeros(n, dtype=torch.bool)
    )


def trainer(policy=None, **changes) -> im.Imitation:
    config = im.ImitationConfig(
        **{"updates": 200, "learning_rate": 0.05, "warmup_updates": 5, **changes}
    )
    return im.Imitation(config, policy or Regressor(), im.DecisionSampler(samples(), 16))


def weights(policy: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_it_learns_and_reports():
    sft = trainer()
    first, *_, last = [sft.update() for _ in range(sft.config.updates)]
    assert first["sft/loss"] > 0.5 and last["sft/loss"] < 0.02
    assert sft.updates == 200
    assert last["sft/error"] == pytest.approx(last["sft/loss"]) and last["sft/grad_norm"] > 0
    assert last["sft/learning_rate"] == pytest.approx(0.005, rel=0.01)


def test_micro_batches_add_up():
    whole, sliced = trainer(grad_clip=None), trainer(grad_clip=None, micro_batch_size=5)
    for _ in range(3):
        a, b = whole.update(), sliced.update()
    assert a["sft/loss"] == pytest.approx(b["sft/loss"], rel=1e-5)
    torch.testing.assert_close(weights(whole.policy), weights(sliced.policy), rtol=1e-4, atol=1e-6)


def test_resume_is_bit_equal(tmp_path):
    sft = trainer()
    for _ in range(5):
        sft.update()
    torch.save(
        [sft.state_dict(), sft.sampler.state_dict(), sft.policy.state_dict()], tmp_path / "s.pt"
    )
    state, sampler, policy = torch.load(tmp_path / "s.pt", weights_only=True)
    other = trainer()
    other.load_state_dict(state)
    other.sampler.load_state_dict(sampler)
    other.policy.load_state_dict(policy)
    for _ in range(4):
        assert sft.update() == other.update()
    assert torch.equal(weights(sft.policy), weights(other.policy))


def test_non_finite_updates_are_skipped_then_stop_the_run():
    sft = trainer(max_bad_updates=2)
    sft.policy.poison = True
    before = weights(sft.policy)
    assert sft.update()["sft/skipped_updates"] == 1
    assert torch.equal(weights(sft.policy), before)
    with pytest.raises(TrainingDiverged, match="2 updates in a row"):
        sft.update()


def test_what_cannot_imitate_is_refused():
    class Plain:
        embodiment, chunk_length = None, 1

        def act(self, observation, *, deterministic=False, seeds=None): ...

    with pytest.raises(ConfigError, match="imitation_loss"):
        im.Imitation(im.ImitationConfig(), Plain(), im.DecisionSampler(samples(), 4))
    with pytest.raises(ConfigError, match="crop=2"):
        AugmentConfig(crop=2.0)
    with pytest.raises(ConfigError, match="updates=0"):
        im.ImitationConfig(updates=0)
    with pytest.raises(ConfigError, match="betas"):
        im.ImitationConfig(betas=[])


def test_config_is_an_omegaconf_schema():
    merged = OmegaConf.merge(
        OmegaConf.structured(im.ImitationConfig), {"augment": {"shift": 2}, "warmup_updates": 9}
    )
    config = OmegaConf.to_object(merged)
    assert config == im.ImitationConfig(warmup_updates=9, augment=AugmentConfig(shift=2))


# -------------------------------------------------------------------------------------- filtered BC
def episode(decisions: int, success: bool) -> Trajectory:
    seen = Observation(
        {},
        torch.full((decisions, P), float(decisions)),
        ("go",) * decisions,
        torch.zeros(decisions, 1),
    )
    return Trajectory(
        episode=EpisodeSpec("lift", 0),
        observations=seen,
        final_observation=seen[:1],
        actions=torch.full((decisions, H, A), float(decisions)),
        valid=torch.ones(decisions, H, dtype=torch.bool),
        rewards=torch.zeros(decisions, H),
        behavior_log_prob=torch.zeros(decisions, H),
        replay={},
        terminated=success,
        truncated=not success,
        success=success,
    )


def test_sampler_visits_every_decision_once_an_epoch_and_resumes():
    data = samples(12)
    data = dataclasses.replace(data, actions=torch.arange(12.0).view(12, 1, 1).expand(12, H, A))
    sampler = im.DecisionSampler(data, 4, seed=1)
    epoch = torch.cat([sampler.next_batch()[1][:, 0, 0] for _ in range(3)])
    assert sorted(epoch.tolist()) == list(range(12))
    sampler.next_batch()
    other = im.DecisionSampler(data, 4)
    other.load_state_dict(sampler.state_dict())
    for _ in range(5):
        assert torch.equal(sampler.next_batch()[1], other.next_batch()[1])
    assert len(im.DecisionSampler(samples(3), 100).next_batch()[0]) == 3
    with pytest.raises(ConfigError, match="12 decisions, there are 64"):
        im.DecisionSampler(samples(), 4).load_state_dict(sampler.state_dict())
    assert json.dumps(sampler.state_dict()["position"])


# -------------------------------------------------------------------------------- use of the images
class _Reader(nn.Module):
    """Predicts the pixel of one camera, or, blind, always 5."""

    embodiment, chunk_length = None, H

    def __init__(self, camera: str | None):
        super().__init__()
        self.camera = camera

    def act(self, observation, *, deterministic=False, seeds=None): ...

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        assert not self.training
        seen = (
            observation.images[self.camera][:, 0, 0, 0].float()
            if self.camera
            else torch.full((len(observation),), 5.0)
        )
        error = (actions[:, :, 0] - seen[:, None]).square() * valid
        return error.sum() / valid.sum(), {}


def _pixels(n: int) -> tuple[Observation, Tensor, Tensor]:
    """Row i shows pixel i to camera a, which is also its action; camera b shows noise."""
    a = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 2, 2, 3)
    seen = Observation(
        {"a": a, "b": images(n, 2, 2)}, torch.zeros(n, P), tuple(f"text {i % 2}" for i in range(n))
    )
    return (
        seen,
        torch.arange(n).float().view(n, 1, 1).expand(n, H, 1),
        torch.ones(n, H, dtype=torch.bool),
    )


def test_nobody_keeps_their_own_row():
    for n in (2, 3, 50):
        order = derangement(n, torch.Generator().manual_seed(n))
        assert sorted(order.tolist()) == list(range(n)) and not (order == torch.arange(n)).any()


def test_input_use_is_what_the_loss_rises_by():
    batch = _pixels(10)
    policy = _Reader("a").train()
    figures = input_use(policy, *batch, seed=3, slice_size=4)
    other = derangement(10, torch.Generator().manual_seed(3)).float()
    by_hand = float((torch.arange(10).float() - other).square().mean())
    assert (
        figures["loss"] == 0.0
        and figures["image_use/b"] == 0.0
        and figures["instruction_use"] == 0.0
    )
    assert figures["image_use"] == figures["image_use/a"] == pytest.approx(by_hand)
    assert policy.training  # as it was
    assert verdict(figures) == ""


def test_a_policy_without_cameras_is_not_called_blind():
    observation, actions, valid = _pixels(6)
    figures = input_use(_Reader(None), dataclasses.replace(observation, images={}), actions, valid)
    assert "image_use" not in figures and figures["loss"] > 0.0
    assert verdict(figures) == "" and described(figures).startswith(
        "on held-out demonstrations: loss "
    )


def test_a_blind_policy_is_called_one():
    figures = input_use(_Reader(None), *_pixels(10))
    assert figures["image_use"] == 0.0
    assert "does not look at its images" in verdict(figures) and "feature_norm" in verdict(figures)
    assert "hardly looks" in verdict({"loss": 1.0, "image_use": 0.1})
    assert (
        verdict({"loss": 1.0, "image_use": 0.2})
        == verdict({"loss": 1.0, "image_use": 0.2, "image_spread": 0.05})
        == ""
    )
    flat = verdict({"loss": 1.0, "image_use": 0.2, "image_spread": 0.004})
    assert (
        "nearly the same for every picture" in flat
        and "spread is 0.004" in flat
        and "feature_norm" in flat
    )
    # said once
    assert "features is 0.00" in verdict({"loss": 1.0, "image_use": 0.0, "image_spread": 0.004})
    alone = {"image_use/wrist": 0.2, "image_use/front": -0.01}
    line = described({"loss": 1.0, "image_use": 0.25, **alone, "instruction_use": 0.0})
    assert line.endswith(
        "loss 1.00, +0.25 with the images of other rows (wrist +0.20, front -0.01 alone)"
    )
    assert described({"loss": 1.0, "image_use": 0.25, "first_loss": 1.5}).endswith(
        "rows; 1.50 on first decisions"
    )


def test_an_instruction_that_is_not_read_is_told_of_where_it_tells_tasks_apart():
    looks = {"loss": 2.0, "image_use": 1.0, "instruction_use": 0.09}
    assert verdict(looks) == verdict({**looks, "tasks": 1.0}) == ""  # the same in other words
    assert "does not read its instruction" in verdict({**looks, "tasks": 2.0})
    assert "2.090 with the instructions of other rows and 2.000" in verdict({**looks, "tasks": 2.0})
    assert verdict({**looks, "tasks": 2.0, "instruction_use": 0.1}) == ""
    both = verdict({**looks, "tasks": 2.0, "image_use": 0.0})
    assert (
        "does not look at its images" in both
        and "Also, the policy does not read its instruction" in both
    )
    assert described({**looks, "tasks": 2.0}).endswith(
        "+1.00 with the images of other rows, +0.09 with their instructions"
    )


class _Goes(_Reader):
    """Predicts where its arm is, and, with the arm at 0, nothing."""

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        return (actions[:, 0, 0] - observation.proprio[:, 0]).square().mean(), {}


def test_use_of_proprioception_and_the_loss_as_episodes_begin():
    observation, actions, valid = _pixels(10)
    arm = torch.arange(10.0)[:, None].repeat(1, P)
    policy = _Goes(None)
    figures = input_use(
        policy, dataclasses.replace(observation, proprio=arm), actions, valid, seed=3
    )
    other = derangement(10, torch.Generator().manual_seed(3)).float()
    assert figures["loss"] == 0.0
    assert figures["proprio_use"] == pytest.approx(
        float((torch.arange(10.0) - other).square().mean())
    )
    assert first_loss(
        policy, dataclasses.replace(observation, proprio=0 * arm), actions, valid
    ) == pytest.approx(28.5)
