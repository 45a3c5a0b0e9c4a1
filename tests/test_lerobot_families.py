"""Families that came with lerobot 0.6, each as a small random policy: they act, learn and are
stored as lerobot's own do."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import check_policy
from lerobot_helpers import (
    ACTIONS,
    CHUNK,
    SPEC,
    grpo_makes_the_better_likelier,
    lerobot_batch,
    observation,
    write_vlm,
)

from policies.actors.residual import ResidualPolicy
from policies.actors.settings import ResidualConfig, SteeredConfig
from policies.actors.steered import SteeredPolicy
from policies.lerobot.families import FAMILIES, LEFT_OUT
from policies.lerobot.improvement import advised
from policies.lerobot.noise import inputs_of
from policies.lerobot.policy import LeRobotChainPolicy, LeRobotPolicy
from policies.settings import LeRobotConfig
from vla_rl.checkpoint import load_policy, save_checkpoint

pytest.importorskip("lerobot", reason="lerobot is not installed: pip install 'vla-rl[lerobot]'")
if sys.version_info < (3, 12):
    pytest.skip("these families need lerobot 0.6, which needs Python 3.12", allow_module_level=True)

import lerobot_families
import test_lerobot_policies as older
import test_pi0 as pi
import test_pi_nano as nano
from lerobot_families import BACKBONES, TRIED, new_policy

EACH = pytest.mark.parametrize("name", TRIED)


@pytest.fixture(scope="module")
def vlms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{family: folder of its language backbone}."""
    folders = {family: tmp_path_factory.mktemp(family) for family in BACKBONES}
    for family, make in BACKBONES.items():
        make(folders[family])
    return {family: str(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def policies(vlms: dict[str, str]) -> dict[str, LeRobotPolicy]:
    return {name: new_policy(name, vlms[family]) for name, (family, _) in TRIED.items()}


def with_frames(policy: LeRobotPolicy, batch: dict[str, Any]) -> dict[str, Any]:
    """As lerobot's loader and its evaluation stack them for a family that reads several frames."""
    if policy.stored.family != "multi_task_dit":
        return batch
    frames = {
        key: value[:, None] for key, value in batch.items() if key.startswith("observation.images.")
    }
    return {**batch, **frames, "observation.state": batch["observation.state"][:, None]}


@EACH
def test_contract(name: str, policies: dict[str, LeRobotPolicy]) -> None:
    check_policy(policies[name], observation(4), tolerance=1e-5)


def test_acts_as_if_told_of_an_improvement(
    policies: dict[str, LeRobotPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, seen = policies["xvla"], observation()
    every = torch.ones(3, dtype=torch.bool)
    aloud = advised(seen, every, every)
    said = policy.act(aloud, seeds=[5, 6, 7]).chunk.actions
    plain = policy.act(seen, seeds=[5, 6, 7]).chunk.actions
    with monkeypatch.context() as patch:
        for weight in (1.0, 1.5):
            patch.setattr(policy, "config", dataclasses.replace(policy.config, improvement=weight))
            output = policy.act(seen, seeds=[5, 6, 7])
            again = policy.evaluate(seen, output.replay).log_prob
            torch.testing.assert_close(again, output.behavior_log_prob, rtol=1e-5, atol=1e-5)
            assert torch.equal(output.chunk.actions, said) == (weight == 1.0)
        assert policy.told_improvement and not torch.equal(output.chunk.actions, plain)
        labels, valid = torch.randn(3, CHUNK, ACTIONS), torch.ones(3, CHUNK).bool()
        losses = []
        for improved, dropout, shown in (
            (every, 0.0, seen),
            (every, 1.0, aloud),
            (~every, 0.0, seen),
        ):
            kept = dataclasses.replace(policy.config, improvement_dropout=dropout)
            patch.setattr(policy, "config", kept)
            torch.manual_seed(3)
            loss, _ = policy.imitation_loss(shown, labels, valid, improved)
            losses.append(float(loss.detach()))
        policy.eval()
    assert losses[0] == pytest.approx(losses[1]) and losses[2] != pytest.approx(losses[0])


@EACH
def test_acts_and_learns_as_lerobot_does(
    name: str, policies: dict[str, LeRobotPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, seen = policies[name], observation()
    output = policy.act(seen, deterministic=True, seeds=[5, 6, 7])
    before, after, theirs = policy.preprocessor, policy.postprocessor, policy.model
    noise = output.replay["chain"][:, 0]
    with monkeypatch.context() as patch, torch.no_grad():
        # lerobot draws its first noise itself
        patch.setattr(torch, "randn", lambda *_, **__: noise.clone())
        patch.setattr(torch, "normal", lambda *_, **__: noise.clone())  # EO-1
        patch.setattr(torch, "rand", lambda *_, **__: (noise.flatten(1) + 1) / 2)  # Evo-1
        batch = with_frames(policy, before(lerobot_batch(seen)))
        if policy.stored.family == "multi_task_dit":
            actions = theirs._generate_actions(theirs._prepare_batch(batch))
        else:
            actions = theirs.predict_action_chunk(batch)
    expected = after(actions)
    torch.testing.assert_close(
        output.chunk.actions[:, : expected.shape[1]], expected, rtol=0, atol=1e-5
    )

    labels, valid = torch.randn(3, CHUNK, ACTIONS), torch.ones(3, CHUNK).bool()
    torch.manual_seed(3)
    loss, _ = policy.imitation_loss(seen, labels, valid)
    torch.manual_seed(3)
    own, _ = theirs.forward(with_frames(policy, before({**lerobot_batch(seen), "action": labels})))
    torch.testing.assert_close(loss.detach(), own.detach())
    policy.eval()


@EACH
def test_stored_and_read(
    name: str, policies: dict[str, LeRobotPolicy], vlms: dict[str, str], tmp_path: Path
) -> None:
    """lerobot's own class loads what is written, a checkpoint of ours comes back, and lerobot's
    folder acts the same."""
    from lerobot.policies.factory import get_policy_class
    from safetensors.torch import load_file

    policy, vlm = policies[name], vlms[policies[name].stored.family]
    before = policy.act(observation(), deterministic=True, seeds=[5, 6, 7]).chunk.actions
    policy.save_pretrained(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", policy)
    published = LeRobotConfig(checkpoint=str(tmp_path / "theirs"), chunk_length=CHUNK, vlm=vlm)
    published.check_machine()
    for again in (
        load_policy(tmp_path / "ours", lambda _: LeRobotPolicy),
        LeRobotPolicy.from_published(published, SPEC),
    ):
        chunk = again.act(observation(), deterministic=True, seeds=[5, 6, 7]).chunk
        torch.testing.assert_close(chunk.actions, before, rtol=0, atol=0)
    again.save_pretrained(tmp_path / "back")
    first, back = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back")
    )
    assert set(first) == set(back) and all(torch.equal(first[key], back[key]) for key in first)
    if name == "xvla":  # (the other's class reads weights of CLIP from a hub first)
        theirs = get_policy_class("xvla").from_pretrained(tmp_path / "theirs")
        assert all(
            torch.equal(x, policy.model.state_dict()[key]) for key, x in theirs.state_dict().items()
        )


@EACH
def test_grpo_through_the_chain(name: str, vlms: dict[str, str]) -> None:
    grpo_makes_the_better_likelier(new_policy(name, vlms[TRIED[name][0]]))


EACH_CAMERA = "multi_task_dit, an encoder for each camera"


def small(name: str, vlms: dict[str, str], folder: Path) -> LeRobotPolicy:
    """A new policy of any family whose encoder can be centred."""
    if name == EACH_CAMERA:
        apart = "use_separate_rgb_encoder_per_camera:true"
        return new_policy("multi_task_dit (flow)", vlms["multi_task_dit"], apart)
    if name in TRIED:
        return new_policy(name, vlms[TRIED[name][0]])
    if name != "smolvla":
        return nano.pi(name)
    write_vlm(folder)
    return older.new_policy("smolvla", str(folder))


@pytest.mark.parametrize("name", [*TRIED, EACH_CAMERA, "smolvla", "pi0", "pi05"])
def test_a_new_encoder_is_centred_on_the_pictures_it_will_see(
    name: str, vlms: dict[str, str], tmp_path: Path
) -> None:
    """Pictures that are black but for a spot: what each eye makes of them has no mean and unit
    variance, or is blind to their mean; so they are told apart. Black ones are not, whatever the
    states are, and a checkpoint's encoder is left as it is."""
    policy = small(name, vlms, tmp_path)
    seen = observation(1)[[0] * 16]
    spots = {camera: torch.zeros_like(x) for camera, x in seen.images.items()}
    for x in spots.values():
        for row in range(16):
            x[row, row : row + 6, row : row + 6] = 255
    seen = dataclasses.replace(seen, images=spots, proprio=torch.randn(16, 5))
    pixels = [type(eye.layer).__name__.startswith("Conv") for eye in policy.head.eyes]
    assert sum(pixels) == (2 if name == EACH_CAMERA else 1)
    before = policy.image_token_spread(seen)
    policy.first_look(lambda: seen)
    assert policy.image_token_spread(seen) > before
    for layer, places in policy.head.eyes:
        with inputs_of(layer) as shown, torch.no_grad():
            policy.head.visual(policy._batch(seen))
            made = layer(torch.cat(shown))
        made = made.flatten(2).transpose(1, 2) if made.dim() > 3 else made
        if places is not None:
            torch.testing.assert_close((made - made.mean(0)).square().mean(), torch.tensor(1.0))
            torch.testing.assert_close((made.mean(0) + places).std(), torch.tensor(1.0))
        else:
            torch.testing.assert_close(made.flatten(0, -2).mean(0), torch.zeros(made.shape[-1]))
    black = {camera: torch.zeros_like(x) for camera, x in spots.items()}
    assert policy.image_token_spread(dataclasses.replace(seen, images=black)) < 1e-3
    policy.config.checkpoint = "somewhere"
    policy.first_look(lambda: pytest.fail("what has weights reads nothing"))


def test_a_new_policy_without_a_camera_has_nothing_to_look_at(
    vlms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_families, "SPEC", dataclasses.replace(SPEC, cameras=()))
    policy = new_policy("multi_task_dit (flow)", vlms["multi_task_dit"])
    seen = dataclasses.replace(observation(4), images={})
    policy.first_look(lambda: seen)
    assert not policy.head.eyes and policy.image_token_spread(seen) is None


# ---------------------------------------------------------------------------- the table in the docs
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "how_to" / "lerobot.md"
MARKS = "<!-- families: written by tests/test_lerobot_families.py -->\n", "<!-- end of families -->"
REMARKS = {
    "act": "deterministic: no likelihood",
    "diffusion": "through the DDPM or DDIM chain; one frame per decision, see below",
    "smolvla": "Flow-SDE or CPS",
    "pi0": "Flow-SDE or CPS; PaliGemma's tokenizer is gated",
    "pi05": "as π0; the state is part of the prompt",
    "xvla": "Flow-SDE or CPS over predicted actions; its loss counts padded steps",
    "evo1": "Flow-SDE or CPS, from uniform noise: exact likelihoods, not the flow's marginals",
    "eo1": "Flow-SDE or CPS; its loss counts padded steps",
    "multi_task_dit (flow)": "Flow-SDE or CPS",
    "multi_task_dit (diffusion)": "through the DDPM or DDIM chain",
}


def on_the_toy() -> dict[str, str]:
    """{family: held-out success after SFT and after PPO, %}, as `vla-rl bench families` last
    showed of it."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*-families.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return {row["family"]: f"{100 * row['before']:g} → {100 * row['after']:g}" for row in rows}


def tried(policy: LeRobotPolicy, name: str) -> str:
    """The row of a policy: each use that is said is made here."""
    seen = observation(2)
    policy.act(seen, seeds=[1, 2])
    loss, _ = policy.imitation_loss(
        seen, torch.zeros(2, CHUNK, ACTIONS), torch.ones(2, CHUNK).bool()
    )
    loss.backward()
    policy.eval()
    chain = isinstance(policy, LeRobotChainPolicy)
    if chain:
        policy.evaluate(seen, policy.act(seen).replay).log_prob.sum().backward()
        SteeredPolicy.from_base(SteeredConfig(hidden=[8], encoder=8), policy).act(
            seen, seeds=[1, 2]
        )
    policy.zero_grad()
    residual = ResidualConfig(hidden=[8], encoder=8, copy_base=False, distribution="deterministic")
    ResidualPolicy(residual, policy).act(seen, deterministic=True, memory=[None] * 2)
    learns, steers = ("yes", "yes") if chain else ("no", "no")
    guided = "yes" if policy.guidable else "no"
    size = f"{policy.num_parameters() / 1000:,.0f} k"
    uses = ["yes", "yes", learns, "yes", steers, guided]
    return (
        "| "
        + " | ".join(
            [
                f"`{name}`",
                FAMILIES[policy.stored.family].since,
                *uses,
                size,
                on_the_toy().get(name.removesuffix(" (flow)"), "–"),
                REMARKS[name],
            ]
        )
        + " |"
    )


def test_the_docs_say_what_was_tried(
    policies: dict[str, LeRobotPolicy],
    tmp_path_factory: pytest.TempPathFactory,
    vlms: dict[str, str],
) -> None:
    """Writes the table where it is another and VLA_RL_WRITE_DOCS is set."""
    write_vlm(folder := tmp_path_factory.mktemp("vlm"))
    rows = [tried(older.new_policy(family, str(folder)), family) for family in older.TINY]
    rows += [tried(pi.new_policy(family, str(folder)), family) for family in ("pi0", "pi05")]
    rows += [tried(policy, name) for name, policy in policies.items()]
    head = [
        "family",
        "lerobot",
        "acts",
        "SFT",
        "PPO, GRPO",
        "residual",
        "steering",
        "guided (RTC)",
        "tried at",
        "toy: SFT → PPO (%)",
        "",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows, ""]
    lines += [
        "All at small sizes with random weights; on the toy task one drawn seed each, by recipes that stand",
        "[with the runs](../results/denoising.md). Refused by name:",
        "",
    ]
    lines += [f"- `{family}`: {why}." for family, why in LEFT_OUT.items()]
    text = DOCS.read_text()
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    written = "\n".join(lines) + "\n"
    if os.environ.get("VLA_RL_WRITE_DOCS"):
        DOCS.write_text(text[:start] + written + text[end:])
        return
    assert text[start:end] == written, "run it with VLA_RL_WRITE_DOCS=1"
