import dataclasses

import numpy as np
import pytest
from contracts import check_env, check_simulator, random_actions

from sim.inline import InlineEnv
from sim.simple import SimpleSimulator
from sim.toy import CAMERA, FAULTS, ToyConfig, ToyReach
from vla_rl import splits
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import EpisodeSpec, Instead


def run_episode(simulator: ToyReach, episode: EpisodeSpec, choose) -> tuple[bool, int]:
    """Success, and control steps executed, of an episode under ``choose(chunk index) ->
    actions``."""
    simulator.start(0, episode)
    executed = 0
    for chunk in range(100):
        step = simulator.step(0, choose(chunk))
        executed += step.executed
        if step.terminated or step.truncated:
            return step.success, executed
    raise AssertionError("the episode never ended")


def episodes(count: int, split: str = "train") -> list[EpisodeSpec]:
    return [EpisodeSpec(("reach_red", "reach_blue")[i % 2], i, split) for i in range(count)]


def test_keeps_the_simulator_contract():
    check_simulator(ToyReach)


def test_keeps_the_env_contract_inline():
    with InlineEnv(ToyReach(), 5) as env:
        check_env(env, ToyReach)


@pytest.mark.parametrize("split", splits.SPLITS)
def test_oracle_always_succeeds_and_stops_early(split):
    simulator = ToyReach()
    outcomes = [
        run_episode(simulator, e, lambda _: simulator.oracle(0, 4)) for e in episodes(50, split)
    ]
    assert all(success for success, _ in outcomes)
    assert max(steps for _, steps in outcomes) < simulator.tasks[0].horizon


def test_random_actions_rarely_succeed():
    simulator = ToyReach()
    wins = sum(
        run_episode(
            simulator,
            e,
            lambda i, e=e: random_actions(simulator.embodiment, 4, 1000 * e.init_state_id + i),
        )[0]
        for e in episodes(200)
    )
    assert 0 < wins < 20


def test_reaching_the_other_colour_earns_nothing():
    simulator, other = ToyReach(), ToyReach()
    for i in range(20):
        simulator.start(0, EpisodeSpec("reach_red", i))
        other.start(0, EpisodeSpec("reach_blue", i))
        step = simulator.step(0, other.oracle(0, 10))
        assert not step.success and not step.rewards.any()
        for _ in range(8):
            if step.instead:
                break
            other.step(0, other.oracle(0, 10))
            step = simulator.step(0, other.oracle(0, 10))
        assert step.instead == Instead("reach_blue", "reach the blue goal")


def test_only_the_instruction_tells_which_goal_is_meant():
    simulator = ToyReach()
    red, blue = (
        simulator.start(slot, EpisodeSpec(f"reach_{c}", 7))
        for slot, c in enumerate(("red", "blue"))
    )
    np.testing.assert_array_equal(red.images[CAMERA], blue.images[CAMERA])
    np.testing.assert_array_equal(red.proprio, blue.proprio)
    assert "red" in red.instruction and "blue" in blue.instruction


def test_the_goals_can_be_read_from_the_image():
    simulator = ToyReach()
    for i in range(20):
        observation = simulator.start(0, EpisodeSpec("reach_red", i))
        pixel = 0.24 / 16  # metres
        for channel, position in ((0, slice(2, 4)), (1, slice(0, 2)), (2, slice(4, 6))):
            row, column = np.unravel_index(
                observation.images[CAMERA][..., channel].argmax(), (16, 16)
            )
            seen = np.array([(column + 0.5) * pixel - 0.12, 0.12 - (row + 0.5) * pixel])
            assert np.abs(seen - observation.privileged[position]).max() <= pixel / 2 + 1e-6


def test_instructions_follow_split_and_index():
    simulator = ToyReach()
    task = simulator.tasks[0]
    for split, texts in (("train", task.instructions), ("held_out", task.held_out_instructions)):
        seen = [
            simulator.start(0, EpisodeSpec(task.task_id, 0, split, instruction_index=i)).instruction
            for i in range(3)
        ]
        assert seen == [texts[i % len(texts)] for i in range(3)]
    assert not set(task.instructions) & set(task.held_out_instructions)


def test_train_and_held_out_initial_states_share_no_cell():
    simulator, cells = ToyReach(), {split: set() for split in splits.SPLITS}
    for split, found in cells.items():
        for i in range(200):
            state = simulator.start(0, EpisodeSpec("reach_red", i, split)).privileged
            found |= {splits.cell_of(float(state[j]), float(state[j + 1])) for j in (0, 2, 4)}
    assert not cells["train"] & cells["held_out"]


