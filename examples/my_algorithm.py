from dataclasses import dataclass

import torch

from vla_rl.algorithms.optim import GuardedStep, make_adamw
from vla_rl.diagnostics import Alarm, Diagnostic
from vla_rl.interfaces import Replayed

FEW = Alarm("Only {value} of the data was rewarded: start from a stronger policy.", below=0.05)
HOW = "How much of a batch is imitated."


class ClonedSuccess(Replayed):
    """Imitates what was rewarded, from all that was ever done (self-imitation, without a critic)."""

    @dataclass
    class Config:
        batch_size: int = 64
        learning_rate: float = 1e-4
        updates_per_decision: float = 0.2
        start_decisions: int = 16
        # what the report draws of its figures, and when it warns
        diagnostics = (Diagnostic("clone/share", "Rewarded share", HOW, share=True, alarm=FEW),)

    def __init__(self, config, policy):
        self.config, self.policy, self.guard = config, policy, GuardedStep(10, grad_clip=1.0)
        self.adamw = make_adamw([(policy.parameters(), config.learning_rate)], (0.9, 0.999), 0.01)

    def annotate(self, trajectory, rewards):
        return {"won": torch.full((len(trajectory) + 1,), float(trajectory.success))}

    def update(self, draw):
        batch = draw(self.config.batch_size, shares={"online": 0.5, "demonstrations": 0.5})
        valid = batch.valid & (batch.extra["won"] > 0)[:, None]
        if not valid.any():
            return {"clone/share": 0.0}
        loss, _ = self.policy.imitation_loss(batch.observations, batch.actions, valid)
        loss.backward()
        self.guard.step(self.adamw, loss.detach())
        return {"clone/loss": loss.item(), "clone/share": float(valid.any(1).float().mean())}
