"""Composing and checking configurations: every shipped file composes, and every mistake is named
with its remedy."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
import textwrap
from pathlib import Path

import pytest

from vla_rl import build
from vla_rl import options as questions
from vla_rl.checks.options import check_run
from vla_rl.commands.evaluate import config_of_checkpoint
from vla_rl.config import RunConfig, compose, from_tree, load, override, save, to_tree
from vla_rl.config.by_hydra import composed
from vla_rl.config.episodes import refuse_potential
from vla_rl.config.own_files import searching
from vla_rl.errors import ConfigError
from vla_rl.paths import config_dir

RUNS = sorted(path.stem for path in (config_dir() / "run").glob("*.yaml"))
# no options of a run: whole runs; sessions with a robot and their limits
_OTHERS = ("run", "robot", "limits")
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in config_dir().glob("*/*.yaml")
    if path.parent.name not in _OTHERS
)
OWN = """
    from dataclasses import dataclass, field

    class Reward:
        @dataclass
        class Config:
            scale: float = 1.0

        def __init__(self, config):
            self.config = config

    class Bare:
        pass

    class Slip:
        @dataclass
        class Config:
            checkpiont: str = ""

    @dataclass
    class Shaping:
        truncated_edn: str = "keep"

    class Shaped:
        @dataclass
        class Config:
            shaping: Shaping = field(default_factory=Shaping)

    class Learner:
        @dataclass
        class Config:
            rate: float = 1.0
