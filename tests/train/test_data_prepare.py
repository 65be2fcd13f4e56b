"""Preparation: the same bytes however it was stopped and however many processes worked; refusals that name the cause."""

from __future__ import annotations

import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fathomlm.errors import DataError, OptionError, OutputError
from fathomlm.train.data import prepare as segments
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.encoding import LOTS, lot
from fathomlm.train.data.manifest import Manifest
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.data.tokenizers import byte_tokenizer
from interrupting import interrupted_everywhere
from jsonl import write_jsonl


def documents(count, seed=0):
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list("abcde fghij"), generator.integers(1, 60))) for _ in range(count)]


def write(path: Path, texts, **more) -> Path:
    write_jsonl(path, ({"text": text, **more} for text in texts))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", [*documents(300), "", "   \n", *documents(40, 1)])
    write(folder / "b.jsonl", [*documents(200, 2), ""])
    (folder / "c.txt").write_text("one text\nof its own")
    return folder


def options(sources, out, **more):
    settings = {"shard_tokens": 2000, "validation_fraction": 0.1, "tokenizer": "bytes", **more}
    return PrepareOptions(sources=(str(sources),), out=out, **settings)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(segments, "BATCH_DOCUMENTS", 16)


def test_directories_that_were_made_for_nothing_go_again(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"no document with text, so there is nothing to prepare \(.*empty\.txt\)"):
        prepare(PrepareOptions(sources=(str(tmp_path / "empty.txt"),), out=tmp_path / "a/b/corpus", tokenizer="bytes"))
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_every_document_is_there_once_and_in_order(sources, tmp_path):
    corpus = prepare(options(sources, tmp_path / "out"))
    tokenizer = byte_tokenizer()
    texts = [text for text in [*documents(300), *documents(40, 1), *documents(200, 2)] if text.strip()]
    texts.append("one text\nof its own")
    for split in ("train", "validation"):
        stream = corpus.stream(split)
        found = [tokenizer.decode(stream.document(n).tolist()) for n in range(stream.documents)]
        wanted = [f"{t}<|endoftext|>" for t in texts if (lot(t) < int(0.1 * LOTS)) == (split == "validation")]
        assert found == wanted
        assert len(stream) == sum(map(len, (w.removesuffix("<|endoftext|>").encode() + b"." for w in wanted)))
    manifest = corpus.manifest
    assert manifest.complete
    assert manifest.empty_documents == 300 + 2 + 40 + 200 + 1 + 1 - len(texts)
    assert len(manifest.splits["train"].shards) > 5
    assert all(shard.tokens < 2100 for split in manifest.splits.values() for shard in split.shards)
    assert 0.05 < manifest.splits["validation"].documents / len(texts) < 0.15
    corpus.verify()


def test_files_are_little_endian_and_start_at_zero(sources, tmp_path):
    corpus = prepare(options(sources, tmp_path / "out"))
    shard = corpus.manifest.splits["train"].shards[0]
    starts = np.fromfile(tmp_path / "out" / "train-00000.idx", "<u8")
    assert len(starts) == shard.documents + 1
    assert (starts[0], starts[-1]) == (0, shard.tokens)
    tokens = np.fromfile(tmp_path / "out" / "train-00000.bin", "<u2")
    assert (tokens[starts[1:] - 1] == 256).all()


def test_the_result_does_not_depend_on_workers_or_batches(sources, tmp_path, small_batches, monkeypatch):
    prepare(options(sources, tmp_path / "three", workers=3))
    prepare(options(sources, tmp_path / "one"))
    monkeypatch.setattr(segments, "BATCH_DOCUMENTS", 7)
    prepare(options(sources, tmp_path / "seven"))
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "seven")


@pytest.mark.parametrize(("after", "workers"), [(1, 1), (9, 1), (20, 1), (33, 1), (20, 2)])
def test_an_exception_in_the_middle_and_a_second_run(sources, tmp_path, small_batches, after, workers):
    prepare(options(sources, tmp_path / "whole"))

    class Stop(Exception):
        pass

    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == after:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(options(sources, out, workers=workers), stop)
    kept = contents(out) if out.exists() else {}
    assert not [name for name in kept if "partial" in name]
    assert (after == 1) == (not kept)  # before the first segment nothing stays
    if kept:
        assert not Manifest.read(out).complete
        with pytest.raises(DataError, match="is incomplete"):
            Corpus.open(out)
        finished = {name: raw for name, raw in kept.items() if name != "corpus.json"}
        assert finished.items() <= contents(tmp_path / "whole").items()
    prepare(options(sources, out, workers=workers))
    assert contents(out) == contents(tmp_path / "whole")


