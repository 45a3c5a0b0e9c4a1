"""Metrics besides metrics.jsonl: CSV, TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import json
import math
import socket
import sys
import types
import urllib.request

import pytest

from vla_rl.checks import preflight
from vla_rl.config import compose
from vla_rl.config.run import WandbConfig
from vla_rl.errors import ConfigError, MissingPackage
from vla_rl.monitoring import sinks as module
from vla_rl.monitoring.metrics import MetricsLogger
from vla_rl.monitoring.sinks import sinks, wandb_mode

REACHABLE = module.reachable


def logger(folder, say=print, name="toy", tensorboard=False, tree=None, **wandb):
    return MetricsLogger(
        folder,
        sinks(folder, name, WandbConfig(**{"mode": "off", **wandb}), tensorboard, tree or {}, say),
    )


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------- CSV
def test_csv_has_a_row_per_step_and_grows_columns(tmp_path):
    with logger(tmp_path) as log:
        log.log("sft", 10, {"sft/loss": 2.5})
        log.log("rl", 1, {"rollout/success": 0.25, "ppo/kl": math.nan})
        log.log("rl", 2, {"rollout/success": 0.5, "eval/success": 0.75})
        # while it goes
        assert [r["step"] for r in table(tmp_path / "metrics_rl.csv")] == ["1", "2"]
    assert [(r["step"], r["sft/loss"]) for r in table(tmp_path / "metrics_sft.csv")] == [
        ("10", "2.5")
    ]
    rows = table(tmp_path / "metrics_rl.csv")
    assert (
        [r["eval/success"] for r in rows] == ["", "0.75"]
        and rows[0]["ppo/kl"] == ""
        and "phase" not in rows[0]
    )


def test_a_resumed_run_has_no_step_twice(tmp_path):
    with logger(tmp_path) as log:
        for step in (1, 2, 3):
            log.log("rl", step, {"x": float(step)})
    with logger(tmp_path) as log:
        log.log("rl", 3, {"x": 30.0})
    assert [(r["step"], r["x"]) for r in table(tmp_path / "metrics_rl.csv")] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "30.0"),
    ]


def test_a_run_that_logs_nothing_opens_nothing(tmp_path, fake_wandb):
    with logger(tmp_path, mode="auto"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"] and fake_wandb.init == []


# -------------------------------------------------------------------------------------- TensorBoard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_events_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with logger(tmp_path, tensorboard=True) as log:
        log.log("sft", 10, {"sft/loss": 2.5})
        log.log("rl", 1, {"rollout/success": 0.25, "guard": math.inf})
        log.log("rl", 2, {"rollout/success": 0.5})
    with logger(tmp_path, tensorboard=True) as log:
        log.log("rl", 2, {"rollout/success": 0.625})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"sft/loss", "rollout/success", "rl/time_s"} == set(events.Tags()["scalars"]) - {
        "sft/time_s"
    }
    assert [(e.step, e.value) for e in events.Scalars("rollout/success")] == [(1, 0.25), (2, 0.625)]


def test_tensorboard_that_is_asked_for_and_missing_is_named_at_once(tmp_path, monkeypatch):
    """Before the run begins; wandb only where its mode is chosen and nothing switches it off."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"tensorboard=true.*\[tensorboard\]"):
        preflight.check(compose(["run=toy", "tensorboard=true", f"output_dir={tmp_path}"]))
    with pytest.raises(MissingPackage, match=r"wandb.mode=offline.*\[wandb\]"):
        preflight.check(compose(["run=toy", "wandb.mode=offline", f"output_dir={tmp_path}"]))
    preflight.check(compose(["run=toy", "wandb=true", f"output_dir={tmp_path}"]))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    preflight.check(compose(["run=toy", "wandb.mode=online", f"output_dir={tmp_path}"]))


