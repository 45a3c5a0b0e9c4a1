"""Reward models that are trained here, and VLAC: they learn, save, judge, and refuse bad input."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from reward_helpers import episodes, trajectory

from reward_models.classifier import ClassifierConfig, SuccessClassifier, best_threshold
from reward_models.network import FrameTable, NetworkConfig, text_ids
from reward_models.pairwise import PairwiseConfig, PairwiseCritic
from reward_models.preference import PreferenceConfig, PreferenceReward, read_comparisons
from reward_models.process import ProcessConfig, ProcessReward
from reward_models.shaping import ShapingConfig
from reward_models.value_progress import ValueProgress, ValueProgressConfig
from reward_models.vlac import VLAC, InternVLBackend, Question, VLACConfig, parse_done, parse_score
from vla_rl.config import compose
from vla_rl.config.episodes import RewardCheckConfig
from vla_rl.errors import ConfigError, MissingDependency, UserError
from vla_rl.rewards.quality import decide, judge, spearman

SMALL = {"updates": 70, "batch_size": 24, "learning_rate": 4e-3}
MODELS = {
    "pairwise": (PairwiseCritic, PairwiseConfig),
    "process": (ProcessReward, ProcessConfig),
    "classifier": (SuccessClassifier, ClassifierConfig),
    "value_progress": (ValueProgress, ValueProgressConfig),
    "preference": (PreferenceReward, PreferenceConfig),
}


def make(kind: str, **options):
    cls, config = MODELS[kind]
    if kind == "process":
        options["milestones"] = {"gripper": [0], "position": [1, 2]}
        from reward_models.milestones import MilestoneConfig

        options["milestones"] = MilestoneConfig(**options["milestones"])
    network = NetworkConfig(image_size=24, width=24)
    return cls(config(**{**SMALL, "network": network, **options}))


@pytest.fixture(scope="module")
def trained():
    """Each kind, trained once on the same episodes."""
    # (a module's fixture is made before the fixture that does so for each test)
    torch.manual_seed(0)
    models = {}
    for kind in MODELS:
        models[kind] = make(kind)
        models[kind].figures = models[kind].fit(episodes(20))
    return models


@pytest.mark.parametrize("kind", MODELS)
def test_learns_to_tell_success_and_progress_on_new_episodes(kind, trained):
    """The arm feels all of it here, so that none is better than proprioception alone; without
    that they are good."""
    quality = judge(trained[kind], episodes(24, seed=7), kind)
    f = quality.figures
    assert f.auc_ends > 0.9 and f.invalid_share == 0.0
    # (where a failure ended first, its success had not happened yet, which a classifier tells of
    # alike)
    assert f.auc > (0.85 if kind == "classifier" else 0.9)
    assert quality.figures.voc > (0.6 if kind in ("pairwise", "process", "value_progress") else 0.0)
    assert (
        quality.verdict in ("unknown", "bad")
        and "proprioception" in quality.reasons[0]
        and f.auc_proprio > 0.98
    )
    assert decide(dataclasses.replace(f, auc_proprio=0.5), RewardCheckConfig())[0] == "good"


@pytest.mark.parametrize("updates", [1, 2, 9, 10, 11])
def test_a_fit_may_be_of_any_length(updates):
    model = make("classifier", updates=updates)
    assert math.isfinite(model.fit(episodes(6))["loss"])


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_shaped_progress_and_survive_saving(kind, trained):
    ts = episodes(6, seed=3)
    model = trained[kind]
    rewards, curves = model.score(ts), model.progress(ts)
    assert [len(r) for r in rewards] == [len(t) for t in ts] and [len(c) for c in curves] == [
        len(t) + 1 for t in ts
    ]
    assert all(float(c.min()) >= 0.0 and float(c.max()) <= 1.0 for c in curves)
    if kind != "classifier":
        # "delta" pays what was gained; a potential returns it at the end
        gained = kind == "pairwise"
        for t, r, c in zip(ts, rewards, curves):
            assert float(r.sum()) == pytest.approx(
                float(t.success) + gained * float(c[-1]) - float(c[0]), abs=1e-4
            )
    assert (
        model.metrics()["reward/progress_end_successes"]
        > model.metrics()["reward/progress_end_failures"]
    )
    copy = make(kind)
    copy.load_state_dict(model.state_dict())
    for a, b in zip(copy.score(ts), rewards):
        torch.testing.assert_close(a, b)
    for t in ts:
        copy.prepare(t)
    assert len(copy._prepared) == 6
    for a, b in zip(copy.score(ts), rewards):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert not copy._prepared and copy.score([]) == []


@pytest.mark.parametrize("kind", MODELS)
def test_unfitted_or_foreign_states_are_refused(kind, trained):
    with pytest.raises(UserError, match=f"reward fit reward={kind}"):
        make(kind).score(episodes(2))
    with pytest.raises(UserError, match=r"at least one trajectory|got 0 and 0"):
        make(kind).fit([])
    other = "process" if kind != "process" else "pairwise"
    with pytest.raises(ConfigError, match=f"use reward={other}"):
        make(kind).load_state_dict(trained[other].state_dict())
    with pytest.raises(UserError, match="has the cameras wrist"):
        trained[kind].score([trajectory([0, 1], camera="wrist")])


@pytest.mark.parametrize("kind", ["pairwise", "process", "classifier", "preference"])
def test_data_without_what_a_model_learns_from(kind):
    with pytest.raises(UserError, match=r"success"):
        make(kind).fit([t for t in episodes(6) if not t.success])


def test_a_model_trained_for_another_robot_is_refused(trained):
    t = trajectory([0, 1])
    import dataclasses

    wide = dataclasses.replace(t.observations, proprio=torch.zeros(1, 5))
    wide_end = dataclasses.replace(t.final_observation, proprio=torch.zeros(1, 5))
    with pytest.raises(UserError, match="3 proprio dimensions"):
        trained["pairwise"].score(
            [dataclasses.replace(t, observations=wide, final_observation=wide_end)]
        )


def test_pairwise_knows_direction_stagnation_and_reverse(trained):
    model = trained["pairwise"]
    t = trajectory([0.1, 0.5, 0.5, 0.9], rollout_id="p")
    there, back = (
        c.tolist() for c in model.critics([t, trajectory([0.9, 0.5, 0.5, 0.1], rollout_id="b")])
    )
    # percent
    assert min(there[0], there[2]) > 20 and abs(there[1]) < 20 and max(back[0], back[2]) < -20
    steps = make("pairwise", curve="steps", done_weight=0.0)
    steps.load_state_dict(model.state_dict())
    ts = episodes(4, seed=9)
    for curve, reverse, critics in zip(
        steps.progress(ts), steps.reverse_progress(ts), steps.critics(ts)
    ):
        assert (
            len(curve) == len(reverse) == len(critics) + 1
            and float(curve[0]) == float(reverse[0]) == 0.0
        )
    assert judge(steps, ts).figures.vroc > 0.5


def test_wrong_instructions_come_from_other_tasks_or_the_list():
    model = make("pairwise")
    two = [
        trajectory([0, 1], task="a", instruction="do a"),
        trajectory([0, 1], task="b", instruction="do b"),
    ]
    assert model._other_instruction(FrameTable.of(two), 0) == "do b"
    assert model._other_instruction(FrameTable.of(two[:1]), 0) in model.config.wrong_instructions
    assert text_ids("Pick up, the CUP") == text_ids("pick up the cup") != text_ids("drop the cup")


def test_process_labels_name_what_is_missing(trained):
    assert (
        trained["process"].figures["milestones"] >= 2
        and 0 < trained["process"].figures["positive_share"] < 1
    )
    with pytest.raises(UserError, match=r"reward.milestones.gripper"):
        ProcessReward(ProcessConfig()).fit(episodes(4))


def test_classifier_chooses_its_threshold_on_held_out_trajectories(trained):
    model = trained["classifier"]
    assert (
        model.figures["held_out"] == 4
        and model.figures["held_out_accuracy"] == 1.0
        and 0 < model.threshold < 1
    )
    ts = episodes(10, seed=5)
    assert [float(r[-1]) for r in model.score(ts)] == [float(t.success) for t in ts]
    assert best_threshold(torch.tensor([0.1, 0.2, 0.8]), torch.tensor([False, False, True])) == (
        0.5,
        1.0,
    )
    with pytest.raises(UserError, match="got 3 and 0"):
        make("classifier").fit([t for t in episodes(6) if t.success])


def test_value_filter_drops_mistakes(trained):
    model = trained["value_progress"]
    slip = trajectory([0.0, 0.3, 0.6, 0.9, 0.1, 0.1, 0.5, 0.9, 1.0])
    keep = model.keep_masks([slip])[0]
    assert len(keep) == 8 and not bool(keep[3]) and bool(keep[-2:].all())


def test_preferences_can_come_from_a_file(tmp_path):
    ts = [trajectory([0, 0.2 * i], rollout_id=f"r{i}", success=False) for i in range(5)]
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(json.dumps({"preferred": f"r{i}", "other": f"r{i + 1}"}) + "\n" for i in range(4))
    )
    model = make("preference", comparisons=str(file))  # somebody prefers what moves less
    assert model.fit(ts)["comparisons"] == 4
    ends = [float(c[-1]) for c in model.progress(ts)]
    assert spearman(ends) <= -0.8
    file.write_text('{"preferred": "a"}\n')
    with pytest.raises(UserError, match=r"line 1.*other"):
        read_comparisons(file)
    file.write_text('{"preferred": "a", "other": "b"}\n')
    with pytest.raises(UserError, match="none of the 1 comparisons"):
        make("preference", comparisons=str(file)).fit(ts)


def test_a_frozen_timm_backbone_is_not_trained():
    network = NetworkConfig(backbone="test_vit", width=16)
    model = PairwiseCritic(PairwiseConfig(updates=2, batch_size=8, network=network))
    model.fit(episodes(2))
    assert (
        not any(p.requires_grad for p in model.network.frozen.parameters())
        and not model.network.frozen.training
    )
    with pytest.raises(ConfigError, match="no_such_net"):
        PairwiseCritic(PairwiseConfig(network=NetworkConfig(backbone="no_such_net"))).fit(
            episodes(2)
        )


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (PairwiseConfig, {"curve": "line"}, "steps, anchored"),
        (PairwiseConfig, {"done_weight": 2.0}, "done_weight=2.0 .* 0 to 1"),
        (PairwiseConfig, {"updates": 0}, "updates=0 .* 1 or more"),
        (ProcessConfig, {"done_weight": -1.0}, "done_weight=-1.0 .* 0 to 1"),
        (ClassifierConfig, {"threshold": 1.0}, "threshold=1.0 .* 0 or more and below 1"),
        (ValueProgressConfig, {"bins": 1}, "bins=1 .* 2 or more"),
        (ValueProgressConfig, {"drop_window": 0}, "drop_window=0 .* 1 or more"),
        (PreferenceConfig, {"frames": 0}, "frames=0 .* 1 or more"),
        (NetworkConfig, {"width": 2}, "reward.network.width=2 .* 8 or more"),
        (VLACConfig, {"value_mode": "up"}, "always, mixed, exact"),
        (VLACConfig, {"pair_template": "<image> {task}"}, "pair_template .* 1 times, .* 2 times"),
        (VLACConfig, {"chat_template": "{question}"}, r"\{system\}"),
        (VLACConfig, {"frame_skip": 0}, "frame_skip=0 .* 1 or more"),
        (VLACConfig, {"texts": "theirs"}, "own, release"),
        (VLACConfig, {"done_threshold": 1.5}, "done_threshold=1.5 .* 0 to 1"),
        (VLACConfig, {"lanczos_size": -1}, "lanczos_size=-1 .* 0 or more"),
    ],
)
def test_unfit_settings_are_named(config, options, named):
    with pytest.raises(ConfigError, match=named):
        config(**options)


# --------------------------------------------------------------------------------------------- VLAC
@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("+20", 20.0),
        ("-15", -15.0),
        (" 7%", 7.0),
        ("+20\nbecause", 20.0),
        ("<score> -3.5 </score>", -3.5),
        ("<think>first 10%</think> +4", 4.0),
        ("\u221212", -12.0),
        ("0", 0.0),
        ("12.", 12.0),
        ("+12. Because", 12.0),
        (".5", 0.5),
        ("-.5%", -0.5),
        ("1e2", 100.0),
        ("+2.5e1", 25.0),
        ("20end", 20.0),
        ("", None),
        ("closer", None),
        ("+200", None),
        ("12.3.4", None),
        ("the score is 5", None),
        (None, None),
        (7, None),
        ("1e3", None),
        ("1e", None),
        ("1e-", None),
        (".", None),
        ("12..", None),
        ("1e2.5", None),
        ("- 5e", None),
    ],
)
def test_scores_are_parsed(reply, score):
    assert parse_score(reply) == score


@pytest.mark.parametrize(
    ("reply", "done"),
    [
        ("1", 1.0),
        ("0", 0.0),
        ("1.", 1.0),
        (".9", 0.9),
        ("<done> 0.4", 0.4),
        ("9e-1", 0.9),
        ("2", None),
        ("1.2.3", None),
    ],
)
def test_done_answers_are_parsed(reply, done):
    assert parse_done(reply) == done


@given(st.one_of(st.text(max_size=40), st.binary(), st.none(), st.floats()))
@settings(max_examples=40)
def test_parsers_never_raise(reply):
    score, done = parse_score(reply), parse_done(reply)
    assert score is None or -100 <= score <= 100
    assert done is None or 0 <= done <= 1


class Scripted:
    """A backend that answers by what it sees: how much further right the bar is, in percent of
    what is left."""

    def __init__(self, garbage_every: int = 0):
        self.questions: list[Question] = []
        self.batches: list[int] = []
        self.garbage_every = garbage_every

    def reply(self, questions):
        self.batches.append(len(questions))
        out = []
        for q in questions:
            self.questions.append(q)
            assert q.text.count("<image>") == len(q.images)
            at = [float(i[12].float().mean(-1).argmax()) / 19 for i in q.images[-2:]]
            if self.garbage_every and len(self.questions) % self.garbage_every == 0:
                out.append("I cannot say")
            elif len(q.images) == 1:
                out.append("1" if at[0] > 0.95 else "0")
            else:
                out.append(f"{100 * (at[1] - at[0]) / max(1 - at[0], 0.05):+.0f}")
        return out


def test_vlac_curves_rewards_and_batches():
    backend = Scripted()
    model = VLAC(
        VLACConfig(batch_size=3, shaping=ShapingConfig(mode="delta", success_coefficient=0.0)),
        backend,
    )
    t = trajectory([0, 0.25, 0.5, 0.75, 1.0], noise=0.0)
    curve = model.progress([t])[0]
    assert backend.batches == [3, 1] and float(curve[0]) == 0.0 and float(curve[-1]) > 0.95
    assert bool((curve.diff() > 0).all())
    assert float(model.score([t])[0].sum()) == pytest.approx(float(curve[-1]), abs=1e-5)
    figures = judge(model, [t, trajectory([0, 0.2, 0.1, 0.0], success=False)], "vlac").figures
    assert (
        figures.voc == 1.0
        and figures.auc == 1.0
        and figures.vroc > 0.9
        and figures.negative_rate == 0.0
    )


def test_vlac_skips_frames_and_asks_whether_done():
    backend = Scripted()
    model = VLAC(VLACConfig(frame_skip=2, done_weight=0.5), backend)
    t = trajectory([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    curve = model.progress([t])[0]
    assert len(model.critics([t])[0]) == 3  # 0-2, 2-4, 4-5
    assert float(curve[1]) == 0.0 and float(curve[2]) == float(curve[3]) and float(curve[-1]) > 0.9


def test_garbage_replies_are_counted_and_spoil_a_curve_only_where_there_are_many():
    t = trajectory([0, 0.25, 0.5, 0.75, 1.0])
    some = VLAC(VLACConfig(), Scripted(garbage_every=4))
    some.score([t])
    assert (
        some.metrics()["reward/invalid_reply_share"] == 0.25
        and some.metrics()["reward/invalid_share"] == 0.0
    )
    most = VLAC(VLACConfig(), Scripted(garbage_every=1))
    reward = most.score([t])[0]
    assert most.metrics()["reward/invalid_share"] == 1.0 and reward.tolist() == [0.0, 0.0, 0.0, 1.0]
    quality = judge(most, [t], "vlac")
    assert quality.verdict == "bad" and "invalid" in quality.reasons[0]


def test_reference_examples_are_shown_and_must_be_of_the_task():
    backend = Scripted()
    model = VLAC(VLACConfig(reference_frames=3), backend)
    model.set_references([trajectory([0, 0.5, 1.0]), trajectory([0, 1.0], task="other")])
    model.progress([trajectory([0, 0.5])])
    question = backend.questions[0]
    assert (
        len(question.images) == 6 and " 0% <image>\n 50% <image>\n 100% <image>\n" in question.text
    )
    with pytest.raises(UserError, match=r"other, slide.*'pour'"):
        model.progress([trajectory([0, 1.0], task="pour")])
    with pytest.raises(UserError, match="no successful demonstration"):
        VLAC(VLACConfig(), backend).set_references([trajectory([0, 1], success=False)])


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    """A tiny random InternVL checkpoint in the native layout, with a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        InternVLConfig,
        InternVLForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    path = tmp_path_factory.mktemp("internvl")
    special = ["<pad>", "<unk>", "<|im_end|>", "<|im_start|>", "<img>", "<IMG_CONTEXT>", "</img>"]
    words = [*special, *"0123456789+-", "user", "system", "assistant", "closer", "<s>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.index("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        bos_token="<s>",
        additional_special_tokens=special[3:],
    )
    fast.save_pretrained(path)
    config = InternVLConfig(
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": [28, 28],
            "patch_size": [14, 14],
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(words),
        },
        image_token_id=5,
        image_seq_length=1,
        downsample_ratio=0.5,
    )
    torch.manual_seed(0)
    InternVLForConditionalGeneration(config).save_pretrained(path)
    return path


