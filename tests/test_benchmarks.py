"""What all benchmarks share: the list of kinds, the command that is noted, turns, ratios and
tables."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kinds, measuring
from benchmarks.learning import reward
from vla_rl import cli

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", kinds.KINDS)
def test_a_kind_measures_with_its_options_and_tells(name):
    kind = kinds.KINDS[name]
    module = importlib.import_module(kind.module)
    signature = inspect.signature(module.measure)
    # raises where an option has no parameter, or a parameter no option
    signature.bind(**dict.fromkeys(kind.names))
    assert (
        list(inspect.signature(module.text).parameters)
        and kind.words[0].islower()
        and not kind.words.endswith(".")
    )


def test_the_command_line_that_is_noted_measures_the_same():
    parser = cli._parser()
    given = "vla-rl bench acting 'robot.options={a: 1}' --episodes 2 --thinking 0.25 --seed 0"
    words = ["bench", "acting", "robot.options={a: 1}", "--episodes", "2", "--thinking", "0.25"]
    assert kinds.command("acting", parser.parse_args(words)) == given
    words = ["bench", "rhythm", "run=toy_td3", "--as-given", "--json", "a.json"]
    noted = kinds.command("rhythm", parser.parse_args(words))
    assert noted == "vla-rl bench rhythm run=toy_td3 --iterations 20 --rounds 2 --as-given"
    for name in set(kinds.KINDS) - {"hil"}:  # which has a required option
        noted = kinds.command(name, parser.parse_args(["bench", name]))
        assert kinds.command(name, parser.parse_args(shlex.split(noted)[1:])) == noted


def test_a_document_says_when_where_and_by_which_command_and_problems_fail(
    tmp_path, monkeypatch, capsys
):
    target = tmp_path / "a.json"
    command = [
        "bench",
        "reward",
        "reward=success",
        "--episodes",
        "2",
        "--decisions",
        "2",
        "--size",
        "8",
    ]
    assert cli.main([*command, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert (
        found["command"] == f"vla-rl {' '.join(command)}"
        and len(found["date"]) == 10
        and found["frames"] == 6
    )
    assert {"load", "hardware", "commit"} <= found.keys() and "cores" in found["hardware"]
    assert "frames/s" in (said := capsys.readouterr().out) and f"wrote {target}" in said
    monkeypatch.setattr(
        reward, "measure", lambda **options: {"problems": ["one"], "rewards": {}, "episodes": 1}
    )
    assert cli.main(command) == 1


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom vla_rl import cli\ntry:\n    cli.main(['bench', 'robot', "
        "'--help'])\nexcept SystemExit:\n    print('HEAVY', *sorted({'torch', 'numpy', 'hydra', "
        "'benchmarks.measuring'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.stdout.splitlines()[-1] == "HEAVY" and "PRIORITY" in done.stdout, done.stderr


def test_a_users_own_benchmarks_keep_only_this_command_from_working(tmp_path):
    (tmp_path / "benchmarks.py").write_text("raise SystemExit('it is not even imported')\n")
    env, shared = (
        os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        {"capture_output": True, "text": True, "timeout": 240},
    )
    runs = [
        subprocess.run([sys.executable, "-m", "vla_rl", *words], env=env, cwd=tmp_path, **shared)
        for words in (["bench", "replay", "--steps", "8"], ["eval", "--help"])
    ]
    assert (
        runs[0].returncode == 2 and "hides the package 'benchmarks' of vla-rl" in runs[0].stderr
    ), runs[0]
    assert runs[1].returncode == 0, runs[1].stderr


def test_sides_take_turns_and_warm_up():
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    took = measuring.take_turns(calls, 2, 2, cold=1)
    assert "".join(seen) == "aaabbb" * 3 and {name: len(found) for name, found in took.items()} == {
        "a": 4,
        "b": 4,
    }
    assert measuring.in_turns("ab", 3) == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("a", 1),
        ("a", 2),
        ("b", 2),
    ]


def test_ratios_percentiles_and_tables():
    assert measuring.over_rounds([2.0, 4.0], [6.0, 4.0]) == pytest.approx(
        {"ratio": 10 / 6, "low": 1.0, "high": 3.0}
    )
    found = measuring.milliseconds([0.001, 0.003, 0.002], (50, 100))
    assert found == pytest.approx({"p50": 2.0, "max": 3.0})
    assert measuring.table(
        [("what", "ms"), ("a", "1.5"), ("longer", "10.25", "x")]
    ).splitlines() == [
        "what       ms",
        "a         1.5",
        "longer  10.25  x",
    ]
