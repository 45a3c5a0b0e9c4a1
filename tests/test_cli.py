"""The command line: help, exit statuses, messages without tracebacks, and the commands on a toy
checkpoint."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import vla_rl
from vla_rl import cli
from vla_rl.assembly.sources import load_source
from vla_rl.errors import UserError
from vla_rl.run import pipeline

TOY = ["run=toy", "slots.slots_per_worker=4"]
SMALL = [
    "collect.episodes_per_task=2",
    "sft.updates=4",
    "phases=[collect,sft,eval_sft]",
    "evaluate.episodes_per_task=2",
]


@pytest.fixture(scope="module")
def run_folder(finished_run) -> Path:
    """A toy run of SFT alone, on a handful of demonstrations."""
    return finished_run(*TOY, *SMALL)


@pytest.fixture(scope="module")
def checkpoint(run_folder) -> Path:
    return run_folder / "checkpoints" / "sft"


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that must fail with status 2 writes to standard error."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err + captured.out
    return captured.err


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What argparse writes about arguments that do not fit."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    "command", [[], ["quickstart"], ["train"], ["eval"], ["bench", "sim"], ["doctor"], ["report"]]
)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: vla-rl{''.join(f' {c}' for c in command)}")
    if not command:
        assert all(
            name in text for name in ("quickstart", "train", "eval", "report", "bench", "doctor")
        )


def test_the_package_runs_as_a_module_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vla_rl", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("vla_rl", run_name="__main__")
    assert caught.value.code == 0 and capsys.readouterr().out == f"vla-rl {vla_rl.__version__}\n"


def test_without_a_command_it_helps_and_fails(capsys):
    assert cli.main([]) == 2
    assert "quickstart" in capsys.readouterr().out


def test_unknown_command_lists_the_commands(capsys):
    text = rejected(capsys, "trian")
    assert "'trian'" in text and "train" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bench"], "KIND"),
        (["bench", "nothing"], "invalid choice: 'nothing'"),
        (["bench", "sim", "--steps", "many"], "invalid int value: 'many'"),
        (["bench", "sim", "--look", "pretty"], "invalid choice: 'pretty'"),
        (["eval"], "checkpoint"),
        (["eval", "x", "--split", "test"], "invalid choice: 'test'"),
        (["train", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["report"], "run"),
    ],
)
def test_arguments_that_do_not_fit(capsys, arguments, part):
    assert part in rejected(capsys, *arguments)


def test_bench_names_the_suites_it_knows(capsys):
    text = failure(capsys, "bench", "sim", "--suite", "toy")
    assert "--suite toy has no benchmark. Choose one of dualarm, libero, libero_10, " in text
    assert text.endswith("robotwin, tabletop\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["slots.workers=1"], "slots.workers=1: the benchmark of tabletop takes no key=value"),
        (
            ["--suite", "dualarm", "--look", "full"],
            "--look full: say it with env.look=... for --suite dualarm",
        ),
        (["--suite", "dualarm", "env.observe=state"], "set env.observe=pictures"),
        (
            ["--suite", "dualarm", "--chunk", "9", "--steps", "3"],
            "--steps of at least a chunk, got 9 and 3",
        ),
        (["--suite", "robotwin"], "RoboTwin needs env.root=FOLDER"),
    ],
)
def test_a_benchmark_says_which_options_it_takes(capsys, arguments, part):
    assert part in failure(capsys, "bench", "sim", *arguments)


def test_bench_policy_names_the_presets_it_knows(capsys):
    text = failure(capsys, "bench", "policy", "--preset", "huge")
    assert "'huge'" in text and "nano" in text


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "run=nothing"], ["run=nothing does not exist", "quickstart"]),
        (["train", "sede=1"], ["'sede'", "'seed'"]),
        (["train", "rl.iterations=x"], ["rl.iterations", "'x'"]),
        (["quickstart", "algorithm.advantage=x"], ["advantage='x'"]),
        (["eval", "no/such/checkpoint", "--suite", "toy"], ["no checkpoint at no/such/checkpoint"]),
        (["report", "no/such/run"], ["no/such/run"]),
        (["train", "run=toy", "name="], ["name=''", "study/seed_1"]),
        (["train", "run=toy", "name=../x", "--fresh"], ["name='../x'"]),
        (["train", "run=toy", "name=/x"], ["name='/x'"]),
        (["train", "run=toy", "rl.eval_every=-1"], ["rl.eval_every=-1", "0 or more"]),
        (["train", "run=toy", "threads=-1"], ["threads=-1"]),
        (["train", "run=toy", "threads=100000"], ["threads=100000 is more than the", "threads=0"]),
        (["eval", "x", "--suite", "toy", "--episodes", "0"], ["--episodes 0: give 1 or more"]),
        (["eval", "x", "--suite", "toy", "--episodes-per-task", "-5"], ["--episodes-per-task -5"]),
        (
            ["eval", "x", "--suite", "tabletop", "--tasks", "lift_red,lift_blue"],
            ["'lift_blue'", "lift_green"],
        ),
        (
            ["eval", "x", "--suite", "dualarm", "--tasks", "ring_red", "ring"],
            ["'ring'", "ring_blue"],
        ),
    ],
)
def test_user_errors_are_one_message_with_status_2(arguments, parts, capsys):
    text = failure(capsys, *arguments)
    assert all(part in text for part in parts), text


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run_pipeline", interrupted)
    assert cli.main(["train", "run=toy"]) == 130
    assert "the same command resumes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_has_gone_ends_a_command_quietly():
    """``vla-rl ... | head``; through a socket too. Where there is no output at all, nobody was
    to read it."""
    command = [sys.executable, "-m", "vla_rl", "train", "run=toy", "--dry-run"]
    read, write = os.pipe()
    os.close(read)
    ours, theirs = socket.socketpair()
    ours.close()
    for output in (write, theirs.fileno()):
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE)
        assert done.returncode == 141 and done.stderr == b""
    os.close(write)
    theirs.close()
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE)
    assert closed.returncode == 0 and closed.stderr == b""


def test_a_device_is_no_place_for_a_file(tmp_path, capsys):
    """What is written is renamed to its name, which would take the device's place."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        assert (
            f"--json {place}" in (said := failure(capsys, "doctor", "--json", str(place)))
            and "Name a file" in said
        )


