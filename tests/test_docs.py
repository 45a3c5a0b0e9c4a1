"""The examples and links of README.md and docs/ work."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts import check_policy, check_simulator

from vla_rl import build
from vla_rl.checks.options import check_run
from vla_rl.config import compose
from vla_rl.config.run import CollectConfig
from vla_rl.interfaces import Critic, RewardModel
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.run.pipeline import run_pipeline
from vla_rl.specs import EpisodeSpec
from vla_rl.types import Observation, Trajectory

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs" / "README.md"
PURPOSEFUL = sorted({*(ROOT / "docs").rglob("*.md")} - {INDEX})
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    INDEX,
    *PURPOSEFUL,
]
KINDS = {
    "tutorials": "Tutorial",
    "how_to": "How-to guide",
    "reference": "Reference",
    "explanation": "Explanation",
    "results": "Results",
    "architecture.md": "Explanation",
}
MADE_ELSEWHERE = {"docs/images/report.png"}  # a screenshot of a real run


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The Python files of examples/ and those that README.md and docs/how_to/adding_your_own.md
    print, importable."""
    for file in (ROOT / "examples").glob("my_*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    for page in (ROOT / "README.md", ROOT / "docs" / "how_to" / "adding_your_own.md"):
        for name, code in re.findall(
            r"^```python\n# (my_\w+)\.py\n(.*?)^```", page.read_text(), re.M | re.S
        ):
            example = ROOT / "examples" / f"{name}.py"
            assert not example.exists() or example.read_text() == code, (
                f"{page.name} and {example} differ"
            )
            (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [n for n in sys.modules if n.startswith("my_")]:
        del sys.modules[name]


def test_what_has_to_be_written_is_short(examples, tmp_path):
    """A component of one's own takes at most 40 lines: what else it needs, its base has."""
    lengths = {file.stem: len(file.read_text().splitlines()) for file in tmp_path.glob("my_*.py")}
    assert len(lengths) == 7 and max(lengths.values()) <= 40, lengths


def make(group: str, name: str, *arguments, **options):
    return build.implementation(group, name)(*arguments, build.config_class(group, name)(**options))


def test_the_env_keeps_the_contract_and_demonstrates(examples):
    check_simulator(lambda: make("env", "my_env:Center"))
    collect = build.attribute(build.env_entry("my_env:Center").collect)
    rng = np.random.default_rng(0)
    demonstrations = [
        collect(
            make("env", "my_env:Center"),
            EpisodeSpec("center", i),
            noise_std=CollectConfig().action_noise,
            rng=rng,
        )
        for i in range(20)
    ]
    assert sum(d["success"] for d in demonstrations) >= 19


def test_the_policy_keeps_the_contract(examples):
    embodiment = make("env", "my_env:Center").embodiment
    config = build.config_class("policy", "my_policy:GaussianPolicy")()
    policy = build.implementation("policy", "my_policy:GaussianPolicy").from_statistics(
        config, embodiment, {}, {}
    )
    check_policy(policy)
    again = type(policy).from_config_dict(policy.config_dict(), embodiment, policy.extra_files())
    again.load_state_dict(policy.state_dict())
    assert again.config == policy.config and policy.policy_type == "my_policy:GaussianPolicy"


def test_the_reward_pays_success_and_costs_effort(examples):
    reward = make("reward", "my_reward:CalmSuccess", effort=0.5)
    assert isinstance(reward, RewardModel)
    seen = Observation({}, torch.zeros(2, 1), ("x", "x"))
    trajectory = Trajectory(
        episode=EpisodeSpec("center", 0),
        observations=seen,
        final_observation=seen[0:1],
        actions=torch.ones(2, 2, 3),
        valid=torch.tensor([[True, True], [True, False]]),
        rewards=torch.zeros(2, 2),
        behavior_log_prob=torch.zeros(2, 2, 3),
        replay={},
        terminated=True,
        truncated=False,
        success=True,
    )
    torch.testing.assert_close(reward.score([trajectory])[0], torch.tensor([-1.0, 0.5]))


def test_the_critic_values_privileged_state(examples):
    critic = make("critic", "my_critic:TinyCritic", 2, hidden=8)
    assert isinstance(critic, Critic)
    value = critic.value(Observation({}, torch.zeros(3, 1), ("x",) * 3, torch.randn(3, 2)))
    assert value.shape == (3,) and value.requires_grad


def test_the_advantage_and_the_algorithm_learn_inside_a_run(examples, tmp_path):
    small = [
        "run=toy",
        "collect.episodes_per_task=6",
        "sft.updates=3",
        "sft.validation_episodes=1",
        "rl.iterations=2",
        "rl.episodes_per_iteration=8",
        "evaluate.episodes_per_task=4",
        "evaluate.video_episodes=0",
        "critic=none",
    ]
    own = [
        "algorithm.advantage=my_advantage:CentredReturns",
        "algorithm.critic_warmup_iterations=0",
    ]
    folder = run_pipeline(compose([*small, *own, f"output_dir={tmp_path}", "name=advantage"]))
    assert "ppo/return_mean" in read_metrics(folder / "metrics.jsonl")[-2]
    own = [
        "algorithm=ppo",
        "algorithm.type=my_algorithm:ClonedSuccess",
        "algorithm.start_decisions=8",
    ]
    folder = run_pipeline(compose([*small, *own, f"output_dir={tmp_path}", "name=algorithm"]))
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["replay/episodes"] for r in rows] == [6 + 8, 6 + 16] and rows[-1][
        "replay/updates"
    ] >= 4
    assert 0 < rows[-1]["clone/share"] <= 1
    page = (folder / "report.html").read_text()
    assert "Rewarded share" in page.partition("All other metrics")[0] and "Only" not in page


def test_the_collector_collects_inside_a_run(examples, tmp_path, monkeypatch):
    """Of each iteration's 8 episodes, 2 are deterministic: every fourth of the plan."""
    asked, plain = [], RolloutEngine.collect

    def collect(self, plan, **options):
        asked.append(([e.rollout_id for e in plan], options["deterministic"]))
        return plain(self, plan, **options)

    monkeypatch.setattr(RolloutEngine, "collect", collect)
    own = [
        "run=toy",
        "algorithm=filtered_bc",
        "collector.type=my_collector:Calm",
        "collector.every=4",
    ]
    own += [
        "phases=[collect,sft,rl]",
        "collect.episodes_per_task=6",
        "sft.updates=3",
        "sft.validation_episodes=1",
    ]
    folder = run_pipeline(
        compose([*own, "rl.iterations=2", "rl.episodes_per_iteration=8", f"output_dir={tmp_path}"])
    )
    assert [(len(plan), calm) for plan, calm in asked] == [(2, True), (6, False)] * 2
    assert len({rollout for plan, _ in asked for rollout in plan}) == 16
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["engine/episodes"] for r in rows] == [8, 8] and [r["episodes"] for r in rows] == [
        8,
        16,
    ]


