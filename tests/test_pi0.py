"""π0 and π0.5 by lerobot's classes at small sizes: openpi's own numbers, files, sampling with a
likelihood."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pi_vectors as vectors
import pytest
import torch
from contracts import check_policy
from lerobot_helpers import (
    ACTIONS,
    CHUNK,
    PI0_SIZES,
    SPEC,
    STATS,
    copy_of,
    four_rollouts,
    grpo_makes_the_better_likelier,
    lerobot_batch,
    observation,
    write_vlm,
)

from policies.actors.residual import ResidualPolicy
from policies.actors.settings import ResidualConfig, SteeredConfig
from policies.actors.steered import SteeredPolicy
from policies.lerobot.families import FAMILIES
from policies.lerobot.heads import ACTION, STATE, TOKEN_MASK, TOKENS
from policies.lerobot.package import quiet
from policies.lerobot.policy import LeRobotPolicy
from policies.lerobot.sizes import sized
from policies.lerobot.stored import decode
from policies.lerobot.weights import load_weights
from policies.settings import LeRobotConfig
from vla_rl.algorithms.dsrl import DSRL
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.cli import main
from vla_rl.config.replay_algorithms import CriticsConfig, DSRLConfig
from vla_rl.data.replay import Replay
from vla_rl.errors import ConfigError, MissingDependency, UserError
from vla_rl.types import Observation

pytest.importorskip("lerobot", reason="lerobot is not installed: pip install 'vla-rl[lerobot]'")
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="π0 needs lerobot 0.6, which needs Python 3.12"
)
BOTH = pytest.mark.parametrize("family", ["pi0", "pi05"])
IMAGES = [f"observation.images.{name}" for name in "abc"]


def own_policy(family: str) -> Any:
    """lerobot's policy at the small size, three cameras, 32 dimensions."""
    from lerobot.policies.factory import get_policy_class

    features = {key: {"type": "VISUAL", "shape": [3, 224, 224]} for key in IMAGES}
    settings = {
        "type": family,
        "device": "cpu",
        "chunk_size": 10,
        "n_action_steps": 10,
        "input_features": features | {STATE: {"type": "STATE", "shape": [32]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [32]}},
    }
    with quiet(), sized(family, vectors.SIZES):
        return get_policy_class(family)(decode(settings)).eval()


def openpi_file(policy: Any, file: Path) -> dict[str, torch.Tensor]:
    """Weights by formula under openpi's names, written to ``file``."""
    from safetensors.torch import save_file

    shapes = {
        name.removeprefix("model."): tuple(x.shape) for name, x in policy.state_dict().items()
    }
    tensors = vectors.weights(shapes)
    save_file(tensors, file)
    return tensors


