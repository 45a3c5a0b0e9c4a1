"""lerobot's policies behind the project's protocols, on tiny random checkpoints that lerobot's
own code writes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import check_policy, random_observation
from lerobot_helpers import (
    ACTIONS,
    CHUNK,
    SIZE,
    SPEC,
    STATS,
    copy_of,
    grpo_makes_the_better_likelier,
    lerobot_batch,
    observation,
    write_vlm,
)
from safetensors.torch import load_file

from policies.actors.improved import ImprovedPolicy
from policies.actors.residual import ResidualPolicy
from policies.actors.settings import ImprovedConfig, ResidualConfig
from policies.lerobot.package import since
from policies.lerobot.policy import LeRobotChainPolicy, LeRobotPolicy
from policies.lerobot.stored import decode
from policies.settings import LeRobotConfig
from sim.toy import ToyConfig, ToyReach
from vla_rl import build, cli
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.errors import (
    ConfigError,
    EmbodimentMismatch,
    MissingDependency,
    MissingPackage,
    UserError,
)
from vla_rl.types import CameraSpec, EpisodeSpec, Observation

pytest.importorskip("lerobot", reason="lerobot is not installed: pip install 'vla-rl[lerobot]'")

TINY = {
    "act": [
        "dim_model:16",
        "n_heads:2",
        "dim_feedforward:32",
        "n_encoder_layers:1",
        "n_vae_encoder_layers:1",
        "latent_dim:4",
    ],
    "diffusion": [
        "down_dims:[16]",
        "n_groups:4",
        "diffusion_step_embed_dim:8",
        "spatial_softmax_num_keypoints:4",
        "num_train_timesteps:12",
        "num_inference_steps:4",
        "use_group_norm:true",
        "use_separate_rgb_encoder_per_camera:false",
    ],
    "smolvla": [
        "resize_imgs_with_padding:[32, 32]",
        "max_action_dim:6",
        "max_state_dim:8",
        "num_steps:3",
        "num_vlm_layers:2",
        "tokenizer_max_length:24",
        "self_attn_every_n_layers:2",
    ],
}
EXECUTED = "n_action_steps:3"


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip(
        "num2words", reason="SmolVLA needs num2words: pip install 'vla-rl[lerobot]'"
    )
    write_vlm(folder := tmp_path_factory.mktemp("vlm"))
    return str(folder)


def new_policy(family: str, vlm: str, *more: str, seed: int = 0, **config: Any) -> LeRobotPolicy:
    torch.manual_seed(seed)
    return LeRobotPolicy.from_statistics(
        LeRobotConfig(
            family=family,
            chunk_length=CHUNK,
            options=[*TINY[family], EXECUTED, *more],
            vlm=vlm if family == "smolvla" else "",
            **config,
        ),
        SPEC,
        STATS["action"],
        STATS["observation.state"],
    ).eval()


@pytest.fixture(scope="session")
def folders(vlm: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per family, written by lerobot: `save_pretrained` of its policy and of its
    processors."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    out = {}
    for family in TINY:
        settings = new_policy(family, vlm).stored.settings
        config = decode(settings)
        torch.manual_seed(1)
        folder = out[family] = tmp_path_factory.mktemp(family)
        get_policy_class(family)(config).save_pretrained(folder)
        short = {"min": "low", "max": "high"}
        stats = {
            key: {k: torch.tensor(values[short.get(k, k)]) for k in ("min", "max", "mean", "std")}
            for key, values in STATS.items()
        }
        for pipeline in make_pre_post_processors(config, dataset_stats=stats):
            pipeline.save_pretrained(folder)
    return out


def load(folder: Path, **config: Any) -> LeRobotPolicy:
    return LeRobotPolicy.from_published(
        LeRobotConfig(checkpoint=str(folder), chunk_length=CHUNK, **config), SPEC
    )


def lerobots_own(folder: Path, config: Any = None) -> tuple[Any, Any, Any]:
    """Policy and processors by lerobot's code alone (whose own reader of ``config.json`` takes a
    second)."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = decode(json.loads((folder / "config.json").read_text())) if config is None else config
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    return policy, *make_pre_post_processors(config, pretrained_path=str(folder))