"""


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's module ``own_plugins`` on the path."""
    (tmp_path / "own_plugins.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_plugins"
    sys.modules.pop("own_plugins", None)


NEED_DATA = ("sft", "pi05_rl_token", "smolvla_residual")


@pytest.mark.parametrize("name", RUNS)
def test_every_run_composes(name):
    config = compose([f"run={name}", *(["dataset=recorded"] if name in NEED_DATA else [])])
    check_run(config)
    assert config.name == name
    for group in ("policy", "env", "reward", "algorithm", "critic"):
        schema = build.config_class(group, getattr(config, f"{group}_type"))
        assert type(getattr(config, group)) is schema
    if hasattr(config.algorithm, "check_policy"):
        config.algorithm.check_policy(config.policy)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_group_option_composes(group, option):
    config = compose(["~run", f"{group}={option}"])
    assert getattr(config, f"{group}_type") in build.names(group)
    assert build.implementation(group, getattr(config, f"{group}_type")) is not None


@pytest.mark.parametrize("group", ["algorithm", "policy", "env", "reward"])
def test_every_option_that_the_core_asks_for_is_one_of_a_shipped_component(group):
    """A misspelt one would be left at its default for ever."""
    configs = [build.config_class(group, name) for name in build.names(group)]
    known = {field.name for config in configs for field in dataclasses.fields(config)}
    known |= {
        name
        for config in configs
        for name, _ in inspect.getmembers(config, lambda x: isinstance(x, property | bool))
    }
    assert {
        field.name for field in dataclasses.fields(vars(questions)[f"{group.title()}Options"])
    } <= known


def test_what_is_asked_is_read_from_what_there_is():
    """Of an instance, a class or nothing; a value that is there counts, even one that means
    nothing."""

    class Mine:
        gamma, learning_rate, unknown = 0.5, 0.0, 1

    for own in (Mine, Mine()):
        assert questions.view(own, questions.AlgorithmOptions) == questions.AlgorithmOptions(
            gamma=0.5, learning_rate=0.0
        )
    assert questions.view(None, questions.EnvOptions) == questions.EnvOptions()
    assert questions.config_of(Mine) is None
    assert questions.EnvOptions().pixels == 0 and questions.EnvOptions(image_size=32).pixels == 32
    assert questions.EnvOptions(camera_size=64, image_size=32).pixels == 64


@pytest.mark.parametrize(
    ("declared", "kind", "meant"),
    [
        ({"discount": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"discount_factor": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"lr": 1e-3}, questions.AlgorithmOptions, "learning_rate"),
        ({"gama": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"gammma": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"gamna": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"gmama": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"Gamma": 0.9}, questions.AlgorithmOptions, "gamma"),
        ({"gammaPerControlStep": True}, questions.AlgorithmOptions, "gamma_per_control_step"),
        ({"chunk_lenght": 4}, questions.PolicyOptions, "chunk_length"),
        ({"hoirzon": 100}, questions.EnvOptions, "horizon"),
        ({"needs_valu": True}, questions.AdvantageClass, "needs_value"),
        ({"judge_frist": True}, questions.RewardClass, "judge_first"),
        ({"discount": 0.9, "gamma": 0.9}, questions.AlgorithmOptions, None),  # it is told apart
        (
            {"reward_name": "x", "mirror": 1, "masks": 2, "minimum_learning_rate": 0.1},
            questions.AlgorithmOptions,
            None,
        ),
        ({"camera": "front", "masks": 3}, questions.EnvOptions, None),
    ],
)
def test_an_own_class_that_misspells_what_is_asked_is_told(declared, kind, meant):
    """It would run with the default: a discount of 1, say."""
    own = type("Mine", (), declared)
    if meant is None:
        build.refuse_misspelt(own, kind, "mine:Config")
        return
    with pytest.raises(
        ConfigError, match=f"mine:Config has '{next(iter(declared))}'.* '{meant}': rename it"
    ):
        build.refuse_misspelt(own, kind, "mine:Config")


def test_no_shipped_component_misspells_what_is_asked():
    for group, kind in questions.OPTIONS.items():
        for name in build.names(group):
            build.refuse_misspelt(build.config_class(group, name), kind, name)


def test_the_default_run_is_the_quickstart():
    assert to_tree(compose()) == to_tree(compose(["run=quickstart"]))


def test_overrides_reach_every_level():
    config = compose(["seed=3", "rl.iterations=7", "sft.augment.shift=2", "policy.chunk_length=4"])
    assert (
        config.seed,
        config.rl.iterations,
        config.sft.augment.shift,
        config.policy.chunk_length,
    ) == (3, 7, 2, 4)


def test_simplevla_recipe_is_the_paper_s():
    config = compose(["run=simplevla_grpo"])
    a, rl = config.algorithm, config.rl
    assert (a.advantage, a.group_center, a.group_scale, a.normalize_advantage) == (
        "grpo",
        "mean",
        "std",
        "none",
    )
    assert (a.ratio_level, a.loss_aggregation, a.minibatch_unit) == (
        "token",
        "trajectory",
        "trajectory",
    )
    assert (a.clip_low, a.clip_high, a.dual_clip, a.kl_coef, a.entropy_coef) == (
        0.2,
        0.28,
        None,
        0.0,
        0.0,
    )
    assert (a.epochs, a.minibatch_size, a.learning_rate, a.weight_decay, a.grad_clip) == (
        1,
        128,
        5e-6,
        0.01,
        1.0,
    )
    assert (rl.group_size, rl.episodes_per_iteration // rl.group_size, rl.dynamic_sampling) == (
        8,
        64,
        True,
    )
    assert (rl.success_low, rl.success_high, rl.init_states) == (0.1, 0.9, 50)
    assert (config.policy.temperature, config.reward.coefficient, config.critic) == (
        1.6,
        5.0,
        build.NoConfig(),
    )
    assert config.evaluate.deterministic


def test_grpo_quickstart_differs_from_quickstart_in_the_algorithm_alone():
    ppo, grpo = to_tree(compose(["run=quickstart"])), to_tree(compose(["run=quickstart_grpo"]))
    changed = {key for key in ppo if ppo[key] != grpo[key]}
    assert changed == {"name", "algorithm", "critic", "rl"}
    assert grpo["algorithm"]["advantage"] == "grpo" and grpo["critic"] == {"type": "none"}
    assert grpo["rl"]["group_size"] > 1 and grpo["rl"]["dynamic_sampling"]


# ----------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("sede=1", "sede", "Did you mean 'seed'?"),
        ("rl.iteration=1", "rl.iteration", "Did you mean 'rl.iterations'?"),
        ("sft.augment.shfit=1", "sft.augment.shfit", "Did you mean 'sft.augment.shift'?"),
        (
            "algorithm.learning_rat=1",
            "algorithm.learning_rat",
            "Did you mean 'algorithm.learning_rate'?",
        ),
        ("policy.chunk_lenght=1", "policy.chunk_lenght", "Did you mean 'policy.chunk_length'?"),
        ("polcy=nano", "polcy", "Did you mean 'policy'?"),
        ("policy_type=nano_vla", "policy_type", "Did you mean 'policy.type'?"),
        ("rl.zzz=1", "rl.zzz", "Known keys here:"),
    ],
)
def test_unknown_key_is_named_with_its_neighbour(override, key, hint):
    text = message(override)
    assert f"unknown config key '{key}'" in text and hint in text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("seed=abc", ["seed = 'abc'", "Integer"]),
        ("rl.iterations=many", ["rl.iterations = 'many'", "Integer"]),
        ("algorithm.learning_rate=fast", ["algorithm.learning_rate = 'fast'", "Float"]),
        ("sft.augment.shift=x", ["sft.augment.shift = 'x'"]),
        ("tasks=lift_cube", ["tasks", "tasks=[lift_cube]"]),
        ("rl=3", ["rl is 3", "mapping", "iterations"]),
        ("seed=null", ["seed = None"]),
    ],
)
def test_wrong_type_is_named_with_its_value(override, parts):
    text = message(override)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("policy.temperature=0", ["temperature", "0"]),
        ("rl.iterations=-1", ["rl.iterations", "-1"]),
        ("rl.group_size=7", ["rl.group_size", "7"]),
        ("rl.dynamic_sampling=true", ["group_size"]),
        ("slots.workers=-1", ["workers", "-1"]),
        ("collect.workers=0", ["workers", "0"]),
        ("evaluate.split=test", ["evaluate.split", "train, held_out"]),
        ("algorithm.advantage=magic", ["advantage='magic'", "grpo"]),
        ("phases=[train]", ["train", "collect", "eval_rl"]),
        ("held_out_tasks=[lift_cube]", ["lift_cube", "held_out_tasks"]),
    ],
)
def test_value_out_of_range_is_named_with_what_would_fit(override, parts):
    text = message("run=quickstart", "tasks=[lift_cube]", override)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("group", "option"), [("run", "quickstrat"), ("env", "libreo"), ("algorithm", "pp")]
)
def test_unknown_group_option_lists_the_available_ones(group, option):
    text = message(f"{group}={option}")
    available = sorted(p.stem for p in (config_dir() / group).glob("*.yaml"))
    assert (
        f"{group}={option} does not exist" in text and f"Available: {', '.join(available)}" in text
    )
    if option == "quickstrat":
        assert "Did you mean run=quickstart?" in text


