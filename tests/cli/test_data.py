"""`fathomlm data`: a corpus made, checked and shown; made again and gone on with; one line for every mistake."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from functools import partial

import pytest

from fathomlm.cli.main import main
from jsonl import write_jsonl
from train.test_data_prepare import STANDS_STILL


@pytest.fixture
def mistake(mistake_of):
    return partial(mistake_of, "data")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl.gz"
    records = [{"text": f"document number {n}" + " and so on" * 60 * (n == 0), "title": f"t{n}"} for n in range(400)]
    path.write_bytes(
        gzip.compress("".join(json.dumps(record) + "\n" for record in [*records, {"text": "", "title": "-"}]).encode())
    )
    return str(path)


def run(capsys, *arguments):
    assert main(["data", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_corpus_from_making_to_showing(text, tmp_path, capsys):
    out = tmp_path / "out"
    made = run(capsys, "prepare", text, out, "--tokenizer", "bytes", "--workers", "1")
    assert made.startswith(f"{out}: train ")
    assert "tokenizer bytes (257 tokens)" in made
    assert "skipped 1 documents without text" in made
    assert "all sizes and checksums match" in run(capsys, "check", out)
    shown = run(capsys, "show", out, "--number", "2")
    assert "--- train document 0, 618 tokens\ndocument number 0 and so on" in shown
    assert "[...]\n--- train document 1" in shown
    again = run(capsys, "prepare", text, out, "--tokenizer", "bytes")
    assert again.startswith(f"{out} is already complete; nothing was done")


def test_json_is_one_object(text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ("prepare", text, out, "--tokenizer", "bytes", "--validation-fraction", "0.2", "--json")
    first = json.loads(run(capsys, *arguments))
    assert first["splits"]["train"]["documents"] + first["splits"]["validation"]["documents"] == 400
    assert (first["complete"], first["already"], first["resumed"], first["kind"]) == (True, False, False, "tokens")
    assert json.loads(run(capsys, *arguments))["already"]
    assert json.loads(run(capsys, "check", out, "--json"))["whole"]
    shown = json.loads(run(capsys, "show", out, "--split", "validation", "--number", "1", "--json"))
    assert shown["shown"][0]["text"].endswith("<|endoftext|>")


def test_pairs(text, tmp_path, capsys):
    out = tmp_path / "out"
    made = run(capsys, "prepare", text, out, "--tokenizer", "bytes", "--pairs", "title", "text", "--max-tokens", "1k")
    assert "pairs" in made
    assert "source: t1\ntarget: document number 1<|endoftext|>" in run(capsys, "show", out)


def test_few_documents_and_none_held_out(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one document")
    made = run(capsys, "prepare", tmp_path / "a.txt", tmp_path / "out", "--tokenizer", "bytes")
    assert "too few documents to hold any out" in made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepar"], "unknown kind 'prepar' (did you mean 'prepare'?)"),
        ([], "the following arguments are required: KIND"),
        (["prepare", "TEXT", "OUT"], "required: --tokenizer"),
        (["prepare", "TEXT", "OUT", "--tokenizer", "byts"], "unknown tokenizer 'byts' (did you mean 'bytes'?)"),
        (["prepare", "TEXT", "OUT", "--tokeniser", "bytes"], "--tokenizer"),
        (["prepare", "TEXTT", "OUT", "--tokenizer", "bytes"], "does not exist (did you mean"),
        (["prepare", "TEXT", "OUT", "--tokenizer", "bytes", "--column", "txt"], "line 1: no column 'txt'"),
        (
            ["prepare", "TEXT", "OUT", "--tokenizer", "bytes", "--shard-tokens", "lots"],
            "--shard-tokens must be an integer between 1 and 1e18",
        ),
        (["prepare", "TEXT", "OUT", "--tokenizer", "bytes", "--workers", "0"], "--workers must be >= 1"),
        (["prepare", "TEXT", "DIR", "--tokenizer", "bytes", "--force"], "exists and is not a corpus"),
        (["check", "OUT"], "does not exist; `fathomlm data prepare` makes one"),
        (["show", "DIR"], "is not a corpus (no corpus.json)"),
        (["show", "OUT", "--split", "valid"], "invalid --split 'valid' (did you mean 'validation'?)"),
    ],
)
def test_mistakes(arguments, message, mistake, text, tmp_path):
    places = {"TEXT": text, "TEXTT": f"{text}t", "OUT": str(tmp_path / "out"), "DIR": str(tmp_path)}
    assert message in mistake(*(places.get(word, word) for word in arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl.gz"]


def test_a_corpus_that_was_altered(text, tmp_path, capsys, mistake):
    out = tmp_path / "out"
    run(capsys, "prepare", text, out, "--tokenizer", "bytes")
    (out / "train-00000.bin").write_bytes(b"\1" + (out / "train-00000.bin").read_bytes()[1:])
    assert "train-00000.bin was altered since it was written (wrong checksum)" in mistake("check", str(out))


@pytest.mark.parametrize("wait", [0, 3])
def test_an_interrupt_keeps_what_is_finished(tmp_path, wait, start_python):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_jsonl(source, ({"text": f"document {n} " * 20} for n in range(500)))
    command = ["data", "prepare", str(source), str(out), "--tokenizer", "bytes", "--workers", "2"]
    command += ["--shard-tokens", "20k" if wait else "1B"]
    process = start_python(STANDS_STILL, str(wait), *command, new_session=True)
    while process.poll() is None:
        if (out / "corpus.json").exists() and len(list(out.glob("train-*.bin"))) >= wait:
            break
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    printed, said = process.communicate()
    assert (process.returncode, printed) == (2, "")
    assert said.count("\n") == 1
    if wait:
        assert "tokens are kept in" in said
        assert "the same command goes on from there" in said
        assert not list(out.glob(".*"))
    else:
        assert "nothing was kept" in said
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_corpus_without_its_tokenizer_is_not_whole(text, tmp_path, capsys, mistake):
    out = tmp_path / "out"
    run(capsys, "prepare", text, out, "--tokenizer", "bytes")
    shutil.rmtree(out / "tokenizer")
    assert "tokenizer" in mistake("check", str(out))