# -------------------------------------------------------------------------------------------- wandb
@pytest.fixture
def fake_wandb(monkeypatch, tmp_path):
    calls = types.SimpleNamespace(init=[], logged=[], axes={}, finished=0, broken=False, refuses="")

    class Run:
        url, dir = "https://wandb.example/run", "/runs/wandb/offline-run-1/files"

        def __init__(self, keywords):
            self.id = keywords["id"] or f"id{len(calls.init)}"

        def define_metric(self, name, step_metric):
            calls.axes[name] = step_metric

        def log(self, values):
            if calls.broken:
                raise ConnectionError("gone")
            calls.logged.append(values)

        def finish(self):
            calls.finished += 1

    def init(**keywords):
        if calls.refuses:
            raise ConnectionError(calls.refuses)
        calls.init.append(keywords)
        return Run(keywords)

    fake = types.SimpleNamespace(
        init=init,
        Settings=lambda **k: k,
        Video=lambda path, format: ("video", path),
        __spec__=object(),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(module, "reachable", lambda: True)
    return calls


def test_wandb_is_offline_unless_logged_in(tmp_path, monkeypatch, fake_wandb):
    netrc = tmp_path / "netrc"
    assert wandb_mode() == "offline"
    assert wandb_mode("online") == "offline"  # it would ask who is there
    netrc.write_text("machine example.org login a password b\n")
    assert wandb_mode() == "offline"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert wandb_mode() == "online" and wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    netrc.unlink()
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert wandb_mode("online") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said = []
    with logger(tmp_path / "off", said.append, mode="auto") as log:
        log.log("rl", 1, {"x": 1.0})
    assert fake_wandb.init == [] and said == ["wandb: disabled by WANDB_MODE"]


def test_wandb_gets_config_metrics_over_iterations_and_videos(tmp_path, fake_wandb):
    said = []
    tree = {"seed": 3, "policy": {"type": "nano_vla"}}
    options = {"mode": "auto", "project": "arms", "entity": "lab", "tags": ["a", "b"]}
    with logger(tmp_path, said.append, "study/seed_1", tree=tree, **options) as log:
        log.log("sft", 10, {"sft/loss": 2.5})
        log.log("rl", 4, {"ppo/kl": 0.1, "x": math.nan, "episodes": 256})
        log.log("eval", 20, {"eval_rl/success": 0.5})
        log.video("eval", 20, tmp_path / "rl.mp4")
    [given] = fake_wandb.init
    assert (
        given["mode"] == "offline" and given["name"] == "study/seed_1" and given["config"] == tree
    )
    assert (given["project"], given["entity"], given["tags"]) == ("arms", "lab", ["a", "b"])
    assert said == [
        "wandb: offline, as nobody is logged in; to send it later: wandb sync "
        "/runs/wandb/offline-run-1"
    ]
    sft, rl, end, video = fake_wandb.logged
    assert sft["sft/loss"] == 2.5 and sft["sft/update"] == 10
    assert (
        rl["rl/iteration"] == 4
        and rl["ppo/kl"] == 0.1
        and rl["rl/episodes"] == 256
        and "rl/x" not in rl
    )
    assert end == {"eval_rl/success": 0.5, "rl/iteration": 20, "eval/time_s": end["eval/time_s"]}
    assert video == {"videos/rl": ("video", str(tmp_path / "rl.mp4")), "rl/iteration": 20}
    assert fake_wandb.axes["sft/loss"] == "sft/update"
    assert {fake_wandb.axes[name] for name in ("ppo/kl", "eval_rl/success", "videos/rl")} == {
        "rl/iteration"
    }
    assert fake_wandb.finished == 1


def test_a_broken_connection_ends_wandb_and_not_the_run(tmp_path, fake_wandb, caplog):
    with logger(tmp_path, mode="auto") as log:
        log.log("rl", 1, {"ppo/kl": 0.1})
        fake_wandb.broken = True
        log.log("rl", 2, {"ppo/kl": 0.2})
        log.log("rl", 3, {"ppo/kl": 0.3})
    assert len(fake_wandb.logged) == 1 and "gone" in caplog.text
    assert [r["step"] for r in table(tmp_path / "metrics_rl.csv")] == ["1", "2", "3"]
    said = []
    fake_wandb.refuses = "no such\nhost"
    with logger(tmp_path / "other", said.append, mode="auto") as log:
        log.log("rl", 1, {"ppo/kl": 0.1})
    assert said == ["wandb: could not start (no such host); metrics stay in the run folder"]


def test_an_online_run_is_resumed_and_a_copy_of_it_is_not(tmp_path, monkeypatch, fake_wandb):
    monkeypatch.setenv("WANDB_API_KEY", "key")
    for step in (1, 2):
        with logger(tmp_path, mode="auto", name="one") as log:
            log.log("rl", step, {"x": 1.0})
    first, second = fake_wandb.init
    assert first["id"] is None and (second["id"], second["resume"]) == ("id1", "allow")
    # what the server has is not sent again
    assert [v["rl/iteration"] for v in fake_wandb.logged] == [1, 2]
    fake_wandb.logged.clear()
    with logger(tmp_path, mode="auto", name="copy") as log:
        log.log("rl", 3, {"x": 1.0})
    assert fake_wandb.init[2]["id"] is None and [v["rl/iteration"] for v in fake_wandb.logged] == [
        1,
        2,
        3,
    ]
    assert json.loads((tmp_path / "wandb.json").read_text())["run"] == "copy"


def test_a_server_that_cannot_be_reached_is_not_waited_for(tmp_path, monkeypatch, fake_wandb):
    with socket.socket() as taken:  # a port on which nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("WANDB_API_KEY", "key")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{address}")
        monkeypatch.setattr(urllib.request, "getproxies", dict)
        monkeypatch.setattr(module, "reachable", REACHABLE)
        said = []
        with logger(tmp_path, said.append, mode="online") as log:
            log.log("rl", 1, {"x": 1.0})
        assert fake_wandb.init[0]["mode"] == "offline"
        assert said[0].startswith(f"wandb: offline, as {address} cannot be reached")
        taken.listen()
        assert REACHABLE()


def test_wandb_that_is_not_installed_is_said_once(tmp_path, monkeypatch, fake_wandb):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    said = []
    with logger(tmp_path, said.append, mode="auto") as log:
        log.log("rl", 1, {"x": 1.0})
        log.log("rl", 2, {"x": 1.0})
    assert said == ["wandb: not installed, so metrics stay in the run folder"]


@pytest.mark.parametrize(
    ("overrides", "mode", "project"),
    [
        ([], "auto", "vla-rl"),
        (["wandb=false"], "off", "vla-rl"),
        (["wandb=true"], "auto", "vla-rl"),
        (["wandb=off", "wandb.project=x"], "off", "x"),
        (["wandb.project=x", "wandb=offline"], "offline", "x"),
        (["run=toy", "wandb.project=x"], "off", "x"),
        (["run=toy", "wandb=true"], "auto", "vla-rl"),
    ],
)
def test_what_users_type(overrides, mode, project):
    wandb = compose(overrides).wandb
    assert (wandb.mode, wandb.project) == (mode, project)


def test_an_unknown_mode_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"wandb.*'sometimes'.*auto, online, offline, off"):
        compose(["wandb=sometimes"])