@pytest.mark.parametrize("group", ["policy", "env", "reward", "algorithm", "critic"])
def test_unknown_component_type_lists_the_registered_ones(group):
    text = message("~run", f"{group}.type=nonsense")
    assert f"{group}.type is 'nonsense'" in text and all(
        name in text for name in build.names(group)
    )


@pytest.mark.parametrize("override", ["seed", "quickstart", "rl.iterations"])
def test_what_is_no_override_gives_an_example(override):
    text = message(override)
    assert repr(override) in text and "run=quickstart" in text


def test_broken_override_syntax_gives_an_example():
    assert "[ is opened and not closed: write ] behind the last entry" in message("tasks=[a,")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"policy": None}, ["policy.type is missing", "nano_vla"]),
        ({"policy": {"chunk_length": 4}}, ["policy.type is missing"]),
        ({"policy": "nano"}, ["policy is 'nano'", "mapping"]),
        ({"policy": {"type": 3}}, ["policy.type is 3", "nano_vla"]),
    ],
)
def test_malformed_component_in_a_saved_config(change, parts):
    with pytest.raises(ConfigError) as caught:
        from_tree(to_tree(compose()) | change)
    assert all(part in str(caught.value) for part in parts), caught.value


# -------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("name", RUNS)
def test_tree_and_file_round_trips(name, tmp_path):
    config = compose([f"run={name}", "seed=5"])
    again = from_tree(to_tree(config))
    assert isinstance(again, RunConfig) and again == config
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", ""])
def test_a_file_that_is_no_config_is_named(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        load(path)


@pytest.mark.parametrize(
    "words",
    [
        "run=toy",
        "run=toy ++seed=3 ++rl={iterations:3} ++rl.iterations=4 ++tasks=[a,b] "
        "++name=${output_dir}/x",
        "++env.camera_size=32 run=toy_td3 algorithm=residual ++algorithm.critics.hidden=[8]",
        "~run env=toy ++env.horizon=9 ++sft={}",
        "run=toy env={horizon:9} ++env.horizon=8",
        "++env.horizon=8 run=toy env={horizon:9}",
        "run=toy +tasks=[a] ++tasks=[b]",
        "run=toy ~seed ++seed=4",
        "run=toy ++seed=1,2",
        "run=toy ++seed.x=1",
        "run=toy ++env@policy=small",
        "run=toy ++env=toy",
        "run=nowhere ++seed=1",
        "run=toy ++tasks=[a",
        "run=toy ++name=${nowhere}",
        "run=toy ++hydra.verbose=true",
    ],
)
def test_what_is_kept_of_a_choice_is_what_hydra_composes(words):
    """Twice, with other values between: the kept tree stays as it is."""
    groups = {d.name for d in config_dir().iterdir() if d.is_dir()}

    def result(words: str, keep: bool) -> object:
        try:
            return composed(words.split(), (config_dir(),), groups, keep=keep)
        except Exception as error:
            return type(error), str(error)

    plain = result(words, False)
    assert result(words, True) == plain
    result(f"{words} ++seed=77 ++env.horizon=77", True)
    assert result(words, True) == plain


def test_a_file_that_changed_is_composed_anew(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [{run: one}]\n")
    for value in (1, 22):
        (tmp_path / "run" / "one.yaml").write_text(f"x: {value}\n")
        assert composed(["run=one", "++y=3"], (tmp_path,), {"run"}) == {"run": {"x": value}, "y": 3}


def test_composing_leaves_the_argument_alone_and_repeats():
    overrides = ["run=toy", "seed=2"]
    assert compose(overrides) == compose(overrides) and overrides == ["run=toy", "seed=2"]


# -------------------------------------------------------------------------------------- own classes
def test_a_user_s_own_class_brings_its_config(own_module):
    config = compose([f"reward.type={own_module}:Reward", "reward.scale=2.5"])
    assert config.reward.scale == 2.5
    reward = build.implementation("reward", config.reward_type)(config.reward)
    assert type(reward).__name__ == "Reward" and from_tree(to_tree(config)) == config
    assert "Did you mean 'reward.scale'?" in message(
        f"reward.type={own_module}:Reward", "reward.scal=1"
    )


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("no_such_package.x:Reward", ["no module 'no_such_package'"]),
        ("own_plugins:Missing", ["no attribute 'Missing'"]),
        ("own_plugins:Bare", ["needs a class attribute 'Config'"]),
        ("own_plugins:Slip", ["Slip.Config has 'checkpiont'", "called 'checkpoint'"]),
        (
            "own_plugins:Shaped",
            ["Shaped.Config.shaping has 'truncated_edn'", "called 'truncated_end'"],
        ),
    ],
)
def test_an_own_class_that_cannot_be_used_is_named(own_module, target, parts):
    text = message(f"reward.type={target}")
    assert all(part in text for part in [target, *parts]), text


