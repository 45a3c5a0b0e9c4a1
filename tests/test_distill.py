"""One-step and few-step students: what they start as, what they learn, and the command that
makes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from contracts import check_policy
from test_denoising import DIFFUSION, FORMS, SPEC, make, observe, rollouts

from benchmarks.policy import denoising as heads
from benchmarks.policy.inputs import bench_embodiment
from policies.denoising.consistency import (
    ConsistencyConfig,
    ConsistencyVLA,
    Grid,
    predict_action,
    same_noise_loss,
)
from policies.denoising.expert import ActionExpert
from policies.denoising.policy import DenoisingVLA
from policies.trunk.noise import counter_normals
from vla_rl import config as configs
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.assembly.env_and_policy import open_env
from vla_rl.build import policy_class
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.cli import main
from vla_rl.errors import ConfigError
from vla_rl.monitoring.progress import Progress
from vla_rl.run.distill import DistillConfig, train_student
from vla_rl.run.pipeline import run_pipeline


def test_student_of_a_flow_starts_as_one_euler_step_of_its_teacher():
    teacher, observation = make(), observe(3)
    student = teacher.make_student(1)
    noise = counter_normals(range(3), 9).view(3, 1, 3, 3)
    cache, _ = teacher.encode(observation)
    velocity, _ = teacher.expert(noise, teacher.expert.modulate(torch.ones(())), cache)
    expected = teacher.denormalize((noise - velocity)[:, 0])
    torch.testing.assert_close(student.act(observation, seeds=range(3)).chunk.actions, expected)
    trainable = {name.split(".")[0] for name, p in student.named_parameters() if p.requires_grad}
    assert trainable == {"expert"}


@pytest.mark.parametrize(
    ("form", "steps", "method"), [("flow_sde", 1, "same_noise"), ("ddim", 2, "lcm")]
)
def test_student_is_a_policy_that_acts_and_is_saved(
    form: str, steps: int, method: str, tmp_path: Path
):
    student = make(**FORMS[form]).make_student(steps, method).eval()
    assert not student.can & {"likelihood", "distillation", "imitation"}
    check_policy(student, observe(4))
    with pytest.raises(ConfigError, match="ConsistencyVLA lacks evaluate"):
        PPO(PPOConfig(), student)
    save_checkpoint(tmp_path / "student", student)
    again = load_policy(tmp_path / "student", {"consistency_vla": ConsistencyVLA}.__getitem__, SPEC)
    a, b = (s.act(observe(2), seeds=[5, 6]).chunk.actions for s in (student, again))
    torch.testing.assert_close(a, b)


def test_a_student_that_acted_follows_new_weights():
    student, observation = make().make_student(1).eval(), observe(2)
    first = student.act(observation, seeds=[1, 2]).chunk.actions
    other = make().make_student(1).eval()
    with torch.no_grad():
        other.expert.modulation.weight += 0.1 * torch.randn_like(other.expert.modulation.weight)
    student.load_state_dict(other.state_dict())
    now, wanted = (s.act(observation, seeds=[1, 2]).chunk.actions for s in (student, other))
    torch.testing.assert_close(now, wanted)
    assert not torch.allclose(now, first)


def test_lcm_parametrisation_by_hand():
    """σ = 0.5, s = 10·t: at t = 0.1, c_skip = 0.25/1.25 and c_out = 1/√1.25; at t = 0 the
    identity."""
    expert = ActionExpert(2, 3, 8, 8, 1, 2, 4)
    torch.nn.init.normal_(expert.action_out.weight)
    cache = [(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))]
    x, modulation = torch.randn(1, 1, 3, 2), expert.modulate(torch.tensor(0.1))
    output, _ = expert(x, modulation, cache)
    t, zero = torch.tensor(0.1), torch.tensor(0.0)
    guess = predict_action(expert, "sample", x, t, t, modulation, cache)
    torch.testing.assert_close(guess, 0.2 * x + output / 1.25**0.5)
    for kind in ("sample", "velocity"):
        torch.testing.assert_close(
            predict_action(expert, kind, x, zero, zero, modulation, cache), x
        )


def test_several_steps_follow_the_line_between_action_and_noise():
    """A student that always answers with the same action ends at it, whatever the number of
    steps."""
    teacher = make(**(DIFFUSION | {"prediction": "sample"}))
    student = teacher.make_student(4)
    with torch.no_grad():
        student.expert.action_out.weight.zero_()
        student.expert.action_out.bias.copy_(torch.tensor([0.5, -0.5, 1.0]))
    cache, _ = student.encode(observe(2))
    noise = torch.randn(2, 3, 3, 3)
    seen = []
    original = student.expert.forward
    student.expert.forward = lambda x, *rest: (seen.append(x), original(x, *rest))[1]
    student.solve(cache, noise)
    first = predict_action(
        student.expert,
        "sample",
        noise,
        torch.tensor(1.0),
        torch.tensor(1.0),
        student.expert.modulate(torch.tensor(1.0)),
        cache,
    )
    torch.testing.assert_close(seen[1], 0.25 * first + 0.75 * noise)


def test_same_noise_loss_counts_every_point_of_the_grid():
    """By a loop over the grid: the points lie between noise and target, and all weigh the same."""
    teacher = make()
    cache, _ = teacher.encode(observe(2))
    noise, target, grid = torch.randn(2, 3, 3, 3), torch.randn(2, 3, 3, 3), Grid.straight(2)
    loss = same_noise_loss(teacher.expert, "velocity", grid, cache, noise, target)
    total = torch.zeros(2)
    for t in (1.0, 0.5):
        x = (1 - t) * target + t * noise
        velocity, _ = teacher.expert(x, teacher.expert.modulate(torch.tensor(t)), cache)
        total += (x - t * velocity - target).square().mean((1, 2, 3)) / 2
    torch.testing.assert_close(loss, total)


@pytest.mark.parametrize(
    ("form", "steps", "method"),
    [
        ("flow_sde", 1, "same_noise"),
        ("ddim", 2, "same_noise"),
        ("flow_sde", 2, "lcm"),
        ("ddim", 1, "lcm"),
    ],
)
def test_students_come_closer_to_their_teacher(form: str, steps: int, method: str):
    teacher, observation = make(scale=1.0, **FORMS[form]), observe(6)
    student = teacher.make_student(steps, method)
    optimizer = torch.optim.AdamW(
        [p for p in student.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0
    )
    trunk = {
        name: p.clone() for name, p in student.named_parameters() if not name.startswith("expert")
    }
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(30):
        loss, metrics = student.distillation_loss(observation, teacher, generator, noises=4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        student.after_update(0.8)
        errors.append(metrics["action_error"])
    assert sum(errors[-5:]) / 5 < 0.7 * sum(errors[:3]) / 3
    assert all(
        torch.equal(p, trunk[name]) for name, p in student.named_parameters() if name in trunk
    )


def test_student_beside_rl_learns_and_is_taken_over():
    policy = make(**FORMS["student"])
    ppo = PPO(PPOConfig(advantage="grpo", learning_rate=3e-3, epochs=5), policy)
    assert torch.equal(policy.student.action_out.weight, policy.expert.action_out.weight), (
        "it starts as a copy"
    )
    batch = rollouts(policy)
    # no advantage: the teacher stays
    alike = dataclasses.replace(batch, rewards=torch.zeros_like(batch.rewards))
    teacher = policy.expert.action_out.weight.clone()
    losses = [ppo.update(alike)["ppo/auxiliary_loss"] for _ in range(3)]
    assert losses[-1] < 0.7 * losses[0] and torch.equal(policy.expert.action_out.weight, teacher)
    student = policy.make_student(1)
    assert torch.equal(student.expert.action_out.weight, policy.student.action_out.weight)


def test_a_checkpoint_without_a_student_gets_one_that_starts_as_its_expert(tmp_path: Path):
    plain = make()
    save_checkpoint(tmp_path / "plain", plain)
    kinds = {"denoising_vla": DenoisingVLA}.__getitem__
    again = load_policy(tmp_path / "plain", kinds, SPEC, {"student_steps": 1})
    for name, weight in again.student.state_dict().items():
        assert torch.equal(weight, plain.expert.state_dict()[name])
    with torch.no_grad():
        again.student.action_out.bias.add_(1.0)
    save_checkpoint(tmp_path / "grown", again)
    grown = load_policy(tmp_path / "grown", kinds, SPEC)
    assert torch.equal(grown.student.action_out.bias, plain.expert.action_out.bias + 1.0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="does not divide"):
        make().make_student(3, "lcm")
    with pytest.raises(ConfigError, match=r"policy\.method.*same_noise"):
        ConsistencyConfig(method="progressive")
    with pytest.raises(ConfigError, match="step_times"):
        ConsistencyConfig(
            denoising_steps=2, step_times=[1.0], step_signals=[0.0], step_noises=[1.0]
        )
    with pytest.raises(ConfigError, match=r"steps=0 .* 1 or more"):
        DistillConfig(steps=0)
    with pytest.raises(ValueError, match="1 seeds for 2"):
        make().make_student(1).act(observe(2), seeds=[1])


def test_bench_compares_equal_outputs():
    result = heads.measure(bench_embodiment(), batch_sizes=(1,), repeats=1, steps=2)
    row = result["batches"]["1"]
    assert set(row["latency_ms"]) >= {"token head", "teacher", "student", "plain teacher"}
    assert all(r["p50"] > 0 for r in row["latency_ms"].values()) and row["teacher_over_student"] > 0
    assert "plain teacher" in heads.text(result)


# ------------------------------------------------------------------------------------------ command
def toy_run(folder: Path) -> Path:
    """The checkpoint of an untrained flow policy in a run folder of the toy task."""
    tree = configs.to_tree(configs.compose(["run=toy", f"output_dir={folder}"]))
    sizes = (
        "chunk_length",
        "stem_channels",
        "stem_kernels",
        "stem_strides",
        "vit_width",
        "vit_heads",
        "vit_depth",
        "merge",
    )
    tree["policy"] = {
        "type": "denoising_vla",
        **{k: tree["policy"][k] for k in sizes},
        "llm_width": 16,
        "llm_depth": 1,
        "llm_heads": 2,
        "llm_mlp": 16,
        "expert_width": 16,
        "expert_mlp": 16,
        "expert_depth": 1,
        "denoising_steps": 2,
    }
    tree["slots"] |= {"workers": 0, "slots_per_worker": 4}
    config = configs.from_tree(tree)
    env = open_env(config)
    policy = DenoisingVLA(config.policy, env.embodiment)
    env.close()
    checkpoint = config.run_dir / "checkpoints" / "sft"
    save_checkpoint(checkpoint, policy)
    configs.save(config, config.run_dir / "config.yaml")
    return checkpoint


def test_the_start_of_rl_is_also_measured_with_sampled_actions(tmp_path: Path):
    checkpoint = toy_run(tmp_path)
    recorded = configs.load(checkpoint.parent.parent / "config.yaml")
    changes = [
        f"checkpoint={checkpoint}",
        "name=start",
        "phases=[eval_sft]",
        "evaluate.deterministic=true",
    ]
    small = ["evaluate.episodes_per_task=3", "evaluate.video_episodes=0", "wandb=false"]
    folder = run_pipeline(configs.override(recorded, [*changes, *small]))
    phase = json.loads((folder / "phases.json").read_text())["eval_sft"]
    assert 0 <= phase["sampled_success"] <= 1 and 0 <= phase["success"] <= 1
    sampled = json.loads((folder / "sampled_sft.json").read_text())
    assert sampled["deterministic"] is False and sampled["total"]["episodes"] == 3


def test_distill_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = toy_run(tmp_path)
    command = [
        "distill",
        str(checkpoint),
        "--episodes",
        "3",
        "--updates",
        "4",
        "--evaluate-episodes",
        "3",
    ]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    student = load_policy(checkpoint.with_name("sft_student1"), policy_class)
    assert isinstance(student, ConsistencyVLA) and student.config.denoising_steps == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert (
        record["observations"] > 3
        and record["action_error"] >= 0
        and record["method"] == "same_noise"
    )
    assert record["teacher"]["total"]["episodes"] == record["student"]["total"]["episodes"] == 3
    capsys.readouterr()
    assert main(["distill", str(checkpoint.with_name("sft_student1"))]) == 2
    assert "make_student" in capsys.readouterr().err
    assert main(["distill", str(checkpoint), "--method", "magic", "--evaluate-episodes", "0"]) == 2
    assert "same_noise" in capsys.readouterr().err


@pytest.mark.parametrize(("form", "method"), [("flow_sde", "same_noise"), ("ddim", "lcm")])
def test_an_interrupted_student_goes_on_as_if_nothing_had_happened(
    form: str, method: str, tmp_path: Path, monkeypatch
):
    settings = DistillConfig(steps=2, method=method, updates=6, batch_size=3, noises=2)

    def student_of(teacher: DenoisingVLA) -> ConsistencyVLA:
        torch.manual_seed(0)
        return teacher.make_student(settings.steps, settings.method)

    teacher, seen = make(**FORMS[form]), observe(8)
    whole = student_of(teacher)
    figures = train_student(
        whole, teacher, seen, settings, tmp_path / "whole", Progress(), checkpoint_every=2
    )

    calls = 0
    forward = ConsistencyVLA.distillation_loss

    def cut(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(ConsistencyVLA, "distillation_loss", cut)
    with pytest.raises(KeyboardInterrupt):
        train_student(
            student_of(teacher),
            teacher,
            seen,
            settings,
            tmp_path / "cut",
            Progress(),
            checkpoint_every=2,
        )
    again = student_of(teacher)
    resumed = train_student(
        again, teacher, seen, settings, tmp_path / "cut", Progress(), checkpoint_every=2
    )
    assert calls == 4 + 4 and resumed == figures  # from the checkpoint after two updates
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=0)
    loaded = load_policy(tmp_path / "cut", {"consistency_vla": ConsistencyVLA}.__getitem__, SPEC)
    assert loaded.state_dict().keys() == whole.state_dict().keys()


def test_distill_goes_on_with_the_same_teacher_and_settings_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    checkpoint = toy_run(tmp_path)
    partial = checkpoint.with_name("sft_student1.partial")
    command = [
        "distill",
        str(checkpoint),
        "--episodes",
        "3",
        "--evaluate-episodes",
        "0",
        "--updates",
    ]

    def cut(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vla_rl.run.distill.train_student", cut)
        main([*command, "4"])
    assert (partial / "rollouts" / "state.json").exists() and not checkpoint.with_name(
        "sft_student1"
    ).exists()
    with monkeypatch.context() as patch:
        # the teacher's episodes are there already
        patch.setattr("vla_rl.run.distill.roll_out", cut)
        assert main([*command, "4"]) == 0
    assert "going on from" in capsys.readouterr().out and not partial.exists()
    with monkeypatch.context() as patch:
        patch.setattr("vla_rl.run.distill.train_student", cut)
        main([*command, "4"])
    assert main([*command, "5"]) == 0
    assert "going on from" not in capsys.readouterr().out