def lerobots_actions(
    folder: Path, obs: Observation, noise: torch.Tensor | None, config: Any = None
) -> torch.Tensor:
    """Physical actions [b h a] by lerobot's code alone, from the given initial noise."""
    policy, before, after = lerobots_own(folder, config)
    batch = before(lerobot_batch(obs))
    with torch.no_grad():
        if policy.config.type == "diffusion":
            images = torch.stack([batch[k] for k in policy.config.image_features], dim=1)[:, None]
            inputs = {
                "observation.state": batch["observation.state"][:, None],
                "observation.images": images,
            }
            condition = policy.diffusion._prepare_global_conditioning(inputs)
            actions = policy.diffusion.conditional_sample(
                len(obs), global_cond=condition, noise=noise
            )
        elif policy.config.type == "act":
            actions = policy.predict_action_chunk(batch)
        else:
            actions = policy.predict_action_chunk(batch, noise=noise)
    return after(actions)


@pytest.mark.parametrize("family", TINY)
def test_contract(family: str, folders: dict[str, Path]) -> None:
    policy = load(folders[family])
    assert isinstance(policy, LeRobotChainPolicy) == (family != "act")
    check_policy(policy, observation(4))
    chunk = policy.act(observation(2), seeds=[1, 2]).chunk
    # n_action_steps of the checkpoint
    assert chunk.valid.tolist() == [[True, True, True, False]] * 2


@pytest.mark.parametrize("family", TINY)
def test_acts_as_lerobot_does(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders[family]
    policy = load(folder, options=["noise_scheduler_type:DDIM"] if family == "diffusion" else [])
    if family == "diffusion":  # what lerobot then runs is the deterministic sampler
        policy.save_pretrained(tmp_path)
        folder = tmp_path
    output = policy.act(observation(), deterministic=True, seeds=[5, 6, 7])
    noise = output.replay["chain"][:, 0] if output.replay else None
    torch.testing.assert_close(
        output.chunk.actions, lerobots_actions(folder, observation(), noise), rtol=0, atol=1e-5
    )


def test_a_flow_of_lerobots_is_drawn_towards_a_wanted_chunk(folders: dict[str, Path]) -> None:
    """Weight 1: nearly that chunk; 0: what it does by itself; of the first control step alone:
    nearly that one."""
    policy, seen = load(folders["smolvla"]), observation(3)
    assert policy.guidable and not load(folders["diffusion"]).guidable
    with torch.inference_mode():  # as a session acts
        plain = policy.act(seen, deterministic=True).chunk
        wanted = policy.act(seen, deterministic=True, seeds=[5, 6, 7]).chunk.actions

        def towards(weight: torch.Tensor) -> torch.Tensor:
            chunk = policy.act_towards(seen, wanted, weight, 5.0, deterministic=True)
            assert chunk.valid.tolist() == plain.valid.tolist()
            return chunk.actions

        scale = (plain.actions - wanted).abs().mean()
        assert (towards(torch.ones(3, CHUNK)) - wanted).abs().mean() < 0.1 * scale
        torch.testing.assert_close(towards(torch.zeros(3, CHUNK)), plain.actions)
        gap = (towards(torch.eye(CHUNK)[:1].expand(3, -1)) - wanted).abs().mean((0, 2))
        assert gap[0] < 0.2 * scale < gap[1:].min()
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
@pytest.mark.parametrize("scheduler", ["DDPM", "DDIM"])
def test_diffusion_step_is_that_of_diffusers(
    folders: dict[str, Path], scheduler: str, prediction: str
) -> None:
    """Mean and standard deviation of every step, clipped estimates included, for η = 1."""
    options = [f"noise_scheduler_type:{scheduler}", f"prediction_type:{prediction}"]
    policy = load(folders["diffusion"], options=options, min_std=1e-9)
    model = policy.model.diffusion
    model.noise_scheduler.set_timesteps(4)
    times = model.noise_scheduler.timesteps.tolist()
    assert times == [9, 6, 3, 0]
    with torch.no_grad():
        condition = policy.head.condition(policy._batch(observation()))
        x = 2 * torch.randn(3, *policy.head.sample_shape)
        for k, time in enumerate(times):
            output = model.unet(x, torch.full((3,), time), global_cond=condition)
            extra = {"eta": 1.0} if scheduler == "DDIM" else {}
            seeded = torch.Generator().manual_seed(k)
            expected = model.noise_scheduler.step(
                output, time, x, generator=seeded, **extra
            ).prev_sample
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(k))
            mean, std, _ = policy._step(condition, x, k)
            torch.testing.assert_close(mean + std * noise, expected, rtol=0, atol=1e-5)
            x = expected