def test_a_potential_takes_no_discount_from_an_algorithm_that_names_none(own_module):
    """With another discount than the learner's it would change which policy is best."""
    algorithm = build.config_class("algorithm", f"{own_module}:Learner")()
    shaping = compose(["reward=process"]).reward.shaping
    with pytest.raises(ConfigError, match=r"reward\.shaping\.gamma=-1 .* no option 'gamma'"):
        refuse_potential(shaping, algorithm)
    for allowed in ({"gamma": 0.9}, {"mode": "delta"}, {"weight": 0.0}):
        refuse_potential(dataclasses.replace(shaping, **allowed), algorithm)


# of the algorithm, of the potential, and by the control step (both): whether both discount alike
GAMMAS = [
    (0.99, -1.0, False, False, ""),
    (0.99, 0.99, False, False, ""),
    (0.99, 0.99, True, True, ""),
    (0.99, -1.0, True, False, ""),
    (1.0, 1.0, False, True, ""),
    (1.0, -1.0, False, True, ""),
    (0.99, 1.0, False, False, "gamma=1 is not algorithm.gamma=0.99"),
    (0.99, 0.0, False, False, "gamma=0 is not"),
    (0.99, 0.98, True, True, "gamma=0.98 is not"),
    (0.99, -1.0, False, True, "by the decision"),
    (0.99, 0.99, False, True, "by the decision"),
]