def test_internvl_checkpoint_answers_in_batches(internvl):
    config = VLACConfig(checkpoint=str(internvl), image_size=28, max_new_tokens=3, device="cpu")
    backend = InternVLBackend(config)
    images = tuple(torch.randint(0, 256, (20, 30, 3), dtype=torch.uint8) for _ in range(3))
    short, long = (
        Question("<image> closer", images[:1]),
        Question("<image> <image> <image> closer closer", images),
    )
    together = backend.reply([short, long])
    assert together == [backend.reply([short])[0], backend.reply([long])[0]]
    assert backend.reply([]) == [] and backend.pixels(images[0]).shape == (1, 3, 28, 28)
    with pytest.raises(UserError, match="2 <image> slots and 1 images"):
        backend.reply([Question("<image> <image>", images[:1])])
    model = VLAC(config)
    assert len(model.score([trajectory([0, 0.5, 1.0])])[0]) == 2


DATA_SOURCE = """
import nothing_of_this_name
def trojectory_example_prompt(images,task):
    prompt=f"<run> {task} </run>:"
    t_len=len(images)-1
    for i,one in enumerate(images):
        temp_p=int((i/t_len)*100)
        prompt=prompt+f" {temp_p} of it <image>\\n"
    prompt=prompt+'</run>'
    return prompt
class DataProcessor():
    def __init__(self):
        self.system_prompt='An older system text.'
        self.prompt_templete={
            "v3":"An older question <image> <image> {}",
            "task_done":"Over? {} <done>",
            "other":"{} {}",
        }
"""
MODEL_SOURCE = """
class GAC_model():
    def __init__(self):
        self.system_prompt=None
        self.dataclient.prompt_templete['v3']="One: <image>\\nTwo: <image>\\nNearer to {}? <score>"
        self.dataclient.prompt_templete['v3_think']="Start: <image>\\nOne: <image>\\nTwo: <image>\\nNearer to {}? <score>"
    def set_system_prompt(self,system_prompt=None):
        if system_prompt is not None:
            self.system_prompt=system_prompt
        else:
            self.system_prompt='Look well.'
"""