def test_last_diffusion_step_gets_the_floor(folders: dict[str, Path]) -> None:
    policy = load(folders["diffusion"], min_std=0.125)
    with torch.no_grad():
        condition = policy.head.condition(policy._batch(observation()))
        mean, std, plain = policy._step(condition, torch.zeros(3, *policy.head.sample_shape), 3)
    assert std == 0.125
    torch.testing.assert_close(mean, plain)


@pytest.mark.parametrize("family", ["diffusion", "smolvla"])
def test_only_the_last_steps_are_learned_from(family: str, folders: dict[str, Path]) -> None:
    """The same chunk, with likelihood, replay and DPPO's schedules over the last two steps
    alone."""
    whole = load(folders[family])
    policy = load(folders[family], trained_steps=2, advantage_discount=0.5, clip_base=0.1)
    output, before = (p.act(observation(), seeds=[1, 2, 3]) for p in (policy, whole))
    torch.testing.assert_close(output.chunk.actions, before.chunk.actions, rtol=0, atol=0)
    torch.testing.assert_close(
        output.behavior_log_prob, before.behavior_log_prob[:, -2:], rtol=0, atol=0
    )
    evaluation = policy.evaluate(observation(), output.replay)
    torch.testing.assert_close(
        evaluation.log_prob.detach(), output.behavior_log_prob, rtol=0, atol=1e-4
    )
    assert evaluation.advantage_weight[0, :, 0, 0].tolist() == [0.5, 1.0]
    assert evaluation.clip_scale[0, :, 0, 0].tolist() == pytest.approx([0.1, 1.0])
    assert whole.evaluate(observation(), before.replay).clip_scale is None


def test_noise_stays_within_what_the_robot_executes(folders: dict[str, Path]) -> None:
    """Padded action dimensions follow Euler's step, which the stored chain shows."""
    policy = load(folders["smolvla"], sampler="flow_cps")
    chain = policy.act(observation(), seeds=[1, 2, 3]).replay["chain"]
    with torch.no_grad():
        condition = policy.head.condition(policy._batch(observation()))
        for k in range(3):
            mean, std, plain = policy._step(condition, chain[:, k], k)
            torch.testing.assert_close(
                chain[:, k + 1, :, ACTIONS:], plain[..., ACTIONS:], rtol=0, atol=1e-5
            )
            z = (chain[:, k + 1, :, :ACTIONS] - mean[..., :ACTIONS]) / std
            assert 0.5 < float(z.std()) < 1.6


@pytest.mark.parametrize("family", TINY)
def test_imitation_loss_is_lerobots_own(family: str, folders: dict[str, Path]) -> None:
    policy = load(folders[family])
    theirs, before, _ = lerobots_own(folders[family])
    obs, actions = observation(), torch.randn(3, CHUNK, ACTIONS)
    valid = torch.ones(3, CHUNK, dtype=torch.bool)
    torch.manual_seed(3)
    loss, metrics = policy.imitation_loss(obs, actions, valid)
    batch = before({**lerobot_batch(obs), "action": actions, "action_is_pad": ~valid})
    if family == "diffusion":  # lerobot's loader adds the axis of frames
        batch["observation.state"] = batch["observation.state"][:, None]
    theirs.train()
    torch.manual_seed(3)
    expected, parts = theirs.forward(batch)
    # which counts the dimensions that pad the robot's; ours follows the newer
    if family == "smolvla" and not since("0.6"):
        torch.manual_seed(3)
        inputs = theirs.prepare_images(batch), batch["observation.language.tokens"]
        mask = batch["observation.language.attention_mask"]
        state, padded = theirs.prepare_state(batch), theirs.prepare_action(batch)
        expected = theirs.model.forward(*inputs[0], inputs[1], mask, state, padded)[
            ..., :ACTIONS
        ].mean()
    torch.testing.assert_close(loss.detach(), expected.detach())
    if family == "act":
        assert metrics == {
            "l1": pytest.approx(parts["l1_loss"]),
            "kl": pytest.approx(parts["kld_loss"]),
        }
    else:
        assert metrics == {"mse": pytest.approx(float(expected.detach()))}


