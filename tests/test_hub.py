"""Names of a hub: what is in the cache of `huggingface_hub` is read, nothing is fetched by itself,
and a push is one commit with a card."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from test_cluster import TOY, start  # noqa: F401 - a fixture

from vla_rl import cli, hub
from vla_rl.cli import main
from vla_rl.config import compose
from vla_rl.errors import UserError
from vla_rl.run.publish import package, push

COMMIT = "1" * 40


def cached(cache: Path, folder: Path, name: str, kind="model", commit=COMMIT, ref="main") -> Path:
    """``folder`` in the cache as `huggingface_hub` lays it: blobs, links to them, and what a
    revision is."""
    place = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        target = snapshot / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = place / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        target.symlink_to(os.path.relpath(blob, target.parent))
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def ours(cache, start):  # noqa: F811
    """The checkpoint in the cache as someone/arm."""
    return cached(cache, start, "someone/arm")


# ------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("user/name", ("user/name", None)),
        ("user/name@v1.0", ("user/name", "v1.0")),
        ("a-b/c.d_e@refs/pr/1", ("a-b/c.d_e", "refs/pr/1")),
        ("name", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("../b", None),
        ("user/", None),
        ("ws://a/b", None),
        ("~/b", None),
    ],
)
def test_what_is_a_name(text, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.hub_name(text) == name


def test_a_folder_here_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert hub.hub_name("outputs/typo") is None, "its parent is here: a mistake in a path"


def test_a_name_stands_for_what_is_in_the_cache(ours, cache, start):  # noqa: F811
    assert hub.located("someone/arm") == str(ours)
    assert hub.located("someone/arm@main") == hub.located(f"someone/arm@{COMMIT}") == str(ours)
    old = cached(cache, start, "someone/arm", commit="2" * 40, ref="v1")
    assert hub.located("someone/arm@v1") == str(old) and hub.located("someone/arm") == str(ours)
    for missing in ("someone/arm@v2", "someone/else"):
        assert hub.located(missing) == missing
    assert hub.located("someone/arm", hub.DATASET) == "someone/arm", "a dataset is another thing"


def test_configs_take_names(ours, cache, finished_run, start):  # noqa: F811
    data = cached(cache, start.parent.parent / "dataset", "someone/data", "dataset")
    config = compose([*TOY, "checkpoint=someone/arm", "dataset=someone/data"])
    assert (config.checkpoint, config.dataset) == (str(ours), str(data))
    config = compose(["policy=lerobot", "policy.checkpoint=someone/arm@main"])
    assert config.policy.checkpoint == str(ours)
    assert compose([*TOY, "collect.policy=someone/arm"]).collect.policy == str(ours)


def test_commands_take_names(ours, cache, start, capsys, tmp_path):  # noqa: F811
    given = ["--suite=toy", "--episodes=2", "slots.workers=0"]
    assert main(["eval", "someone/arm@main", *given, f"--json={tmp_path / 'a.json'}"]) == 0
    assert main(["eval", str(start), *given, f"--json={tmp_path / 'b.json'}"]) == 0
    found = [json.loads((tmp_path / f"{name}.json").read_text())["outcomes"] for name in "ab"]
    assert found[0] == found[1]
    cached(cache, start.parent.parent / "dataset", "someone/data", "dataset")
    assert main(["data", "check", "someone/data", "run=toy"]) == 0
    assert main(["train", *TOY, "dataset=someone/data", "phases=[sft]", "sft.updates=2"]) == 0
    capsys.readouterr()
    assert main(["distill", "someone/arm", "run=toy"]) == 2
    assert "name --out" in capsys.readouterr().err


def test_what_is_not_there_is_said_with_what_fetches_it(cache, capsys):
    wanted = {
        "eval someone/arm --suite toy": "'vla-rl hub fetch someone/arm'",
        "eval someone/arm@v1 --suite toy": "'vla-rl hub fetch someone/arm@v1'",
        "serve someone/arm": "'vla-rl hub fetch someone/arm'",
        "train run=toy checkpoint=someone/arm": "checkpoint=someone/arm: .*hub fetch someone/arm'",
        "train run=toy dataset=someone/data": "dataset=someone/data: .*someone/data --dataset'",
        "data show https://hub/datasets/someone/data/tree/main": "someone/data --dataset'",
    }
    for command, told in wanted.items():
        assert main(command.split()) == 2
        assert re.search(told, capsys.readouterr().err), command


def test_what_was_fetched_in_part_is_named(ours, cache, capsys):
    (cache / "models--someone--arm" / "blobs" / "abc.incomplete").touch()
    assert main(["eval", "someone/arm", "--suite=toy"]) == 2
    assert "someone/arm was fetched in part (a file is incomplete" in capsys.readouterr().err
    (cache / "models--someone--arm" / "blobs" / "abc.incomplete").unlink()
    (ours / "model.safetensors").resolve().unlink()
    with pytest.raises(UserError, match=r"model.safetensors is missing .*hub fetch someone/arm'"):
        compose([*TOY, "checkpoint=someone/arm"])


# ------------------------------------------------------------------------------------------- fetch
def test_fetch_fetches_and_other_commands_are_offline(cache, monkeypatch, capsys, tmp_path):
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options, os.environ.get("HF_HUB_OFFLINE")))
        return str(tmp_path / "there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert main(["hub", "fetch", "someone/data@v2", "--dataset"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'there'}\n"
    assert asked == [("someone/data", {"repo_type": "dataset", "revision": "v2"}, None)]
    assert main(["data", "check", "no/folder/here"]) == 2
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # (taken back at the end)
    assert main(["hub", "fetch", "folder"]) == 2
    assert "folder is no name of a hub" in capsys.readouterr().err


class HTTPError(Exception): ...


class RepositoryNotFoundError(Exception): ...


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("no route"), "the hub was not reached (ConnectionError: no route)"),
        (HTTPError("name resolution"), "the hub was not reached"),
        (RepositoryNotFoundError("404"), "the hub does not have it, or not for you"),
        (HTTPError("401 Client Error"), "you are not logged in, or may not"),
        (RuntimeError("x\ny"), "RuntimeError: x"),
    ],
)
def test_a_hub_that_is_not_reached_is_one_clear_error(error, told, cache, monkeypatch, capsys):
    def snapshot_download(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert main(["hub", "fetch", "someone/arm"]) == 2
    assert f"someone/arm could not be fetched: {told}" in capsys.readouterr().err


def test_without_a_network_the_library_itself_is_understood(cache, capsys, monkeypatch):
    """The real library, at an address where nobody listens."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:1")
    assert main(["hub", "fetch", "someone/arm"]) == 2
    assert "someone/arm could not be fetched: the hub was not reached" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- push
