"""The policy's process: ``python -m vla_rl.robot.policy CONFIG.json`` with socket, checkpoint,
embodiment, acting, steps, valid_s, instruction, deterministic, device and threads. It is told when
to decide by `real.acting`.

With ``learner``, the folder between an actor and a learner (`vla_rl.learning.episode_queue`), it
acts with the learner's newest weights, which it takes as an episode ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import build
from vla_rl.config.serving import RemoteConfig
from vla_rl.errors import ConfigError, PolicyLost
from vla_rl.paths import is_address
from vla_rl.robot.process import run_process
from vla_rl.specs import EmbodimentSpec, SlotObservation

_ANSWER_SECONDS = 5.0  # that a served policy may take to decide for an arm

Decide = Callable[..., Any]  # as of `real.acting`


def make_decide(
    policy: Any, deterministic: bool, device: Any = None, acting: str = "synchronous"
) -> Decide:
    """How a policy decides in a session: on the `Observation` that the simulator's slots would
    yield. Raises `ConfigError` for one that cannot act as `real.acting` is to (``acting``)."""
    import torch

    from vla_rl.types import Observation

    _require_acting(policy, acting)
    memory: list[Any] = []

    def rows(chunk: Any) -> np.ndarray:
        return chunk.actions[0][chunk.valid[0]].float().cpu().numpy()

    def decide(
        images: dict[str, np.ndarray],
        proprio: np.ndarray,
        instruction: str,
        first: bool,
        guide: Any = None,
    ) -> Any:
        """Actions float32 [h a], with the shares [h 1] of a control step that they last where the
        policy says so; ``guide`` as `real.overlap.Guide`."""
        seen = Observation.from_slots([SlotObservation(images, proprio, instruction)])
        seen = seen if device is None else seen.to(device)
        if guide is not None:
            wanted = torch.zeros(1, policy.chunk_length, guide.wanted.shape[1])
            weight = torch.zeros(1, policy.chunk_length)
            wanted[0, : len(guide.wanted)] = torch.from_numpy(guide.wanted)
            weight[0, : len(guide.weight)] = torch.from_numpy(guide.weight)
            return rows(
                policy.act_towards(seen, wanted, weight, guide.most, deterministic=deterministic)
            )
        options: dict[str, Any] = {"deterministic": deterministic}
        if "memory" in policy.can:
            if first or not memory:
                memory[:] = [policy.initial_memory()]
            options["memory"] = memory
        with torch.inference_mode():
            output = policy.act(seen, **options)
        if output.memory is not None:
            memory[:] = output.memory
        found, lasts = rows(output.chunk), policy.lasts(output)
        return found if lasts is None else (found, lasts.double().cpu().numpy()[: len(found), None])

    return decide


def _require_acting(policy: Any, acting: str) -> None:
    if acting == "rtc" and not policy.guidable:
        raise ConfigError(
            f"robot.acting=rtc guides a flow policy while it denoises, and {type(policy).__name__} "
            "cannot be guided: use robot.acting=ensemble or asynchronous, or a policy that can "
            "(policy=nano_flow, or another sampler of a flow)"
        )
    if "memory" in policy.can and acting in ("rtc", "ensemble"):
        raise ConfigError(
            f"robot.acting={acting} decides anew while a chunk runs, and {type(policy).__name__} "
            "follows a chunk from one decision to the next: use robot.acting=synchronous"
        )


def load(
    checkpoint: str,
    embodiment: EmbodimentSpec,
    deterministic: bool,
    device: str = "auto",
    acting: str = "synchronous",
) -> tuple[Decide, str]:
    """(how it decides, its version for the record) of a checkpoint. Raises `UserError` for one of
    another robot, or one that cannot act in this way."""
    from vla_rl.checkpoint import fingerprint, load_policy
    from vla_rl.devices import pick_device

    if is_address(checkpoint):
        return _served(checkpoint, embodiment, deterministic, acting)
    path, place = Path(checkpoint), pick_device(device)
    policy = load_policy(path, build.policy_class, expected_embodiment=embodiment)
    decide = _warm(make_decide(policy.to(place), deterministic, place, acting), embodiment)
    return decide, f"{path.name}@{fingerprint(path)[:12]}"


def _served(
    address: str, embodiment: EmbodimentSpec, deterministic: bool, acting: str
) -> tuple[Decide, str]:
    """The same of a policy that somebody serves. Where the connection is lost it decides nothing,
    which an arm is held still by, and tries to connect again whenever it is asked."""
    from vla_rl.serving.policy import WirePolicy

    options = RemoteConfig(url=address, timeout=_ANSWER_SECONDS, reconnect=0.0)
    policy = WirePolicy(options, embodiment)
    asked = _warm(make_decide(policy, deterministic, None, acting), embodiment)

    def decide(*given: Any) -> np.ndarray | None:
        try:
            return asked(*given)
        except PolicyLost:
            return None

    return decide, policy.version


def load_others(
    checkpoints: Mapping[str, str], embodiment: EmbodimentSpec, device: str, acting: str
) -> dict[str, tuple[Decide, str]]:
    """`real.acting.Acting`'s ``others``, of {instruction: checkpoint}."""
    return {
        text: load(checkpoint, embodiment, True, device, acting)
        for text, checkpoint in checkpoints.items()
    }


