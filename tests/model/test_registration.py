"""`import fathomlm` registers with transformers however Python was started and whichever was imported first, and imports
nothing that takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fathomlm
from fathomlm.checkpoints.native import save
from parity.families import tiny
from parity.t5_models import write_tiny_t5

FATHOMLM_FIRST = """
import sys
import fathomlm
assert not {{'torch', 'transformers'}} & set(sys.modules)
from transformers import CONFIG_MAPPING
assert CONFIG_MAPPING['fathomlm'].model_type == 'fathomlm' and 'fathomlm-seq2seq' in CONFIG_MAPPING
assert 'fathomlm.model' not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
model = AutoModelForCausalLM.from_pretrained({where!r})
assert type(AutoConfig.for_model('fathomlm-seq2seq')).__name__ == 'FathomSeq2SeqConfig'
print(type(model).__name__)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("registered")
    tiny("llama").save_pretrained(directory / "plain")
    save(fathomlm.convert(directory / "plain", recursions=2), directory / "looped")
    write_tiny_t5("t5", directory / "t5")
    save(fathomlm.convert(directory / "t5", recursions=2), directory / "looped-t5")
    return {"AutoModelForCausalLM": str(directory / "looped"), "AutoModelForSeq2SeqLM": str(directory / "looped-t5")}


def python(arguments: list[str], where: Path) -> Any:
    package = Path(fathomlm.__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=where, timeout=250, check=False
    )


def test_a_script_that_imports_fathomlm_first(saved: dict[str, str], tmp_path: Path) -> None:
    """Each way of starting and each order once: a process that imports transformers takes seconds. `-m`, with transformers
    first, is below."""
    # The script has the command's name; its directory comes first on the path and would hide the package.
    code = FATHOMLM_FIRST.format(where=saved["AutoModelForCausalLM"])
    (tmp_path / "fathomlm.py").write_text("import sys; sys.path.pop(0)\n" + code)
    done = python([str(tmp_path / "fathomlm.py")], tmp_path)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["FathomForCausalLM"]), done.stderr


AUTO_CLASSES_FIRST = """
import os
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers import GenerationMixin, PreTrainedModel, T5Model  # which takes seconds, and each child would import anew
directories = sys.argv[1:]
for fathomlm in "unasked", "missing", "imported":
    sys.stdout.flush()
    if child := os.fork():  # which begins with the modules that its parent has
        assert os.waitpid(child, 0)[1] == 0, fathomlm
        continue
    assert "fathomlm" not in sys.modules
    if fathomlm == "missing":
        sys.modules["fathomlm"] = None
    elif fathomlm == "imported":
        import fathomlm
        assert type(AutoConfig.for_model("fathomlm-seq2seq")).__name__ == "FathomSeq2SeqConfig"
    for auto, where in zip((AutoModelForCausalLM, AutoModelForSeq2SeqLM), directories):
        try:
            model = auto.from_pretrained(where, trust_remote_code=True if fathomlm in ("unasked", "missing") else None)
        except ImportError as error:
            print("ImportError:", error)
        else:
            print(type(model).__name__)
            if fathomlm == "unasked":
                model.save_pretrained(where + "-again")
    sys.exit()
"""


def test_a_saved_model_is_read_whether_fathomlm_was_imported_or_not(
    saved: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "mytool.py").write_text(AUTO_CLASSES_FIRST)
    done = python(["-m", "mytool", *saved.values()], tmp_path)
    assert done.returncode == 0, done.stderr
    *unasked, missing, missing_too, model, seq2seq = done.stdout.splitlines()
    assert unasked == [model, seq2seq] == ["FathomForCausalLM", "FathomForSeq2SeqLM"]
    for line in missing, missing_too:
        assert line.startswith("ImportError: ")
        assert "fathomlm" in line
    for where in saved.values():
        names = [sorted(path.name for path in Path(place).glob("*.py")) for place in (where, f"{where}-again")]
        assert names == [["fathomlm_auto.py"]] * 2, "no other source file is copied along"
