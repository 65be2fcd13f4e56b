"""The ledger: what is known of finished runs, a small JSON file for each study.

Runs are known by the fingerprint of their settings and by the corpus that they read, never by when or where they were made.
So records from any number of machines merge into one ledger, in any order and any number of times, with the same outcome; a
run that two studies ask for is made once; and a run whose settings were changed in the YAML counts as not made.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import DataError, OutputError, writing
from fathomlm.jsonfile import read_object
from fathomlm.lab.study.options import Merge
from fathomlm.train.directory import FREE
from fathomlm.train.recipe import Recipe

FORMAT = 1
MOST_BYTES = 256 << 20
"""Of a ledger's file; a run takes a few kilobytes."""
UNMARKED = FREE - {"evaluate"} | {"evaluate.every", "evaluate.first"}
"""Fields that change where and how a run is made, not what comes out; how many rows its loss is measured on does."""
NEEDED = ("study", "variant", "budget", "seed", "fingerprint", "data", "status")
NAMES = ("study", "variant", "budget", "fingerprint", "status")

Record = dict[str, Any]


def identifying_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe that decide what comes out and are not the defaults. Fields that a later version adds do not
    change it while they are not used."""
    found = _identifying(recipe, "")
    assert isinstance(found, dict)
    return found


def _identifying(value: Any, prefix: str) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    out = {}
    for field in dataclasses.fields(value):
        name, own = f"{prefix}{field.name}", getattr(value, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if name in UNMARKED or own == default:
            continue
        inner = _identifying(own, f"{name}.")
        if inner != {} or default is None:  # a section without identifying fields is left out, unless it may be null
            out[field.name] = inner
    return out


def fingerprint(recipe: Recipe, *, without: str | None = None) -> str:
    """What a run is known by, its seed and budget included, or all but the field `without`."""
    settings = {name: value for name, value in identifying_settings(recipe).items() if name != without}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """A directory of `STUDY.json` files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, study: str) -> Path:
        return self.directory / f"{study}.json"

    def read(self, study: str) -> list[Record]:
        """The records of one study, finished and failed."""
        path = self.path(study)
        return read_records(path) if path.exists() else []

    def all(self) -> list[Record]:
        """The records of all studies."""
        return [record for path in sorted(self.directory.glob("*.json")) for record in read_records(path)]

    def standing(self, corpus_checksum: str = "") -> dict[str, Record]:
        """One record for each fingerprint, on this corpus where one is given; a finished one stands over a failed one,
        which another study may have."""
        found = [record for record in self.all() if corpus_checksum in ("", record["data"]["mark"])]
        return {record["fingerprint"]: record for record in sorted(found, key=lambda r: r["status"] == "finished")}

    def add(self, study: str, records: Iterable[Record]) -> int:
        """Merge records into a study's file; returns how many were new or better than what was there."""
        with self._alone():
            return self._add(study, records)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Reading and writing as one act: several processes may add to a ledger."""
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _add(self, study: str, records: Iterable[Record]) -> int:
        before = self.read(study)
        after = merge_records([*before, *records])
        if after == before:
            return 0
        head = json.dumps({"format": FORMAT, "study": study})[:-1]
        lines = ",\n".join(json.dumps(record, sort_keys=True) for record in after)
        with whole_file(self.path(study)) as temporary:
            temporary.write_text(f'{head}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")
        return sum(record not in before for record in after)

    def merge(self, files: Sequence[Path]) -> dict[str, int]:
        """Add the records of other ledgers' files, by study; how many of each were new or better."""
        by_study: dict[str, list[Record]] = {}
        for file in files:
            for record in read_records(file):
                by_study.setdefault(record["study"], []).append(record)
        return {study: self.add(study, records) for study, records in sorted(by_study.items())}

    def check_writable(self) -> None:
        """Refuse a directory that cannot be written to: better now than after hours of a run whose record is then lost."""
        with self._alone():
            if not os.access(self.directory, os.W_OK):
                raise OutputError(f"cannot write {self.directory}: Permission denied")

    def check_corpus(self, corpus_checksum: str, where: str, studies: Iterable[str]) -> None:
        """Refuse to add runs on one corpus to a study on another: they could not be compared."""
        for study in studies:
            for record in self.read(study):
                if record["data"]["mark"] != corpus_checksum:
                    raise DataError(
                        f"{self.path(study)} holds runs on another corpus (mark {record['data']['mark']}) than {where} "
                        f"(mark {corpus_checksum}); name another --ledger"
                    )


def read_records(path: Path) -> list[Record]:
    """The records of a ledger's file."""
    if not path.exists():
        raise DataError(f"there is no ledger file {path}")
    content = read_object(path, error=DataError, max_bytes=MOST_BYTES).values
    if content.get("format") != FORMAT or not isinstance(content.get("runs"), list):
        raise DataError(f"{path} is not a ledger of format {FORMAT}: an object with `format`, `study` and a list `runs`")
    for record in content["runs"]:
        missing = [name for name in NEEDED if not isinstance(record, dict) or name not in record]
        if missing:
            raise DataError(f"{path}: a record of `runs` has no {missing[0]}")
        if not isinstance(record["data"], dict) or not isinstance(record["data"].get("mark"), str):
            raise DataError(f"{path}: a record of `runs` has no mark of its corpus in `data`")
        if strange := [name for name in NAMES if not isinstance(record[name], str)]:
            raise DataError(f"{path}: {strange[0]} of a record of `runs` must be text")
    runs: list[Record] = content["runs"]
    return runs


def merge_records(records: Iterable[Record]) -> list[Record]:
    """One record for each run, in an order of its own. A finished one stands over a failed one; of two finished ones the
    earlier stands, whichever was read first."""
    best: dict[tuple[str, str], Record] = {}
    for record in records:
        key = identity(record)
        best[key] = record if key not in best else min(best[key], record, key=_standing)
    return sorted(
        best.values(), key=lambda r: (r["seed"], r["variant"], r.get("tokens") or 0, r["budget"], r["fingerprint"])
    )


def identity(record: Record) -> tuple[str, str]:
    return record["fingerprint"], record["data"]["mark"]


def _standing(record: Record) -> tuple[bool, str, str]:
    return record["status"] != "finished", str(record.get("date")), json.dumps(record, sort_keys=True)


def run_merge(options: Merge) -> int:
    added = Ledger(options.ledger).merge(options.files)

    def show(record: dict[str, Any]) -> None:
        for study, number in added.items():
            print(f"{study}: {number} new or better records")

    return options.answer({"added": added, "ledger": str(options.ledger)}, show)