def test_a_programming_error_is_not_hidden(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "run_pipeline", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "run=toy"])


# ----------------------------------------------------------------------------------------- commands
@pytest.fixture
def composed(monkeypatch) -> list:
    """Configs and ``fresh`` flags that commands hand to the pipeline, which does not run."""
    calls: list = []

    def record(config, *, fresh=False):
        calls.append((config, fresh))
        return config.run_dir

    monkeypatch.setattr(pipeline, "run_pipeline", record)
    return calls


def test_train_hands_over_the_composed_config(composed, capsys):
    assert cli.main(["train", "run=toy", "--fresh", "seed=3", "rl.iterations=2"]) == 0
    config, fresh = composed[0]
    assert (config.name, config.seed, config.rl.iterations, fresh) == ("toy", 3, 2, True)
    assert "report.html" in capsys.readouterr().out


def test_collect_runs_that_phase_alone(composed, capsys):
    assert cli.main(["collect", "run=toy"]) == 0
    assert composed[0][0].phases == ["collect"] and "dataset" in capsys.readouterr().out


def test_threads_wait_briefly_unless_the_user_says_otherwise(composed, monkeypatch):
    """Of torch's, which is imported later."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    cli.main(["train", "run=toy"])
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    cli.main(["train", "run=toy"])
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    cli.main(["train", "run=toy"])
    assert "GOMP_SPINCOUNT" not in os.environ


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"vla-rl {vla_rl.__version__}\n"


def test_a_dry_run_prints_config_and_plan_and_writes_nothing(
    run_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *TOY, "rl.iterations=7", "--dry-run"]) == 0
    text = capsys.readouterr().out
    tree = yaml.safe_load(text.partition("\nwould ")[0])
    assert tree["rl"]["iterations"] == 7 and tree["policy"]["type"] == "nano_vla"
    assert (
        "would write to outputs/toy:" in text
        and "complete" not in text
        and "  rl        online RL" in text
    )
    here = [f"output_dir={run_folder.parent}", *SMALL]
    assert cli.main(["train", *TOY, *here, "phases=[collect,sft,rl]", "--dry-run"]) == 0
    assert "  sft       complete, skipped\n  rl        online RL" in capsys.readouterr().out
    assert "another config" in failure(capsys, "train", *TOY, *here, "seed=4", "--dry-run")
    assert cli.main(["train", *TOY, *here, "seed=4", "--fresh", "--dry-run"]) == 0
    assert "start over" in capsys.readouterr().out and (run_folder / "checkpoints" / "sft").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_quickstart_seeds_get_a_folder_each(composed):
    assert cli.main(["quickstart", "rl.iterations=1", "--seeds", "0", "1", "2"]) == 0
    assert [config.seed for config, _ in composed] == [0, 1, 2]
    assert len({config.run_dir for config, _ in composed}) == 3
    assert cli.main(["quickstart"]) == 0
    assert composed[-1][0].name == "quickstart"


def test_eval_writes_the_result_as_json(checkpoint, tmp_path, capsys):
    target = tmp_path / "new" / "result.json"
    status = cli.main(
        [
            "eval",
            str(checkpoint),
            "--suite",
            "toy",
            "--episodes",
            "6",
            "--json",
            str(target),
            "slots.workers=0",
        ]
    )
    assert status == 0
    document = json.loads(target.read_text())
    assert document["total"]["episodes"] == 6 and set(document["tasks"]) == {
        "reach_red",
        "reach_blue",
    }
    assert document["split"] == "held_out" and document["deterministic"] is True
    text = capsys.readouterr().out
    assert "reach_red" in text and "95 % interval" in text and str(target) in text


def test_tasks_stand_apart_or_are_joined_by_commas(checkpoint, tmp_path):
    for tasks in (
        ["reach_red,reach_blue"],
        ["reach_red", "reach_blue"],
        ["reach_red,", "reach_blue"],
    ):
        target = tmp_path / "result.json"
        given = [
            "eval",
            str(checkpoint),
            "--suite",
            "toy",
            "--episodes",
            "2",
            "--json",
            str(target),
            "slots.workers=0",
        ]
        assert cli.main([*given, "--tasks", *tasks]) == 0
        assert set(json.loads(target.read_text())["tasks"]) == {"reach_red", "reach_blue"}
        target.unlink()


def test_eval_takes_the_env_that_the_run_recorded(checkpoint, tmp_path, capsys):
    """No suite named: the toy env of the checkpoint's own run, not the default suite."""
    target = tmp_path / "result.json"
    assert (
        cli.main(
            ["eval", str(checkpoint), "--episodes", "2", "--json", str(target), "env.horizon=5"]
        )
        == 0
    )
    document = json.loads(target.read_text())
    assert set(document["tasks"]) == {"reach_red"}  # that run's
    assert max(o["control_steps"] for o in document["outcomes"]) <= 5
    assert document["conditions"] == "picture of 16 px, at most 5 control steps"
    assert f"conditions: {document['conditions']}" in capsys.readouterr().out


