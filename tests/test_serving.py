"""Policies over the wire: what is sent, who is understood, what is refused, and what happens where
the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time

import aiohttp
import msgpack
import numpy as np
import pytest
import torch
from real_helpers import LIMITS
from serving_helpers import Silent, served, speaking
from session_policy import Mover
from test_cluster import TOY, start  # noqa: F401 - a fixture
from wire_seeker import STEPS, Policy, chunk

from real.acting import ActingConfig
from real.body import BodyConfig
from real.episodes import Plan
from real.lockstep import Lockstep
from real.robots.world import PointWorld
from real.tasks import Task
from sim.inline import InlineEnv
from sim.toy import ToyReach
from vla_rl.assembly.env_and_policy import acting_policy
from vla_rl.cli import main
from vla_rl.config import compose
from vla_rl.config.robot import compose as robot_settings
from vla_rl.config.serving import RemoteConfig
from vla_rl.errors import ConfigError, EmbodimentMismatch, PolicyLost, UserError
from vla_rl.interfaces import Policy as IsPolicy
from vla_rl.robot.policy import load
from vla_rl.robot.session import SessionRequest, run
from vla_rl.rollout.engine import RolloutConfig, RolloutEngine
from vla_rl.rollout.stepwise import Stepwise
from vla_rl.run.pipeline import run_pipeline
from vla_rl.serving import rows
from vla_rl.serving.packing import WireError, pack, pack_for_vla_eval, unpack
from vla_rl.serving.policy import WirePolicy
from vla_rl.specs import CameraSpec, EpisodeSpec
from vla_rl.types import ActionChunk, Observation, PolicyOutput

SPEC = ToyReach().embodiment


class Seeker:
    """`wire_seeker` in this process. ``gate`` holds its decisions up."""

    chunk_length = STEPS

    def __init__(self, gate=None):
        self.embodiment, self.gate, self.batches = SPEC, gate, []

    def act(self, observation, *, deterministic=False, seeds=None):
        if self.gate is not None:
            self.gate.wait(60)
        self.batches.append(len(observation))
        images = observation.images["top"].numpy()
        found = [
            chunk(image, state.numpy(), text)
            for image, state, text in zip(images, observation.proprio, observation.instruction)
        ]
        actions = torch.from_numpy(np.stack(found))
        valid = torch.ones(actions.shape[:2], dtype=torch.bool)
        return PolicyOutput(ActionChunk(actions, valid), torch.zeros(len(actions)), {})


def specs(count):
    return [
        EpisodeSpec(f"reach_{'red' if i % 2 else 'blue'}", i, seed=i, rollout_id=f"e{i}")
        for i in range(count)
    ]


def collected(policy, count=6, slots=3, **options):
    config = RolloutConfig(serve_fraction=1.0, max_retries=2)
    with_env = InlineEnv(ToyReach(), num_slots=slots)
    return RolloutEngine(with_env, policy, config).collect(specs(count), **options)


def differences(found, wanted):
    """In what is executed, and what is known of it."""
    assert [t.rollout_id for t in found] == [t.rollout_id for t in wanted]
    names = ("actions", "valid", "rewards", "behavior_log_prob")
    return [
        f"{a.rollout_id}: {name}"
        for a, b in zip(found, wanted)
        for name in names
        if not torch.equal(getattr(a, name), getattr(b, name))
    ]


def row(**changes):
    seen = {
        "observation/image": np.zeros((16, 16, 3), np.uint8),
        "observation/state": np.zeros(2),
        "prompt": "reach the red goal",
    }
    return {key: value for key, value in (seen | changes).items() if value is not None}


def remote(url, **options):
    return WirePolicy(RemoteConfig(url=url, **{"reconnect": 5.0, **options}), SPEC)


# ---------------------------------------------------------------------------------------- messages
def test_messages_are_those_of_openpi_and_of_vla_eval():
    x = np.arange(6, dtype="<f4").reshape(2, 3)
    fields = {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": "<f4", b"shape": (2, 3)}
    assert pack({"actions": x, "n": 1}) == msgpack.packb({"actions": fields, "n": 1})
    plain = {key.decode(): value for key, value in fields.items()}
    assert pack_for_vla_eval({"actions": x}) == msgpack.packb({"actions": plain})
    for packed in (pack({"a": [x]}), pack_for_vla_eval({"a": [x]})):
        [found] = unpack(packed)["a"]
        assert found.dtype == x.dtype and np.array_equal(found, x) and found.flags.writeable
    number = {b"__npgeneric__": True, b"data": 2.5, b"dtype": "<f8"}
    assert unpack(msgpack.packb({"a": number})) == {"a": 2.5}
    assert pack({"a": np.int64(7)}) == msgpack.packb({"a": 7})


@pytest.mark.parametrize("form", ["png", "raw"])
def test_pictures_of_vla_eval_are_read(form):
    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    data = {"png": file.getvalue(), "raw": picture.tobytes()}[form]
    sent = {"__image__": True, "format": form, "data": data, "dtype": "|u1", "shape": [9, 7, 3]}
    assert np.array_equal(unpack(msgpack.packb({"i": sent}))["i"], picture)


def array(**changes):
    return {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2]} | changes


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (b"\xc1", "no msgpack"),
        (b"", "no msgpack"),
        (b"\x80\x05\x95", "no msgpack"),  # (how a pickle begins, and rubbish behind a message)
        (msgpack.packb([1]), "holds a list"),
        (msgpack.packb({b"a": 1}), "mapping of names"),
        (b"\x91" * 3000, "no msgpack"),  # lists in lists
        (msgpack.packb({"a": array(dtype="|O")}), "type '|O'"),
        (msgpack.packb({"a": array(dtype="V8")}), "type 'V8'"),
        (msgpack.packb({"a": array(dtype=5)}), "type 5"),
        (msgpack.packb({"a": array(shape=[-2])}), "shape"),
        (msgpack.packb({"a": array(shape=[2**40])}), "has 8 bytes"),
        (msgpack.packb({"a": array(shape=3)}), "shape"),
        (msgpack.packb({"a": array(data="text")}), "no bytes"),
        (msgpack.packb({"a": {"__ndarray__": True}}), "no msgpack: 'data'"),
        (msgpack.packb({"a": {"__image__": 1, "format": "gif", "data": b""}}), "form 'gif'"),
        (msgpack.packb({"a": {"__image__": 1, "format": "png", "data": b"x"}}), "damaged"),
    ],
)
def test_messages_that_are_none_are_refused(message, told):
    with pytest.raises(WireError, match=told):
        unpack(message)


def test_a_picture_that_unpacks_to_more_than_it_should_is_refused():
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (5000, 8)).save(file, "PNG")
    with pytest.raises(WireError, match="5000x8 pixels"):
        unpack(msgpack.packb({"a": {"__image__": 1, "format": "png", "data": file.getvalue()}}))


def test_what_cannot_be_sent_is_not():
    for value in (np.array([object()]), torch.zeros(2), {1, 2}):
        with pytest.raises(TypeError, match="on the wire"):
            pack({"a": value})


# ------------------------------------------------------------------------------------ observations
def two_cameras(size=16):
    import dataclasses

    return dataclasses.replace(
        SPEC, cameras=(CameraSpec("agentview", size, size), CameraSpec("hand", size, size))
    )


def test_an_observation_is_read_by_the_names_of_openpi_of_vla_eval_and_its_own():
    spec = two_cameras()
    first, second = (np.full((16, 16, 3), v, np.uint8) for v in (1, 2))
    state = np.array([0.5, 0.25])
    for sent in (
        {"observation/image": first, "observation/wrist_image": second, "observation/state": state},
        {"observation/agentview": first, "observation/hand": second, "observation/state": state},
        {"images": {"agentview": first, "wrist": second}, "states": state},
    ):
        seen = rows.read_row({**sent, "prompt": "go"}, spec)
        assert {name: image[0, 0, 0] for name, image in seen.images.items()} == {
            "agentview": 1, "hand": 2,
        }  # fmt: skip
        assert seen.proprio.tolist() == [0.5, 0.25] and seen.instruction == "go"
    assert rows.camera_keys(spec) == {
        "agentview": "observation/image", "hand": "observation/wrist_image",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"observation/image": None}, "lacks the picture of camera top: .*observation/image"),
        (
            {"observation/image": np.zeros((8, 8, 3), np.uint8)},
            r"is uint8 \[8, 8, 3\]; this policy",
        ),
        ({"observation/image": np.zeros((16, 16, 3))}, "is float64"),
        ({"observation/image": "picture"}, "this policy was made for"),
        ({"observation/state": None}, "lacks the state: .* as 2 numbers"),
        ({"observation/state": np.zeros(3)}, "has 3 numbers; finite ones are needed of: x, y"),
        ({"observation/state": [0, np.nan]}, "finite"),
        ({"observation/state": ["a", "b"]}, "finite"),
        ({"prompt": None}, "instruction is 'None'"),
        ({"prompt": 3}, "instruction is '3'"),
        ({"prompt": "x" * 5000}, "instruction"),
    ],
)
def test_an_observation_of_another_robot_is_refused(changes, told):
    with pytest.raises(WireError, match=told):
        rows.read_row(row(**changes), SPEC)


def test_pictures_are_resized_as_openpis_clients_do_it():
    """Worked out: 20 by 10 pixels into 8 by 8 are 8 by 4, two rows of black above and below."""
    picture = np.full((10, 20, 3), 200, np.uint8)
    small = rows.padded(picture, 8)
    assert small.shape == (8, 8, 3)
    assert (small[2:6] == 200).all() and not small[:2].any() and not small[6:].any()
    assert rows.padded(picture, 0) is picture


# ------------------------------------------------------------------------------ one policy, served
def test_a_served_policy_acts_as_in_this_process(start):  # noqa: F811
    """Bit for bit: actions, what is meant of them, and log-probs; sampled and most likely."""
    config = compose([*TOY, f"checkpoint={start}"])
    policy = acting_policy(config, start, SPEC)
    with served(policy, rows=2) as url:  # so that a batch of three goes in two messages
        wire = remote(url)
        assert isinstance(wire, IsPolicy) and wire.chunk_length == policy.chunk_length
        for deterministic in (True, False):
            found = collected(wire, slots=2, deterministic=deterministic).trajectories
            wanted = collected(policy, slots=2, deterministic=deterministic).trajectories
            assert differences(found, wanted) == []
            assert found[0].behavior_log_prob.any()
        assert len(collected(wire, count=3, slots=3).trajectories) == 3


def test_those_who_wait_are_one_batch_and_each_gets_its_own(start):  # noqa: F811
    gate = threading.Event()
    policy = Seeker(gate)
    texts = ["the red spot please", "touch blue", "go to the red spot"]

    async def ask(session, url, text):
        async with session.ws_connect(url) as socket:
            await socket.receive_bytes()
            await socket.send_bytes(pack(row(prompt=text, **{rows.LOG_PROB: "red" in text})))
            return unpack(await socket.receive_bytes())

    async def everybody(url):
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(ask(session, url, text)) for text in ["go", *texts]]
            await asyncio.sleep(0.5)  # all but the first wait for it (fewer, on a busy machine)
            gate.set()
            return await asyncio.gather(*tasks)

    with served(policy) as url:
        answers = asyncio.run(everybody(url))
    assert sum(policy.batches) == 4 and max(policy.batches) > 1
    for text, answer in zip(["go", *texts], answers):
        assert np.array_equal(answer["actions"], chunk(*row(prompt=text).values()))
        assert answer["valid"].all() and ("log_prob" in answer) == ("red" in text)
        assert answer["server_timing"]["infer_ms"] >= 0


def test_metadata_say_who_and_which_robot(start):  # noqa: F811
    config = compose([*TOY, f"checkpoint={start}"])
    policy = acting_policy(config, start, SPEC)

    async def first(url):
        async with aiohttp.ClientSession() as session:
            async with session.get(url.replace("ws", "http") + "/healthz") as answer:
                assert (answer.status, await answer.text()) == (200, "OK\n")
            async with session.ws_connect(url) as socket:
                return unpack(await socket.receive_bytes())

    with served(policy) as url:
        about = asyncio.run(first(url))["vla_rl"]
    assert about["embodiment"] == json.loads(json.dumps(SPEC.to_dict()))
    assert about["protocol"] == rows.PROTOCOL and about["policy"] == "policy@0"
    assert about["log_prob_axes"] == list(policy.log_prob_axes)
    assert about["chunk_length"] == policy.chunk_length


def test_what_is_not_understood_is_answered_and_the_next_is_served():
    async def talk(url):
        told = []
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
            await socket.receive_bytes()
            await socket.send_str("hello")
            told.append(await socket.receive_str())
            for message in (b"\xc1", pack(row(**{rows.SEED: -1})), pack(row(**{rows.SAMPLE: 1}))):
                await socket.send_bytes(message)
                told.append(await socket.receive_str())
            await socket.send_bytes(pack({rows.ROWS: [row()] * 65}))
            told.append(await socket.receive_str())
            await socket.send_bytes(pack({rows.ROWS: [1]}))
            told.append(await socket.receive_str())
            await socket.send_bytes(pack(row()))
            assert unpack(await socket.receive_bytes())["actions"].shape == (STEPS, 2)
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
            await socket.receive_bytes()
            with contextlib.suppress(ConnectionError):  # the server ends it before all is sent
                await socket.send_bytes(b"\0" * 2**23)
            end = await socket.receive()
            assert end.type is not aiohttp.WSMsgType.BINARY
            assert end.data in (None, aiohttp.WSCloseCode.MESSAGE_TOO_BIG)
        return told

    with served(Seeker()) as url:
        told = asyncio.run(talk(url))
    wanted = [
        "is a text",
        "no msgpack",
        "vla_rl/seed is -1",
        "vla_rl/sample is 1",
        "1 to 64",
        "is a int",
    ]
    assert all(want in text for want, text in zip(wanted, told, strict=True)), told


def test_pages_and_more_than_there_is_room_for_are_refused():
    async def status(session, url, **headers):
        with pytest.raises(aiohttp.WSServerHandshakeError) as found:
            await session.ws_connect(url, headers=headers)
        return found.value.status

    async def talk(url):
        async with aiohttp.ClientSession() as session:
            assert await status(session, url, Origin="http://localhost") == 403
            async with session.get(url.replace("ws", "http")) as answer:
                assert answer.status == 426
            async with session.ws_connect(url):
                assert await status(session, url) == 503
            async with session.ws_connect(url) as socket:  # there is room again
                await socket.receive_bytes()

    with served(Seeker(), connections=1) as url:
        asyncio.run(talk(url))


def test_a_policy_that_fails_fails_one_client():
    class Failing(Seeker):
        def act(self, observation, **options):
            if observation.instruction == ("fail",):
                raise RuntimeError("out of memory\nmore")
            return super().act(observation, **options)

    with served(Failing()) as url:
        seen = Observation.blank(SPEC)
        bad = Observation(seen.images, seen.proprio, ("fail",))
        wire = remote(url)
        with pytest.raises(WireError, match=r"the policy failed: RuntimeError: out of memory$"):
            wire.act(bad)
        assert wire.act(seen).chunk.actions.shape == (1, STEPS, 2)


def test_who_remembers_cannot_be_served():
    with (
        pytest.raises(ConfigError, match=r"Stepwise remembers .* which episode it is of"),
        served(Stepwise(Seeker())),
    ):
        pass


# -------------------------------------------------------------------------------- anybody's server
def test_a_server_of_openpis_form_drives_an_evaluation_as_in_this_process():
    asked = []

    def answer(seen):
        asked.append(seen)
        return Policy().infer(seen)

    with speaking(answer) as url:
        wire = remote(url)
        found = collected(wire).trajectories
        assert wire.chunk_length == STEPS and wire.version.endswith("#openpi")
    assert differences(found, collected(Seeker()).trajectories) == []
    assert sum(t.success for t in found) > 0
    assert set(asked[-1]) == {"observation/image", "observation/state", "prompt"}


def test_names_and_size_are_those_that_the_server_wants():
    def answer(seen):
        assert seen["state"].shape == (2,) and "task" in seen
        assert seen["cam"].shape == (8, 8, 3), "as asked for"
        return {"actions": np.zeros((3, 2))}

    with speaking(answer) as url:
        wire = remote(url, images={"top": "cam"}, state="state", prompt="task", resize=8)
        assert wire.act(Observation.blank(SPEC)).chunk.actions.shape == (1, 3, 2)
        with pytest.raises(ConfigError, match="names the camera 'wrist', and the env shows top"):
            remote(url, images={"wrist": "cam"})


LIES = [
    (lambda seen: {"other": 1}, "answers without actions: it has other"),
    (lambda seen: {"actions": [[0.0, 0.0]]}, "answers without actions"),
    (lambda seen: {"actions": np.zeros((4, 7))}, "7 numbers for each step, .* takes 2: dx, dy"),
    (lambda seen: {"actions": np.zeros(2)}, r"actions \[2\], and \[steps, 2\] are needed"),
    (lambda seen: {"actions": np.zeros((0, 2))}, r"actions \[0, 2\]"),
    (lambda seen: {"actions": np.zeros((5000, 2))}, "5000 steps, of at most"),
    (lambda seen: {"actions": np.full((4, 2), np.nan)}, "not finite"),
    (lambda seen: b"\xc1", "another protocol than openpi's, asked for actions"),
    (lambda seen: "Traceback (most recent call last):\n  x\nKeyError: 'state'\n", "KeyError: 'state'$"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "told"), LIES, ids=[told for _, told in LIES])
def test_a_server_that_lies_is_one_clear_error(answer, told):
    with speaking(answer) as url, pytest.raises(UserError, match=told):
        remote(url)


def test_a_server_that_begins_to_lie_is_found_out():
    sizes = iter([4, 4, 3])
    with speaking(lambda seen: {"actions": np.zeros((next(sizes), 2))}) as url:
        wire = remote(url)
        wire.act(Observation.blank(SPEC))
        with pytest.raises(WireError, match=r"actions \[3, 2\], and \[4, 2\] are needed"):
            wire.act(Observation.blank(SPEC))


def about(**changes):
    own = {
        "protocol": 1, "version": "9.9", "policy": "x@1", "embodiment": SPEC.to_dict(),
        "chunk_length": STEPS, "executed_steps": STEPS, "rows": 64,
    }  # fmt: skip
    return {"vla_rl": own | changes}


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (about(protocol=2), "a vla-rl 9.9 that speaks version 2 of the wire, this one 1"),
        (
            about(embodiment=two_cameras().to_dict()),
            "embodiment of the env or robot here .*cameras",
        ),
        (about(embodiment={}), "describes no robot"),
        (about(chunk_length="four"), "chunk_length='four'"),
        (about(rows=0), "rows=0"),
        (b"\xc1", "another protocol than openpi's, asked on connect"),
        ("go away", "refuses, asked on connect: go away"),
    ],
)
def test_a_server_of_another_robot_version_or_protocol_is_refused(metadata, told):
    with (
        speaking(lambda seen: None, metadata) as url,
        pytest.raises(UserError, match=f"(?s){told}"),
    ):
        remote(url)


def test_where_nobody_answers_is_told():
    with pytest.raises(PolicyLost, match=r"ws://localhost:1 cannot be reached .* is the server up"):
        remote("ws://localhost:1", reconnect=0.0)
    with speaking(lambda seen: None, Silent) as url:
        with pytest.raises(PolicyLost, match=r"did not answer within 0.5 s"):
            remote(url, timeout=0.5, reconnect=0.0)
        with pytest.raises(WireError, match=r"no policy server of openpi's protocol: .* HTTP 404"):
            remote(f"{url}/elsewhere", reconnect=0.0)
    for url in ("ws://", "ws://[", "ws://local host:1"):
        with pytest.raises(UserError, match=r"no address|cannot be reached"):
            remote(url, reconnect=0.0)


# ------------------------------------------------------------------------------------ what is lost
def test_an_evaluation_whose_connection_is_lost_runs_its_episodes_anew():
    """Each third message closes the connection. What comes out is what an undisturbed one
    brings."""
    count = iter(range(10**6))

    def answer(seen):
        return None if next(count) % 7 == 6 else Policy().infer(seen)

    with speaking(answer) as url:
        wire = remote(url)
        config = RolloutConfig(serve_fraction=1.0, max_retries=50)
        engine = RolloutEngine(InlineEnv(ToyReach(), num_slots=1), wire, config)
        found = engine.collect(specs(4))
    assert found.stats["retries"] > 0
    assert differences(found.trajectories, collected(Seeker(), 4).trajectories) == []


def test_a_server_that_comes_back_is_waited_for_and_must_be_the_same():
    with speaking(Policy().infer) as url:
        wire = remote(url)
        port = int(url.rpartition(":")[2])
    seen = Observation.blank(SPEC)
    with pytest.raises(PolicyLost, match="went away"):
        wire.act(seen)
    with speaking(Policy().infer, port=port):
        assert wire.act(seen).chunk.actions.shape == (1, STEPS, 2)
    with pytest.raises(PolicyLost):
        wire.act(seen)
    with (
        speaking(Policy().infer, about(), port=port),
        pytest.raises(WireError, match="another policy now: x@1"),
    ):
        wire.act(seen)


def test_a_server_that_is_gone_ends_an_evaluation_with_its_name():
    with speaking(Policy().infer) as url:
        wire = remote(url, reconnect=0.3)
    with pytest.raises(UserError, match=f"failed 3 times .* Last error: {url} cannot be reached"):
        collected(wire)


def test_a_slow_server_ends_an_evaluation_with_its_name():
    calls = iter(range(10**6))

    def answer(seen):
        if next(calls):
            time.sleep(2.0)
        return Policy().infer(seen)

    with speaking(answer) as url, pytest.raises(UserError, match=r"did not answer within 0.2 s"):
        collected(remote(url, timeout=0.2), count=1, slots=1)


# ------------------------------------------------------------------------------------------ an arm
POINT = BodyConfig(
    limits=str(LIMITS / "fake_point.yaml"),
    camera_hz=20.0,
    supervisor={"required": ["guard", "recorder"], "cameras": ["front"]},
)


def test_a_session_whose_policy_is_lost_holds_still_and_goes_on(tmp_path):
    """The server is gone at the third decision and back, at the same port, a hundred later."""
    arm, asked, servers = Lockstep(tmp_path / "session", POINT), [], contextlib.ExitStack()
    policy = Mover(arm.robot.embodiment)
    url = servers.enter_context(served(policy))
    decide, version = load(url, arm.robot.embodiment, True)

    def watched(images, proprio, *more):
        if len(asked) == 2:
            servers.close()
        if len(asked) == 102:
            servers.enter_context(served(policy, port=int(url.rpartition(":")[2])))
        asked.append((proprio.copy(), decide(images, proprio, *more)))
        return asked[-1][1]

    try:
        plan = Plan((Task("raise", "raise the point", horizon=400),), 2, alone=True)
        done = arm.run(plan, watched, version, ActingConfig(), lambda outcome: None)
    finally:
        arm.close()
        servers.close()
    silent = [i for i, (_, answer) in enumerate(asked) if answer is None]
    assert silent == list(range(2, 102))
    places = np.stack([asked[i][0] for i in silent])
    assert (places[-1, 2] - places[0, 2]) < 0.04  # m: to the end of the chunk before, no further
    np.testing.assert_allclose(places[50:], places[50:51].repeat(50, 0), atol=1e-4)
    assert [o.success for o in done.outcomes] == [True, True]
    assert version == f"{url}#policy@0"


def test_a_session_asks_for_no_checkpoint_where_a_policy_is_served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served(Mover(PointWorld().embodiment)) as url:
        told: list[str] = []
        chosen = ["robot=fake", f"checkpoint={url}", "name=s", "device=cpu"]
        run(robot_settings(chosen), SessionRequest(1, console=False, lockstep=True), told.append)
        assert any("1 of 1 episodes succeeded" in text for text in told)
    with served(Seeker()) as url, pytest.raises(EmbodimentMismatch, match="robot here"):
        chosen = ["robot=fake", f"checkpoint={url}", "name=t"]
        run(robot_settings(chosen), SessionRequest(1, console=False, lockstep=True), told.append)


# ----------------------------------------------------------------------------------- the command
# line
@contextlib.contextmanager
def serving(*arguments):
    """`vla-rl serve` in a process of its own, until Ctrl-C, with what it said."""
    command = [sys.executable, "-m", "vla_rl", "serve", *map(str, arguments), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            assert line.startswith("serving"), line
            yield re.search(r"ws://localhost:\d+", line)[0], server
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(240) == 0, "Ctrl-C is how it ends"


def test_eval_judges_a_served_policy_as_the_checkpoint_itself(start, tmp_path, capfd):  # noqa: F811
    given = ["--suite=toy", "--episodes=8", "slots.workers=0", "rollout.serve_fraction=1"]

    def judged(name, *arguments):
        assert main(["eval", *arguments, *given, f"--json={tmp_path / name}"]) == 0
        return json.loads((tmp_path / name).read_text())

    with serving(start) as (url, _):
        wanted = judged("own", str(start), "--compare", url)
        own, other = wanted["results"]
        assert own["outcomes"] == other["outcomes"]
        for name, how in {
            "address": [url],
            "named": ["policy=remote", f"policy.url={url}"],
        }.items():
            assert judged(name, *how)["outcomes"] == own["outcomes"]
    capfd.readouterr()
    for how, told in {
        "ws://localhost:1": "ws://localhost:1 cannot be reached",
        "policy=remote": "policy=remote: name a checkpoint before it, or a served policy with",
        "policy.url=x": "policy.url",
    }.items():
        assert main(["eval", how, *given]) == 2
        assert told in capfd.readouterr().err


def test_serve_says_what_it_cannot_do(start, tmp_path, capfd):  # noqa: F811
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(start), f"--port={port}"]) == 2
    assert f"port {port} is taken" in capfd.readouterr().err
    for arguments, told in [
        ([str(tmp_path / "none")], "there is no checkpoint at"),
        ([str(start), "--port=70000"], "--port 70000"),
        ([str(start), "--host=no.such.host.here"], "--host no.such.host.here"),
    ]:
        assert main(["serve", *arguments]) == 2
        assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"url": "localhost:8000"}, "is no address of a server"),
        ({"timeout": 0.0}, "policy.timeout=0.0"),
        ({"reconnect": -1.0}, "policy.reconnect=-1.0"),
        ({"resize": -1}, "policy.resize=-1"),
        ({"state": ""}, "none may be empty"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        RemoteConfig(**changes)


def test_a_served_policy_cannot_be_trained(tmp_path, capfd):
    for phases in ("collect,sft", "collect,sft,rl"):
        options = [f"phases=[{phases}]", "policy=remote", "policy.url=ws://localhost:1"]
        assert main(["train", "run=toy", f"output_dir={tmp_path}", *options]) == 2
        assert "policy.type=remote" in capfd.readouterr().err


def test_a_served_policy_demonstrates(tmp_path):
    with speaking(Policy().infer) as url:
        config = compose(
            [
                "run=toy",
                "phases=[collect]",
                f"collect.policy={url}",
                "collect.episodes_per_task=2",
                "sft.validation_episodes=0",
                "slots.workers=0",
                f"output_dir={tmp_path}",
            ]
        )
        folder = run_pipeline(config)
    found = json.loads((folder / "phases.json").read_text())["collect"]
    assert found["episodes"] == 2


@pytest.mark.real_time
def test_the_processes_of_a_session_ask_a_served_policy(tmp_path, monkeypatch, capsys):
    from test_robot_session import unhurried

    monkeypatch.chdir(tmp_path)
    with served(Mover(PointWorld().embodiment)) as url:
        chosen = ["--episodes", "1", "robot=fake", f"checkpoint={url}", "device=cpu", "threads=1"]
        chosen += ["robot.supervisor.silence_s=0.3", "robot.supervisor.frame_age_s=2.0"]
        _, said = unhurried(capsys, lambda i: ["robot", "run", "--headless", *chosen, f"name=s{i}"])
    assert f"loading {url}" in said.splitlines()
    assert "1 of 1 episodes succeeded" in said
