"""OpenVLA inside the platform: memory estimates, benchmarks, configs, and whole runs from SFT or
a published checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from openvla_checkpoints import libero_like, write_checkpoint
from safetensors.torch import load_file

from benchmarks.policy import openvla
from benchmarks.policy.inputs import bench_embodiment, bench_observation
from benchmarks.policy.memory import estimate, skeleton
from benchmarks.policy.presets import estimated
from policies.openvla import OpenVLA, OpenVLAConfig
from vla_rl.cli import main
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.run.pipeline import run_pipeline

NANO = OpenVLAConfig(architecture="nano", weights="bfloat16")


# ------------------------------------------------------------------------------------------- memory
def test_the_7b_layout_has_the_published_number_of_parameters():
    """Projector 71.4 M and 7.5 B in all (openvla-7b), 15 GB in bfloat16; nothing of that size is
    allocated."""
    policy = skeleton(OpenVLAConfig(architecture="7b", weights="bfloat16"), bench_embodiment(256))
    assert all(p.device.type == "meta" for p in policy.parameters())
    assert (
        sum(p.numel() for p in policy.projector.parameters())
        == 2177 * 8704 + 8705 * 4096 + 4097 * 4096
    )
    assert 7.4e9 < policy.num_parameters() < 7.6e9
    shapes = {name: tuple(t.shape) for name, t in policy.state_dict().items()}
    assert shapes["projector.fc1.weight"] == (8704, 2176) and shapes["projector.fc2.weight"] == (
        4096,
        8704,
    )
    assert shapes["vision_backbone.featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight"] == (4304, 1152)
    assert shapes["vision_backbone.fused_featurizer.attn_pool.latent"] == (1, 1, 1152)
    assert shapes["language_model.lm_head.weight"] == (32064, 4096)


def test_memory_is_counted_by_the_rules():
    embodiment = bench_embodiment(64)
    full, lora = (
        estimate(NANO, embodiment),
        estimate(dataclasses.replace(NANO, lora_rank=4), embodiment),
    )
    assert (
        full.weights == 2 * full.parameters
        and full.gradients == 2 * full.trained
        and full.optimizer == 12 * full.trained
    )
    # LoRA's own weights are float32
    assert lora.trained < full.trained / 50 and lora.optimizer == 8 * lora.trained
    offloaded = estimate(NANO, embodiment, offload_optimizer=True)
    assert offloaded.host == full.optimizer and offloaded.device == full.device - full.optimizer
    lean = estimate(dataclasses.replace(NANO, gradient_checkpointing=True), embodiment)
    assert lean.activations < full.activations
    frozen = estimate(dataclasses.replace(NANO, freeze_vision=True), embodiment)
    assert frozen.activations < full.activations and frozen.trained < full.trained
    doubled = estimate(NANO, embodiment, micro_batch=16)
    assert doubled.activations == 2 * full.activations


def test_dry_run_from_the_command_line(tmp_path, capsys):
    assert (
        main(
            [
                "bench",
                "policy",
                "--preset",
                "openvla-7b",
                "--dry-run",
                "--json",
                str(tmp_path / "m.json"),
            ]
        )
        == 0
    )
    assert "optimiser" in capsys.readouterr().out
    result = json.loads((tmp_path / "m.json").read_text())
    assert 14.8e9 < result["weights"] < 15.2e9 and result["optimizer"] == 12 * result["trained"]
    published = write_checkpoint(tmp_path / "c", chunk_length=8)
    run = ["run=openvla_oft_libero_grpo", f"policy.checkpoint={published}", "policy.lora_rank=4"]
    assert main(["bench", "policy", "--dry-run", *run, "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["trained"] < 50_000
    assert main(["bench", "policy", "--dry-run", "run=toy"]) == 2
    assert main(["bench", "policy", "--preset", "openvla-7b"]) == 2
    assert "need a GPU" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="openvla-7b"):
        estimated([], "nano")


# -------------------------------------------------------------------------------------------- bench
def test_all_forms_of_decoding_choose_the_same_tokens():
    result = openvla.decoding(bench_embodiment(56), batch_sizes=(1, 3), repeats=1)
    assert all(
        row["equal"] for row in result["batches"].values()
    ) and "same tokens" in openvla.text({"decoding": result})


def test_training_bench_counts_tokens():
    result = openvla.training(bench_embodiment(56), "nano", batch=2, updates=1, device="cpu")
    assert set(result) == {"lora", "full"} and result["full"]["utilisation"] is None
    assert result["full"]["tokens_per_second"] > 0


@pytest.mark.gpu
def test_gpu_outputs_agree_with_the_cpus(tmp_path):
    folder = write_checkpoint(tmp_path)
    observation = bench_observation(libero_like(), 3)
    for options in ({}, {"decoding": "autoregressive"}):
        policy = OpenVLA.from_pretrained(
            folder, libero_like(), precision="float32", chunk_length=2, **options
        )
        tokens = torch.randint(0, 256, (3, 2, 7))
        with torch.inference_mode():
            expected = policy.evaluate(observation, {"action_tokens": tokens}).log_prob
            found = policy.to("cuda").evaluate(observation, {"action_tokens": tokens}).log_prob
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


# --------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize(
    "name", ["openvla", "openvla_oft", "openvla_oft_rlinf", "openvla_oft_l1", "openvla_nano"]
)
def test_the_policy_configs_compose(name):
    config = compose(["~run", f"policy={name}"])
    assert isinstance(config.policy, OpenVLAConfig) and config.policy_type.startswith("openvla")


def test_the_libero_recipe_composes():
    config = compose(["run=openvla_oft_libero_grpo", "policy.checkpoint=somewhere"])
    assert (
        config.algorithm.advantage == "grpo"
        and config.algorithm.clip_high == 0.28
        and config.rl.group_size == 8
    )
    assert (
        config.policy.temperature == 1.6
        and config.policy.checkpoint == "somewhere"
        and "sft" not in config.phases
    )
    assert (
        config.env.camera_size == 256
        and config.env.cameras == ["agentview"]
        and config.critic_type == "none"
    )


TOY = [
    "~run",
    "env=toy",
    "algorithm=grpo",
    "critic=none",
    "env.horizon=4",
    "tasks=[reach_red]",
    "wandb=false",
    "threads=1",
    "policy.chunk_length=2",
    "policy.gripper=none",
    "policy.precision=float32",
    "slots.workers=0",
    "slots.slots_per_worker=4",
    "rl.iterations=1",
    "rl.episodes_per_iteration=4",
    "rl.group_size=2",
    "algorithm.minibatch_size=8",
    "algorithm.critic_warmup_iterations=0",
    "evaluate.episodes_per_task=2",
    "evaluate.video_episodes=0",
]


@pytest.mark.slow
def test_sft_grpo_export_and_a_run_from_the_export(tmp_path):
    """Supervised training from a published folder, GRPO, resuming, export; another run starts
    from what was exported."""
    published = write_checkpoint(tmp_path / "published")
    start = ["policy=openvla_oft", f"policy.checkpoint={published}", "policy.cameras=[]"]
    sft = [
        "collect.workers=1",
        "collect.episodes_per_task=3",
        "sft.updates=2",
        "sft.batch_size=4",
        "sft.augment.shift=0",
    ]
    lora = ["policy.lora_rank=2", "policy.save_trained_only=true"]
    overrides = [*TOY, *start, *sft, *lora, f"output_dir={tmp_path}", "name=first"]
    run = run_pipeline(compose(overrides))
    summary = json.loads((run / "summary.json").read_text())
    assert summary and json.loads((run / "phases.json").read_text())["rl"]["iterations"] == 1
    stored = load_file(run / "checkpoints" / "rl" / "model.safetensors")
    assert stored and all(".lora_" in name for name in stored)
    run_pipeline(compose(overrides))  # everything is complete: skipped
    assert main(["export", str(run / "checkpoints" / "rl"), str(tmp_path / "exported")]) == 0
    again = [
        "policy=openvla_oft",
        f"policy.checkpoint={tmp_path / 'exported'}",
        "policy.cameras=[]",
        "phases=[eval_sft,rl]",
    ]
    second = run_pipeline(compose([*TOY, *again, f"output_dir={tmp_path}", "name=second"]))
    assert json.loads((second / "phases.json").read_text())["rl"]["complete"]
    assert (second / "checkpoints" / "rl" / "training_state").is_dir()
