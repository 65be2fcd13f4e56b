"""Names of models and exits that come with the package: what they are, who else may have them, what is in a wheel."""

from __future__ import annotations

import fnmatch
import hashlib
import tomllib
from pathlib import Path

import pytest
import torch

import fathomlm.packaged
from fathomlm.checkpoints.exit_pack import RECORD, THRESHOLD, WEIGHTS
from fathomlm.checkpoints.locate import locate
from fathomlm.checkpoints.resolve import architecture_of, encoder_of, exits_of, load
from fathomlm.depth import ExitParts
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import ModelNotFound
from fathomlm.packaged import packaged_drafts, packaged_exits, packaged_models, packaged_path, packaged_texts, text_path

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
SOURCE, EXITS, TEXTS = (f"src/fathomlm/packaged/{kind}" for kind in ("models", "exits", "texts"))


def test_directories_with_a_configuration_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fathomlm.packaged, "models_directory", lambda: tmp_path)
    for name in ("second", "first", ".first.partial-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert packaged_models() == ["first", "second"]
    assert packaged_path("second") == tmp_path / "second"
    for other in ("third", "empty", "file", ".first.partial-1", "", ".", "../" + tmp_path.name + "/first"):
        assert packaged_path(other) is None


def test_directories_with_a_record_are_exit_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fathomlm.packaged, "exits_directory", lambda: tmp_path)
    for name, sign in (("whole", "exits.json"), (".whole.partial-1", "exits.json"), ("half", "exits.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / sign).write_text("{}")
    assert packaged_exits("whole") == tmp_path / "whole"
    for other in ("half", ".whole.partial-1", "", ".", "third", "./whole", "../" + tmp_path.name + "/whole"):
        assert packaged_exits(other) is None
    monkeypatch.setattr(fathomlm.packaged, "_directory", {"drafts": tmp_path}.get)
    assert (packaged_drafts("whole"), packaged_drafts("half")) == (tmp_path / "whole", None)
    monkeypatch.setattr(fathomlm.packaged, "exits_directory", lambda: None)
    assert packaged_exits("whole") is None


def test_the_directories_are_inside_the_package() -> None:
    """Unpatched: whatever this installation has lies beside the code, as plain files."""
    place = Path(fathomlm.packaged.__file__).parent
    for kind, found in (("models", fathomlm.packaged.models_directory()), ("exits", fathomlm.packaged.exits_directory())):
        assert found == (place / kind if (place / kind).is_dir() else None)


def test_exits_come_for_models_that_can_be_named() -> None:
    place = fathomlm.packaged.exits_directory()
    names = [] if place is None else [each.name for each in place.iterdir()]
    assert set(names) <= {*PRESETS, *packaged_models()}
    assert all(packaged_exits(name) is not None for name in names)


def test_an_installation_without_models(nothing_packaged: None) -> None:
    assert packaged_models() == []
    assert packaged_path("tiny-mor") is None
    with pytest.raises(ModelNotFound, match="unknown model 'tiny-mor'"):
        locate("tiny-mor")


def test_no_packaged_model_has_a_presets_name() -> None:
    """`inspect`, `plan` and `train` answer for a preset without asking what is packaged."""
    assert not set(packaged_models()) & set(PRESETS)


def test_a_name_is_a_source_like_any_other(packaged: str, packaged_models_dir: Path) -> None:
    assert locate(packaged) == packaged_models_dir / packaged
    model = load(packaged)
    same = load(packaged_models_dir / packaged)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    architecture, plan, _ = architecture_of(packaged)
    assert (architecture, plan) == (model.architecture, model.plan)
    assert (encoder_of(packaged), exits_of(packaged)) == (None, ExitParts())


def test_a_path_on_disk_wins(packaged: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / packaged).symlink_to(tiny_model_dir)
    assert locate(packaged) == Path(packaged)
    plan = architecture_of(packaged)[1]
    assert plan is not None
    assert plan.routing is None


def test_a_packaged_model_wins_over_a_preset(
    packaged_models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2-135m").symlink_to(packaged_models_dir / "tiny-mor")
    monkeypatch.setattr(fathomlm.packaged, "models_directory", lambda: tmp_path)
    assert locate("smollm2-135m") == tmp_path / "smollm2-135m"
    assert architecture_of("smollm2-135m")[1] is not None


def test_the_text_is_what_it_was_when_it_was_copied() -> None:
    """Recipes and tests have figures that any edit would change."""
    place = text_path("docs")
    assert place is not None
    assert {"docs", "docs/README.md", "docs/generation.md"} <= set(packaged_texts())
    digest = hashlib.sha256()
    for file in sorted(place.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    assert digest.hexdigest() == "9ba980689374011ee6b32ba0812eb839624db85475e86d3662aaf04b98699497"
    for other in ("README.md", "", ".", "..", "docs/..", "docs/none.md", "../models"):
        assert text_path(other) is None


def uncovered(files: list[str]) -> list[str]:
    """Those of some files, below the repository's root, that the build's settings do not name."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["artifacts"]
    flat = [pattern.replace("/**/", "/") for pattern in patterns]  # fnmatch's * goes through directories by itself
    return [file for file in files if not any(fnmatch.fnmatchcase(file, pattern) for pattern in flat)]


def test_the_wheel_takes_every_kind_of_file_that_a_packaged_model_has(packaged_models_dir: Path) -> None:
    written = [file for file in (packaged_models_dir / "tiny-mor").iterdir() if file.is_file()]
    assert {file.suffix for file in written} == {".json", ".safetensors", ".md", ".py"}
    assert uncovered([f"{SOURCE}/tiny-mor/{file.name}" for file in written]) == []
    shipped = [file for place in (SOURCE, EXITS, TEXTS) for file in (ROOT / place).rglob("*") if file.is_file()]
    assert uncovered([str(file.relative_to(ROOT)) for file in shipped]) == []
    pack = [RECORD, WEIGHTS, THRESHOLD, "README.md"]
    assert uncovered([f"{EXITS}/smollm2-135m/{file}" for file in pack]) == []
    other = [f"{SOURCE}/tiny-mor/merges.txt", f"{EXITS}/smollm2-135m/threshold.png", "docs/model.json"]
    assert uncovered(other) == other