def test_an_interrupt_before_any_line_leaves_finished_segments_or_nothing(tmp_path):
    write(tmp_path / "in.jsonl", ["one", "two"])
    out = tmp_path / "deep" / "out"
    nothing, something = 0, 0
    steps = {"prepare", "_begin", "_fill", "finish", "_commit"}
    work = partial(prepare, options(tmp_path / "in.jsonl", out, validation_fraction=0.0))
    for _ in interrupted_everywhere(work, segments, steps):
        left = {path.name for path in tmp_path.iterdir()} - {"in.jsonl"}
        if left:
            assert Manifest.read(out).started
            shutil.rmtree(out)
            something += 1
        else:
            nothing += 1
    assert Manifest.read(out).complete
    assert nothing > 20
    assert something > 3


STANDS_STILL = (
    "import signal, sys\n"
    "from fathomlm.cli.main import main\n"
    "from fathomlm.train.data import prepare as segments\n"
    "segments.BATCH_DOCUMENTS, SegmentWriter = 64, segments.SegmentWriter\n"
    "commit, most = SegmentWriter._commit, int(sys.argv.pop(1))\n"
    "def held(self):\n"
    "    while len(self.manifest.splits['train'].shards) >= most:\n"
    "        signal.pause()\n"
    "    commit(self)\n"
    "SegmentWriter._commit = held\n"
    "sys.exit(main(sys.argv[1:]))\n"
)
"""The command, which stands still when it has written as many shards as its first argument says: it cannot end before a
signal comes."""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes(sources, tmp_path, workers, start_python):
    write(sources / "d.jsonl", documents(500, 5))
    prepare(options(sources, tmp_path / "whole"))
    out = tmp_path / "out"
    command = ["data", "prepare", str(sources), str(out), "--tokenizer", "bytes", "--shard-tokens", "2k"]
    command += ["--validation-fraction", "0.1", "--workers", str(workers)]
    kills = 0
    for shards in (3, 9):
        process = start_python(STANDS_STILL, str(shards + 2), *command)
        while process.poll() is None:
            if len(list(out.glob("train-*.bin"))) >= shards:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.communicate()
        assert not Manifest.read(out).complete
    assert kills == 2
    prepare(options(sources, out))
    assert contents(out) == contents(tmp_path / "whole")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_complete_corpus_is_returned_as_it_is(sources, tmp_path):
    out = tmp_path / "out"
    prepare(options(sources, out))
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert prepare(options(sources, out, workers=2)).manifest.complete
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"column": "body"}, r"out was prepared with column\(s\) text, not body; choose another name, or --force"),
        ({"validation_fraction": 0.2}, "with validation fraction 0.1, not 0.2"),
        ({"shard_tokens": 3000}, "with shard tokens 2,000, not 3,000"),
        ({"max_tokens": 10}, "with max tokens none, not 10"),
        ({"separator": "a"}, "with separator token 256, not 97"),
        ({"pairs": ("a", "b")}, "with kind tokens, not pairs"),
        ({"tokenizer": "TINY"}, r"with tokenizer bytes \(\w{12}\), not .*tiny"),
    ],
)
def test_another_corpus_is_not_written_over(sources, tmp_path, more, message, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    more = {key: str(tmp_path / "tiny") if value == "TINY" else value for key, value in more.items()}
    prepare(options(sources, tmp_path / "out"))
    with pytest.raises(OutputError, match=message):
        prepare(options(sources, tmp_path / "out", **more))


def test_a_changed_source_is_noticed_and_force_starts_again(sources, tmp_path):
    out = tmp_path / "out"
    prepare(options(sources, out))
    write(sources / "b.jsonl", documents(50, 2))
    with pytest.raises(OutputError, match=r"with source .*b\.jsonl \([\d,]+ bytes\), not .*b\.jsonl \([\d,]+ bytes\)"):
        prepare(options(sources, out))
    write(sources / "d.jsonl", documents(50, 2))
    prepare(options(sources, out, force=True))
    prepare(options(sources, tmp_path / "new"))
    assert contents(out) == contents(tmp_path / "new")


def test_force_deletes_corpora_only(sources, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="exists and is not a corpus"):
        prepare(options(sources, out, force=True))
    (out / "corpus.json").write_text("{}")
    with pytest.raises(OutputError, match=r"holds thesis\.txt, which is no part of a corpus; --force will not delete it"):
        prepare(options(sources, out, force=True))
    assert (out / "thesis.txt").read_text() == "years of work"
    (out / "thesis.txt").unlink()
    with pytest.raises(DataError, match="has format version null"):
        prepare(options(sources, out))
    assert prepare(options(sources, out, force=True)).manifest.complete


def test_an_empty_directory_is_filled(sources, tmp_path):
    (tmp_path / "out").mkdir()
    assert prepare(options(sources, tmp_path / "out")).manifest.complete


def test_two_at_once_are_refused(sources, tmp_path, small_batches):
    out = tmp_path / "out"

    def again(progress):
        if Manifest.read(out).started:
            prepare(options(sources, out))

    with pytest.raises(OutputError, match="another process is preparing"):
        prepare(options(sources, out), again)


def test_a_bad_line_leaves_nothing_where_nothing_was_finished(sources, tmp_path):
    with (sources / "b.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"b\.jsonl line 202 is not valid JSON"):
        prepare(options(sources, tmp_path / "out", shard_tokens=10**6))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_copies_stay_on_one_side(tmp_path):
    texts = documents(200)
    write(tmp_path / "a.jsonl", texts)
    write(tmp_path / "b.jsonl", texts[::-1])
    corpus = prepare(options(tmp_path / "*.jsonl", tmp_path / "out", validation_fraction=0.3))
    seen = {
        split: {corpus.stream(split).document(n).tobytes() for n in range(corpus.stream(split).documents)}
        for split in ("train", "validation")
    }
    assert not seen["train"] & seen["validation"]
    assert len(seen["train"] | seen["validation"]) == len({text for text in texts if text.strip()})


def test_sources_held_out_whole(sources, tmp_path):
    corpus = prepare(options(sources, tmp_path / "out", validation_fraction=None, validation_from=(f"{sources}/c.txt",)))
    assert corpus.manifest.splits["validation"].documents == 1
    assert corpus.manifest.validation_fraction == 0
    assert corpus.load_tokenizer().decode(corpus.stream("validation").document(0)[:-1]) == "one text\nof its own"


def test_max_tokens_ends_with_the_document_that_reaches_it(sources, tmp_path, small_batches):
    more = {"max_tokens": 5000, "validation_from": (f"{sources}/c.txt",)}
    corpus = prepare(options(sources, tmp_path / "out", **more))
    assert 5000 <= corpus.manifest.splits["train"].tokens < 5061
    assert corpus.manifest.complete
    first = corpus.stream("validation").document(0)
    assert len(first) == len("one text\nof its own") + 1
    last = corpus.stream("train").documents - 1
    assert corpus.manifest.splits["train"].tokens - len(corpus.stream("train").document(last)) < 5000


def test_sources_without_text(tmp_path):
    write(tmp_path / "a.jsonl", ["", " "])
    with pytest.raises(DataError, match="no document with text"):
        prepare(options(tmp_path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cuts_texts_does_not_cut_these(tmp_path, tiny_tokenizer):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(4)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(tmp_path / "tok")
    text = "the depth of the water is the measure of the fathom line " * 20
    write(tmp_path / "a.jsonl", [text])
    corpus = prepare(options(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tok"), validation_fraction=0))
    assert len(corpus.stream()) == len(tiny_tokenizer(text)["input_ids"]) + 1


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({**{f"w{n}": n for n in range(70_000)}, "</s>": 70_000}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path / "tok")
    write(tmp_path / "a.jsonl", ["w1 w69999", "w2"])
    corpus = prepare(options(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tok"), validation_fraction=0))
    assert corpus.manifest.dtype == "uint32"
    assert corpus.stream().read(0, 5).tolist() == [1, 69_999, 70_000, 2, 70_000]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"validation_fraction": 1.0}, "validation_fraction must be >= 0 and < 1, got 1"),
        ({"workers": 0}, "workers must be >= 1, got 0"),
        ({"shard_tokens": 0}, "shard_tokens must be >= 1"),
    ],
)
def test_options_out_of_range(more, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        options(tmp_path, tmp_path / "out", **more)


def test_progress_counts_what_earlier_runs_did(sources, tmp_path, small_batches):
    seen = []
    prepare(options(sources, tmp_path / "out"), seen.append)
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    corpus = Corpus.open(tmp_path / "out")
    splits = corpus.manifest.splits.values()
    assert seen[-1].documents == sum(split.documents for split in splits)
    assert seen[-1].tokens == sum(split.tokens for split in splits)
    assert seen[-1].share == 1.0
