"""Supervised fine-tuning: the loop. It resumes: training N updates equals training k, resuming,
and training N − k."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import described, first_loss, input_use, verdict
from vla_rl.checkpoint import (
    load_training_state,
    load_weights,
    restoring,
    save_checkpoint,
)
from vla_rl.config.imitation import ImitationConfig
from vla_rl.data.demonstrations import DatasetSampler
from vla_rl.interfaces import Policy
from vla_rl.learning.counters import Counters
from vla_rl.monitoring.metrics import MetricsLogger
from vla_rl.monitoring.progress import Progress
from vla_rl.terminal import leave_terminal
from vla_rl.types import Observation


@contextlib.contextmanager
def postponed_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP do not break into the block, which asks whether one came; a second
    one does break in.

    Where Python does not handle these signals, and outside the main thread, nothing changes.
    """
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if came:
            raise KeyboardInterrupt
        came.append(number)

    main = threading.current_thread() is threading.main_thread()
    handled = [
        s
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if main and callable(signal.getsignal(s))
    ]
    before = {s: signal.signal(s, note) for s in handled}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SFTLearner(Protocol):
    """Who makes the updates of SFT: this process, or ranks elsewhere."""

    config: ImitationConfig

    @property
    def policy(self) -> Policy:
        """With the weights of the last update."""
        ...

    @property
    def described(self) -> Policy:
        """As a checkpoint of `state_dict` describes it: with these weights too, unless others write
        them."""
        ...

    def update(self) -> dict[str, float]:
        """One optimiser step; metrics as of `Imitation.update`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """``algorithm`` and ``sampler``: where to go on from."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """``policy`` has its weights by now."""
        ...


class OwnSFT:
    """An `SFTLearner` of one process, or of one of several ranks that are called alike."""

    def __init__(self, imitation: Imitation) -> None:
        self._imitation, self._sampler = imitation, cast(DatasetSampler, imitation.sampler)
        self.config, self.policy = imitation.config, imitation.policy
        self.described = self.policy
        self.update = imitation.update

    def state_dict(self) -> dict[str, Any]:
        return {
            "algorithm": self._imitation.state_dict(),
            "sampler": self._sampler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._imitation.load_state_dict(state["algorithm"])
        self._sampler.load_state_dict(state["sampler"])


def train_sft(
    learner: SFTLearner,
    *,
    folder: Path,
    logger: MetricsLogger,
    progress: Progress,
    validation: tuple[Observation, Tensor, Tensor] | None = None,
    first: tuple[Observation, Tensor, Tensor] | None = None,
    tasks: int = 1,
) -> Counters:
    """Supervised fine-tuning (behaviour cloning) up to ``learner.config.updates`` updates.

    ``validation`` are decisions that are not trained on: with each checkpoint they show the loss
    and whether the policy looks at its images (`algorithms.validation.input_use`), and at the end a
    policy that does not is warned about. ``first`` are those with which their episodes begin, whose
    loss is shown apart; ``tasks``: of how many instructions tell. The checkpoint with its training
    state (the sampler's included) is written to ``folder`` at intervals, at the end, and on Ctrl-C
    after the present update; an existing one there is resumed.
    """
    counters = Counters()
    if (folder / "training_state").exists():
        load_weights(folder, learner.policy)
        state = load_training_state(folder)
        with restoring(folder):
            learner.load_state_dict(state)
            counters = Counters(**state["counters"])
    total, every = learner.config.updates, learner.config.checkpoint_every
    started = time.perf_counter() - counters.seconds
    with (
        progress.task("SFT", total, start=counters.iteration) as bar,
        postponed_interrupts() as interrupted,
    ):
        while counters.iteration < total:
            metrics = learner.update()
            counters.iteration += 1
            counters.seconds = time.perf_counter() - started
            last, stop = counters.iteration == total, interrupted()
            if counters.iteration % 10 == 0 or last:
                logger.log("sft", counters.iteration, metrics)
                bar.update(counters.iteration, loss=metrics["sft/loss"])
            if counters.iteration % every == 0 or last or stop:
                state = learner.state_dict() | {"counters": dict(vars(counters))}
                save_checkpoint(folder, learner.described, state)
            if validation is not None and (counters.iteration % every == 0 or last):
                use = input_use(learner.policy, *validation) | {"tasks": float(tasks)}
                use |= {} if first is None else {"first_loss": first_loss(learner.policy, *first)}
                logger.log(
                    "sft", counters.iteration, {f"validation/{name}": x for name, x in use.items()}
                )
                if last:
                    progress.say(described(use))
                if last and (warning := verdict(use)):
                    progress.say(f"warning: {warning}")
            if stop:
                progress.say(f"SFT is saved at update {counters.iteration} of {total}")
                break
        if interrupted():
            raise KeyboardInterrupt
    return counters
