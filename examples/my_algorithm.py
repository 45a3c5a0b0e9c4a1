from dataclasses import dataclass

import torch

from vla_rl.diagnostics import Alarm, Diagnostic


@dataclass
class ClonedSuccessConfig:
    batch_size: int = 64
    learning_rate: float = 1e-4
    updates_per_decision: float = 0.2
    start_decisions: int = 16

    diagnostics = (  # what the report draws of its figures, and when it warns
        Diagnostic("clone/loss", "Loss on what was rewarded", "Falls while successes are alike.", smooth=True),
        Diagnostic("clone/share", "Share that was rewarded", "How much of a batch is imitated.", share=True,
                   alarm=Alarm("Only {value} of the data was rewarded: start from a stronger policy.", below=0.05)),
    )  # fmt: skip


class ClonedSuccess:
    """Imitates what was rewarded, from all that was ever done (self-imitation, without a critic)."""

    Config = ClonedSuccessConfig

    def __init__(self, config, policy):
        self.config, self.policy = config, policy
        self.optimizer = torch.optim.AdamW(
            [p for p in policy.parameters() if p.requires_grad], config.learning_rate
        )

    def annotate(self, trajectory, rewards):
        return {"won": torch.full((len(trajectory) + 1,), float(trajectory.success))}

    def update(self, draw):
        batch = draw(self.config.batch_size, shares={"online": 0.5, "demonstrations": 0.5})
        valid = batch.valid & (batch.extra["won"] > 0)[:, None]
        if not valid.any():
            return {"clone/share": 0.0}
        loss, _ = self.policy.imitation_loss(batch.observations, batch.actions, valid)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {
            "clone/loss": float(loss.detach()),
            "clone/share": float(valid.any(1).float().mean()),
        }

    def state_dict(self):
        return {}  # (AdamW's moments start anew: `vla_rl.algorithms.optim.optimizer_state` would keep them)

    def load_state_dict(self, state):
        pass