def _warm(decide: Decide, embodiment: EmbodimentSpec) -> Decide:
    """The first decision is slow."""
    blank = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in embodiment.cameras}
    decide(blank, np.zeros(embodiment.proprio_dim, np.float32), "", True)
    return decide


@dataclass(frozen=True)
class Learned:
    """A policy that a learner trains meanwhile: how it decides, ``chunk_length`` control steps at a
    time, its version, and `real.acting.Acting`'s ``swap``."""

    decide: Decide
    chunk_length: int
    version: str
    swap: Callable[[], str | None]


def load_learner(
    folder: Path, embodiment: EmbodimentSpec, deterministic: bool, acting: str
) -> Learned:
    """The policy that the learner of ``folder`` trains, with its newest weights."""
    import torch

    from vla_rl import config as configs
    from vla_rl.assembly.learner import trained_policy
    from vla_rl.assembly.learner_main import run_of
    from vla_rl.data.session_trajectory import version_name
    from vla_rl.files import read_json
    from vla_rl.learning.episode_queue import JOB, NewestWeights, take_weights

    job = read_json(folder / JOB, "the session's launcher writes it: start the session again")
    run = run_of(configs.from_tree(job["config"]), job)
    torch.seed()  # sessions explore differently
    policy, newest = trained_policy(run), NewestWeights(folder)

    def swap() -> str | None:
        weights = newest()
        if weights is None:
            return None
        take_weights(policy, weights.tensors)
        return version_name(weights.version)

    version = swap() or version_name(0)
    decide = _warm(make_decide(policy, deterministic, run.device, acting), embodiment)
    return Learned(decide, policy.chunk_length, version, swap)


def main(config: dict[str, Any]) -> None:
    """Until the session ends."""
    if config.get("threads"):
        import torch

        torch.set_num_threads(int(config["threads"]))
    embodiment = EmbodimentSpec.from_dict(config["embodiment"])
    deterministic, learned = bool(config["deterministic"]), None
    how = build.attribute("real.acting:ActingConfig")(**config["acting"])
    if config.get("learner"):
        learned = load_learner(Path(config["learner"]), embodiment, deterministic, how.acting)
        decide, version = learned.decide, learned.version
    else:
        decide, version = load(
            config["checkpoint"], embodiment, deterministic, config["device"], how.acting
        )
    pictures = build.attribute("real.ring:Rings")()
    acting = build.attribute("real.acting:Acting")(
        decide,
        pictures,
        version,
        how,
        config["instruction"],
        learned.swap if learned else lambda: None,
    )
    acting.others |= load_others(config["resets"], embodiment, config["device"], how.acting)
    client = build.attribute("real.link:Client")(config["socket"], "policy")
    print("ready", learned.chunk_length if learned else "", flush=True)
    try:
        build.attribute("real.acting:serve")(client, acting)
    finally:
        times = sorted(acting.waited) or [0.0]
        took = {"p50": 1e3 * times[len(times) // 2], "max": 1e3 * times[-1]}
        Path(config["report"]).write_text(
            json.dumps({"decisions": acting.decisions, "ms": took}), encoding="utf-8"
        )


if __name__ == "__main__":
    run_process(main)