@pytest.fixture
def release(tmp_path):
    """A made-up release: its sources have the shape of VLAC's and other words; importing them
    would fail."""
    folder = tmp_path / "made_up" / "evo_vlac" / "utils"
    folder.mkdir(parents=True)
    (folder / "data_processing_vlm.py").write_text(DATA_SOURCE)
    (folder / "model_utils.py").write_text(MODEL_SOURCE)
    return tmp_path / "made_up"


def released(release, **changes) -> VLACConfig:
    """``reward=vlac_release`` with its texts from ``release``."""
    config = compose(["~run", "reward=vlac_release", f"reward.release={release}"]).reward
    return dataclasses.replace(config, **changes)


def test_a_release_asks_in_its_own_words(release):
    config = released(release, reference_frames=3)
    assert (
        config.value_mode == "always"
        and config.bos
        and config.image_newline
        and not config.compare_last
    )
    backend = Scripted()
    model = VLAC(config, backend)
    assert model.config.system == "Look well."
    t = trajectory([0, 0.5, 1.0], instruction="push {it}")
    model.critics([t])
    assert [q.text for q in backend.questions] == 2 * [
        "One: <image>\nTwo: <image>\nNearer to push {it}? <score>"
    ]
    backend.questions.clear()
    model.set_references([trajectory([0, 0.25, 0.5, 1.0])])
    model.critics([t])
    assert backend.questions[1].text == (
        "<run> push {it} </run>: 0 of it <image>\n 50 of it <image>\n 100 of it <image>\n</run>"
        "Start: <image>\nOne: <image>\nTwo: <image>\nNearer to push {it}? <score>"
    )
    start, before, after = backend.questions[1].images[3:]
    frames = torch.cat([t.observations.images["front"], t.final_observation.images["front"]])
    assert (
        torch.equal(start, frames[0])
        and torch.equal(before, frames[1])
        and torch.equal(after, frames[2])
    )


