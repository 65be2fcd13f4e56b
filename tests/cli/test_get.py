"""`fathomlm get`: where the file is, once fetched and again; one line for every mistake."""

from __future__ import annotations

import json
from functools import partial

import pytest

from fathomlm.checkpoints import fetch as fetching
from fathomlm.cli.main import main


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """The bundled model, made of nothing: the downloads that were made."""
    made = []
    target = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"

    def fetch(name: str, progress: bool = True):
        made.append(name)
        target.write_bytes(b"x" * 98_362)
        return target

    monkeypatch.setattr(fetching, "fetch", fetch)
    monkeypatch.setattr(fetching, "cached", lambda name: target if target.exists() else None)
    return made


@pytest.fixture
def mistake(mistake_of):
    return partial(mistake_of, "get")


def test_it_says_where_the_file_is_and_the_second_time_that_it_was_there(downloads, capsys, tmp_path):
    assert main(["get", "smollm2-135m"]) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"smollm2-135m downloaded to {tmp_path}")
    assert "98.36 kB, licence: Apache-2.0" in first
    assert main(["get", "smollm2-135m"]) == 0
    assert "smollm2-135m is already at" in capsys.readouterr().out
    assert downloads == ["smollm2-135m"]


def test_json_is_one_object(downloads, capsys):
    records = []
    for _ in range(2):
        assert main(["get", "smollm2-135m", "--json"]) == 0
        records.append(json.loads(capsys.readouterr().out))
    assert set(records[0]) == {"name", "path", "bytes", "licence", "downloaded"}
    assert [record["downloaded"] for record in records] == [True, False]
    assert records[0]["bytes"] == 98_362


@pytest.mark.parametrize(("name", "repo"), [("pythia-70m", "EleutherAI/pythia-70m"), ("some/model", "some/model")])
def test_other_presets_and_hub_ids_come_from_the_hub(name, repo, monkeypatch, capsys, tmp_path):
    def hub_snapshot(repo_id: str, config_only: bool = False):
        assert repo_id == repo
        if not (tmp_path / "config.json").exists():
            (tmp_path / "config.json").write_text("{}")
            (tmp_path / "model.safetensors").write_bytes(bytes(998))
        return tmp_path

    monkeypatch.setattr(fetching, "hub_snapshot", hub_snapshot)
    assert main(["get", name, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    expected = {"name": name, "path": str(tmp_path), "bytes": 1000, "downloaded": True}
    assert record == expected | {"licence": f"see https://huggingface.co/{repo}"}


def test_mistakes(mistake, tmp_path):
    assert "did you mean 'smollm2-135m'?" in mistake("smollm2-135mm")
    assert "'smollm-730m' is a shape without weights" in mistake("smollm-730m")
    assert "is not a hub id" in mistake("not a/hub id")
    assert "is a local path; `get` takes a preset or a hub id" in mistake(str(tmp_path))


def test_a_failed_download_is_one_line(mistake, monkeypatch, tmp_path):
    monkeypatch.setenv("FATHOMLM_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert "cannot download smollm2-135m" in mistake("smollm2-135m", "--json")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