@pytest.mark.parametrize("gamma, own, by_step, own_by_step, said", GAMMAS)
def test_a_potential_discounts_as_the_algorithm_does(gamma, own, by_step, own_by_step, said):
    """A worked example of why: two ways to one success, straight (s0, s2) or by a place of high
    potential (s0, s1, s1, s2). With γ = 0.9 both are paid 0.9 and 0.729 for it, and a potential of
    1 at s1 alone changes neither sum; with γ' = 1 in it, the way round is paid 0.1 · (1 + 0.9)
    more, and wins."""
    values, ways = {"s0": 0.0, "s1": 1.0, "s2": 0.0}, (["s0", "s2"], ["s0", "s1", "s1", "s2"])

    def paid(places, of_potential):
        success = 0.9 ** (len(places) - 1)
        shaped = [of_potential * values[b] - values[a] for a, b in itertools.pairwise(places)]
        return success + sum(0.9**i * reward for i, reward in enumerate(shaped))

    assert [paid(way, 0.9) for way in ways] == pytest.approx([0.9, 0.729])
    assert [paid(way, 1.0) for way in ways] == pytest.approx([0.9, 0.729 + 0.1 * 1.9])
    config = compose(
        [
            "reward=process",
            f"algorithm.gamma={gamma}",
            f"algorithm.gamma_per_control_step={by_step}",
        ]
    )
    shaping = dataclasses.replace(
        config.reward.shaping, mode="potential", gamma=own, gamma_per_control_step=own_by_step
    )
    if not said:
        return refuse_potential(shaping, config.algorithm)
    with pytest.raises(ConfigError, match=said):
        refuse_potential(shaping, config.algorithm)
    for allowed in ({"mode": "delta"}, {"weight": 0.0}):
        refuse_potential(dataclasses.replace(shaping, **allowed), config.algorithm)


def test_override_changes_a_finished_config_and_checks_it():
    config = compose(["run=toy"])
    changed = override(config, ["env.image_size=12", "tasks=[reach_red]", "rl.iterations=2"])
    assert (changed.env.image_size, changed.tasks, changed.rl.iterations) == (12, ["reach_red"], 2)
    assert override(config, []) == config and config.env.image_size == 16
    with pytest.raises(ConfigError, match=r"Did you mean 'env\.image_size'"):
        override(config, ["env.image_siz=12"])
    with pytest.raises(ConfigError, match="'image_size' is not an override"):
        override(config, ["image_size"])