def test_eval_of_a_runs_checkpoint_measures_what_its_report_measures(
    run_folder, checkpoint, tmp_path
):
    """The toy run evaluates one task of two, two episodes, sampled."""
    target = tmp_path / "again.json"
    assert cli.main(["eval", str(checkpoint), "--json", str(target)]) == 0
    again, reported = (
        json.loads(target.read_text()),
        json.loads((run_folder / "eval_sft.json").read_text()),
    )
    assert again["outcomes"] == reported["outcomes"] and again["deterministic"] is False
    assert (
        cli.main(["eval", str(checkpoint), "--no-sample", "--episodes", "1", "--json", str(target)])
        == 0
    )
    other = json.loads(target.read_text())
    assert other["deterministic"] is True and other["total"]["episodes"] == 1


def test_a_checkpoint_that_diverged_is_no_ordinary_failure(checkpoint, tmp_path, capsys):
    import shutil

    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["action_head.bias"][1] = float("nan")
    save_file(weights, broken / "model.safetensors")
    message = failure(
        capsys, "eval", str(broken), "--suite", "toy", "--episodes", "2", "slots.workers=0"
    )
    assert (
        "action_head.bias" in message and "not finite" in message and "broken.last_good" in message
    )


def test_eval_compares_two_checkpoints_on_the_same_episodes(checkpoint, tmp_path, capsys):
    target = tmp_path / "result.json"
    arguments = [
        "--suite",
        "toy",
        "--tasks",
        "reach_red",
        "--split",
        "train",
        "--sample",
        "--episodes",
        "4",
    ]
    same = [
        "eval",
        str(checkpoint),
        "slots.workers=0",
        "--compare",
        str(checkpoint),
        "--json",
        str(target),
        *arguments,
    ]
    assert cli.main(same) == 0
    document = json.loads(target.read_text())
    first, second = document["results"]
    assert first["outcomes"] == second["outcomes"] and len(first["outcomes"]) == 4
    assert (first["split"], first["deterministic"]) == ("train", False)
    assert document["comparison"]["trials"] == 4 and document["comparison"]["difference"] == 0.0
    assert "same 4 episodes" in capsys.readouterr().out