def test_faults_strike_the_chosen_state_only():
    for fault, text in (("raise", "RuntimeError: a fault"), ("nan", "proprio is not finite")):
        config = ToyConfig(fault=fault, fault_init_state_id=1, fault_control_step=2)
        with InlineEnv(ToyReach(config), 2) as env:
            for slot in range(2):
                env.start(slot, EpisodeSpec("reach_red", slot))
            assert [e.error for e in env.poll()] == [None, None]
            for slot in range(2):
                env.step(slot, np.zeros((4, 2), dtype=np.float32))
            fine, struck = env.poll()
            assert fine.error is None and fine.step.executed == 4
            assert text in struck.error and struck.observation is None


def test_a_user_error_of_the_simulator_is_raised_and_loses_no_other_event():
    with InlineEnv(
        ToyReach(ToyConfig(fault="user_error", fault_init_state_id=1, fault_control_step=-1)), 3
    ) as env:
        for slot in range(3):
            env.start(slot, EpisodeSpec("reach_red", slot))
        with pytest.raises(UserError, match="a user error was asked for"):
            env.poll()
        assert [event.slot for event in env.poll()] == [0, 2]
        env.start(1, EpisodeSpec("reach_red", 5))
        assert env.poll()[0].error is None


@pytest.mark.parametrize(("failure", "horizon"), [("clumsy", 20), ("wrong_object", 100)])
def test_a_failure_that_is_none_is_refused(failure, horizon):
    """An unknown kind, and one on success."""

    class Odd(ToyReach):
        def step(self, slot, actions):
            return dataclasses.replace(super().step(slot, actions), failure=failure)

    simulator = Odd(ToyConfig(horizon=horizon))
    with InlineEnv(simulator) as env:
        env.start(0, EpisodeSpec("reach_red", 0))
        env.poll()
        env.step(0, simulator.oracle(0, 30))
        with pytest.raises(
            UserError, match=f"'reach_red'.*success=True.*{failure}.*leave it empty.*never_reached"
        ):
            env.poll()


def test_what_was_solved_instead_is_another_task():
    class Odd(ToyReach):
        def step(self, slot, actions):
            own = Instead("reach_red", "reach the red goal")
            return dataclasses.replace(super().step(slot, actions), instead=own)

    with InlineEnv(Odd()) as env:
        env.start(0, EpisodeSpec("reach_red", 0))
        env.poll()
        env.step(0, np.zeros((1, 2), dtype=np.float32))
        with pytest.raises(
            UserError, match=r"'reach_red' solved 'reach_red' instead.*reach_blue.*success"
        ):
            env.poll()


def test_bad_config_is_named():
    with pytest.raises(ConfigError, match=f"'burn'.*{', '.join(FAULTS)}"):
        ToyConfig(fault="burn")
    with pytest.raises(ConfigError, match="horizon"):
        ToyConfig(horizon=0)
    with pytest.raises(ConfigError, match="num_slots"):
        InlineEnv(ToyReach(), 0)


def test_a_tail_slows_some_episodes_far_more_than_others(monkeypatch):
    """The mean over episodes stays what it is; a factor is an episode's own, whoever plays it."""
    slept: list[float] = []
    monkeypatch.setattr("sim.toy.time.sleep", slept.append)
    simulator = ToyReach(ToyConfig(step_seconds=1.0, step_tail=3.0))
    for seed in [*range(4000), 17]:
        simulator.start(0, EpisodeSpec("reach_red", 0, seed=seed))
        simulator.step(0, np.zeros((1, 2)))
    assert slept[-1] == slept[17]
    assert np.mean(slept) == pytest.approx(1.0, abs=0.05) and np.median(slept) < 0.9
    assert max(slept) > 5.0 and min(slept) > 0.66
    with pytest.raises(ConfigError, match="step_tail"):
        ToyConfig(step_tail=1.0)


def test_one_without_an_expert_says_what_else_to_start_from():
    class Alone(ToyReach):
        expert = SimpleSimulator.expert

    with pytest.raises(
        ConfigError, match="Alone has no demonstrator: give it a method `expert`, or"
    ):
        Alone().collect_episode(EpisodeSpec("reach_red", 0))
