"""``vla-rl bench gpu``: its arithmetic against hand arithmetic, against models without weights and
against the fact that the same code measures small ones."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.kinds import SIZED, TRAINED
from benchmarks.policy.gpu_sizes import MODELS, MODES, cost, openvla_oft, pi05, smolvla
from vla_rl.cli import main

MB, GB, TERA = 1e6, 1e9, 1e12


def near(value, wanted, within=0.1):
    assert value == pytest.approx(wanted, rel=within), f"{value:,.0f} is not near {wanted:,.0f}"


def test_the_command_names_what_there_is():
    assert set(SIZED) == set(MODELS) and TRAINED == MODES


def test_openvla_oft_by_hand():
    """7.5 billion weights: 32 layers of 4 x 4096^2 and 3 x 4096 x 11008, two tables of 32064 x
    4096, SigLIP of 27 layers of 4 x 1152^2 + 2 x 1152 x 4304, DINOv2 of 24 layers of 12 x 1024^2, a
    projector."""
    llama = 32 * (67.1 * MB + 135.3 * MB) + 2 * 131.3 * MB
    vision = 27 * (5.31 * MB + 9.92 * MB) + 24 * 12.58 * MB
    whole = llama + vision + 18.9 * MB + 35.7 * MB + 16.8 * MB
    model = openvla_oft()
    near(model.parameters, whole, 0.01)
    # all: bfloat16 weights and gradients, 12 bytes of Adam; two cameras of 256 tokens, 32 of
    # text, 56 numbers and a stop: 601 tokens
    found = cost(model, "all", micro_batch=8, acting_batch=32)
    checkpoints = 601 * 4096 * 2 * 32
    layer = 601 * (7 * 4096 + 3 * 4096 + 4 * 11008) * 2
    towers = 2 * (256 * 1152 * 2 * 27 + 256 * 17824 * 2) + 2 * (
        261 * 1024 * 2 * 24 + 261 * 16384 * 2
    )
    near(found.sft_activations, 8 * (checkpoints + layer + towers))
    near(found.sft_memory, 16 * whole + 32 * layer)  # 32 rows act: more than 8 rows keep
    # LoRA of rank 32 on every matrix: 4 bytes of weight and gradient, 8 of Adam
    adapters = 32 * (
        32 * (8 * 4096 + 3 * 15104) + 27 * (8 * 1152 + 2 * 5456) + 24 * (8 + 10) * 1024
    )
    lora = cost(model, "lora", micro_batch=8, acting_batch=32)
    near(lora.trained, adapters, 0.01)
    near(lora.sft_memory, 2 * whole + 16 * adapters + 32 * layer)
    assert cost(model, "expert") is None
    # a forward costs 2 operations a weight and token, one pass decides
    forward = 2 * 32 * 202.4 * MB * 601 + 2 * 2 * (411 * MB * 256 + 302 * MB * 261)
    near(found.act_operations, forward)
    near(found.sft_operations, 3 * forward)
    near(lora.ppo_operations, 2 * forward)
    assert found.passes == {"act": "1", "sft": "1", "ppo": "1"}


def test_pi05_by_hand():
    """The fact sheet's counts: vision 0.41 billion, table 0.53, blocks 1.98, expert 0.31, its norms
    0.117, a head that is not used 0.263; 968 tokens of prefix, 18 MB of keys and values."""
    model = pi05()
    whole = (0.41 + 0.53 + 1.98 + 0.31 + 0.117 + 0.263) * GB
    near(model.parameters, whole, 0.01)
    trunk, expert = model.prefix[-1], model.expert
    assert trunk.tokens == 968
    near(trunk.cache, 18 * MB)
    near(trunk.forward, 3.9 * TERA)
    step = 0.031 * TERA + 4 * 18 * 8 * 256 * 50 * 1018  # weights, and attention to 1018 keys
    near(expert.forward, step)
    # expert alone: the rest is bfloat16 and passes without gradient, a layer at a time
    own = (0.31 + 0.117 + 0.263) * GB
    layer = 968 * (7 * 2048 + 3 * 256 + 4 * 16384) * 2 + 8 * 968 * 968 * 6
    kept = 18 * (50 * (7 * 1024 + 3 * 256 + 4 * 4096) * 2 + 8 * 50 * 1018 * 6)
    found = cost(model, "expert", micro_batch=8, acting_batch=32)
    near(found.trained, own, 0.01)
    near(found.sft_activations, 8 * (layer + 18 * MB + kept))
    near(found.ppo_activations, 8 * (layer + 18 * MB + 5 * kept))
    near(found.ppo_memory, 2 * whole + 14 * own + 32 * (layer + 18 * MB))
    # all weights: 16 bytes each, whatever is kept of 8 rows is less than 32 rows acting
    near(cost(model, "all").sft_memory, 16 * whole + 32 * (layer + 18 * MB))
    # a decision: the prefix (three pictures) once, ten steps of the expert; PPO learns from five
    once = 3.9 * TERA + 3 * 2 * 411 * MB * 256
    near(found.act_operations, once + 10 * step)
    near(found.ppo_operations, once + 3 * 5 * step)
    near(found.sft_operations, once + 3 * step)
    assert found.passes == {"act": "1 + 10", "sft": "1 + 1", "ppo": "1 + 5"}


def test_smolvla_by_hand():
    """450 million: 16 layers of 9.8, two tables of 47.3, SigLIP B of 86, a connector of 11.8, an
    expert of 100."""
    model = smolvla()
    whole = (16 * 9.83 + 2 * 47.3 + 86 + 11.8 + 100) * MB
    near(model.parameters, whole, 0.01)
    near(model.parameters, 450 * MB, 0.01)
    found = cost(model, "expert", micro_batch=8, acting_batch=32)
    tower = 2 * (1024 * (8 * 768 + 2 * 3072) * 2)  # a block of two pictures, the most that passes
    kept = 16 * (50 * (7 * 720 + 3 * 320 + 4 * 2048) * 2 + 15 * 50 * 227 * 6)
    cache = 177 * 2 * 16 * 320 * 2
    near(found.sft_activations, 8 * (tower + cache + kept))
    near(found.ppo_memory, 2 * whole + 14 * 101 * MB + 8 * (tower + cache + 10 * kept))
    near(cost(model, "all").sft_memory, 16 * whole + 32 * (tower + cache))


@pytest.mark.parametrize(("mode", "rank"), [("all", 0), ("lora", 32)])
def test_openvla_is_what_a_model_without_weights_counts(mode, rank):
    """`vla-rl bench policy --dry-run`, which builds the layers: one camera, as it has them."""
    pytest.importorskip("timm")
    if rank:
        pytest.importorskip("peft")
    from benchmarks.policy.inputs import bench_embodiment
    from benchmarks.policy.memory import estimate
    from policies.openvla.config import OpenVLAConfig

    config = OpenVLAConfig(
        architecture="7b",
        weights="bfloat16",
        gradient_checkpointing=True,
        lora_rank=rank,
        chunk_length=8,
    )
    theirs = estimate(config, bench_embodiment(256, cameras=1))
    ours = cost(openvla_oft(cameras=1), mode, micro_batch=8, acting_batch=32)
    near(ours.trained, theirs.trained, 0.05)  # (the towers' q, k and v are one matrix there)
    near(ours.weights, theirs.weights, 0.02)
    near(ours.sft_memory, theirs.device)
    near(ours.sft_activations, theirs.activations)


def test_a_dry_run_prints_and_writes_the_table(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    assert main(["bench", "gpu", "--dry-run", "--modes", "expert", "all", f"--json={file}"]) == 0
    said = capsys.readouterr().out
    assert "pi0.5 expert" in said and "1 + 5" in said and "measured" not in said
    found = json.loads(file.read_text())
    assert [(r["key"], r["mode"]) for r in found["estimated"]] == [
        ("openvla_oft", "all"), ("pi05", "expert"), ("pi05", "all"), ("smolvla", "expert"),
        ("smolvla", "all"),
    ]  # fmt: skip
    assert "measured" not in found and found["command"].endswith("--dry-run")


def test_published_sizes_are_not_tried_without_a_gpu(capsys):
    assert main(["bench", "gpu", "--device", "cpu"]) == 2
    assert "--device cpu: the published sizes need a GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_small_ones_are_measured_by_the_same_code(tmp_path, capsys):
    """What a GPU would be asked, on this machine; a mode that a class does not have is said so."""
    pytest.importorskip("lerobot")
    file = tmp_path / "gpu.json"
    options = ["--nano", "--device=cpu", "--updates=1", "--micro-batch=2", f"--json={file}"]
    assert main(["bench", "gpu", *options]) == 0
    found = json.loads(file.read_text())["measured"]
    able = ["openvla_oft", "smolvla"] + (["pi05"] if sys.version_info >= (3, 12) else [])
    for name in able:
        whole = found[name]["all"]
        assert whole["sft"]["ms"] > 0 and whole["ppo"]["ms"] > 0 and set(whole["act"]) == {"1", "8"}
        assert whole["sft"]["share_of_peak"] is None and "peak_memory" not in whole
        for mode in ("lora",) if name == "openvla_oft" else ("lora", "expert"):
            assert 0 < found[name][mode]["trained"] < whole["trained"] <= whole["parameters"]
    if "pi05" not in able:
        assert "lerobot" in found["pi05"]["expert"]["error"]
