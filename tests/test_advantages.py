"""Advantages against hand-computed numbers, naive loops, limits and invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms import advantages as adv
from vla_rl.learning.groups import GroupBuffer
from vla_rl.types import EpisodeSpec, Observation, Trajectory

torch.set_num_threads(1)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---------------------------------------------------------------------------------------- decisions
def test_chunk_rewards_and_discounts_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]])
    assert adv.chunk_rewards(rewards).tolist() == [7.0, 1.0]
    torch.testing.assert_close(adv.chunk_rewards(rewards, 0.5), t(3.0, 0.25))
    valid = torch.tensor([[True, True, True], [True, False, False]])
    torch.testing.assert_close(
        adv.decision_discounts(valid, 0.9, per_control_step=True), t(0.729, 0.9)
    )
    torch.testing.assert_close(
        adv.decision_discounts(valid, 0.9, per_control_step=False), t(0.9, 0.9)
    )


def test_gae_by_hand_with_a_terminated_and_a_truncated_trajectory():
    rewards, values = t(0.0, 1.0, 0.0), t(0.5, 0.25, 1.0)
    lengths, terminated = torch.tensor([2, 1]), torch.tensor([True, False])
    a, returns = adv.gae(
        rewards, values, t(9.0, 2.0), terminated, torch.full((3,), 0.5), 0.5, lengths
    )
    # last of the terminated one: 1 − 0.25 = 0.75; before it: 0.5·0.25 − 0.5 + 0.25·0.75; truncated:
    # 0.5·2 − 1
    torch.testing.assert_close(a, t(0.125 - 0.5 + 0.25 * 0.75, 0.75, 0.0))
    torch.testing.assert_close(returns, a + values)


def naive_gae(rewards, values, final_values, terminated, discounts, lam, lengths):
    out, start = [], 0
    for j, length in enumerate(lengths.tolist()):
        following, running, rows = 0.0 if terminated[j] else float(final_values[j]), 0.0, []
        for i in range(start + length - 1, start - 1, -1):
            delta = float(rewards[i]) + float(discounts[i]) * following - float(values[i])
            running = delta + float(discounts[i]) * lam * running
            following = float(values[i])
            rows.append(running)
        out += rows[::-1]
        start += length
    return torch.tensor(out, dtype=torch.float64)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 10_000))
def test_gae_equals_a_naive_loop(lengths, lam, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    n, m = int(lengths.sum()), len(lengths)
    rewards, values = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(2))
    final, discounts = (
        torch.randn(m, generator=g, dtype=torch.float64),
        torch.rand(n, generator=g, dtype=torch.float64),
    )
    terminated = torch.rand(m, generator=g) < 0.5
    fast, _ = adv.gae(rewards, values, final, terminated, discounts, lam, lengths)
    torch.testing.assert_close(
        fast, naive_gae(rewards, values, final, terminated, discounts, lam, lengths)
    )


def test_gae_limits():
    g = torch.Generator().manual_seed(0)
    lengths, terminated = torch.tensor([3, 4, 1]), torch.tensor([True, False, False])
    rewards, values, final = (
        torch.randn(8, generator=g),
        torch.randn(8, generator=g),
        torch.randn(3, generator=g),
    )
    discounts = torch.full((8,), 0.9)
    one_step, _ = adv.gae(rewards, values, final, terminated, discounts, 0.0, lengths)
    following = torch.cat([values[1:3], t(0.0), values[4:7], final[1:2], final[2:3]])
    torch.testing.assert_close(one_step, rewards + 0.9 * following - values)
    monte_carlo, _ = adv.gae(rewards, values, final, terminated, discounts, 1.0, lengths)
    with_bootstrap = rewards.clone()
    with_bootstrap[6] += 0.9 * final[1]
    with_bootstrap[7] += 0.9 * final[2]
    torch.testing.assert_close(
        monte_carlo, adv.discounted_returns(with_bootstrap, discounts, lengths) - values
    )


def test_vtrace_by_hand():
    """Two decisions that terminate and one that runs out of time; w = 1/2, 2, 3 with ρ̄ = 2 and
    c̄ = 1."""
    rewards, values = t(0.0, 1.0, 0.0), t(0.5, 0.25, 1.0)
    lengths, terminated, w = torch.tensor([2, 1]), torch.tensor([True, False]), t(0.5, 2.0, 3.0)
    truncated = adv.Truncated(w.clamp(max=2.0), w.clamp(max=1.0))
    a, targets = adv.vtrace(
        rewards, values, t(9.0, 1.5), terminated, torch.full((3,), 0.5), 1.0, lengths, truncated
    )
    # δ = 0.5·0.25 − 0.5 = −0.375, 1 − 0.25 = 0.75, 0.5·1.5 − 1 = −0.25; v − V from behind: 2·0.75 =
    # 1.5, 0.5·(−0.375) + 0.5·0.5·1.5 = 0.1875, and 2·(−0.25)
    torch.testing.assert_close(targets, t(0.6875, 1.75, 0.5))
    torch.testing.assert_close(a, t(0.0 + 0.5 * 1.75 - 0.5, 0.75, -0.25))  # r + γ·v' − V


@settings(max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 10_000))
def test_vtrace_equals_the_sum_of_its_definition_and_gae_on_fresh_data(lengths, lam, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    n, m = int(lengths.sum()), len(lengths)
    rewards, values, logs = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(3))
    final, discounts = (
        torch.randn(m, generator=g, dtype=torch.float64),
        torch.rand(n, generator=g, dtype=torch.float64),
    )
    terminated = torch.rand(m, generator=g) < 0.5
    given_ = (rewards, values, final, terminated, discounts, lam, lengths)
    rho, c = logs.exp().clamp(max=1.5), logs.exp().clamp(max=1.0)
    _, targets = adv.vtrace(*given_, adv.Truncated(rho, c))
    end = 0
    for j, length in enumerate(lengths.tolist()):
        first, end = end, end + length
        for s in range(first, end):
            total, factor = float(values[s]), 1.0  # Σ_t Π_{i<t} (γ_i λ c_i) · ρ_t δ_t
            for i in range(s, end):
                after = (
                    values[i + 1] if i + 1 < end else torch.zeros(()) if terminated[j] else final[j]
                )
                total += factor * float(rho[i] * (rewards[i] + discounts[i] * after - values[i]))
                factor *= float(discounts[i] * lam * c[i])
            assert float(targets[s]) == pytest.approx(total, abs=1e-9)
    ones = torch.ones(n, dtype=torch.float64)
    for found, expected in zip(
        adv.vtrace(*given_, adv.Truncated(ones, ones)), adv.gae(*given_), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("cap", "value"), [(1.0, 5 / 6), (100.0, 0.9)])
def test_vtrace_values_the_policy_that_learns_and_not_the_one_that_acted(cap, value):
    """Two arms that pay 1 and 0, tried equally often; the policy that learns takes the first in 9
    of 10 cases. Its value is 0.9; with ρ̄ = 1 the fixed point is that of the policy ∝ min(μ, π) =
    (1/2, 1/10) (Espeholt et al. 2018, eq. 2). GAE's targets say 1/2, what the policy that acted
    earned."""
    rewards, w, ones = t(1.0, 0.0), t(0.9 / 0.5, 0.1 / 0.5), torch.ones(2, dtype=torch.int64)
    weights, ended = adv.Truncated(w.clamp(max=cap), w.clamp(max=1.0)), torch.tensor([True, True])
    given_ = (torch.zeros(2), ended, torch.ones(2), 1.0, ones)
    _, targets = adv.vtrace(rewards, torch.full((2,), value), *given_, weights)
    assert float(targets.mean()) == pytest.approx(value)  # it stays where it is
    assert float(adv.gae(rewards, torch.full((2,), value), *given_)[1].mean()) == 0.5


def test_gae_of_a_perfect_critic_is_zero_and_ignores_what_follows_termination():
    lengths = torch.tensor([3])
    values, rewards, discounts = t(0.81, 0.9, 1.0), t(0.0, 0.0, 1.0), torch.full((3,), 0.9)
    for final in (0.0, 5.0, float("nan")):
        a, _returns = adv.gae(
            rewards, values, t(final), torch.tensor([True]), discounts, 0.95, lengths
        )
        torch.testing.assert_close(a, torch.zeros(3), atol=1e-6, rtol=0)
    truncated, _ = adv.gae(rewards, values, t(5.0), torch.tensor([False]), discounts, 0.95, lengths)
    assert (truncated > 1.0).all()


def test_trajectories_do_not_leak_into_each_other():
    g = torch.Generator().manual_seed(1)
    lengths, discounts = torch.tensor([2, 3]), torch.full((5,), 0.99)
    rewards, values, final = (
        torch.randn(5, generator=g),
        torch.randn(5, generator=g),
        torch.randn(2, generator=g),
    )
    ends = torch.tensor([False, True])
    both, _ = adv.gae(rewards, values, final, ends, discounts, 0.9, lengths)
    parts = [
        adv.gae(
            rewards[s],
            values[s],
            final[j : j + 1],
            ends[j : j + 1],
            discounts[s],
            0.9,
            lengths[j : j + 1],
        )[0]
        for j, s in enumerate((slice(0, 2), slice(2, 5)))
    ]
    assert torch.equal(both, torch.cat(parts))


# ------------------------------------------------------------------------------------------- groups
GROUP_OF_6 = torch.zeros(6, dtype=torch.long)


def test_grpo_on_the_published_example():
    binary = adv.grpo_advantages(t(5, 5, 0, 0, 0, 0), GROUP_OF_6)
    torch.testing.assert_close(
        binary, t(1.2910, 1.2910, -0.6455, -0.6455, -0.6455, -0.6455), atol=1e-4, rtol=0
    )


def test_grpo_is_per_group_whatever_the_order():
    index = torch.tensor([0, 1, 0, 1, 0])
    a = adv.grpo_advantages(t(1, 7, 0, 3, 0), index)
    torch.testing.assert_close(
        a[index == 0], adv.grpo_advantages(t(1, 0, 0), torch.zeros(3, dtype=torch.long))
    )
    torch.testing.assert_close(a[index == 1], t(2**-0.5, -(2**-0.5)))


def test_dr_grpo_does_not_divide():
    torch.testing.assert_close(
        adv.grpo_advantages(t(1, 0, 0, 0), torch.zeros(4, dtype=torch.long), scale="none"),
        t(0.75, -0.25, -0.25, -0.25),
    )


@pytest.mark.parametrize("scale", ["std", "none", "mad"])
@pytest.mark.parametrize("center", adv.CENTERS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.7])
def test_equal_scores_and_groups_of_one_give_no_advantage(scale, center, value):
    index = torch.tensor([0] * 7 + [1])
    a = adv.grpo_advantages(torch.full((8,), value), index, scale=scale, center=center)
    assert a.abs().max() < 1e-6


def test_median_centre_and_mad():
    index = torch.zeros(5, dtype=torch.long)
    a = adv.grpo_advantages(t(0, 1, 2, 3, 100), index, center="median", scale="none")
    assert a.tolist() == [-2.0, -1.0, 0.0, 1.0, 98.0]
    scaled = adv.grpo_advantages(t(0, 1, 2, 4, 100), index, center="median", scale="mad")
    # distances 2 1 0 2 98, their median 2
    torch.testing.assert_close(scaled, t(-1.0, -0.5, 0.0, 1.0, 49.0))
    even = adv.grpo_advantages(t(0, 1, 3, 9), index[:4], center="median", scale="none")
    assert even.tolist() == [-2.0, -1.0, 1.0, 7.0]
    binary = adv.grpo_advantages(t(1, 0, 0, 0, 0), index, center="median", scale="mad")
    assert binary.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_virtual_best_sample_teaches_a_group_that_failed():
    index = torch.tensor([0] * 8 + [1] * 2)
    scores, success = t(*[0.0] * 8, 1.0, 0.0), torch.tensor([False] * 8 + [True, False])
    a = adv.grpo_advantages(scores, index, virtual_best="all_fail", success=success)
    # mean 1/9, unbiased std 1/3
    torch.testing.assert_close(a[:8], torch.full((8,), -1 / 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(a[8:], t(2**-0.5, -(2**-0.5)), atol=1e-5, rtol=0)  # untouched
    always = adv.grpo_advantages(scores, index, virtual_best="always")
    torch.testing.assert_close(always[:8], a[:8])
    torch.testing.assert_close(always[8:], t(1 / 3, -2 / 3) / (1 / 3) ** 0.5, atol=1e-5, rtol=0)
    best = adv.grpo_advantages(
        torch.ones(4), torch.zeros(4, dtype=torch.long), virtual_best="always"
    )
    assert best.abs().max() == 0
    with pytest.raises(ValueError, match="success"):
        adv.grpo_advantages(scores, index, virtual_best="all_fail")


def test_running_std_averages_over_calls():
    running, index = adv.RunningScale(decay=0.5), torch.zeros(2, dtype=torch.long)
    first = adv.grpo_advantages(t(2, 0), index, scale="running_std", running=running)
    torch.testing.assert_close(first, t(1.0, -1.0), atol=1e-5, rtol=0)
    second = adv.grpo_advantages(t(0, 0), index, scale="running_std", running=running)
    assert second.tolist() == [0.0, 0.0] and running.variance == pytest.approx(0.5)
    copy = adv.RunningScale()
    copy.load_state_dict(running.state_dict())
    assert copy == running


def test_rloo_subtracts_the_mean_of_the_others():
    index = torch.tensor([0, 0, 0, 1, 1, 2])
    a = adv.rloo_advantages(t(1, 0, 5, 2, 4, 9), index)
    torch.testing.assert_close(a, t(1 - 2.5, 0 - 3.0, 5 - 0.5, -2.0, 2.0, 0.0))


@settings(max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.floats(-3, 3), st.floats(0.5, 4))
def test_group_advantages_ignore_a_shift_and_std_ignores_a_scale(scores, shift, scale):
    x, index = torch.tensor(scores, dtype=torch.float64), torch.zeros(len(scores), dtype=torch.long)
    for center in adv.CENTERS:
        torch.testing.assert_close(
            adv.grpo_advantages(x + shift, index, center=center, scale="none"),
            adv.grpo_advantages(x, index, center=center, scale="none"),
            atol=1e-5,
            rtol=1e-5,
        )
    a = adv.grpo_advantages(x, index)
    assert abs(float(a.sum())) < 1e-3
    if float(x.std()) > 0.1:
        torch.testing.assert_close(adv.grpo_advantages(x * scale, index), a, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        adv.rloo_advantages(x, index) * (len(scores) - 1) / len(scores),
        adv.grpo_advantages(x, index, scale="none"),
        atol=1e-5,
        rtol=1e-5,
    )


def test_reinforce_plus_plus_normalises_over_the_batch():
    lengths = torch.tensor([2, 1])
    a = adv.reinforce_plus_plus_advantages(t(0, 2, 0), torch.full((3,), 0.5), lengths)
    torch.testing.assert_close(a, t(0.0, 1.0, -1.0), atol=1e-5, rtol=0)  # returns 1, 2, 0


def test_whiten_counts_only_the_mask():
    x, mask = t(1, 3, 100), torch.tensor([True, True, False])
    torch.testing.assert_close(adv.whiten(x, mask)[:2], t(-(2**-0.5), 2**-0.5), atol=1e-5, rtol=0)
    assert adv.whiten(t(3.0)).tolist() == [0.0]
    assert adv.whiten(t(3.0, 3.0)).abs().max() == 0
    assert adv.whiten(x, torch.zeros(3, dtype=torch.bool)).tolist() == x.tolist()


def test_gdpo_keeps_apart_what_a_summed_reward_confuses():
    index = torch.zeros(4, dtype=torch.long)
    scores = {"success": t(0, 1, 0, 1), "style": t(1, 0, 1, 2) * 100}
    grouped = lambda x: adv.grpo_advantages(x, index)  # noqa: E731
    a = adv.gdpo_advantages(scores, {"success": 1.0, "style": 1.0}, grouped)
    by_hand = grouped(scores["success"]) + grouped(scores["style"])
    torch.testing.assert_close(a, (by_hand - by_hand.mean()) / by_hand.std(), atol=1e-4, rtol=0)
    rescaled = adv.gdpo_advantages(
        {**scores, "style": scores["style"] / 100}, {"success": 1.0, "style": 1.0}, grouped
    )
    torch.testing.assert_close(a, rescaled, atol=1e-4, rtol=0)
    only = adv.gdpo_advantages(scores, {"success": 1.0, "style": 0.0}, grouped)
    torch.testing.assert_close(only, adv.whiten(scores["success"]), atol=1e-4, rtol=0)


def test_unknown_choice_lists_the_choices():
    with pytest.raises(ValueError, match=r"'mode'.*mean, median"):
        adv.grpo_advantages(t(1, 0), torch.zeros(2, dtype=torch.long), center="mode")


# --------------------------------------------------------------------------------- dynamic sampling
def trajectory(group: int, success: bool, version: int = 0) -> Trajectory:
    privileged = torch.full((1, 2), float(group)) if group % 2 else None
    seen = Observation(
        {"front": torch.full((1, 2, 2, 3), group, dtype=torch.uint8)},
        torch.zeros(1, 3),
        ("go",),
        privileged,
    )
    return Trajectory(
        episode=EpisodeSpec("lift", group, group_id=group),
        observations=seen,
        final_observation=seen,
        actions=torch.full((1, 2, 1), float(group)),
        valid=torch.ones(1, 2, dtype=torch.bool),
        rewards=torch.zeros(1, 2),
        behavior_log_prob=torch.zeros(1, 2),
        replay={"tokens": torch.tensor([[group, 1]])},
        terminated=success,
        truncated=not success,
        success=success,
        policy_version=version,
        failure="" if success else "dropped",
    )


def group(gid: int, successes: int, size: int = 4, version: int = 0) -> list[Trajectory]:
    return [trajectory(gid, i < successes, version) for i in range(size)]


def test_buffer_keeps_informative_groups_and_their_surplus():
    buffer = GroupBuffer(0.1, 0.9)
    kept = buffer.add(
        group(0, 0) + group(1, 1) + group(2, 4) + group(3, 3) + group(4, 2) + [trajectory(5, True)]
    )
    assert (kept, len(buffer), buffer.seen, buffer.kept) == (3, 3, 6, 3)
    taken = buffer.take(2)
    assert [x.episode.init_state_id for x in taken] == [1] * 4 + [3] * 4
    assert [x.episode.group_id for x in taken] == [0] * 4 + [1] * 4
    buffer.add(group(1, 2))  # the next iteration uses the ids again
    rest = buffer.take(9)
    assert [x.episode.group_id for x in rest] == [0] * 4 + [1] * 4 and len(buffer) == 0


def test_buffer_range_is_inclusive_and_stale_groups_leave():
    buffer = GroupBuffer(0.25, 0.75, max_staleness=2)
    assert buffer.add(group(0, 1, version=1) + group(1, 3, version=5)) == 2
    assert {x.episode.init_state_id for x in buffer.take(9, policy_version=5)} == {1}
    with pytest.raises(ValueError, match="range"):
        GroupBuffer(0.9, 0.1)


def plain(state) -> bool:
    if isinstance(state, dict):
        return all(isinstance(k, str) and plain(v) for k, v in state.items())
    if isinstance(state, list | tuple):
        return all(plain(v) for v in state)
    return state is None or isinstance(state, torch.Tensor | str | int | float | bool)


def test_buffer_state_is_plain_and_round_trips():
    buffer, copy = GroupBuffer(), GroupBuffer()
    buffer.add(group(1, 2) + group(2, 1))
    state = buffer.state_dict()
    assert plain(state)
    copy.load_state_dict(state)
    assert (copy.seen, copy.kept) == (buffer.seen, buffer.kept)
    for a, b in zip(buffer.take(9), copy.take(9), strict=True):
        assert (
            a.episode == b.episode
            and a.success == b.success
            and a.failure == b.failure != str(a.success)
        )
        assert torch.equal(a.observations.images["front"], b.observations.images["front"])
        assert (a.observations.privileged is None) == (b.observations.privileged is None)
        assert (
            torch.equal(a.replay["tokens"], b.replay["tokens"])
            and a.observations.instruction == b.observations.instruction
        )
