"""Programs of other projects at the other end of the wire: ``python wire_peers.py KIND URL FILE``,
under an interpreter that has their packages (`scripts/peers.sh`), which need another numpy than
this project.

openpi asks the server about the observations of FILE; vla_eval runs episodes of the toy task on it;
serve is a server of openpi's at that address. What came of it is written to FILE.npz."""

from __future__ import annotations

import asyncio
import logging
import sys
from urllib.parse import urlparse

import numpy as np


def openpi(url: str, file: str) -> None:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    client = WebsocketClientPolicy(url)
    seen = np.load(file)
    answers = []
    for i in range(len(seen["state"])):
        answers.append(
            client.infer(
                {
                    "observation/image": seen["image"][i],
                    "observation/state": seen["state"][i],
                    "prompt": str(seen["prompt"][i]),
                    "vla_rl/log_prob": True,
                    "vla_rl/sample": True,
                    "vla_rl/seed": i,
                }
            )
        )
    version = client.get_server_metadata()["vla_rl"]["policy"]
    try:
        client.infer({"prompt": "nothing else"})
    except RuntimeError as error:
        told = str(error)
    found = {key: np.stack([a[key] for a in answers]) for key in ("actions", "log_prob")}
    np.savez(f"{file}.npz", version=version, told=told, **found)


def vla_eval(url: str, file: str) -> None:
    from vla_eval.benchmarks.base import StepBenchmark, StepResult
    from vla_eval.connection import Connection
    from vla_eval.runners.sync_runner import SyncEpisodeRunner

    from sim.toy import ToyReach
    from vla_rl.specs import EpisodeSpec

    kept = {"image": [], "state": [], "prompt": [], "actions": [], "episode": []}

    class Toy(StepBenchmark):
        def get_tasks(self):
            return [{"name": t.task_id} for t in self.toy.tasks]

        def reset(self, task):
            self.toy = ToyReach()
            self.number = task["number"]
            return self.toy.start(0, EpisodeSpec(task["name"], self.number))

        def step(self, action):
            kept["actions"].append(action["actions"])
            done = self.toy.step(0, np.asarray(action["actions"], np.float32)[None])
            over = done.terminated or done.truncated
            return StepResult(done.observation, 0.0, over, {"success": done.success})

        def make_obs(self, seen, task):
            kept["image"].append(seen.images["top"])
            kept["state"].append(seen.proprio)
            kept["prompt"].append(seen.instruction)
            kept["episode"].append(self.number)
            images = {"whatever": seen.images["top"]}
            return {"images": images, "states": seen.proprio, "task_description": seen.instruction}

        def get_step_result(self, result):
            return {"success": result.info["success"]}

    async def run() -> None:
        results = []
        async with Connection(f"{url}/vla-eval") as connection:
            wanted = connection.server_info["observation_params"]
            for number in range(3):
                task = {"name": "reach_red", "number": number}
                results.append(await SyncEpisodeRunner().run_episode(Toy(), task, connection))
            try:
                await connection.act({"images": {}, "task_description": "x"})
            except RuntimeError as error:
                told = str(error)
        np.savez(
            f"{file}.npz",
            steps=[r["steps"] for r in results],
            wanted=sorted(wanted),
            told=told,
            **{name: np.stack(values) for name, values in kept.items()},
        )

    asyncio.run(run())


def serve(url: str, file: str) -> None:
    from openpi_server import websocket_policy_server
    from wire_seeker import Policy

    place = urlparse(url)
    websocket_policy_server.WebsocketPolicyServer(
        Policy(), place.hostname, place.port, {"robot": "toy"}
    ).serve_forever()


if __name__ == "__main__":
    logging.disable(logging.INFO)
    {"openpi": openpi, "vla_eval": vla_eval, "serve": serve}[sys.argv[1]](*sys.argv[2:])