def test_a_release_s_rules_for_the_end(release):
    """Frames 0-2 and 2-4 of six are compared and not 4-5; "always" takes −50 % of what is left;
    0.9 is not above 0.9."""

    class Fixed:
        def reply(self, questions):
            assert all(
                q.text == "<image>Over? slide the bar <done>"
                for q in questions
                if len(q.images) == 1
            )
            return [next(self.pair) if len(q.images) == 2 else next(self.over) for q in questions]

    backend = Fixed()
    backend.pair, backend.over = iter(["+40", "-50"]), iter(["0", "0.3", "0.9", "0.9", "0.91", "1"])
    model = VLAC(released(release, frame_skip=2, done_weight=0.5), backend)
    curve = model.progress([trajectory([0, 0.2, 0.4, 0.6, 0.8, 1.0])])[0]
    values = [0.0, 0.0, 0.4, 0.4, 0.1, 0.1]  # 40 − 60 · 0.5 = 10
    over = [0.0, 0.0, 0.0, 0.0, 0.91, 1.0]
    assert curve.tolist() == pytest.approx([0.5 * v + 0.5 * d for v, d in zip(values, over)])


def test_a_release_s_prompt_and_images_reach_the_checkpoint(release, internvl):
    config = released(
        release,
        checkpoint=str(internvl),
        image_size=28,
        lanczos_size=60,
        max_new_tokens=2,
        device="cpu",
    )
    backend = VLAC(config).backend
    image = torch.randint(0, 256, (20, 30, 3), dtype=torch.uint8)
    assert backend._prompt(Question("<image>\nclose", (image,))) == (
        "<s><|im_start|>system\nLook well.<|im_end|>\n<|im_start|>user\n"
        "<img><IMG_CONTEXT></img>\n\nclose<|im_end|>\n<|im_start|>assistant\n"
    )
    square = Image.fromarray(image.numpy()).resize((60, 60), Image.Resampling.LANCZOS)
    wanted = (
        np.asarray(square.resize((28, 28), Image.Resampling.BICUBIC)).transpose(2, 0, 1) / 255.0
    )
    wanted = (wanted - np.array([0.485, 0.456, 0.406])[:, None, None]) / np.array(
        [0.229, 0.224, 0.225]
    )[:, None, None]
    torch.testing.assert_close(backend.pixels(image)[0], torch.from_numpy(wanted).float())
    assert len(backend.reply([Question("<image> closer", (image,))])) == 1
    plain = InternVLBackend(VLACConfig(checkpoint=str(internvl), device="cpu"))
    assert (
        plain._prompt(Question("<image>", (image,))).startswith("<|im_start|>") and plain.bos == ""
    )


