"""SRPO: the formulas of the fact sheet, every switch, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
import yaml
from reward_helpers import episodes, trajectory

from reward_models import srpo_math as m
from reward_models.encoders import (
    EncoderConfig,
    PooledEncoder,
    SegmentEncoder,
    VJEPA2Encoder,
    clip_indices,
    make_encoder,
)
from reward_models.settings import SPACES
from reward_models.srpo import SRPO, SRPOConfig, find_references
from vla_rl.config import checked
from vla_rl.errors import ConfigError, MissingDependency, UserError
from vla_rl.paths import config_dir


def scored(model: SRPO, trajectories) -> list[float]:
    rewards = model.score(trajectories)
    assert all(len(r) == len(t) and not r[:-1].any() for r, t in zip(rewards, trajectories))
    return [float(r[-1]) for r in rewards]


class ByName:
    """An encoder with one embedding per rollout, handed in by rollout id through the cache."""

    def encode(self, clips):
        raise AssertionError("every embedding is cached")


def with_embeddings(config: SRPOConfig, rows: dict[str, list[float]]) -> SRPO:
    model = SRPO(config)
    model.encoder = ByName()
    model._cache = {name: torch.tensor(row) for name, row in rows.items()}
    return model


def line(distances: list[float], **config) -> tuple[SRPO, list]:
    """One success at 0 on a line, and failures at these distances."""
    rows = {"w": [0.0]} | {f"f{i}": [d] for i, d in enumerate(distances)}
    ts = [trajectory([0, 1], name == "w", rollout_id=name) for name in rows]
    # A zero row would mean "no embedding": shift all by one.
    return with_embeddings(SRPOConfig(**config), {k: [v[0] + 1.0] for k, v in rows.items()}), ts


def test_rewards_of_failures_as_coded_and_as_in_the_paper():
    d = torch.tensor([1.0, 2.0, 3.0, 5.0])
    torch.testing.assert_close(
        m.shape_minmax(d), torch.tensor([0.59598, 0.55449, 0.30000, 0.00402]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        m.shape_zscore(d), torch.tensor([0.61242, 0.49930, 0.36627, 0.14342]), atol=1e-5, rtol=0
    )
    assert m.shape_minmax(torch.tensor([7.0])).tolist() == pytest.approx([0.3])
    assert m.shape_zscore(torch.tensor([7.0, 7.0])).tolist() == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0, 0.59598, 0.55449, 0.30000, 0.00402]),
        (
            {"normalise": "zscore", "scale": 0.8, "slope": 1.0},
            [1.0, 0.61242, 0.49930, 0.36627, 0.14342],
        ),
        ({"coefficient": 5.0}, [5.0, 2.97992, 2.77244, 1.5, 0.02008]),
        ({"slope": 1.0}, [1.0, 0.37348, 0.33731, 0.3, 0.22652]),
    ],
)
def test_score_places_the_formula_on_the_last_decision(settings, expected):
    model, ts = line([1.0, 2.0, 3.0, 5.0], **settings)
    assert scored(model, ts) == pytest.approx(expected, abs=1e-4)


def test_group_advantages_of_shaped_rewards_match_the_fact_sheet():
    from vla_rl.algorithms.advantages import grpo_advantages

    scores = torch.cat([torch.ones(2), m.shape_minmax(torch.tensor([1.0, 2.0, 3.0, 5.0]))]) * 5
    got = grpo_advantages(scores, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(
        got, torch.tensor([1.0855, 1.0855, 0.0518, -0.0544, -0.7055, -1.4629]), atol=2e-4, rtol=0
    )


def preset(name: str) -> SRPOConfig:
    values = yaml.safe_load((config_dir() / "reward" / f"{name}.yaml").read_text())
    assert values.pop("type") == "srpo"
    return checked(SRPOConfig, values, "reward")


def test_two_rollouts_of_one_initial_state_never_share_an_embedding():
    twins = [
        trajectory([0, 1.0], True, rollout_id="a"),
        trajectory([0, 0.9], False, rollout_id="b"),
        trajectory([0, 0.1], False, rollout_id="c"),
    ]
    model = SRPO(SRPOConfig())
    rewards = scored(model, twins)
    assert rewards[0] == 1.0 and rewards[1] > 0.5 > 0.1 > rewards[2] > 0


def test_embeddings_are_computed_once_per_rollout_and_dropped_after():
    ts = episodes(6)
    model = SRPO(SRPOConfig())
    inner, calls = model.encoder, []

    class Counting:
        def encode(self, clips):
            calls.append(len(clips))
            return inner.encode(clips)

    model.encoder = Counting()
    for t in ts[:4]:
        model.prepare(t)
    model.score(ts)
    model.score(ts)
    assert calls == [1, 1, 1, 1, 2]
    model.score(ts[:2])
    assert set(model._cache) == {t.rollout_id for t in ts[:2]}


def test_all_success_and_all_fail_batches_keep_the_task_reward():
    wins = [t for t in episodes(8) if t.success]
    losses = [t for t in episodes(8) if not t.success]
    model = SRPO(SRPOConfig())
    assert scored(model, wins) == [1.0] * 4
    fresh = SRPO(SRPOConfig())
    assert scored(fresh, losses) == [0.0] * 4
    assert fresh.metrics()["reward/fallback_share"] == 1.0
    assert fresh.score([]) == []


def test_all_fail_falls_back_on_earlier_successes_where_asked():
    ts = episodes(8)
    losses = [t for t in ts if not t.success]
    model = SRPO(SRPOConfig(all_fail="buffer"))
    assert scored(model, losses) == [0.0] * 4
    model.add_references([t for t in ts if t.success])
    rewards = scored(model, losses)
    assert (
        max(rewards) > 0.5
        and min(rewards) < 0.1
        and model.metrics()["reward/fallback_share"] == 0.0
    )
    copy = SRPO(SRPOConfig(all_fail="buffer"))
    copy.load_state_dict(model.state_dict())
    assert scored(copy, losses) == pytest.approx(rewards)


def test_demonstrations_are_what_failures_of_a_policy_that_never_succeeds_come_near_to():
    ts = episodes(8)
    losses, wins = [t for t in ts if not t.success], [t for t in ts if t.success]
    model = SRPO(SRPOConfig(all_fail="buffer", demonstrations=2))
    assert model.wants_demonstrations and not SRPO(SRPOConfig()).wants_demonstrations
    with pytest.raises(
        UserError, match="demonstrations=2, and the run has no successful demonstration"
    ):
        model.set_demonstrations(losses)
    model.set_demonstrations(ts)
    assert [name for name, _ in model.buffer["slide"]] == [t.rollout_id for t in wins[:2]]
    rewards = scored(model, losses)
    assert (
        max(rewards) > 0.5 and min(rewards) < 0.1 and model.metrics()["reward/shaped_share"] == 1.0
    )


def test_demonstrations_that_nothing_would_read_are_refused():
    with pytest.raises(ConfigError, match=r"reward\.all_fail=buffer"):
        SRPOConfig(demonstrations=5)
    with pytest.raises(
        ConfigError, match=r"reward.demonstrations=65 .* 0 to reward.buffer_size=64"
    ):
        SRPOConfig(demonstrations=65, all_fail="buffer")


def test_buffer_is_bounded_and_holds_a_rollout_once():
    model = SRPO(SRPOConfig(buffer_size=3))
    wins = [t for t in episodes(12) if t.success]
    model.add_references(wins)
    model.add_references(wins[-1:])
    assert [name for name, _ in model.buffer["slide"]] == [t.rollout_id for t in wins[-3:]]


def test_tasks_never_mix_and_groups_may_be_kept_apart():
    rows = {"w1": [1.0], "f1": [2.0], "f2": [3.0], "w2": [10.0], "f3": [11.0]}
    ts = [
        trajectory([0, 1], True, rollout_id="w1", group=0),
        trajectory([0, 1], False, rollout_id="f1", group=0),
        trajectory([0, 1], False, rollout_id="f2", group=1),
        trajectory([0, 1], True, rollout_id="w2", task="other"),
        trajectory([0, 1], False, rollout_id="f3", task="other"),
    ]
    # alone in its task
    assert scored(with_embeddings(SRPOConfig(), rows), ts)[-1] == pytest.approx(0.3)
    apart = scored(with_embeddings(SRPOConfig(reference_scope="group"), rows), ts)
    assert apart[1] == pytest.approx(0.3) and apart[2] == 0.0  # group 1 has no success


def test_buffer_scope_uses_old_successes_as_references():
    model = with_embeddings(
        SRPOConfig(reference_scope="buffer", cluster="nearest"),
        {"w": [1.0], "f": [5.0], "g": [6.0]},
    )
    model.buffer["slide"] = [("old", torch.tensor([6.0]))]
    ts = [trajectory([0, 1], n == "w", rollout_id=n) for n in ("w", "f", "g")]
    rewards = scored(model, ts)
    assert rewards[2] == pytest.approx(0.59598, abs=1e-4) and rewards[1] == pytest.approx(
        0.00402, abs=1e-4
    )


def test_a_broken_embedding_keeps_the_task_reward_and_is_no_reference():
    rows = {"w": [1.0], "x": [math.nan], "f": [2.0], "g": [4.0], "z": [0.0]}
    ts = [trajectory([0, 1], n in ("w", "x"), rollout_id=n) for n in rows]
    model = with_embeddings(SRPOConfig(), rows)
    assert scored(model, ts) == pytest.approx([1.0, 1.0, 0.59598, 0.00402, 0.0], abs=1e-4)
    assert model.metrics()["reward/invalid_share"] == pytest.approx(0.4)
    assert [name for name, _ in model.buffer["slide"]] == ["w"]


def test_published_radius_finds_no_cluster_but_one_from_the_data_does():
    generator = torch.Generator().manual_seed(0)
    far = 3 * torch.ones(300)
    rows = torch.cat(
        [
            torch.randn(8, 300, generator=generator) * 0.1,
            far + torch.randn(8, 300, generator=generator) * 0.1,
        ]
    )
    published = find_references(rows, SRPOConfig(eps=0.5))
    assert published.clusters == 0 and published.noise_share == 1.0
    torch.testing.assert_close(published.centres, rows.mean(0, keepdim=True))
    found = find_references(rows, SRPOConfig())
    assert found.clusters == 2
    torch.testing.assert_close(found.centres[0], rows[:8].mean(0), atol=0.15, rtol=0)


@pytest.mark.parametrize(
    ("cluster", "centres"), [("mean", 1), ("kmeans", 2), ("nearest", 16), ("dbscan", 2)]
)
@pytest.mark.parametrize("space", SPACES)
def test_every_cluster_and_space(cluster, centres, space):
    generator = torch.Generator().manual_seed(1)
    base = torch.zeros(2, 20)
    base[0, :10], base[1, 10:] = 5.0, 5.0
    rows = torch.cat([b + 0.1 * torch.randn(8, 20, generator=generator) for b in base])
    references = find_references(rows, SRPOConfig(cluster=cluster, clusters=2, space=space))
    assert len(references.centres) == centres
    near, away = references.distances(torch.stack([base[0], -base[0]]))
    assert near < away and (cluster == "mean" or near < 0.5 * away)


def test_standardisation_leaves_constant_dimensions_alone():
    mean, scale = m.standardisation(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    assert mean.tolist() == [2.0, 2.0] and scale.tolist() == [1.0, 1.0]


def test_dbscan_labels_border_points_and_noise():
    rows = torch.tensor([[0.0], [0.5], [1.0], [1.8], [10.0], [10.3]])
    assert m.dbscan(rows, 0.6, 2).tolist() == [0, 0, 0, -1, 1, 1]
    assert m.dbscan(rows, 0.9, 3).tolist() == [0, 0, 0, 0, -1, -1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"normalise": "rank"}, "minmax, zscore"),
        ({"cluster": "meanshift"}, "dbscan"),
        ({"space": "log"}, "standardised"),
        ({"reference_scope": "world"}, "task_global"),
        ({"all_fail": "guess"}, "binary, buffer"),
        ({"scale": 1.5}, "1.5"),
        ({"buffer_size": 0}, "buffer_size"),
    ],
)
def test_unfit_settings_are_named(settings, named):
    with pytest.raises(ConfigError, match=named):
        SRPOConfig(**settings)


def test_presets_are_what_their_sources_say():
    code, paper = (preset(f"srpo_{name}") for name in ("code", "paper"))
    assert (code.normalise, code.scale, code.slope, code.coefficient, code.eps) == (
        "minmax",
        0.6,
        10.0,
        5.0,
        0.5,
    )
    assert (paper.normalise, paper.scale, paper.slope, paper.coefficient) == (
        "zscore",
        0.8,
        1.0,
        1.0,
    )
    assert code.encoder.type == paper.encoder.type == "vjepa2"


def test_a_missing_camera_is_named():
    model = SRPO(SRPOConfig(camera="wrist"))
    with pytest.raises(UserError, match=r"'wrist'.*has the cameras front"):
        model.score(episodes(2))


def test_progress_rises_on_successes_and_ends_higher_than_on_failures():
    ts = episodes(10, noise=0.0)
    curves = SRPO(SRPOConfig()).progress(ts)
    won = [c for c, t in zip(curves, ts) if t.success]
    lost = [c for c, t in zip(curves, ts) if not t.success]
    assert all(len(c) == len(t) + 1 and c.min() >= 0 and c.max() <= 1 for c, t in zip(curves, ts))
    assert min(float(c[-1]) for c in won) > max(float(c[-1]) for c in lost)
    assert SRPO(SRPOConfig()).progress(ts[1:2])[0].isnan().all()  # nothing to compare with


# ----------------------------------------------------------------------------------------- encoders
def test_pooled_encoder_tells_order_and_outcome():
    forth, back = trajectory([0, 0.5, 1.0]), trajectory([1.0, 0.5, 0])
    clips = [
        torch.cat([t.observations.images["front"], t.final_observation.images["front"]])
        for t in (forth, back)
    ]
    rows = PooledEncoder(4, 2).encode(clips)
    assert rows.shape == (2, 3 * 4 * 4 * 3) and (rows[0] - rows[1]).abs().max() > 0.1


def test_policy_features_are_averaged_over_segments():
    encoder = make_encoder(
        EncoderConfig(type="policy", segments=2, batch_size=3), lambda f: f.float().mean((1, 2))
    )
    clip = torch.zeros(4, 8, 8, 3, dtype=torch.uint8)
    clip[2:] = 100
    assert isinstance(encoder, SegmentEncoder)
    assert encoder.encode([clip, clip[:1]]).tolist() == [[0, 0, 0, 100, 100, 100], [0] * 6]
    with pytest.raises(ConfigError, match="policy"):
        make_encoder(EncoderConfig(type="policy"))
    with pytest.raises(ConfigError, match="pooled, timm, vjepa2, policy"):
        EncoderConfig(type="clip")


def test_timm_encoder_runs_and_names_an_unknown_model():
    encoder = make_encoder(EncoderConfig(type="timm", model="test_vit", segments=2, device="cpu"))
    rows = encoder.encode(
        [
            torch.zeros(3, 20, 30, 3, dtype=torch.uint8),
            torch.full((1, 20, 30, 3), 255, dtype=torch.uint8),
        ]
    )
    assert rows.shape[0] == 2 and rows.isfinite().all() and not torch.equal(rows[0], rows[1])
    with pytest.raises(ConfigError, match="no_such_model"):
        make_encoder(EncoderConfig(type="timm", model="no_such_model"))


def test_clips_are_sampled_as_published_and_short_ones_stretched():
    assert clip_indices(200, 5) == [0, 49, 99, 149, 199]
    assert clip_indices(3, 7) == [0, 0, 1, 1, 1, 2, 2]
    assert clip_indices(1, 3) == [0, 0, 0] and clip_indices(64, 64) == list(range(64))


@pytest.mark.parametrize("length", [2, 7, 8, 13, 63])
def test_the_length_of_a_short_clip_does_not_change_its_phase(length: int):
    """What is shown after a share of the 64 moments is what happened after that share of the
    episode."""
    shown = [i / (length - 1) for i in clip_indices(length, 64)]
    assert max(abs(share - k / 63) for k, share in enumerate(shown)) <= 0.5 / (length - 1) + 1e-9


def test_vjepa2_loads_a_checkpoint_and_preprocesses(tmp_path):
    from transformers import VJEPA2Config, VJEPA2Model

    config = VJEPA2Config(
        patch_size=8,
        crop_size=16,
        frames_per_clip=4,
        tubelet_size=2,
        hidden_size=24,
        num_attention_heads=2,
        num_hidden_layers=1,
        pred_hidden_size=24,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
        num_pooler_layers=1,
    )
    model = VJEPA2Model(config)
    model.save_pretrained(tmp_path)
    encoder = VJEPA2Encoder(EncoderConfig(type="vjepa2", checkpoint=str(tmp_path), device="cpu"))
    clip = torch.randint(0, 256, (6, 20, 30, 3), dtype=torch.uint8)
    pixels = encoder.preprocess(clip)
    assert pixels.shape == (4, 3, 16, 16)
    with torch.no_grad():
        tokens = encoder.model(
            pixel_values_videos=pixels[None], skip_predictor=True
        ).last_hidden_state
    assert tokens.shape == (1, 2 * 2 * 2, 24)  # 4/2 times 16/8 times 16/8
    torch.testing.assert_close(encoder.encode([clip, clip[:2]])[0], tokens[0].mean(0))
    white = encoder.preprocess(torch.full((4, 20, 30, 3), 255, dtype=torch.uint8))
    torch.testing.assert_close(
        white[0, :, 0, 0],
        torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]),
    )
    with pytest.raises(MissingDependency, match="V-JEPA 2"):
        VJEPA2Encoder(EncoderConfig(type="vjepa2", checkpoint=str(tmp_path / "nothing")))