def test_eval_takes_the_episodes_of_a_task_as_a_key_too(checkpoint, tmp_path):
    words = ["--suite", "toy", "--tasks", "reach_red", "--json", str(tmp_path / "result.json")]
    assert cli.main(["eval", str(checkpoint), *words, "evaluate.episodes_per_task=3"]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["total"]["episodes"] == 3


def test_a_checkpoint_outside_of_its_run_is_of_a_suite_that_is_named(
    checkpoint, tmp_path, capsys, monkeypatch
):
    """Nothing says which env it is of; the default is another one's."""
    from vla_rl.errors import EmbodimentMismatch
    from vla_rl.run import evaluate_checkpoints as checkpoints

    def differs(*_, **__):
        raise EmbodimentMismatch("the robots differ")

    monkeypatch.setattr(checkpoints, "evaluate_checkpoints", differs)
    lone = shutil.copytree(checkpoint, tmp_path / "lone")
    assert (
        "the robots differ\n" in (said := failure(capsys, "eval", str(lone)))
        and "--suite ENV" in said
    )
    assert "--suite" not in failure(capsys, "eval", str(lone), "--suite", "toy")
    assert "--suite" not in failure(capsys, "eval", str(checkpoint))


def test_a_video_that_is_asked_for_is_written_whatever_the_run_kept(checkpoint, tmp_path):
    pytest.importorskip("av")
    words = ["--episodes", "2", "--video", str(tmp_path / "grid.mp4"), "evaluate.video_episodes=0"]
    assert cli.main(["eval", str(checkpoint), *words]) == 0
    assert (tmp_path / "grid.mp4").read_bytes()[4:8] == b"ftyp"


def test_eval_writes_a_video(checkpoint, tmp_path):
    pytest.importorskip("av")
    target = tmp_path / "grid.mp4"
    arguments = ["--suite", "toy", "--episodes", "2", "--video", str(target), "slots.workers=0"]
    assert cli.main(["eval", str(checkpoint), *arguments]) == 0
    assert target.read_bytes()[4:8] == b"ftyp"
    # it was trained for two updates
    assert (tmp_path / "grid_failure_never_reached.mp4").read_bytes()[4:8] == b"ftyp"


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (["--suite", "toy", "env.image_size=12"], "height=12"),
        (["--suite", "toy", "--tasks", "reach_green"], "reach_blue, reach_red"),
        (
            ["--suite", "marble"],
            "--suite marble does not exist. Choose one of dataset, dualarm, gym, lerobot, libero, libero_10",
        ),
        (["env=toy", "--tasks", "reach_green"], "reach_blue, reach_red"),
    ],
)
def test_eval_names_what_does_not_fit(checkpoint, capsys, extra, part):
    assert part in failure(capsys, "eval", str(checkpoint), "slots.workers=0", *extra)


def test_report_command(run_folder, capsys):
    (run_folder / "report.html").unlink()
    assert cli.main(["report", str(run_folder)]) == 0
    assert (run_folder / "report.html").is_file() and "report.html" in capsys.readouterr().out


