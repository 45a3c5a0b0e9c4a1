"""Other projects' own clients and servers at the other end of the wire (`scripts/peers.sh` installs
them)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from socket import create_server

import numpy as np
import pytest
import torch
from serving_helpers import served
from test_cluster import TOY, start  # noqa: F401 - a fixture
from test_serving import SPEC, Seeker, collected, differences, remote

from vla_rl.assembly.env_and_policy import acting_policy
from vla_rl.config import compose
from vla_rl.types import Observation

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(os.environ.get("VLA_RL_PEERS") or ROOT / "build" / "peers") / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PEERS.is_file(), reason=f"no peers at {PEERS}: 'make test-peers' installs them there"
)


def peer(*arguments, **options):
    command = [str(PEERS), str(ROOT / "tests" / "wire_peers.py"), *map(str, arguments)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **options)


def ended(process):
    assert process.wait(240) == 0


@pytest.fixture
def policy(start):  # noqa: F811
    return acting_policy(compose([*TOY, f"checkpoint={start}"]), start, SPEC)


def seen_by(found, i):
    image, state = torch.from_numpy(found["image"][[i]]), torch.from_numpy(found["state"][[i]])
    return Observation({"top": image}, state.float(), (str(found["prompt"][i]),))


def test_openpis_client_gets_the_same_actions_and_log_probs(policy, tmp_path):
    rng = np.random.default_rng(0)
    asked = {
        "image": rng.integers(0, 255, (5, 16, 16, 3), dtype=np.uint8),
        "state": rng.uniform(-0.1, 0.1, (5, 2)).astype(np.float32),
        "prompt": ["the red spot please"] * 5,
    }
    np.savez(tmp_path / "asked.npz", **asked)
    with served(policy) as url:
        ended(peer("openpi", url, tmp_path / "asked.npz"))
    found = np.load(tmp_path / "asked.npz.npz")
    assert found["version"] == "policy@0"
    assert "lacks the picture of camera top" in str(found["told"])
    for i in range(5):
        with torch.inference_mode():
            out = policy.act(seen_by(asked, i), seeds=[i])
        assert np.array_equal(found["actions"][i], out.chunk.actions[0].numpy())
        assert np.array_equal(found["log_prob"][i], out.behavior_log_prob[0].numpy())


def test_vla_eval_drives_a_served_policy_through_episodes(policy, tmp_path):
    """Each action is the one that the policy decided on, when it was last asked, for that step."""
    with served(policy) as url:
        ended(peer("vla_eval", url, tmp_path / "episodes"))
    found = np.load(tmp_path / "episodes.npz")
    assert list(found["wanted"]) == ["send_state"] and found["steps"].sum() == len(found["actions"])
    assert "lacks the picture" in str(found["told"])
    at = 0
    for number, steps in enumerate(found["steps"]):
        [first, *_] = np.flatnonzero(found["episode"] == number)
        for step in range(steps):
            if step % policy.chunk_length == 0:
                with torch.inference_mode():
                    out = policy.act(seen_by(found, first + step), deterministic=True, seeds=[0])
            wanted = out.chunk.actions[0, step % policy.chunk_length].numpy()
            assert np.array_equal(found["actions"][at], wanted), (number, step)
            at += 1


@contextlib.contextmanager
def openpis_server():
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = peer("serve", f"ws://127.0.0.1:{port}", "")
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_openpis_server_drives_an_evaluation_as_in_this_process():
    with openpis_server() as url:
        wire = remote(url)
        found = collected(wire).trajectories
    assert wire.version == f"{url}#openpi"
    assert differences(found, collected(Seeker()).trajectories) == []