@BOTH
def test_openpis_numbers(family: str, tmp_path: Path) -> None:
    """Embeddings, velocities, loss and chunks of openpi's model (docstring of `pi_vectors`)."""
    policy, said, given = own_policy(family), vectors.EXPECTED[family], vectors.inputs(family)
    tensors = openpi_file(policy, tmp_path / "model.safetensors")
    assert len(tensors) == {"pi0": 88, "pi05": 91}[family]
    assert tensors["action_in_proj.bias"][:3].tolist() == pytest.approx(
        [0.009241, 0.006529, -0.058747], abs=1e-6
    )
    assert given["noise"].flatten()[:3].tolist() == pytest.approx(
        [-1.686818, 0.138456, 0.511565], abs=1e-6
    )
    load_weights(policy, tmp_path / "model.safetensors")

    def close(name: str, got: torch.Tensor, atol: float = 1e-5) -> None:
        torch.testing.assert_close(
            got, torch.tensor(said[name]), rtol=0, atol=atol, msg=lambda m: f"{name}: {m}"
        )

    batch = {
        STATE: given["state"],
        TOKENS: given["tokens"],
        TOKEN_MASK: given["mask"],
        ACTION: given["actions"],
    }
    batch |= {IMAGES[k]: given[str(k)] for k in range(2)}
    head = FAMILIES[family].make_head(policy)
    model = policy.model
    with torch.no_grad():
        images, _, tokens, *_ = head._inputs(batch)
        close("image", head.trunk.embed_image(images[0])[0, 0, :4])
        close("word", head.trunk.embed_language_tokens(tokens)[0, 0, :4])
        time, noise = given["time"], given["noise"]
        x = time[:, None, None] * noise + (1 - time[:, None, None]) * given["actions"]
        suffix, _, _, adaptive = model.embed_suffix(
            *((given["state"],) if family == "pi0" else ()), x, time
        )
        close("suffix", suffix[0, 0, :4])
        if family == "pi05":
            close("condition", adaptive[0, :4])
        condition = head.condition(batch)
        velocity = model.denoise_step(x_t=x, timestep=time, **condition)
        close("velocity", velocity[0, 0, :4])
        assert float(velocity.abs().sum()) == pytest.approx(said["velocity_sum"], abs=1e-3)
        losses = model.forward(*head._inputs(batch), given["actions"], noise, time)
        assert float(losses.mean()) == pytest.approx(said["loss"], abs=1e-5)
        chunks = {}
        for steps in (4, 10):
            chain, chunk = head.chain(steps, "flow_sde", 0.5), noise
            for k in range(steps):
                action, epsilon = head.estimates(condition, chunk, chain, k)
                chunk = chain.mean_action[k] * action + chain.mean_noise[k] * epsilon
            chunks[steps] = chunk
    close("four", chunks[4][0, 0, :4])
    close("ten", chunks[10][0, 0, :4], atol=1e-4)
    close("ten_end", chunks[10][1, 9, 28:], atol=1e-4)
    assert (float(chunks[10].sum()), float(chunks[10].abs().sum())) == pytest.approx(
        said["ten_sums"], abs=2e-3
    )


# ----------------------------------------------------------------------------- behind our protocols
TINY = PI0_SIZES
OPTIONS = [
    "max_action_dim:6",
    "max_state_dim:8",
    "num_inference_steps:3",
    "tokenizer_max_length:120",
    "n_action_steps:3",
    "image_resolution:[28, 28]",
    "device:cpu",
]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    write_vlm(folder := tmp_path_factory.mktemp("vlm"))
    return str(folder)


@pytest.fixture(scope="module")
def policies(vlm: str) -> dict[str, LeRobotPolicy]:
    """One new policy a family, of random weights throughout (lerobot's zeros would hide errors);
    not to be changed."""
    return {family: new_policy(family, vlm) for family in ("pi0", "pi05")}


def new_policy(family: str, vlm: str, *more: str) -> LeRobotPolicy:
    torch.manual_seed(0)
    config = LeRobotConfig(
        family=family, chunk_length=CHUNK, options=[*OPTIONS, *more], vlm=vlm, sizes=TINY
    )
    policy = LeRobotPolicy.from_statistics(
        config, SPEC, STATS["action"], STATS["observation.state"]
    ).eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith((".dense.weight", ".dense.bias")):
                parameter.normal_(std=0.2)
    return policy


def load(folder: Path, **config: Any) -> LeRobotPolicy:
    return LeRobotPolicy.from_published(
        LeRobotConfig(checkpoint=str(folder), chunk_length=CHUNK, **config), SPEC
    )


def tensors_in(file: Path) -> dict[str, torch.Tensor]:
    """Copies, since the file is mapped and may be overwritten."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(file).items()}


@BOTH
def test_contract(family: str, policies: dict[str, LeRobotPolicy]) -> None:
    policy = policies[family]
    assert policy.can >= {"likelihood", "noise", "features"}
    check_policy(policy, observation(4), tolerance=1e-5)
    assert (
        policy.act(observation(2), seeds=[1, 2]).chunk.valid.tolist()
        == [[True, True, True, False]] * 2
    )


@pytest.mark.parametrize(
    ("family", "more"), [("pi0", []), ("pi05", []), ("pi05", ["use_relative_actions:true"])]
)
def test_acts_and_learns_as_lerobot_does(family: str, more: list[str], vlm: str) -> None:
    """Chunks from one noise, and the loss, of lerobot's own code in between its own processors."""
    policy, seen = new_policy(family, vlm, *more), observation()
    output = policy.act(seen, deterministic=True, seeds=[5, 6, 7])
    before, after = policy.preprocessor, policy.postprocessor
    theirs = policy.model.predict_action_chunk(
        before(lerobot_batch(seen)), noise=output.replay["chain"][:, 0]
    )
    torch.testing.assert_close(output.chunk.actions, after(theirs), rtol=0, atol=1e-5)
    actions, valid = torch.randn(3, CHUNK, ACTIONS), torch.ones(3, CHUNK).bool()
    torch.manual_seed(3)
    loss, metrics = policy.imitation_loss(seen, actions, valid)
    torch.manual_seed(3)
    expected, _ = policy.model.forward(before({**lerobot_batch(seen), "action": actions}))
    torch.testing.assert_close(loss.detach(), expected.detach())
    assert metrics == {"mse": pytest.approx(float(expected.detach()))}


