"""What components offer beyond what they must: the words of ``can``, defaults, and objects that
name no base."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vla_rl import build
from vla_rl.errors import ConfigError
from vla_rl.interfaces import ActorPolicy, Critic, Env, Policy, RewardModel


class Plain:
    """A policy that names no base."""

    chunk_length = 4
    imitates_itself = True

    def act(self, observation, *, deterministic=False, seeds=None):
        return "acted"

    def imitation_loss(self, observation, actions, valid):
        return "loss", {}


def test_an_object_that_names_no_base_gets_its_answers():
    plain = Plain()
    policy = Policy.of(plain)
    assert policy is plain and isinstance(plain, Plain) and type(plain).__name__ == "Plain"
    assert policy.can == {"imitation"} and policy.act(None) == "acted"
    assert policy.executed_steps == 4 and policy.imitates_itself and not policy.guidable
    policy.prepare_for_rl()  # nothing
    assert policy.base_folder() is None and policy.completed({"a": 1}) == {"a": 1}
    with pytest.raises(NotImplementedError):
        policy.evaluate(None, {})
    assert type(Policy.of(plain)) is type(plain) is type(Policy.of(Plain()))  # once, for all
    assert copy.deepcopy(plain).executed_steps == 4
    fresh = Plain()  # the class itself stays as it is
    assert isinstance(fresh, Policy) and Policy not in type(fresh).__mro__
    assert not isinstance(object(), Policy)


def test_an_attribute_of_the_object_goes_before_the_default():
    plain = Policy.of(Plain())
    plain.executed_steps = 2
    assert plain.executed_steps == 2
    env = Env.of(type("Slots", (), {"num_workers": 3})())
    assert env.num_workers == 3 and env.busy_seconds is None and not env.repeatable


def test_what_a_class_has_itself_is_what_it_can():
    class Tokens(nn.Module, Policy):
        def evaluate(self, observation, replay):
            return None

    class Fewer(Tokens):
        evaluate = None

    class Withheld(Tokens):
        can = frozenset()

    class Older(Tokens):
        can = frozenset({"kept", "likelihood"})

    assert Older.can == {"cached_features", "likelihood"}
    assert Tokens().can == {"likelihood"} and not Fewer.can and not Withheld.can
    assert list(Tokens().parameters()) == [] and Tokens().training  # of the module, not the default


def test_an_actor_is_one_by_its_methods():
    class Reach(Plain):
        def propose(self, encoded, frames, noise):
            return encoded, noise

        def annotate(self, trajectory):
            return {}

    reach = Reach()
    assert isinstance(reach, ActorPolicy) and not isinstance(Plain(), ActorPolicy)
    assert Policy.of(reach).can == {"imitation"}
    assert ActorPolicy.of(reach).can == {"imitation", "actor"} and reach.shift == 0


def test_a_base_that_hides_a_method_is_refused():
    with pytest.raises(
        TypeError, match=r"class Wrong: \w+ of Module is hidden .* class Wrong\(Module"
    ):

        class Wrong(Policy, nn.Module):
            pass


def test_a_submodule_of_the_name_of_a_method_is_refused():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Linear(2, 1)

    with pytest.raises(ConfigError, match=r"'value', and that is the name of a method .*Policy"):
        Policy.of(Headed())


def test_a_class_that_takes_no_base_is_named():
    with pytest.raises(ConfigError, match=r"tuple has methods of a Critic.* subclass of .*Critic"):
        Critic.of((1, 2))


def test_what_a_reward_offers():
    class Curve:
        learned = True

        def score(self, trajectories):
            return [torch.zeros(1)]

        def progress(self, trajectories):
            return [torch.zeros(2)]

    reward = RewardModel.of(Curve())
    assert reward.can == {"progress"} and reward.learned and not reward.wants_demonstrations
    assert reward.metrics() == {} and not reward.parts and reward.backend is None


NEEDS = {
    row.needs
    for group in ("algorithm", "actor")
    for row in build.REGISTRY[group].values()
    if hasattr(row, "needs")
}


@pytest.mark.parametrize("group", ["policy", "actor"])
def test_the_registry_says_what_the_classes_can(group):
    """Known there without importing them; here each is asked."""
    for name, row in build.REGISTRY[group].items():
        if not isinstance(row, build.PolicyEntry):
            continue
        cls = build.attribute(row.target)
        if name == "lerobot":  # one class for families that denoise, and ACT's
            cls = build.attribute("policies.lerobot.policy:LeRobotChainPolicy")
        assert set(row.can) == cls.can & NEEDS, name