class Api:
    """As `huggingface_hub.HfApi`, as far as a push uses it."""

    def __init__(self, error=None):
        self.error, self.repos, self.commits = error, [], []

    def create_repo(self, name, *, repo_type, private, exist_ok):
        if self.error:
            raise self.error
        self.repos.append((name, repo_type, private, exist_ok))

    def create_commit(self, name, operations, *, commit_message, repo_type):
        files = {o.path_in_repo: o.path_or_fileobj for o in operations}
        self.commits.append((name, repo_type, files))
        return SimpleNamespace(commit_url=f"https://hub/{name}/commit/1")


@pytest.fixture
def judged(start, tmp_path) -> Path:  # noqa: F811
    file = tmp_path / "held_out.json"
    given = ["--suite=toy", "--episodes=4", "slots.workers=0", "--seed=3"]
    assert main(["eval", str(start), *given, f"--json={file}"]) == 0
    return file


def test_a_push_is_one_commit_of_the_policy_and_its_card(start, judged):  # noqa: F811
    api, parcel = Api(), package(start, "someone/arm", [judged], "apache-2.0")
    assert push(parcel, True, api) == "https://hub/someone/arm/commit/1"
    assert api.repos == [("someone/arm", "model", True, True)]
    [(name, kind, files)] = api.commits
    assert (name, kind) == ("someone/arm", "model")
    own = {"config.json", "embodiment.json", "model.safetensors", "tokenizer.json"}
    assert set(files) == {*own, "README.md"}, "not what training goes on from"
    assert all(Path(files[file]).samefile(start / file) for file in own)
    assert files["README.md"].decode() == parcel.card


def test_a_card_has_results_with_intervals_protocol_and_seed(start, judged):  # noqa: F811
    text = package(start, "someone/arm", [judged], "apache-2.0").card
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    assert "nano_vla" in yaml.safe_load(front)["tags"]
    total = json.loads(judged.read_text())["total"]
    interval = f"({100 * total['low']:.1f} to {100 * total['high']:.1f})"
    [row] = [line for line in body.splitlines() if line.startswith("| held_out | all |")]
    assert f"{100 * total['rate']:.1f} % {interval}" in row
    assert f"{total['successes']} of 4" in row
    assert "toy; held_out initial states; seed 3; most likely actions" in row
    assert "Nothing was measured." in package(start, "someone/arm", [], "mit").card


def test_a_dry_run_sends_nothing(start, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    assert main(["hub", "push", str(start), "someone/arm", "--license=mit", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("someone/arm: README.md, config.json,") and "license: mit" in said


def test_a_push_that_fails_says_why(start):  # noqa: F811
    parcel = package(start, "someone/arm", [], "mit")
    with pytest.raises(UserError, match=r"someone/arm was not pushed: you are not logged in"):
        push(parcel, False, Api(HTTPError("401 Client Error: Unauthorized")))


def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(start, tmp_path):  # noqa: F811
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"total": {"rate": 2}}')
    pair = tmp_path / "pair.json"
    pair.write_text('{"results": []}')
    based = tmp_path / "based"
    shutil.copytree(start, based)
    config = json.loads((based / "config.json").read_text())
    base = {"path": "/elsewhere", "fingerprint": "x"}
    (based / "config.json").write_text(json.dumps(config | {"frozen_base": base}))
    for given, told in [
        ((start, "arm", [], "mit"), "arm is no name of a hub"),
        ((start, "a/b", [], "My licence"), "--license 'My licence'"),
        ((start, "a/b", [wrong], "mit"), "wrong.json is no evaluation"),
        ((start, "a/b", [pair], "mit"), "pair.json compares two checkpoints"),
        ((start, "a/b", [tmp_path / "none"], "mit"), "none is missing"),
        ((tmp_path, "a/b", [], "mit"), "is not a checkpoint"),
        ((based, "a/b", [], "mit"), r"builds on frozen weights elsewhere \(/elsewhere\)"),
    ]:
        with pytest.raises(UserError, match=told):
            package(*given)
    assert cli.hub.REACHES, "and no other command reaches for one"
