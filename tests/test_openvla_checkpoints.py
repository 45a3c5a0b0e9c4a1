"""OpenVLA checkpoint folders: reading, writing, LoRA, this platform's own checkpoints, and
broken ones."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from openvla_checkpoints import (
    STATISTICS,
    libero_like,
    random_part,
    random_weights,
    shapes,
    write_checkpoint,
)
from safetensors.torch import load_file, save, save_file
from test_openvla import PLAIN, load, observe

from policies.actors.residual import ResidualPolicy
from policies.actors.settings import ResidualConfig
from policies.normalization import VectorStats
from policies.openvla import OpenVLA, OpenVLAL1
from policies.openvla.config import OpenVLAConfig
from policies.openvla.statistics import statistics_of
from policies.openvla.weights import lora_targets
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.build import implementation, policy_class
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.errors import CheckpointError, ConfigError, MissingPackage, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("openvla") / "oft")


def same_outputs(a, b, tolerance=1e-5):
    observation = observe()
    x, y = (p.act(observation, deterministic=True) for p in (a, b))
    torch.testing.assert_close(x.chunk.actions, y.chunk.actions, rtol=0, atol=tolerance)
    torch.testing.assert_close(x.behavior_log_prob, y.behavior_log_prob, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------ reading and writing
def test_the_state_dict_is_in_the_upstream_format(folder):
    assert {name: tuple(t.shape) for name, t in load(folder).state_dict().items()} == shapes()


def test_saved_folders_are_what_upstream_publishes(folder, tmp_path):
    policy = load(folder)
    policy.save_pretrained(tmp_path / "out", dtype="float32")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    expected = random_weights()
    assert weights.keys() == expected.keys() and all(
        torch.equal(weights[name], expected[name]) for name in weights
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # no modelling files are copied
    assert config["model_type"] == "openvla" and "auto_map" not in config
    assert config["norm_stats"] == STATISTICS and config["text_config"]["torch_dtype"] == "float32"
    assert json.loads((tmp_path / "out" / "dataset_statistics.json").read_text()) == STATISTICS
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).is_file()
    same_outputs(policy, load(tmp_path / "out"))
    with pytest.raises(ConfigError, match="records chunk_length = 2"):
        load(tmp_path / "out", chunk_length=4)


def test_large_weights_are_sharded_and_parts_lie_beside_them(tmp_path, monkeypatch):
    monkeypatch.setattr("policies.openvla.checkpoint._SHARD_BYTES", 3 * 10**6)
    parts = ("proprio_projector", "action_head")
    policy = load(write_checkpoint(tmp_path / "in", parts=parts), OpenVLAL1, use_proprio=True)
    policy.save_pretrained(tmp_path / "out", dtype="float32", step=7)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert (
        len(set(index["weight_map"].values())) > 1 and index["weight_map"].keys() == shapes().keys()
    )
    for part in parts:
        saved = torch.load(tmp_path / "out" / f"{part}--7_checkpoint.pt", weights_only=True)
        assert all(
            torch.equal(saved[k.removeprefix("module.")], v) for k, v in random_part(part).items()
        )
    observation = observe()
    again = load(tmp_path / "out", OpenVLAL1, use_proprio=True)
    torch.testing.assert_close(
        again.normalized_actions(observation), policy.normalized_actions(observation)
    )


def test_bfloat16_weights(folder, tmp_path):
    load(folder).save_pretrained(tmp_path / "out")
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["projector.fc1.weight"].dtype
        == torch.bfloat16
    )
    policy = load(tmp_path / "out", weights="bfloat16", value_head=True)
    assert {p.dtype for n, p in policy.named_parameters() if not n.startswith("value_head")} == {
        torch.bfloat16
    }
    output = policy.act(observe(), deterministic=True)
    reference = load(folder).evaluate(observe(), output.replay)
    assert (
        output.behavior_log_prob - reference.log_prob
    ).abs().max() < 0.5 and output.value.dtype == torch.float32
    evaluation = policy.evaluate(observe(), output.replay)
    evaluation.log_prob.sum().backward()
    assert torch.isfinite(policy.projector.fc1.weight.grad).all()


def test_weights_that_are_never_computed_may_be_absent(tmp_path):
    weights = {
        n: t for n, t in random_weights().items() if "attn_pool" not in n and "blocks.2." not in n
    }
    full, stripped = (
        load(write_checkpoint(tmp_path / "a")),
        load(write_checkpoint(tmp_path / "b", weights=weights)),
    )
    same_outputs(full, stripped)


# --------------------------------------------------------------------------------------------- LoRA
def test_lora_merges_into_an_upstream_checkpoint(folder, tmp_path):
    policy = load(folder, lora_rank=4)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    same_outputs(policy, load(folder))  # B starts at zero
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.1)
    observation = observe()
    assert (
        policy.action_logits(observation)[0] - load(folder).action_logits(observation)[0]
    ).abs().max() > 1e-2
    policy.save_pretrained(tmp_path / "merged", dtype="float32")
    merged = load(tmp_path / "merged")
    assert {n: tuple(t.shape) for n, t in merged.state_dict().items()} == shapes()
    expected = policy.action_logits(observation)[0]
    torch.testing.assert_close(merged.action_logits(observation)[0], expected, rtol=1e-4, atol=1e-4)


def test_lora_on_bfloat16_weights_is_trained_in_float32(folder, tmp_path):
    policy = load(folder, weights="bfloat16", lora_rank=2, value_head=True)
    output = policy.act(observe(), deterministic=True)
    evaluation = policy.evaluate(observe(), output.replay)
    torch.testing.assert_close(
        evaluation.log_prob.detach(), output.behavior_log_prob, rtol=0, atol=0.1
    )
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(torch.isfinite(p.grad).all() for name, p in trained.items() if ".lora_B." in name)
    assert any(p.grad.abs().max() > 0 for name, p in trained.items() if ".lora_B." in name)
    policy.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged", weights="bfloat16", value_head=True).act(
        observe(), deterministic=True
    )
    torch.testing.assert_close(again.value, output.value, rtol=0, atol=0.05)


def test_lora_targets_and_frozen_vision(folder):
    names = lora_targets(
        load(folder, freeze_vision=True, lora_rank=2, lora_targets=["q_proj", "fc1"])
    )
    assert all(n.rpartition(".")[2] in ("base_layer", "q_proj", "fc1", "default") for n in names)
    policy = load(folder)
    wide = lora_targets(policy)
    assert "language_model.model.layers.0.self_attn.q_proj" in wide and "projector.fc3" in wide
    assert not any("lm_head" in n or "blocks.2." in n or "attn_pool" in n for n in wide)
    with pytest.raises(ConfigError, match="names no linear layer"):
        load(folder, lora_rank=2, lora_targets=["no_such_layer"])


def test_lora_without_peft(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingPackage, match="peft"):
        load(folder, lora_rank=2)


# -------------------------------------------------------------------------- this platform's folders
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_rank": 2, "value_head": True},
        {"lora_rank": 2, "save_trained_only": True},
        {"freeze_vision": True},
    ],
    ids=["full", "lora", "trained_only", "frozen"],
)
def test_a_runs_checkpoint_comes_back(folder, tmp_path, options):
    policy = load(folder, **options)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)
    save_checkpoint(tmp_path / "rl", policy)
    again = load_policy(tmp_path / "rl", lambda name: implementation("policy", name), libero_like())
    assert type(again) is OpenVLA and again.config == policy.config
    same_outputs(policy, again)
    size = (tmp_path / "rl" / "model.safetensors").stat().st_size
    whole = sum(4 * p.numel() for p in policy.parameters())
    assert size < whole / 10 if options.get("save_trained_only") else size > 0.9 * whole


def test_a_checkpoint_of_trained_weights_alone_knows_what_it_builds_on(folder, tmp_path):
    base, trained = (
        shutil.copytree(folder, tmp_path / "base"),
        {"lora_rank": 2, "save_trained_only": True},
    )
    policy = load(base, **trained)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_" in name:
                p.add_(torch.randn_like(p) * 0.02)
    save_checkpoint(tmp_path / "run" / "checkpoints" / "rl", policy)
    file = tmp_path / "run" / "checkpoints" / "rl" / "config.json"

    def again(**changes):
        return load_policy(
            file.parent, lambda name: implementation("policy", name), libero_like(), changes
        )

    stored = json.loads(file.read_text())
    assert stored["frozen_base"]["path"] == str(base) and "frozen_base" not in again().source.config
    base = base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"builds on frozen weights, which are not at .*base"):
        again()
    same_outputs(policy, again(checkpoint=str(base)))
    # as it was before
    file.write_text(json.dumps({k: v for k, v in stored.items() if k != "frozen_base"}))
    (tmp_path / "moved").rename(tmp_path / "base")
    same_outputs(policy, again())
    file.write_text(json.dumps(stored))
    shard = sorted((tmp_path / "base").glob("*.safetensors"))[-1]
    save_file({name: x + 0.01 for name, x in load_file(shard).items()}, shard)
    with pytest.raises(CheckpointError, match="holds other weights than those that"):
        again()


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2, "save_trained_only": True}])
def test_a_residual_on_it_leaves_its_weights_where_they_are(folder, tmp_path, options):
    policy = load(folder, **options)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_" in name:
                p.add_(torch.randn_like(p) * 0.02)
    run = tmp_path / "run"
    save_checkpoint(run / "sft", policy)
    actor = ResidualPolicy(ResidualConfig(hidden=[8], encoder=8, copy_base=False), policy)
    actor.refer_to(run / "sft")
    save_checkpoint(run / "rl", actor)
    parts = {name.partition(".")[0] for name in load_file(run / "rl" / "model.safetensors")}
    assert parts == {"actor", "encoder", "practice"}
    run = run.rename(tmp_path / "moved")
    again = load_policy(run / "rl", policy_class, libero_like())
    observation = observe()
    memory = [None] * len(observation)
    a, b = (
        p.act(observation, deterministic=True, memory=memory).chunk.actions for p in (actor, again)
    )
    torch.testing.assert_close(a, b)
    frames = policy.frame_features(observation)
    cells = len(policy.cameras) * min(16, policy.vision_backbone.patches)
    assert frames["visual"].shape[1] == frames["text"].shape[1] * cells
    alone = policy.frame_features(observation[1:2])
    for name, frame in frames.items():  # whatever it is batched with
        torch.testing.assert_close(alone[name], frame[1:2], rtol=1e-2, atol=1e-2)
    if not options:  # copies are what a small policy gets by itself
        actor.config.copy_base = None
        actor.refer_to(run / "sft")
        assert actor.base_folder() is None
    policy.requires_grad_(True)
    with torch.no_grad():
        next(policy.projector.parameters()).add_(0.1)
        for name, p in policy.named_parameters():
            if ".lora_" in name:
                p.add_(0.1)
    save_checkpoint(run / "sft", policy, keep_last_good=False)
    with pytest.raises(CheckpointError, match="holds other weights than those that"):
        load_policy(run / "rl", policy_class, libero_like())
    shutil.rmtree(run / "sft")
    with pytest.raises(CheckpointError, match="builds on frozen weights, which are not at"):
        load_policy(run / "rl", policy_class, libero_like())


def test_a_fully_trained_runs_checkpoint_is_itself_in_the_upstream_format(folder, tmp_path):
    policy = load(folder)
    save_checkpoint(tmp_path / "rl", policy)
    same_outputs(policy, load(tmp_path / "rl"))


def test_training_on_a_dataset_takes_its_statistics(folder):
    embodiment = libero_like()
    actions = VectorStats.from_bounds([-0.5] * 6 + [-1.0], [0.5] * 6 + [1.0])
    proprio = VectorStats.from_bounds([-1.0] * 8, [1.0] * 8)
    own = statistics_of(OpenVLAConfig(), embodiment, actions, proprio)
    assert own["action"]["mask"] == [True] * 6 + [False]
    # 1: open
    assert own["action"]["min"] == [-0.5] * 6 + [0.0] and own["action"]["max"] == [0.5] * 6 + [1.0]
    config = OpenVLAConfig(**PLAIN, checkpoint=str(folder), use_proprio=True)
    policy = OpenVLA.from_statistics(
        config, embodiment, actions.to_dict(), proprio.to_dict(), seed=0
    )
    assert policy.unnorm_key == "vla_rl" and policy.statistics["proprio"]["max"] == [1.0] * 8
    # the part that the checkpoint lacks is new
    assert policy.proprio_projector.fc1.weight.abs().max() > 0
    kept = OpenVLA.from_statistics(
        dataclasses.replace(config, unnorm_key="libero_spatial"),
        embodiment,
        actions.to_dict(),
        proprio.to_dict(),
    )
    assert kept.unnorm_key == "libero_spatial_no_noops"
    with pytest.raises(ConfigError, match=r"policy.architecture=nano"):
        OpenVLA.from_statistics(OpenVLAConfig(), embodiment, actions.to_dict(), proprio.to_dict())


def test_ppo_takes_tokens_and_refuses_the_l1_head(folder, tmp_path):
    PPO(PPOConfig(advantage="grpo", learning_rate=1e-5), load(folder))
    l1 = load(write_checkpoint(tmp_path, parts=("action_head",)), OpenVLAL1)
    with pytest.raises(ConfigError, match="OpenVLAL1 lacks evaluate"):
        PPO(PPOConfig(advantage="grpo"), l1)


# -------------------------------------------------------------------------------------- broken ones
def test_wrong_weights_are_listed(tmp_path):
    weights = random_weights()
    del weights["projector.fc2.bias"]
    weights["language_model.model.extra"] = torch.zeros(3)
    weights["projector.fc3.weight"] = torch.zeros(32, 31)
    with pytest.raises(UserError) as caught:
        load(write_checkpoint(tmp_path, weights=weights))
    text = str(caught.value)
    assert (
        "missing: projector.fc2.bias [32]" in text
        and "unexpected: language_model.model.extra [3]" in text
    )
    assert (
        "misshapen: projector.fc3.weight is [32, 31] in the checkpoint, [32, 32]" in text
        and str(tmp_path) in text
    )


def test_missing_and_truncated_shards(tmp_path):
    folder = write_checkpoint(tmp_path)
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors is damaged or cut off"):
        load(folder)
    shard.unlink()
    with pytest.raises(
        UserError, match=r"lacks weights: model-00002-of-00002.safetensors not found"
    ):
        load(folder)


def test_weights_that_are_not_finite(tmp_path):
    weights = random_weights()
    weights["projector.fc1.bias"][3] = torch.nan
    with pytest.raises(UserError, match=r"not finite .* in projector.fc1.bias"):
        load(write_checkpoint(tmp_path, weights=weights))


@pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.json", "config.json"])
def test_missing_and_damaged_files(tmp_path, name):
    folder = write_checkpoint(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=r"damaged|cannot be read"):
        load(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        load(folder)


def test_foreign_configs(tmp_path):
    with pytest.raises(UserError, match="model_type 'llava', this policy reads 'openvla'"):
        load(write_checkpoint(tmp_path / "a", model_type="llava"))
    with pytest.raises(UserError, match="needs 2 of one size"):
        load(write_checkpoint(tmp_path / "b", image_sizes=[28, 42]))
    with pytest.raises(UserError, match="rope_scaling"):
        text = {"vocab_size": 32064, "rope_scaling": {"type": "linear", "factor": 2.0}}
        load(write_checkpoint(tmp_path / "c", text_config=text))


def test_parts_are_never_left_out_silently(tmp_path):
    with pytest.raises(UserError, match=r"set policy.use_proprio=true"):
        load(write_checkpoint(tmp_path / "a", parts=("proprio_projector",)))
    with pytest.raises(UserError, match=r"set policy.type=openvla_l1"):
        load(write_checkpoint(tmp_path / "b", parts=("action_head",)))
    with pytest.raises(UserError, match=r"missing: proprio_projector.fc1.bias"):
        load(write_checkpoint(tmp_path / "c"), use_proprio=True)
    folder = write_checkpoint(tmp_path / "d", parts=("action_head",))
    torch.save(random_part("action_head"), folder / "action_head--50000_checkpoint.pt")
    with pytest.raises(UserError, match="2 files of action_head"):
        load(folder, OpenVLAL1)


L1 = {"use_proprio": True, "cameras": ["agentview", "wrist"]}
HEAD = {"parts": ["proprio_projector", "action_head"]}
CODE = "modeling_prismatic.py"


@pytest.mark.parametrize(
    ("options", "config", "files", "words"),
    [
        (
            {"cameras": ["agentview"]},
            HEAD,
            {},
            r"has 1 of .* L1 head is published for 2.*\"num_images_in_input\": 1",
        ),
        (L1, {**HEAD, "num_images_in_input": 3}, {}, r"has 2 of .*records num_images_in_input = 3"),
        (
            {"cameras": ["agentview", "wrist"]},
            {},
            {},
            r"has 2 of .* discrete tokens is published for 1",
        ),
        (
            {"decoding": "autoregressive"},
            {"parts": ["proprio_projector"]},
            {},
            r"OFT \(it has proprio_projector--150000",
        ),
        (
            {"decoding": "autoregressive"},
            {},
            {CODE: "x = NUM_ACTIONS_CHUNK"},
            r"imports NUM_ACTIONS_CHUNK",
        ),
        (
            {},
            {},
            {CODE: "raise SystemExit"},
            r"is a checkpoint of OpenVLA \(.*set policy.decoding=auto",
        ),
        (
            {"unnorm_key": "fractal20220817_data"},
            {"pretrained": True},
            {},
            r"OpenVLA \(its norm_stats are those of the pre",
        ),
        (
            {**L1, "dialect": "rlinf"},
            HEAD,
            {},
            r"dialect=rlinf, but .* has a proprio_projector in openvla-oft's form",
        ),
        (
            {"image_path": "auto"},
            {"_name_or_path": "RLinf/OFT"},
            {},
            r"calls itself 'RLinf/OFT': take policy=openvla_oft",
        ),
    ],
)
def test_a_folder_run_otherwise_than_it_was_published_is_refused(
    tmp_path, options, config, files, words
):
    config = {"num_images_in_input": None, **config}
    parts = tuple(config.pop("parts", ()))
    pretrained = config.pop("pretrained", False)
    if pretrained:
        config["norm_stats"] = {"fractal20220817_data": STATISTICS["libero_spatial_no_noops"]}
    folder = write_checkpoint(tmp_path, parts=parts, **config)
    if pretrained:
        (folder / "dataset_statistics.json").unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(
            folder,
            OpenVLAL1 if "action_head" in parts else OpenVLA,
            **{"use_proprio": bool(parts), **options},
        )


def test_an_l1_head_with_both_pictures_loads(tmp_path):
    folder = write_checkpoint(
        tmp_path, parts=("proprio_projector", "action_head"), num_images_in_input=None
    )
    assert [camera.name for camera in load(folder, OpenVLAL1, **L1).cameras] == L1["cameras"]


def damaged(folder, tmp_path):
    """The folder again, with the large files shared."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy, copy_function=os.link)
    for path in copy.iterdir():
        if not path.name.endswith(".safetensors"):
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    return copy