def commands() -> list[str]:
    """The overrides of every ``vla-rl train``, ``collect`` and ``quickstart`` line of the pages,
    once each.

    Not those of docs/results: what was measured was run at the commit that stands beside it.
    """
    found = []
    for page in (page for page in PAGES if page.parent.name != "results"):
        text = page.read_text().replace("\\\n", " ").replace("'", "")
        text = re.sub(r"\n +(?=[a-z_]+\.[a-z_]+=)", " ", text)  # a command that YAML folds
        for line in re.findall(
            r"vla-rl (?:train|collect|quickstart)((?: +[~\w.]+(?:=[^\s`|]+)?)+)", text
        ):
            given = [o for o in line.split() if "=" in o or o.startswith("~")]
            found.append(
                " ".join(
                    o
                    for o in given
                    if o == "dataset=FOLDER" or ("NAME" not in o and "FOLDER" not in o)
                )
            )
    return sorted({line for line in found if line})


@pytest.mark.parametrize("overrides", commands())
def test_the_commands_compose(examples, overrides):
    check_run(compose(overrides.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve()
        assert path.exists() or str(path.relative_to(ROOT)) in MADE_ELSEWHERE, (
            f"{page.name} links to {target}"
        )


@pytest.mark.parametrize("page", PURPOSEFUL, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_head_says_what_the_page_is_for(page):
    """Right below the title, by the kind of page that its folder holds."""
    title, blank, purpose, after = [*page.read_text().split("\n", 3), "", "", ""][:4]
    kind = KINDS[page.relative_to(ROOT / "docs").parts[0]]
    assert title.startswith("# ") and not blank and (not after or after.startswith("\n")), (
        f"{title}: one line, between blanks"
    )
    assert re.fullmatch(rf"\*{kind}: .+\.\*", purpose), f"{title}: *{kind}: what it is for.*"


def test_the_index_leads_to_every_page():
    found = {
        (INDEX.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#\s]+)", INDEX.read_text())
    }
    assert {page for page in PURPOSEFUL if page not in found} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_left_to_be_filled_in(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert re.findall(r"^(?:[A-Z]{3,}|.*\b(?:TODO|FIXME|TBD|XXX)\b.*|.*@\w+@.*)$", text, re.M) == []