def test_policy_overrides_beside_a_checkpoint_are_changes_of_its_policy(tmp_path):
    config = compose(
        ["run=toy", "checkpoint=somewhere", "policy.temperature=0.5", "++policy.soft_label_sigma=1"]
    )
    assert config.policy_changes == {"temperature": 0.5, "soft_label_sigma": 1.0}
    path = tmp_path / "config.yaml"
    save(config, path)
    assert override(load(path), ["policy.temperature=0.7", "seed=3"]).policy_changes == {
        "temperature": 0.7,
        "soft_label_sigma": 1.0,
    }
    assert compose(["run=toy", "policy.temperature=0.5"]).policy_changes == {}  # nothing is loaded
    of_run = tmp_path / "checkpoints" / "rl"
    # its checkpoints hold the changes already
    assert config_of_checkpoint(of_run, None, []).policy_changes == {}
    assert config_of_checkpoint(of_run, None, ["policy.temperature=0.7"]).policy_changes == {
        "temperature": 0.7
    }


# ------------------------------------------------------------------------------- a user's own files
MINE = """
defaults:
  - env: toy
  - policy: nano_toy
  - override /algorithm: ppo_toy

wandb: false
tasks: [reach_red]
rl:
  iterations: 7
sft:
  learning_rate: 2e-3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize("named", ["./mine.yaml", "mine.yaml", "{}/mine.yaml", "'mine.yaml'"])
def test_a_file_of_ones_own_is_a_run(mine, named):
    config = compose([f"run={named.format(mine)}", "seed=3"])
    assert (config.env_type, config.policy, config.rl.iterations) == (
        "toy",
        compose(["run=toy"]).policy,
        7,
    )
    assert (config.name, config.seed, config.wandb.mode, config.sft.learning_rate) == (
        "mine",
        3,
        "off",
        2e-3,
    )
    # nothing of another run
    assert config.rl.episodes_per_iteration == compose(["~run"]).rl.episodes_per_iteration
    assert compose(["run=toy"]).rl.iterations == 20  # and no trace of it is left


def test_a_file_of_ones_own_can_start_from_a_run_and_have_any_name(mine):
    folder = mine / "配置 (neu), v=1"
    folder.mkdir()
    (folder / "grüße.yml").write_text(
        "defaults: [{run: toy}, {policy: nano}]\nname: other\nrl: {iterations: 2}\n"
    )
    config = compose([f"run={folder}/grüße.yml"])
    assert (config.env_type, config.rl.iterations, config.rl.episodes_per_iteration) == (
        "toy",
        2,
        128,
    )
    assert config.name == "other" and config.policy == compose(["~run"]).policy
    (mine / "short.yaml").write_text(
        "# @package _global_\ndefaults:\n  - toy\n  - _self_\nseed: 5\n"
    )
    assert (compose(["run=short.yaml"]).seed, compose(["run=short.yaml"]).name) == (5, "short")


def test_a_folder_of_ones_own_adds_to_the_groups(mine):
    folder = mine / "a 'quoted' \"folder\""
    for name, text in {
        "run/study": "defaults: [{run: base}, {algorithm: mine}]\nseed: 4\n",
        "run/base": "# @package _global_\ndefaults: [toy, _self_]\nrl: {iterations: 3}\n",
        "algorithm/mine": "defaults: [ppo_toy]\nclip_low: 0.125\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / f"{name}.yaml").write_text(text)
    config = compose(["run=study"], folders=[folder])
    assert (config.name, config.seed, config.rl.iterations, config.algorithm.clip_low) == (
        "study",
        4,
        3,
        0.125,
    )
    with searching([folder]):
        assert compose(["run=toy", "algorithm=mine"]).algorithm.clip_low == 0.125
        with pytest.raises(
            ConfigError, match=r"algorithm=miine does not exist. Did you mean algorithm=mine\?"
        ):
            compose(["algorithm=miine"])
    with pytest.raises(ConfigError, match="algorithm=mine does not exist"):
        compose(["algorithm=mine"])


def test_the_record_of_a_run_is_a_file_of_ones_own(mine):
    config = compose(
        ["run=mine.yaml", "algorithm=td3", "policy=small_toy", "critic=none", "name=first"]
    )
    save(config, mine / "config.yaml")
    assert compose([f"run={mine}/config.yaml"]) == config
    again = compose([f"run={mine}/config.yaml", "algorithm.learning_rate=0.5", "name=second"])
    assert again.algorithm.learning_rate == 0.5 and again.name == "second"
    with pytest.raises(
        ConfigError, match="record of a whole run, so that algorithm=ppo would change nothing"
    ):
        compose([f"run={mine}/config.yaml", "algorithm=ppo"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "seed: 1\nrl:\n  iterrations: 3\n",
            ["mine.yaml, line 3: ", "'rl.iterrations'", "Did you mean 'rl.iterations'"],
        ),
        ("sft:\n  updates: many\n", ["mine.yaml, line 2: ", "sft.updates = 'many'"]),
        ("seed: 1\nsede: 2\n", ["mine.yaml, line 2: ", "'sede'"]),
        ("rl: {iterations: -1}\n", ["mine.yaml, line 1: ", "rl.iterations"]),
        ("defaults:\n  - env: moon\n", ["mine.yaml, line 2: ", "env=moon does not exist", "toy"]),
        ("seed: 1\ndefaults: toy\n", ["mine.yaml, line 2: defaults must be a list"]),
        ("defaults: [[toy]]\n", ["mine.yaml, line 1: defaults has ['toy']"]),
        ("defaults: [other.yaml]\n", ["mine.yaml, line 1", "--config-dir"]),
        ("a: [1\nb: 2\n", ["mine.yaml, line 2 is no YAML"]),
        ("seed: 1\nseed: 2\n", ["mine.yaml", "seed", "duplicate"]),
        ("a: &a\n  b: *a\n", ["mine.yaml"]),
        ("", ["mine.yaml is empty"]),
        ("- seed\n", ["mine.yaml holds a sequence, not a mapping"]),
        ("seed\n", ["mine.yaml holds a scalar, not a mapping"]),
    ],
)
def test_what_is_wrong_in_a_file_of_ones_own_is_said_with_its_place(mine, text, parts):
    (mine / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as told:
        compose(["run=./mine.yaml"])
    assert all(part in str(told.value) for part in parts), told.value


def test_an_override_that_is_wrong_is_not_laid_to_the_file(mine):
    with pytest.raises(ConfigError, match=r"^unknown config key 'rl.iterrations'"):
        compose(["run=./mine.yaml", "rl.iterrations=3"])
    with pytest.raises(ConfigError, match=r"^rl.iterations"):  # which the file sets too
        compose(["run=./mine.yaml", "rl.iterations=-3"])


def test_folders_that_hold_no_configs_of_ones_own(mine):
    with pytest.raises(ConfigError, match=r"--config-dir .*mine.yaml is no folder"):
        compose([], folders=[mine / "mine.yaml"])
    with pytest.raises(ConfigError, match=r"holds no configs: .*run/mine.yaml"):
        compose([], folders=[mine])
    (mine / "run").mkdir()
    (mine / "run" / "toy.yaml").write_text("seed: 1\n")
    with pytest.raises(
        ConfigError, match=r"run/toy.yaml has the name of a config of vla-rl .*rename it"
    ):
        compose([], folders=[mine])
    (mine / "run" / "toy.yaml").rename(mine / "run" / "one.yaml")
    for name, text in {
        "one": "defaults: [two]\n",
        "two": "defaults: [three]\n",
        "three": "defaults: [two]\n",
    }.items():
        (mine / "run" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises(ConfigError, match="lead in a circle"):
        compose(["run=one"], folders=[mine])
    (mine / "run" / "two.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        compose(["run=one"], folders=[mine])
    (mine / "run" / "two.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"cannot be read: .*two.yaml"):
        compose(["run=one"], folders=[mine])