def test_report_compares_runs_that_are_named(run_folder, tmp_path, capsys):
    a, b = (Path(shutil.copytree(run_folder, tmp_path / name)) for name in ("a", "b"))
    assert cli.main(["report", str(a), str(b)]) == 0
    page = tmp_path / "comparison" / "report.html"
    assert str(page) in capsys.readouterr().out and "../a/report.html" in page.read_text()
    assert len(json.loads((tmp_path / "comparison" / "summary.json").read_text())["runs"]) == 2
    assert cli.main(["report", str(a), str(b), str(a), "--out", str(tmp_path / "c")]) == 0
    assert len(json.loads((tmp_path / "c" / "summary.json").read_text())["runs"]) == 2
    assert "is a run" in failure(capsys, "report", str(a), str(b), "--out", str(a))
    assert "several runs" in failure(capsys, "report", str(a), "--out", str(b))


def test_rerun_shows_every_control_step_of_a_dataset(run_folder, tmp_path, capsys):
    rerun = pytest.importorskip("rerun")
    target = tmp_path / "new" / "data.rrd"
    assert cli.main(["export-rerun", str(run_folder / "dataset"), str(target), "--limit", "2"]) == 0
    assert f"wrote {target}" in capsys.readouterr().out and [
        p.name for p in target.parent.iterdir()
    ] == ["data.rrd"]
    episodes = load_source(run_folder / "dataset", stride=1, limit=2).trajectories
    view = rerun.dataframe.load_recording(target).view(index="step", contents="/**")
    rows = view.select().read_all().to_pydict()
    assert rows["episode"] == [
        i for i, t in enumerate(episodes) for _ in range(t.num_control_steps + 1)
    ]
    actions = [x for x in rows["/action:Scalars:scalars"] if x is not None]
    assert actions == torch.cat([t.actions.flatten(0, 1) for t in episodes]).tolist()
    assert all(x is not None for x in rows["/camera/top:EncodedImage:blob"])
    assert sum(x[0] for x in rows["/reward:Scalars:scalars"] if x is not None) == 2
    assert ".rrd" in failure(
        capsys, "export-rerun", str(run_folder / "dataset"), str(tmp_path / "x.txt")
    )


def test_advise_reads_a_run_and_rolls_it_out(run_folder, tmp_path, capsys):
    target = tmp_path / "advice.json"
    assert (
        cli.main(
            ["advise", str(run_folder), "--rollouts", "8", "--json", str(target), "env.horizon=6"]
        )
        == 0
    )
    document, text = json.loads(target.read_text()), capsys.readouterr().out
    named = {c["name"]: c for c in document["checks"]}
    assert {
        "success of the start",
        "image use",
        "time limit",
        "groups with both outcomes",
        "exploration",
    } <= set(named)
    assert "of 2 groups of 4" in named["groups with both outcomes"]["text"]
    assert "of 8 =" in named["success with sampled actions"]["text"]
    assert named["time limit"]["text"].startswith("6 control steps, demonstrations of reach_red")
    assert document["not_measured"] == [] and document["verdict"] in ("good", "watch", "bad")
    assert all(bool(c["remedy"]) == (c["verdict"] != "good") for c in named.values())
    assert "RL " in text.splitlines()[-2] and str(target) in text


def test_advise_names_what_it_cannot_judge(run_folder, tmp_path, capsys):
    assert "no config.yaml" in failure(capsys, "advise", str(tmp_path))
    (tmp_path / "config.yaml").write_text((run_folder / "config.yaml").read_text())
    assert "holds no start to judge" in failure(capsys, "advise", str(tmp_path))
    (tmp_path / "eval_sft.json").write_text((run_folder / "eval_sft.json").read_text())
    assert "--rollouts 4 needs" in failure(capsys, "advise", str(tmp_path), "--rollouts", "4")
    assert cli.main(["advise", str(tmp_path)]) == 0
    assert "--rollouts 64" in capsys.readouterr().out


def test_main_turns_any_user_error_into_status_2(monkeypatch, capsys):
    def unusable(*_, **__):
        raise UserError("the value 3 at x.y is odd: use 4")

    monkeypatch.setattr(pipeline, "run_pipeline", unusable)
    assert failure(capsys, "train", "run=toy") == "error: the value 3 at x.y is odd: use 4\n"