def test_a_file_of_texts_names_its_licence_and_lacks_nothing(tmp_path):
    texts = {
        "system": "Look.",
        "pair_template": "<image> <image> {task}",
        "done_template": "<image> {task}",
        "reference_template": "{task}: {frames}",
        "reference_frame_template": "{percent} <image>",
        "reference_pair_template": "<image> <image> <image> {task}",
    }
    path = tmp_path / "texts.yaml"

    def write(**changes) -> Path:
        path.write_text(
            yaml.safe_dump(
                {k: v for k, v in (texts | {"licence": "MIT"} | changes).items() if v is not None}
            )
        )
        return path

    assert VLAC(released(write()), Scripted()).config.pair_template == "<image> <image> {task}"
    for changes, words in (
        ({"licence": None}, "names no licence"),
        ({"system": None}, "lacks system"),
        ({"done_template": "<image>"}, r"done_template lacks the slot \{task\}"),
        ({"pair_template": "<image> {task}"}, "pair_template .* 1 times, .* 2 times"),
        ({"question": "x"}, "unknown names question"),
        ({"system": 3}, "mapping of names to texts"),
    ):
        with pytest.raises(ConfigError, match=words):
            VLAC(released(write(**changes)), Scripted())
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        VLAC(released(path), Scripted())


