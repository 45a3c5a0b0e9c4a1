"""Curricula: published weights, the floor, sampling frequencies, learning from outcomes, resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.curriculum import (
    Curriculum,
    CurriculumConfig,
    strategy_weights,
    systematic_sample,
    with_floor,
)
from vla_rl.config.algorithms import STRATEGIES
from vla_rl.errors import ConfigError

RATES = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
ITEMS = [("lift", i) for i in range(5)]


@pytest.mark.parametrize(
    ("strategy", "temperature", "expected"),
    [
        ("vla_rl", 1.0, [0.3100, 0.2414, 0.1880, 0.1464, 0.1141]),
        ("vla_rl", 0.5, [0.4287, 0.2600, 0.1577, 0.0956, 0.0580]),
        ("vla_rl_power", 1.0, [0.4, 0.3, 0.2, 0.1, 0.0]),
        ("vla_rl_power", 0.5, [0.5333, 0.3, 0.1333, 0.0333, 0.0]),
        ("frontier", 1.0, [0.1609, 0.2065, 0.2652, 0.2065, 0.1609]),
        ("uniform", 1.0, [0.2] * 5),
    ],
)
def test_weights_match_hand_computed_values(strategy, temperature, expected):
    p = with_floor(strategy_weights(RATES, strategy, temperature), 0.0)
    torch.testing.assert_close(p, torch.tensor(expected, dtype=torch.float64), atol=6e-5, rtol=0)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=30), st.floats(0.0, 1.0))
def test_floor_bounds_every_probability_from_below(weights, floor):
    p = with_floor(torch.tensor(weights, dtype=torch.float64), floor)
    assert float(p.sum()) == pytest.approx(1.0)
    assert float(p.min()) >= floor / len(weights) - 1e-12


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_systematic_sampling_rounds_the_expected_counts(n, seed):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    counts = Counter(systematic_sample(p, n, torch.Generator().manual_seed(seed)))
    assert sum(counts.values()) == n
    for i, x in enumerate(p.tolist()):
        assert abs(counts[i] - n * x) < 1.0 + 1e-9


def test_systematic_sampling_is_unbiased():
    p, generator = (
        torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64),
        torch.Generator().manual_seed(0),
    )
    counts = Counter(i for _ in range(1500) for i in systematic_sample(p, 2, generator))
    for i, x in enumerate(p.tolist()):
        assert counts[i] / 3000 == pytest.approx(x, abs=0.03)


def fill(curriculum: Curriculum) -> Curriculum:
    for item, rate in zip(ITEMS, RATES.tolist(), strict=True):
        curriculum.record(item, int(rate * 40), 40)
    return curriculum


def test_frontier_prefers_the_half_solved_item():
    c = fill(Curriculum(CurriculumConfig("frontier", temperature=0.1, floor=0.0), ITEMS))
    p = c.probabilities()
    assert int(p.argmax()) == 2 and float(p[2]) > 0.8
    assert float(p[0]) == pytest.approx(float(p[4]))


def test_thompson_prefers_the_uncertain_and_half_solved_items():
    c = fill(Curriculum(CurriculumConfig("thompson", floor=0.0), ITEMS))
    generator = torch.Generator().manual_seed(0)
    counts = Counter(item for _ in range(300) for item in c.propose(1, generator))
    assert counts[ITEMS[2]] > 200
    assert counts[ITEMS[0]] + counts[ITEMS[4]] < 10


def test_thompson_floor_keeps_solved_items_alive_and_proposals_are_distinct_without_it():
    c = fill(Curriculum(CurriculumConfig("thompson", floor=0.5), ITEMS))
    generator = torch.Generator().manual_seed(0)
    counts = Counter(item for _ in range(600) for item in c.propose(1, generator))
    assert counts[ITEMS[4]] / 600 == pytest.approx(0.1, abs=0.04)
    plain = fill(Curriculum(CurriculumConfig("thompson", floor=0.0), ITEMS))
    assert sorted(plain.propose(5, generator)) == ITEMS
    assert Counter(Counter(plain.propose(10, generator)).values()) == {2: 5}


def test_window_forgets_old_outcomes_and_unseen_items_have_their_strategys_rate():
    c = Curriculum(CurriculumConfig("vla_rl", window=4), ITEMS)
    assert c.success_rates().tolist() == [0.0] * 5
    c.record(ITEMS[0], 4, 4)
    assert float(c.success_rates()[0]) == 1.0
    c.record(ITEMS[0], 0, 2)
    # six trials: dropping four would leave too few
    assert float(c.success_rates()[0]) == pytest.approx(4 / 6)
    c.record(ITEMS[0], 0, 2)
    assert float(c.success_rates()[0]) == 0.0
    assert Curriculum(CurriculumConfig("frontier"), ITEMS).success_rates().tolist() == [0.5] * 5


def test_decay_brings_the_posterior_back_to_its_prior():
    c = Curriculum(CurriculumConfig("thompson", decay=0.5, visited_decay=0.5), ITEMS)
    c.record(ITEMS[0], 6, 8)
    assert (c.successes[0], c.failures[0]) == (6.0, 2.0)
    c.record(ITEMS[0], 1, 2)
    assert (c.successes[0], c.failures[0]) == (4.0, 2.0)
    c.tick()
    assert (c.successes[0], c.failures[0]) == (2.0, 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_continues_with_the_same_proposals(strategy):
    a = fill(Curriculum(CurriculumConfig(strategy), ITEMS))
    b = Curriculum(CurriculumConfig(strategy), ITEMS)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    for seed in range(5):
        assert a.propose(7, torch.Generator().manual_seed(seed)) == b.propose(
            7, torch.Generator().manual_seed(seed)
        )
    assert a.metrics() == b.metrics()


def test_metrics_count_what_was_seen():
    c = Curriculum(CurriculumConfig("uniform"), ITEMS)
    c.record(ITEMS[0], 1, 2)
    c.record(ITEMS[1], 2, 2)
    metrics = c.metrics()
    assert metrics["curriculum/seen_fraction"] == pytest.approx(0.4)
    assert metrics["curriculum/success_mean"] == pytest.approx(0.75)
    assert metrics["curriculum/frontier_fraction"] == pytest.approx(0.5)
    assert metrics["curriculum/effective_items"] == pytest.approx(5.0)


def test_bad_input_names_the_value():
    with pytest.raises(ConfigError, match=r"'hard'.*frontier"):
        CurriculumConfig("hard")
    with pytest.raises(ConfigError, match="floor=2"):
        CurriculumConfig(floor=2.0)
    with pytest.raises(ConfigError, match="distinct"):
        Curriculum(CurriculumConfig(), [("a", 0), ("a", 0)])
    c = Curriculum(CurriculumConfig(), ITEMS)
    with pytest.raises(ValueError, match="stack"):
        c.record(("stack", 0), 1, 2)
    with pytest.raises(ValueError, match="3 successes of 2"):
        c.record(ITEMS[0], 3, 2)
    with pytest.raises(ConfigError, match="same tasks"):
        Curriculum(CurriculumConfig(), ITEMS[:2]).load_state_dict(c.state_dict())