def change(file, **keys):
    """Keys of a JSON file get other values; "a.b" is b inside a."""

    def do(folder):
        content = json.loads((folder / file).read_text())
        for key, value in keys.items():
            *path, last = key.split("__")
            inner = content
            for part in path:
                inner = inner[part]
            inner[last] = value
        (folder / file).write_text(json.dumps(content))

    return do


def write(file, content):
    return lambda folder: (folder / file).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def config(**keys):
    return change("config.json", **keys)


def statistics(**keys):
    return change(
        "dataset_statistics.json", **{f"libero_spatial_no_noops__{k}": v for k, v in keys.items()}
    )


def preprocessor(**keys):
    return change("preprocessor_config.json", **keys)


def only_bin(folder):
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").touch()


def only_adapter(folder):
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    (folder / "lora_adapter").mkdir()


def shard(content):
    """The only shard is this one."""

    def do(folder):
        write("shard.safetensors", content)(folder)
        write(INDEX, '{"weight_map": {"x": "shard.safetensors"}}')(folder)

    return do


def unreadable(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")  # a loop: is_file() says no


INDEX = "model.safetensors.index.json"
Q = [0.5] * 7
BROKEN = {  # what is done to a good folder, and what the message has to say
    "film": (
        write("vision_backbone--150000_checkpoint.pt", ""),
        r"vision_backbone--150000_checkpoint.pt holds FiLM",
    ),
    "diffusion": (
        write("noisy_action_projector--5_checkpoint.pt", ""),
        r"noisy_action_projector--5.*diffusion head",
    ),
    "unknown part": (
        write("tactile_encoder--5_checkpoint.pt", ""),
        r"tactile_encoder--5.*does not know",
    ),
    "film recorded": (
        config(use_film=True),
        r"config.json has use_film 'True': FiLM .* is not supported",
    ),
    "quantised": (
        config(quantization_config={"load_in_4bit": True}),
        r"config.json has quantization_config",
    ),
    "letterbox": (
        config(image_resize_strategy="letterbox"),
        r"config.json has image_resize_strategy 'letterbox'",
    ),
    "letterbox 2": (
        preprocessor(image_resize_strategy="letterbox"),
        r"preprocessor_config.json has .*'letterbox'",
    ),
    "letterbox 3": (
        preprocessor(tvf_do_letterbox=True),
        r"preprocessor_config.json has .*tvf_do_letterbox True",
    ),
    "no padding": (
        config(pad_to_multiple_of=0),
        r"config.json has .*pad_to_multiple_of 0, .* before id 32064",
    ),
    "padding of 32": (config(pad_to_multiple_of=32), r"pad_to_multiple_of 32"),
    "bins": (config(n_action_bins=128), r"config.json has n_action_bins 128"),
    "bins text": (
        config(n_action_bins="256"),
        r"config.json has n_action_bins '256', it should be a whole number",
    ),
    "mistral": (
        config(text_config__model_type="mistral"),
        r"text_config.model_type 'mistral': only 'llama'",
    ),
    "gelu": (config(text_config__hidden_act="gelu"), r"text_config.hidden_act 'gelu'"),
    "rope of transformers 5": (
        config(text_config__rope_parameters={"rope_type": "yarn"}),
        r"rope_scaling .*yarn",
    ),
    "text null": (
        config(text_config=None),
        r"config.json has text_config None, it should be an object",
    ),
    "text list": (config(text_config=[1]), r"config.json has text_config \[1\]"),
    "heads": (config(text_config__num_attention_heads=3), r"hidden_size 32 for 3 heads"),
    "width": (config(text_config__hidden_size="32"), r"text_config.hidden_size '32'"),
    "layers": (config(text_config__num_hidden_layers=0), r"text_config.num_hidden_layers 0"),
    "eps": (
        config(text_config__rms_norm_eps="small"),
        r"text_config.rms_norm_eps 'small', it should be a number above",
    ),
    "rope": (config(text_config__rope_scaling="linear"), r"rope_scaling linear"),
    "towers null": (config(timm_model_ids=None), r"names the vision towers \[\].* needs 2"),
    "towers text": (config(timm_model_ids="vit"), r"timm_model_ids 'vit', it should be a list"),
    "towers numbers": (config(timm_model_ids=[1, 2]), r"timm_model_ids \[1, 2\]"),
    "sizes": (config(image_sizes=["28", "28"]), r"image_sizes '28', it should be a whole number"),
    "one size": (config(image_sizes=28), r"image_sizes 28, it should be a list"),
    "arguments": (config(timm_model_args=[1, 2]), r"timm_model_args \[1, 2\]"),
    "timm id": (
        config(timm_model_ids=["vit_large_patch14_reg4_dinov2.lvd142m", "vit_huge_patch3"]),
        r"config.json names the vision tower 'vit_huge_patch3' .*timm knows no such model",
    ),
    "timm online": (
        config(timm_model_ids=["hf-hub:a/b", "hf-hub:a/b"]),
        r"'hf-hub:a/b' .*timm knows no such model",
    ),
    "no vit": (
        config(timm_model_ids=["resnet18", "resnet18"], timm_model_args=None),
        r"the vision tower 'resnet18' .*(no VisionTransformer|timm cannot build it)",
    ),
    "activation": (
        config(timm_override_act_layers=["nonsense", None]),
        r"vision tower .*timm cannot build it",
    ),
    "patches": (
        config(timm_model_ids=["vit_large_patch14_reg4_dinov2.lvd142m", "vit_small_patch16_224"]),
        r"config.json names two vision towers .*4 and 1 patches",
    ),
    "norm_stats": (config(norm_stats=[1]), r"config.json has norm_stats of type list"),
    "no object": (write("config.json", "[]"), r"config.json holds a list"),
    "not JSON": (write("dataset_statistics.json", "{"), r"dataset_statistics.json is damaged"),
    "not text": (
        write("dataset_statistics.json", b"\xff\xfe"),
        r"dataset_statistics.json is damaged",
    ),
    "deep": (
        write("dataset_statistics.json", "[" * 100_000),
        r"dataset_statistics.json is damaged",
    ),
    "a list": (write("dataset_statistics.json", "[1]"), r"dataset_statistics.json holds a list"),
    "no statistics": (
        write("dataset_statistics.json", "{}"),
        r"does not choose among .*dataset_statistics.json: none",
    ),
    "entry": (
        change("dataset_statistics.json", libero_spatial_no_noops=5),
        r"statistics.json has no object 'action'",
    ),
    "action": (
        statistics(action=[1.0]),
        r"dataset_statistics.json has no object 'action' under 'libero_spatial_no_noops'",
    ),
    "no q01": (
        statistics(action={"mean": Q, "min": Q, "max": Q}),
        r"dataset_statistics.json lack q01, q99 .*max, mean",
    ),
    "q01 null": (
        statistics(action__q01=None),
        r"dataset_statistics.json have q01 None, it should be a list of numbers",
    ),
    "q01 text": (statistics(action__q01=["a"] * 7), r"have q01 \['a'"),
    "q01 ragged": (statistics(action__q01=[[0.0]] * 7), r"have q01 \[\[0.0\]"),
    "q01 short": (
        statistics(action__q01=[0.0] * 6),
        r"have 6 numbers in q01, 7 in q99 and 7 in mask",
    ),
    "mask short": (statistics(action__mask=[True]), r"7 in q99 and 1 in mask"),
    "mask text": (statistics(action__mask=["False"] * 7), r"have mask \['False'"),
    "NaN": (
        statistics(action__q01=[float("nan"), *Q[1:]]),
        r"'libero_spatial_no_noops' of .*dataset_statistics.json are not finite \(q01 is nan in dimension 0",
    ),
    "infinite": (
        statistics(action__q99=[*Q[1:], float("inf")]),
        r"not finite \(q99 is inf in dimension 6",
    ),
    "absurd": (
        statistics(action__q01=[-1e30] * 7, action__q99=[1e30] * 7),
        r"q01 -1e\+30 in dimension 0, which is no r",
    ),
    "another robot's": (
        statistics(action__q99=[350.0, *[0.7] * 6]),
        r"send dx of embodiment libero_like as far as 350, its bound is 1",
    ),
    "crossed": (
        statistics(action__q01=[0.95, *[-0.6] * 5, 0.0]),
        r"have q01 0.95 above q99 0.9 in dimension 0",
    ),
    "constants": (
        preprocessor(tvf_normalize_params=[1, 2]),
        r"preprocessor_config.json gives normalisation constants",
    ),
    "constants text": (
        preprocessor(tvf_normalize_params="x"),
        r"preprocessor_config.json .* for no towers",
    ),
    "no std": (
        preprocessor(tvf_normalize_params=[{"mean": Q[:3]}] * 2),
        r"preprocessor_config.json has .*std None",
    ),
    "std 0": (
        preprocessor(tvf_normalize_params=[{"mean": Q[:3], "std": [0.0] * 3}] * 2),
        r"three numbers above 0",
    ),
    "four means": (
        preprocessor(tvf_normalize_params=[{"mean": Q[:4], "std": Q[:3]}] * 2),
        r"mean \[0.5, 0.5, 0.5, 0.5\]",
    ),
    "means": (
        preprocessor(tvf_normalize_params=None, means=3),
        r"preprocessor_config.json gives .* for 0 towers",
    ),
    "tokenizer": (write("tokenizer.json", b"\xff"), r"tokenizer.json is damaged"),
    "companion": (write("tokenizer_config.json", b"\xff"), r"tokenizer_config.json is damaged"),
    "another tokenizer": (
        change("tokenizer.json", model__vocab={"<unk>": 0, "▁": 5}),
        r"gives the lone space id 5",
    ),
    "index": (
        write(INDEX, '{"metadata": {}}'),
        r"index.json has no weight_map that gives a file name for each tensor",
    ),
    "index list": (write(INDEX, '{"weight_map": ["a"]}'), r"index.json has no weight_map"),
    "index numbers": (write(INDEX, '{"weight_map": {"a": 1}}'), r"index.json has no weight_map"),
    "index elsewhere": (
        write(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'),
        r"index.json has no weight_map",
    ),
    "bin": (only_bin, r"weights in pytorch_model-00001-of-00002.bin; only safetensors are read"),
    "adapter": (only_adapter, r"has a lora_adapter but not the weights .*merge"),
    "integers": (
        shard(save({"x": torch.zeros(2, dtype=torch.int8)})),
        r"no floating-point numbers \(x\)",
    ),
    "empty shard": (shard(b""), r"shard.safetensors is damaged or cut off"),
    "part": (
        write("proprio_projector--5_checkpoint.pt", "no part"),
        r"proprio_projector--5.*not a file of plain tensors",
    ),
    "loop": (unreadable, r"holds no config.json"),
    "folder": (
        lambda f: ((f / "tokenizer.json").unlink(), (f / "tokenizer.json").mkdir()),
        r"lacks tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_malformed_file_gets_one_clear_error(folder, tmp_path, name):
    do, words = BROKEN[name]
    broken = damaged(folder, tmp_path)
    do(broken)
    with pytest.raises(UserError, match=words) as caught:
        load(broken)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_file_that_may_not_be_read(folder, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"config.json cannot be read \(Permission denied\)"):
        load(folder)


def test_malformed_proprio_statistics(tmp_path):
    folder = write_checkpoint(tmp_path, parts=("proprio_projector",))
    for proprio, words in (
        (None, r"dataset_statistics.json has none with q01 and q99"),
        ([1.0], r"has none with q01 and q99"),
        (
            {"q01": [0.0] * 8, "q99": [float("nan")] * 8},
            r"the proprio statistics .* are not finite \(q99",
        ),
        (
            {"q01": [0.0] * 5, "q99": [1.0] * 5},
            r"proprio statistics .* have 5 dimensions, embodiment libero_like has 8",
        ),
    ):
        statistics(proprio=proprio)(folder)
        with pytest.raises(UserError, match=words):
            load(folder, use_proprio=True)


def test_a_lower_bound_may_be_anything_where_the_mask_leaves_it_out(tmp_path):
    folder = write_checkpoint(tmp_path)
    statistics(action__q01=[-0.8] * 3 + [-0.3] * 3 + [2.0])(folder)  # the gripper's
    load(folder).act(observe())


@pytest.mark.parametrize(
    ("file", "change_of", "words"),
    [
        ("config.json", {"vla_rl_policy": 3}, r"no object vla_rl_policy.config"),
        (
            "config.json",
            {"vla_rl_policy__config__chunk_length": "2"},
            r"vla_rl_policy.config of wrong types",
        ),
        (
            "config.json",
            {"vla_rl_policy__unnorm_key": "bridge"},
            r"'bridge' is not among .*dataset_statistics.json",
        ),
        ("dataset_statistics.json", "{", r"dataset_statistics.json is damaged"),
        ("preprocessor_config.json", "[]", r"preprocessor_config.json holds a list"),
    ],
)
def test_a_runs_malformed_checkpoint(folder, tmp_path, file, change_of, words):
    save_checkpoint(tmp_path / "rl", load(folder))
    (write(file, change_of) if isinstance(change_of, str) else change(file, **change_of))(
        tmp_path / "rl"
    )
    with pytest.raises(UserError, match=words):
        load_policy(tmp_path / "rl", lambda name: implementation("policy", name), libero_like())


class Payload:
    def __reduce__(self):
        return (print, ("this must never run",))


def test_parts_are_loaded_without_running_them(tmp_path, capsys):
    folder = write_checkpoint(tmp_path, parts=("action_head",))
    torch.save({"x": Payload()}, folder / "action_head--150000_checkpoint.pt")
    with pytest.raises(UserError, match="not a file of plain tensors"):
        load(folder, OpenVLAL1)
    assert "never run" not in capsys.readouterr().out
