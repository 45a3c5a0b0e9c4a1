from dataclasses import dataclass


@dataclass
class CalmSuccessConfig:
    effort: float = 0.01


class CalmSuccess:
    """1 for a success, less a little for every large action."""

    Config = CalmSuccessConfig

    def __init__(self, config):
        self.config = config

    def score(self, trajectories):
        """One float32 tensor [t] per trajectory: a reward per decision."""
        rewards = []
        for trajectory in trajectories:
            # [t h]; valid: was executed
            effort = trajectory.actions.square().mean(-1) * trajectory.valid
            reward = -self.config.effort * effort.sum(1)
            reward[-1] += float(trajectory.success)
            rewards.append(reward)
        return rewards
