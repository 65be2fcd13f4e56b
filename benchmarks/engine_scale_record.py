"""The record of engine_scale.py: one file that grows over several calls on one machine, and its comparisons.

Cells are small (one model at one batch size), each is written as soon as it is measured, and a failed one is noted and loses
nothing else. A call goes on with a record of the same source, settings and GPU only: figures of different code are no run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import make_directories, whole_file
from fathomlm.errors import OptionError
from fathomlm.jsonfile import read_object

Record = dict[str, Any]
NAMES = {
    "vanilla": "plain",
    "mor2": "MoR, 2 recursions",
    "mor3": "MoR, 3 recursions",
    "mor4": "MoR, 4 recursions",
    "exits": "two loops, half exit early",
}
KEPT = ("source", "settings", "environment", "gpu")
"""What must be the same for a record to be continued."""
BARS = {
    "vanilla_256rows.tokens_per_s": 180_000, "mor3_256rows.speedup": 1.40, "mor3_same_bytes.speedup": 1.50,
    "mor4_same_bytes.speedup": 1.60, "vanilla_256rows.host_us_per_token": 2, "mor3_256rows.host_us_per_token": 2,
    "vanilla_360m_1row.floor_share": 0.45, "vanilla_1.7b_1row.floor_share": 0.78, "prefill_1.7b.mfu": 0.45,
    "prefill_360m.tokens_per_s": 350_000, "mor3_512_2048.speedup": 1.35, "bundled.speedup": 1.15,
}  # fmt: skip
"""What this benchmark was written to show: at least, but for the host's microseconds."""
_COMPARED = re.compile(rf"({'|'.join(NAMES)})_(\d+rows|same_bytes|512_2048|nano_vllm)(_[a-z0-9]+)?")


def source_hash(files: Iterable[Path]) -> str:
    """Of what is measured and what measures it. A machine that runs it may have no git."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def open_record(path: Path, head: Record, *, fresh: bool = False, mixed: bool = False) -> Record:
    """The record to go on with, or a new one. `head` says what is run and where; with `mixed` one of another source or GPU
    is continued, and says so."""
    new = head | {"seconds": {}, "failures": {}, "tries": {}}
    if fresh or not path.exists():
        return new
    found = dict(read_object(path, error=OptionError, nonfinite=True).values)
    if not {"seconds", "failures", "tries", *KEPT} <= found.keys():
        raise OptionError(f"{path} is not a record that can be continued; --fresh begins a new one in its place")
    different = [name for name in KEPT if _lasting(found[name]) != _lasting(head[name])]
    if "settings" in different or (different and not mixed):
        said = ", ".join(different)
        raise OptionError(
            f"{path} was measured with another {said}; --fresh begins anew, and --mixed goes on where the settings agree"
        )
    if different:
        found.setdefault("mixed", []).append({name: head[name] for name in different})
    return found


def _lasting(value: Any) -> Any:
    """A call may go on after midnight, and thread counts are the machine's mood."""
    return {k: v for k, v in value.items() if k not in ("date", "threads")} if isinstance(value, dict) else value


def write_record(record: Record, path: Path) -> None:
    make_directories(path.parent)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")


def add_try(record: Record, key: str, label: str, found: Record) -> None:
    """One of several settings of a measurement, of which the fastest is what counts."""
    tries = record["tries"].setdefault(key, {})
    tries[label] = found
    best = max(tries.values(), key=lambda one: one["tokens_per_s"])
    record[key] = best | {"tried": {name: one["tokens_per_s"] for name, one in tries.items()}}


def compare(record: Record) -> None:
    """Every speedup, from what is there: of whatever order it was measured in."""
    for key, found in record.items():
        match = _COMPARED.fullmatch(key)
        base = f"vanilla_{match[2]}" if match else "bundled_plain" if key in ("bundled", "bundled_plain") else None
        if base is None:
            continue
        found.pop("speedup", None)
        if base in record:
            found["speedup"] = round(found["tokens_per_s"] / record[base]["tokens_per_s"], 3)


def bar_rows(record: Record) -> list[list[str]]:
    """What was asked for and what was measured, for whoever runs it."""
    rows = [["key", "asked", "measured", ""]]
    for name, bar in BARS.items():
        key, field = name.rsplit(".", 1)
        found = record.get(key, {}).get(field)
        met = found is not None and (found <= bar if field.startswith("host") else found >= bar)
        rows.append(
            [name, f"{bar:,}", "-" if found is None else f"{found:,}", "met" if met else "" if found is None else "NOT MET"]
        )
    return rows