@BOTH
@pytest.mark.parametrize(
    "layout", ["lerobot 0.6", "lerobot 0.4", "openpi", "before transformers 4.52"]
)
def test_what_is_read_is_written(
    family: str, layout: str, policies: dict[str, LeRobotPolicy], tmp_path: Path
) -> None:
    """Names, counts and bits of each layout's tensors; a checkpoint of ours between changes
    none."""
    from safetensors.torch import save_file

    policies[family].save_pretrained(folder := tmp_path / "theirs")
    written = tensors_in(folder / "model.safetensors")
    table, words = (f"model.{name}" for name in (vectors.TABLE, vectors.TIED))
    assert {table, words, f"model.{vectors.UNUSED}"} <= set(written)
    kept = written
    if layout != "lerobot 0.6":  # one table
        kept = {name: tensor for name, tensor in written.items() if name != words}
        start, inner = "model.paligemma_with_expert.paligemma.", "model.language_model."
        named = {
            "openpi": lambda name: name.removeprefix("model."),
            "before transformers 4.52": lambda name: (
                name.replace(f"{start}{inner}", f"{start}language_model.model.")
                .replace(f"{start}lm_head", f"{start}language_model.lm_head")
                .replace(f"{start}model.", start)
            ),
        }.get(layout, lambda name: name)
        save_file(
            {named(name): tensor for name, tensor in kept.items()}, folder / "model.safetensors"
        )
    policy = load(folder)
    save_checkpoint(tmp_path / "ours", policy)
    again = load_policy(tmp_path / "ours", lambda name: LeRobotPolicy, SPEC)
    again.save_pretrained(tmp_path / "back")
    back = tensors_in(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(kept) and all(torch.equal(back[name], kept[name]) for name in kept)
    chunks = [
        p.act(observation(), deterministic=True, seeds=[5, 6, 7]).chunk.actions
        for p in (policy, again)
    ]
    torch.testing.assert_close(*chunks, rtol=0, atol=0)
    if layout == "lerobot 0.4":
        loss, _ = again.imitation_loss(
            observation(), torch.zeros(3, CHUNK, ACTIONS), torch.ones(3, CHUNK).bool()
        )
        loss.backward()
        trunk = again.model.model.paligemma_with_expert.paligemma
        # they learn as one
        assert trunk.lm_head.weight is trunk.model.language_model.embed_tokens.weight


def openpi_folder(policy: LeRobotPolicy, folder: Path) -> Path:
    """As openpi's converter writes it."""
    from safetensors.torch import save_file

    (folder / "assets" / "arm").mkdir(parents=True)
    tensors = {name.removeprefix("model."): x for name, x in policy.model.state_dict().items()}
    tensors[vectors.TABLE] = tensors.pop(vectors.TIED)
    save_file(tensors, folder / "model.safetensors")
    said = {
        "action_dim": 6,
        "action_horizon": CHUNK,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
    }
    (folder / "config.json").write_text(json.dumps({**said, "precision": "float32"}))
    stats = {
        ours: STATS[theirs]
        for ours, theirs in (("actions", "action"), ("state", "observation.state"))
    }
    padded = {
        name: {k: [*values[k], 0.0] for k in ("mean", "std", "q01", "q99")}
        for name, values in stats.items()
    }
    (folder / "assets" / "arm" / "norm_stats.json").write_text(json.dumps({"norm_stats": padded}))
    return folder


@BOTH
def test_a_folder_of_openpis(
    family: str, policies: dict[str, LeRobotPolicy], vlm: str, tmp_path: Path
) -> None:
    """Its weights and normalisation act as the policy that they were taken from; a third picture
    is absent and masked."""
    folder = openpi_folder(policies[family], tmp_path / "openpi")
    cameras = ["base_0_rgb:front", "left_wrist_0_rgb:wrist", "right_wrist_0_rgb:none"]
    options = [option for option in OPTIONS if not option.startswith(("max_action_dim", "device"))]
    policy = load(folder, options=options, cameras=cameras, vlm=vlm, sizes=TINY)
    assert policy.stored.family == family
    chunks = [
        p.act(observation(), deterministic=True, seeds=[5, 6, 7]).chunk.actions
        for p in (policy, policies[family])
    ]
    torch.testing.assert_close(*chunks, rtol=0, atol=1e-5)
    policy.save_pretrained(tmp_path / "lerobot")
    assert (tmp_path / "lerobot" / "policy_preprocessor.json").is_file()
    (folder / "assets" / "arm" / "norm_stats.json").unlink()
    with pytest.raises(UserError, match=r"must hold one assets/<asset>/norm_stats.json.*has none"):
        load(folder, options=options, cameras=cameras, vlm=vlm, sizes=TINY)


@BOTH
def test_openpis_folder_comes_back_from_a_checkpoint_of_ours(
    family: str, policies: dict[str, LeRobotPolicy], vlm: str, tmp_path: Path
) -> None:
    """`vla-rl export --form openpi`: names, counts and bits of its tensors, its settings and norms;
    `--form lerobot` of the same checkpoint, and that back in openpi's, too."""
    folder = openpi_folder(policies[family], tmp_path / "openpi")
    cameras = ["base_0_rgb:front", "left_wrist_0_rgb:wrist", "right_wrist_0_rgb:none"]
    options = [option for option in OPTIONS if not option.startswith(("max_action_dim", "device"))]
    given = {"options": options, "cameras": cameras, "vlm": vlm, "sizes": TINY}
    save_checkpoint(tmp_path / "ours", load(folder, **given))
    forms = {"openpi": tmp_path / "back", "lerobot": tmp_path / "lerobot"}
    for form, place in forms.items():
        assert main(["export", str(tmp_path / "ours"), str(place), "--form", form]) == 0
    save_checkpoint(tmp_path / "again", load(forms["lerobot"], cameras=cameras, vlm=vlm))
    assert main(["export", str(tmp_path / "again"), str(tmp_path / "two"), "--form=openpi"]) == 0
    wanted = tensors_in(folder / "model.safetensors")
    for back in (forms["openpi"], tmp_path / "two"):
        found = tensors_in(back / "model.safetensors")
        assert set(found) == set(wanted) and len(found) == len(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        said = [json.loads((f / "config.json").read_text()) for f in (back, folder)]
        assert said[0] == said[1]
        [norms] = [json.loads(f.read_text())["norm_stats"] for f in back.rglob("norm_stats.json")]
        for ours, theirs in (("actions", "action"), ("state", "observation.state")):
            for key in ("mean", "std", "q01", "q99"):
                np.testing.assert_array_equal(
                    *map(np.float32, (norms[ours][key], STATS[theirs][key]))
                )
    chunks = [
        p.act(observation(), deterministic=True, seeds=[5, 6, 7]).chunk.actions
        for p in (load(forms["openpi"], **given), policies[family])
    ]
    torch.testing.assert_close(*chunks, rtol=0, atol=1e-5)


def test_files_that_are_not_this_policys(
    policies: dict[str, LeRobotPolicy], vlm: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    for family in ("pi0", "pi05"):
        policies[family].save_pretrained(tmp_path / family)
    file = tmp_path / "pi05" / "model.safetensors"
    weights = tensors_in(file)
    file.write_bytes((tmp_path / "pi0" / "model.safetensors").read_bytes())
    with pytest.raises(
        UserError, match=r"unexpected: model.action_time_mlp_in.bias[\s\S]*and \d+ more"
    ):
        load(tmp_path / "pi05")
    for lost in (vectors.TABLE, vectors.TIED):
        weights.pop(f"model.{lost}")
    save_file(weights, file)
    with pytest.raises(
        UserError, match=r"missing: model.paligemma_with_expert.paligemma.lm_head.weight\n"
    ):
        load(tmp_path / "pi05")
    foreign = {"sizes": {"width": 32, "depht": 2}}
    with pytest.raises(ConfigError, match=r"policy.sizes has 'depht', choose of width, mlp"):
        load(copy_of(tmp_path / "pi0", tmp_path / "misspelt", **foreign))
    with pytest.raises(ConfigError, match=r"policy.sizes is for pi0 and pi05"):
        LeRobotConfig(family="act", sizes={"width": 8})
    with pytest.raises(
        UserError, match=r"has 1\d\d tokens as it is put, this policy reads at most 120"
    ):
        one = observation(1)
        policies["pi05"].act(Observation(one.images, one.proprio, ("pick it up " * 40,)))


@BOTH
def test_a_gated_tokenizer_is_missed_before_anything_is_spent(
    family: str,
    vlm: str,
    policies: dict[str, LeRobotPolicy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    policies[family].save_pretrained(tmp_path / "with")
    LeRobotConfig(checkpoint=str(tmp_path / "with")).check_machine()
    stored = policies[family].stored
    step = next(
        s
        for s in stored.pipelines["policy_preprocessor"]["json"]["steps"]
        if "tokenizer_name" in s["config"]
    )
    hub = {"tokenizer_name": "google/paligemma-3b-pt-224"}
    monkeypatch.setitem(step, "config", step["config"] | hub)
    policies[family].save_pretrained(tmp_path / "without")
    said = r"'google/paligemma-3b-pt-224' is not on this machine.*policy.vlm=/path.*after accepting its licence"
    for config in (
        LeRobotConfig(checkpoint=str(tmp_path / "without")),
        LeRobotConfig(family=family, sizes=TINY),
    ):
        with pytest.raises(MissingDependency, match=said):
            config.check_machine()
    LeRobotConfig(checkpoint=str(tmp_path / "without"), vlm=vlm).check_machine()


@BOTH
def test_lora_is_trained_and_written_merged(
    family: str, policies: dict[str, LeRobotPolicy], tmp_path: Path
) -> None:
    """At first it changes nothing; then only adapters and what projects states and actions are
    trained, and others read the sum under the names that they know."""
    policies[family].save_pretrained(folder := tmp_path / "start")
    plain, policy = load(folder), load(folder, lora_rank=2, lora_alpha=4)
    seen, seeds = observation(), [5, 6, 7]

    def acted(p: LeRobotPolicy) -> torch.Tensor:
        return p.act(seen, deterministic=True, seeds=seeds).chunk.actions

    torch.testing.assert_close(acted(policy), acted(plain), rtol=0, atol=0)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    inner = {name for name in trained if "paligemma_with_expert" in name}
    assert inner and all(".lora_" in name for name in inner)
    assert not any("vision" in name for name in trained)
    assert any("action_out_proj" in name for name in trained)
    taken = policy.act(seen, seeds=seeds)
    policy.evaluate(seen, taken.replay).log_prob.sum().backward()
    moved = {name for name, p in trained.items() if p.grad is not None and p.grad.any()}
    ends = {name for name in inner if ".lora_B." in name}
    assert {n for n in ends if "gemma_expert" in n} <= moved
    assert any("language_model" in name for name in ends & moved)
    with torch.no_grad():
        for name in ends:
            trained[name].normal_(std=0.3)
    assert (acted(policy) - acted(plain)).abs().max() > 1e-2
    save_checkpoint(tmp_path / "ours", policy)
    again = load_policy(tmp_path / "ours", lambda name: LeRobotPolicy, SPEC)
    torch.testing.assert_close(acted(again), acted(policy), rtol=0, atol=0)
    again.save_pretrained(tmp_path / "merged")
    merged, start = (tensors_in(x / "model.safetensors") for x in (tmp_path / "merged", folder))
    assert {n: x.shape for n, x in merged.items()} == {n: x.shape for n, x in start.items()}
    torch.testing.assert_close(acted(load(tmp_path / "merged")), acted(policy), rtol=0, atol=1e-4)
    student = policy.make_student(1, "same_noise")
    assert not any(".lora_" in name for name, _ in student.named_parameters())
    torch.testing.assert_close(student.state_dict(), load(tmp_path / "merged").state_dict())


def test_lora_of_what_is_frozen_or_not_there(
    policies: dict[str, LeRobotPolicy], tmp_path: Path
) -> None:
    policies["pi0"].save_pretrained(folder := tmp_path / "start")
    expert = load(folder, lora_rank=2, options=["train_expert_only:true"])
    adapted = {name for name, _ in expert.named_parameters() if ".lora_" in name}
    assert adapted and all("gemma_expert" in name for name in adapted)
    with pytest.raises(ConfigError, match=r"policy\.lora_targets names no linear layer"):
        load(folder, lora_rank=2, lora_targets=["qkv"])
    with pytest.raises(ConfigError, match=r"a new pi0 has random ones: set policy\.checkpoint"):
        LeRobotConfig(family="pi0", lora_rank=2)


@BOTH
def test_rl_residuals_noise_and_guidance(family: str, policies: dict[str, LeRobotPolicy]) -> None:
    policy, seen = policies[family], observation(3)
    actor = ResidualPolicy(
        ResidualConfig(hidden=[8], encoder=8, copy_base=False, distribution="deterministic"), policy
    )
    plain = policy.act(seen, deterministic=True)
    unit = plain.chunk.actions[:, :1].clamp(-1.0, 1.0)
    torch.testing.assert_close(
        actor.eval().act(seen, deterministic=True, memory=[None] * 3).chunk.actions, unit
    )
    noise = plain.replay["chain"][:, 0, :, :ACTIONS]
    torch.testing.assert_close(
        policy.decode(seen, noise), policy.decode(seen, noise), rtol=0, atol=0
    )
    assert not torch.allclose(
        policy.decode(seen, noise + 1.0), policy.decode(seen, noise), atol=1e-3
    )
    wanted = policy.act(seen, deterministic=True, seeds=[1, 2, 3]).chunk.actions
    free, held = (
        policy.act_towards(
            seen, wanted, torch.full((3, CHUNK), weight), 5.0, deterministic=True
        ).actions
        for weight in (0.0, 1.0)
    )
    torch.testing.assert_close(free, plain.chunk.actions)
    assert (held - wanted).abs().mean() < 0.5 * (free - wanted).abs().mean(), (
        "in three denoising steps"
    )


def test_dsrl_chooses_the_first_noise_of_a_frozen_policy(
    policies: dict[str, LeRobotPolicy],
) -> None:
    """It decodes from the pictures that the replay has, and the weights beneath stay as they
    are."""
    base = policies["pi05"]
    before = {name: x.clone() for name, x in base.state_dict().items()}
    torch.manual_seed(0)
    policy = SteeredPolicy.from_base(SteeredConfig(hidden=[8], encoder=8), base)
    config = DSRLConfig(batch_size=4, actor_every=1, critic_warmup=0, demonstration_share=0.0)
    algorithm, replay = (
        DSRL(dataclasses.replace(config, critics=CriticsConfig(hidden=[8])), policy),
        Replay(),
    )
    for trajectory in four_rollouts(policy):
        rewards = torch.tensor([float(trajectory.success)])
        replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
    draw = functools.partial(replay.draw, generator=torch.Generator().manual_seed(0))
    metrics = [algorithm.update(draw) for _ in range(2)][-1]
    assert metrics["dsrl/noise_critic_loss"] > 0.0
    assert all(torch.equal(x, before[name]) for name, x in base.state_dict().items())


@BOTH
def test_grpo_through_the_chain(family: str, vlm: str) -> None:
    grpo_makes_the_better_likelier(new_policy(family, vlm, "train_expert_only:true"))