def test_a_release_that_cannot_be_read_is_named(release, tmp_path):
    with pytest.raises(MissingDependency, match=r"reward.release='' does not exist.*evo_vlac"):
        VLAC(released(""), Scripted())
    (tmp_path / "made_up" / "empty").mkdir()
    with pytest.raises(MissingDependency, match=r"holds no data_processing_vlm.py"):
        VLAC(released(tmp_path / "made_up" / "empty"), Scripted())
    (release / "evo_vlac" / "utils" / "data_processing_vlm.py").write_text("x = 1\n")
    with pytest.raises(
        ConfigError,
        match=r"lacks done_template, reference_frame_template, reference_template\. Write",
    ):
        VLAC(released(release), Scripted())
    (release / "evo_vlac" / "utils" / "model_utils.py").write_text("def (")
    with pytest.raises(ConfigError, match=r"model_utils.py cannot be parsed"):
        VLAC(released(release), Scripted())


def test_checkpoints_that_cannot_be_read_are_named(internvl, tmp_path):
    with pytest.raises(MissingDependency, match="no model folder"):
        VLAC(VLACConfig(checkpoint=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    with pytest.raises(ConfigError, match="trust_remote_code"):
        VLAC(VLACConfig(checkpoint=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="'llama'"):
        VLAC(VLACConfig(checkpoint=str(tmp_path)))


def test_figures_of_an_unjudgeable_set_are_not_numbers(trained):
    wins = [t for t in episodes(4) if t.success]
    quality = judge(trained["pairwise"], wins)
    assert (
        math.isnan(quality.figures.auc)
        and quality.verdict == "unknown"
        and "failed" in quality.reasons[0]
    )