# a U-Net's convolutions see the padding, as lerobot trains it
@pytest.mark.parametrize("family", ["act", "smolvla"])
def test_padded_steps_do_not_count(family: str, folders: dict[str, Path]) -> None:
    policy = load(folders[family])
    actions, valid = torch.randn(3, CHUNK, ACTIONS), torch.ones(3, CHUNK, dtype=torch.bool)
    valid[1, 2:] = False
    other = actions.clone()
    other[1, 2:] += 5.0
    losses = []
    for labels in (actions, other):
        torch.manual_seed(3)
        losses.append(policy.imitation_loss(observation(), labels, valid)[0])
    torch.testing.assert_close(losses[0].detach(), losses[1].detach())


@pytest.mark.parametrize("family", TINY)
def test_trained_policy_loads_in_lerobot_and_resumes_here(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from lerobot.configs.policies import PreTrainedConfig

    more = {"options": ["noise_scheduler_type:DDIM"]} if family == "diffusion" else {}
    policy = load(folders[family], **more)
    before = policy.act(observation(), deterministic=True, seeds=[5, 6, 7]).chunk.actions
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], 1e-2)
    for _ in range(2):
        loss, _ = policy.imitation_loss(
            observation(), torch.randn(3, CHUNK, ACTIONS), torch.ones(3, CHUNK).bool()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    output = policy.act(observation(), deterministic=True, seeds=[5, 6, 7])
    assert not torch.allclose(output.chunk.actions, before, atol=1e-3)
    policy.save_pretrained(tmp_path / "exported")
    noise = output.replay["chain"][:, 0] if output.replay else None
    # all as lerobot's evaluation loads it
    config = PreTrainedConfig.from_pretrained(tmp_path / "exported")
    theirs = lerobots_actions(tmp_path / "exported", observation(), noise, config)
    torch.testing.assert_close(output.chunk.actions, theirs, rtol=0, atol=1e-5)
    if family == "act":  # step by step, as lerobot's evaluation runs it
        own, pre, post = lerobots_own(tmp_path / "exported")
        for t in range(3):
            action = post(own.select_action(pre(lerobot_batch(observation()))))
            torch.testing.assert_close(output.chunk.actions[:, t], action, rtol=0, atol=1e-5)

    save_checkpoint(tmp_path / "own", policy)
    again = load_policy(tmp_path / "own", lambda name: LeRobotPolicy, SPEC)
    assert type(again) is type(policy)
    same = again.act(observation(), deterministic=True, seeds=[5, 6, 7])
    torch.testing.assert_close(same.chunk.actions, output.chunk.actions, rtol=0, atol=0)


def test_half_precision_weights_stay_so(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = load(folders["smolvla"])
    policy.model.model.vlm_with_expert.vlm.to(torch.bfloat16)
    policy.save_pretrained(tmp_path / "mixed")
    mixed = load(tmp_path / "mixed")
    save_checkpoint(tmp_path / "own", mixed)
    for kept in (mixed, load_policy(tmp_path / "own", lambda name: LeRobotPolicy)):
        dtypes = {name: p.dtype for name, p in kept.model.named_parameters()}
        assert {d for n, d in dtypes.items() if ".vlm." in n} == {torch.bfloat16}
        assert dtypes["model.action_out_proj.weight"] == torch.float32
        assert torch.isfinite(kept.act(observation(), seeds=[1, 2, 3]).chunk.actions).all()


def test_fine_tuning_takes_the_datasets_statistics(folders: dict[str, Path]) -> None:
    """As lerobot's own fine-tuning; images keep the checkpoint's."""
    stats = {
        key: {k: [2 * x for x in v] for k, v in values.items()} for key, values in STATS.items()
    }
    config = LeRobotConfig(checkpoint=str(folders["act"]), chunk_length=CHUNK)
    tuned = LeRobotPolicy.from_statistics(config, SPEC, stats["action"], stats["observation.state"])
    plain, obs = load(folders["act"]), observation()
    normal = torch.zeros(1, CHUNK, ACTIONS)
    torch.testing.assert_close(tuned._chunk(normal).actions, 2 * plain._chunk(normal).actions)
    state = tuned._batch(obs)["observation.state"]
    torch.testing.assert_close(state, (obs.proprio - 0.2) / 3.0)
    torch.testing.assert_close(
        tuned._batch(obs)["observation.images.front"], plain._batch(obs)["observation.images.front"]
    )


def test_cameras_are_matched_by_name_or_as_told(folders: dict[str, Path]) -> None:
    renamed = dataclasses.replace(
        SPEC, cameras=(CameraSpec("left", SIZE, SIZE), CameraSpec("wrist", SIZE, SIZE))
    )
    config = LeRobotConfig(checkpoint=str(folders["smolvla"]), chunk_length=CHUNK)
    with pytest.raises(
        EmbodimentMismatch,
        match=r"\['front', 'wrist'\].*\['left', 'wrist'\].*policy.cameras=\[front:left\]",
    ):
        LeRobotPolicy.from_published(config, renamed)
    told = LeRobotPolicy.from_published(
        dataclasses.replace(config, cameras=["front:left"]), renamed
    )
    images = {"left": observation().images["front"], "wrist": observation().images["wrist"]}
    swapped = dataclasses.replace(observation(), images=images)
    expected = load(folders["smolvla"]).act(observation(), seeds=[1, 2, 3]).chunk.actions
    torch.testing.assert_close(
        told.act(swapped, seeds=[1, 2, 3]).chunk.actions, expected, rtol=0, atol=0
    )
    blind = load(folders["smolvla"], cameras=["front:none"])
    assert blind.cameras == {"observation.images.wrist": "wrist"}
    blind.act(observation(), seeds=[1, 2, 3])
    with pytest.raises(EmbodimentMismatch, match=r"every image it was trained with"):
        load(folders["act"], cameras=["front:none"])


def test_repeated_frames_must_be_asked_for(vlm: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reads 2 frames.*policy.repeat_observation=true"):
        new_policy("diffusion", vlm, "n_obs_steps:2", "horizon:4")
    torch.manual_seed(0)
    config = LeRobotConfig(
        family="diffusion",
        chunk_length=3,
        repeat_observation=True,
        options=[*TINY["diffusion"], "n_obs_steps:2", "horizon:4"],
    )
    policy = LeRobotPolicy.from_statistics(
        config, SPEC, STATS["action"], STATS["observation.state"]
    ).eval()
    check_policy(policy, observation(4))
    output = policy.act(observation(), seeds=[1, 2, 3])
    assert output.behavior_log_prob.shape == (3, 4, 3, ACTIONS) and output.replay[
        "chain"
    ].shape == (3, 5, 4, ACTIONS)
    loss, _ = policy.imitation_loss(
        observation(), torch.randn(3, 3, ACTIONS), torch.ones(3, 3).bool()
    )
    loss.backward()
    assert torch.isfinite(loss)


def test_damaged_checkpoints(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(UserError, match=r"no readable config.json.*pretrained_model"):
        load(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"type 'tdmpc' \(it plans with a world model\); supported are act, diffusion",
    ):
        load(copy_of(folders["act"], tmp_path / "type", type="tdmpc"))
    with pytest.raises(
        ConfigError,
        match=r"does not know an_option_of_tomorrow=1 of this act policy.*another version",
    ):
        load(copy_of(folders["act"], tmp_path / "newer", an_option_of_tomorrow=1))
    with pytest.raises(ConfigError, match=r"do not fit the installed lerobot .*version that wrote"):
        load(copy_of(folders["act"], tmp_path / "typed", dim_model="wide"))
    with pytest.raises(UserError, match=r"misshapen: model.action_head"):
        load(copy_of(folders["act"], tmp_path / "wide", dim_model=32))

    old = copy_of(folders["act"], tmp_path / "old")
    (old / "policy_preprocessor.json").unlink()
    with pytest.raises(
        UserError, match=r"older than lerobot's processors.*migrate_policy_normalization"
    ):
        load(old)

    foreign = copy_of(folders["act"], tmp_path / "foreign")
    document = json.loads((foreign / "policy_preprocessor.json").read_text())
    document["steps"].append({"class": "os.system", "config": {}})
    (foreign / "policy_preprocessor.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"'os.system', which would run code from outside"):
        load(foreign)

    weights = load_file(folders["act"] / "model.safetensors")
    lost = copy_of(folders["act"], tmp_path / "lost")
    save_file(
        {k: v for k, v in weights.items() if k != "model.action_head.bias"}
        | {"extra": torch.ones(2)},
        lost / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"missing: model.action_head.bias\n  unexpected: extra"):
        load(lost)
    save_file(
        {**weights, "model.action_head.bias": torch.full((ACTIONS,), torch.nan)},
        lost / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"not finite, first in model.action_head.bias"):
        load(lost)
    (lost / "model.safetensors").write_bytes(
        (folders["act"] / "model.safetensors").read_bytes()[:1000]
    )
    with pytest.raises(UserError, match=r"missing or damaged"):
        load(lost)


def test_bad_input(folders: dict[str, Path]) -> None:
    small = dataclasses.replace(
        SPEC, cameras=(CameraSpec("front", 16, 16), CameraSpec("wrist", SIZE, SIZE))
    )
    config = LeRobotConfig(checkpoint=str(folders["act"]), chunk_length=CHUNK)
    with pytest.raises(
        EmbodimentMismatch,
        match=r"observation.images.front: .* \(3, 32, 32\), camera front gives \(3, 16, 16\)",
    ):
        LeRobotPolicy.from_published(config, small)
    wide = dataclasses.replace(SPEC, action_names=tuple("xyzg"))
    with pytest.raises(
        EmbodimentMismatch, match=r"action: the checkpoint has shape \(3,\), the robot \(4,\)"
    ):
        LeRobotPolicy.from_published(config, wide)
    with pytest.raises(ConfigError, match=r"chunk_length is 8.*set policy.chunk_length=4"):
        LeRobotPolicy.from_published(dataclasses.replace(config, chunk_length=8), SPEC)
    with pytest.raises(ConfigError, match=r"policy.options has 'dim_modell'"):
        load(folders["act"], options=["dim_modell:3"])
    with pytest.raises(
        ConfigError, match=r"denoising_steps is 13, .* 12 diffusion steps: choose 1 to 12"
    ):
        load(folders["diffusion"], denoising_steps=13)
    with pytest.raises(ConfigError, match=r"trained_steps is 5, the chain has 4 steps"):
        load(folders["diffusion"], trained_steps=5)
    for field, value, text in (
        ("family", "rt2", "family='rt2' .* one of act, diffusion, smolvla"),
        ("min_std", 0.0, "no likelihood"),
        ("sampler", "ddim", "sampler='ddim' .* one of flow_sde, flow_noise, flow_cps"),
        ("clip_base", 0.0, "clip_base=0.0 .* above 0 and at most 1"),
        ("options", ["dim_model"], "name:value"),
        ("denoising_steps", -1, "denoising_steps=-1 .* 0 or more"),
    ):
        with pytest.raises(ConfigError, match=text):
            LeRobotConfig(**{field: value})

    policy = load(folders["smolvla"])
    one = observation(1)
    long = "x" * 25
    for text, message in (
        ("  ", "empty instruction"),
        (long, "has 25 tokens as it is put, this policy reads at most 24"),
    ):
        with pytest.raises(UserError, match=message):
            policy.act(Observation(one.images, one.proprio, (text,)))
    with pytest.raises(EmbodimentMismatch, match=r"reads camera 'wrist'"):
        policy.act(Observation({"front": one.images["front"]}, one.proprio, one.instruction))
    with pytest.raises(EmbodimentMismatch, match=r"\(1, 5, 3\).*chunks of 4 x 3"):
        policy.imitation_loss(one, torch.zeros(1, 5, 3), torch.ones(1, 5).bool())


def test_backbone_that_is_not_on_this_machine(
    folders: dict[str, Path], vlm: str, tmp_path: Path
) -> None:
    elsewhere = copy_of(
        folders["smolvla"], tmp_path / "elsewhere", vlm_model_name="someone/their-vlm"
    )
    with pytest.raises(
        MissingDependency, match=r"'someone/their-vlm'.*not on this machine.*policy.vlm="
    ):
        load(elsewhere)
    here = load(elsewhere, vlm=vlm)
    # an export names what the checkpoint named
    assert here.stored.settings["vlm_model_name"] == "someone/their-vlm"


@pytest.mark.skipif(since("0.6"), reason="this is the newer lerobot")
def test_a_family_of_the_newer_lerobot(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders["act"], tmp_path / "pi0", type="pi0")
    for config in (LeRobotConfig(checkpoint=str(folder)), LeRobotConfig(family="pi05")):
        with pytest.raises(
            MissingDependency,
            match=r"pi05? needs lerobot 0.6 or newer, and 0.4.4 .*PYTHON=python3.12",
        ):
            config.check_machine()


NEWER = {  # as lerobot 0.6 and its next write settings that others lack
    "pretrained_revision": "main",
    "a_switch_that_is_off": False,
    "a_list_that_is_empty": [],
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": ["x"],
    "rtc_training_max_delay": 0,
}


def test_settings_of_another_version_that_change_nothing_are_left_out(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Same actions; what does change something is refused by its name."""
    newer, plain = load(copy_of(folders["act"], tmp_path / "newer", **NEWER)), load(folders["act"])
    chunks = [policy.act(observation()).chunk.actions for policy in (newer, plain)]
    torch.testing.assert_close(*chunks, rtol=0, atol=0)
    newer.save_pretrained(tmp_path / "exported")
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert written.keys() == plain.stored.settings.keys() and "use_relative_actions" not in written
    for number, changes in enumerate(
        ({"use_relative_actions": True}, {"rtc_training_max_delay": 3})
    ):
        with pytest.raises(
            ConfigError,
            match=rf"does not know {next(iter(changes))}={next(iter(changes.values()))!r}",
        ):
            load(copy_of(folders["act"], tmp_path / str(number), **NEWER | changes))


def test_a_new_language_policy_needs_its_tokenizer_before_anything_is_spent(
    vlm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What preflight asks; neither torch nor the hub is."""
    from policies.lerobot import needs

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(needs, "_cached", lambda name: name == "someone/cached")
    monkeypatch.setattr(needs, "since", lambda version: True)
    for family, name in (
        ("pi0", "google/paligemma-3b-pt-224"),
        ("pi05", "google/paligemma-3b-pt-224"),
        ("smolvla", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"),
    ):
        with pytest.raises(
            MissingDependency,
            match=rf"policy.family={family}: its tokenizer '{name}'.*policy.vlm=/path",
        ):
            LeRobotConfig(family=family).check_machine()
        with pytest.raises(MissingDependency, match=r"no tokenizer\.json or tokenizer\.model or"):
            LeRobotConfig(family=family, vlm=str(tmp_path)).check_machine()
        LeRobotConfig(family=family, vlm=vlm).check_machine()
        LeRobotConfig(family=family, checkpoint="its own brings it along").check_machine()
    LeRobotConfig(family="smolvla", options=["vlm_model_name:someone/cached"]).check_machine()
    LeRobotConfig(family="act").check_machine()


def test_missing_lerobot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lerobot.policies.factory", None)
    with pytest.raises(MissingPackage, match=r"pip install -e '.*\[lerobot\]'"):
        LeRobotPolicy.from_published(LeRobotConfig(checkpoint="somewhere"), SPEC)


@pytest.mark.parametrize("family", ["diffusion", "smolvla"])
def test_grpo_through_the_chain(family: str, folders: dict[str, Path]) -> None:
    grpo_makes_the_better_likelier(load(folders[family]))


def test_a_deterministic_family_is_refused_by_ppo(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"LeRobotPolicy lacks evaluate, log_prob_axes"):
        PPO(PPOConfig(advantage="grpo"), load(folders["act"]))


@pytest.mark.parametrize("family", list(TINY))
def test_what_it_sees_is_offered_to_small_networks(family: str, vlm: str, tmp_path: Path) -> None:
    """Features of a row depend on it alone: its images, state and words. A residual follows what
    is meant to be executed."""
    policy = new_policy(family, vlm)
    observation = dataclasses.replace(
        random_observation(SPEC, 3), instruction=("push", "lift it", "push")
    )
    frames = policy.frame_features(observation)
    assert set(frames) == {"visual", "state"} | ({"text"} if family == "smolvla" else set())
    blank = policy.frame_features(Observation.blank(SPEC))
    for name, frame in frames.items():
        assert (
            frame.shape == (3, blank[name].shape[1])
            and frame.isfinite().all()
            and not frame.requires_grad
        )
        torch.testing.assert_close(
            policy.frame_features(observation[1:2])[name], frame[1:2], rtol=1e-2, atol=1e-2
        )
        # (all its keypoints lie in the one cell here)
        if name != "text" and (family, name) != ("diffusion", "visual"):
            assert not torch.equal(frame[0], frame[2])
    mean, std = (torch.tensor(STATS["observation.state"][k]) for k in ("mean", "std"))
    if family == "act":  # normalised by mean and deviation
        torch.testing.assert_close(frames["state"], (observation.proprio - mean) / (std + 1e-8))
    if family == "smolvla":
        assert torch.equal(frames["text"][0], frames["text"][2]) and not torch.equal(
            frames["text"][0], frames["text"][1]
        )
    actor = ResidualPolicy(
        ResidualConfig(hidden=[8], encoder=8, copy_base=False, distribution="deterministic"), policy
    )
    assert actor.base_decisions == 3  # of four control steps three are executed
    save_checkpoint(tmp_path / "base", policy)
    actor.refer_to(tmp_path / "base")
    save_checkpoint(tmp_path / "actor", actor)
    again = load_policy(tmp_path / "actor", build.policy_class, SPEC)
    options = {"deterministic": True, "memory": [None] * 3}
    a, b = (p.act(observation, **options).chunk.actions for p in (actor.eval(), again))
    assert torch.equal(a, b)
    unit = policy.act(observation, deterministic=True).chunk.actions[:, :1].clamp(-1.0, 1.0)
    torch.testing.assert_close(a, unit)  # untrained it acts as the policy does
    with pytest.raises(
        ConfigError, match="actor improved trains the policy beneath from the features"
    ):
        ImprovedPolicy(ImprovedConfig(), policy)


@pytest.mark.slow
def test_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SFT of a new policy on the toy task, evaluation, export, and evaluation of the exported
    folder: the same episodes."""
    toy = ToyReach(ToyConfig())
    with DemonstrationWriter(tmp_path / "data", toy.embodiment) as writer:
        for i in range(2):
            writer.add_episode(**toy.collect_episode(EpisodeSpec("reach_red", i)))
    tiny = ",".join(f"'{option}'" for option in TINY["act"])
    common = [
        "policy=lerobot",
        f"policy.chunk_length={CHUNK}",
        "slots.workers=0",
        "slots.slots_per_worker=4",
    ]
    run = [
        "train",
        "~run",
        "name=act",
        f"output_dir={tmp_path}",
        "env=toy",
        "tasks=[reach_red]",
        "wandb=false",
        *common,
        "policy.family=act",
        f"policy.options=[{tiny},{EXECUTED}]",
        "phases=[sft,eval_sft]",
        f"dataset={tmp_path}/data",
        "sft.updates=2",
        "sft.batch_size=4",
        "sft.warmup_updates=1",
        "evaluate.episodes_per_task=2",
        "evaluate.video_episodes=0",
        "threads=1",
    ]
    assert cli.main(run) == 0
    checkpoint, exported = tmp_path / "act/checkpoints/sft", tmp_path / "exported"
    assert cli.main(["export", str(checkpoint), str(exported)]) == 0
    assert (
        cli.main(["export", str(checkpoint), str(exported)]) == 2
        and "exists already" in capsys.readouterr().err
    )
    documents = []
    for path, overrides in ((checkpoint, []), (exported, ["env=toy", *common])):
        file = tmp_path / f"{path.name}.json"
        options = ["--suite", "toy", "--tasks", "reach_red", "--episodes", "4", "--json", str(file)]
        assert cli.main(["eval", str(path), *options, *overrides]) == 0
        documents.append(json.loads(file.read_text()))
    ours, exported_ones = (document["outcomes"] for document in documents)
    jerk = [
        [outcome.pop("mean_jerk") for outcome in outcomes] for outcomes in (ours, exported_ones)
    ]
    assert len(ours) == 4 and ours == exported_ones
    assert jerk[0] == pytest.approx(jerk[1], rel=1e-4)  # the same motion

    # The exported folder starts a run of its own: a residual on top, whose checkpoint leaves the
    # weights where they are.
    again = [
        a for a in run if not a.startswith(("phases", "policy.family", "policy.options", "name="))
    ]
    residual = [
        "algorithm=residual_quickstart",
        "actor.hold=3",
        "actor.copy_base=false",
        "algorithm.start_decisions=4",
        "algorithm.critic_warmup=0",
        "algorithm.updates_per_decision=0.2",
        "algorithm.batch_size=8",
        "rl.iterations=1",
        "rl.episodes_per_iteration=4",
        "phases=[eval_sft,rl,eval_rl]",
        f"policy.checkpoint={exported}",
    ]
    assert cli.main([*again, "name=again", *residual]) == 0
    stored = tmp_path / "again" / "checkpoints"
    assert (
        json.loads((stored / "rl" / "config.json").read_text())["frozen_base"]["path"]
        == "../published"
    )
    assert not any(
        name.startswith("base.") for name in load_file(stored / "rl" / "model.safetensors")
    )
    shutil.copytree(tmp_path / "again", tmp_path / "moved")
    assert (
        cli.main(
            ["eval", str(tmp_path / "moved/checkpoints/rl"), "--suite", "toy", "--episodes", "2"]
        )
        == 0
    )
    kept = load_policy(tmp_path / "again/checkpoints/published", lambda name: LeRobotPolicy)
    assert kept.config.checkpoint == str(exported)
