"""The options of `fathomlm study`. Nothing here loads a tensor library: what they do is in the other files."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from fathomlm.cli.common import DeviceOptions, JsonOptions
from fathomlm.cli.first import check_device
from fathomlm.options import like, option

WORK = Path("runs/study")
LEDGER = Path("benchmarks/results/study")
NAME = "shipped study (see: fathomlm study list) or YAML file"


def check_study(name: str) -> None:
    """Refuse a study that is not there, or says what no study may."""
    from fathomlm.lab.study.spec import read_study

    read_study(name)


def check_run_device(device: str) -> None:
    if device != "auto":
        check_device(device)


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(JsonOptions):
    """What the kinds share."""

    ledger: Path = option(LEDGER, metavar="DIR", help="directory of STUDY.json files")


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    corpus: Path | None = option(None, metavar="DIR", help="corpus from `fathomlm data prepare`, to count passes over it")


@dataclass(frozen=True, kw_only=True)
class ListStudies(JsonOptions):
    """List the shipped studies: what they compare, and in how many runs."""


@dataclass(frozen=True, kw_only=True)
class ShowStudy(LedgerOptions, CorpusOptions):
    """Show a study: every run in the order of the queue, its tokens and forward FLOPs, passes over --corpus, and whether it
    is in the ledger."""

    name: str = option(positional=True, first=check_study, help=NAME)


@dataclass(frozen=True, kw_only=True)
class StudyStatus(LedgerOptions):
    """Count the runs of each study that the ledger has, those that failed, and those that are left."""

    corpus: Path | None = like(
        CorpusOptions, "corpus", help="count runs on this corpus only, and those that would take too many passes over it"
    )
    names: tuple[str, ...] = option(
        (), positional=True, metavar="NAME", first=check_study, help=NAME, default_text="all shipped studies"
    )


@dataclass(frozen=True, kw_only=True)
class Merge(LedgerOptions):
    """Add the records of ledger files from another machine to the ledger here. Merging the same files again changes nothing;
    a finished run stands over a failed one."""

    files: tuple[Path, ...] = option(positional=True, metavar="FILE", help="STUDY.json files")


@dataclass(frozen=True, kw_only=True)
class Report(LedgerOptions):
    """Write a page from the ledger: for each study a table, a picture and a verdict on each claim, decided by the interval
    of paired differences. Without NAME all shipped studies, examples left out."""

    names: tuple[str, ...] = like(StudyStatus, "names")
    out: Path = option(Path("docs/results.md"), metavar="FILE", help="page to write; pictures go beside it")


@dataclass(frozen=True, kw_only=True)
class RunStudy(LedgerOptions):
    """Do the runs of one or several studies that the ledger does not have yet: all variants of the first seed, then those of
    the second. Each finished run is in the ledger at once. With --minutes it stops cleanly before the time is over: runs
    that would not finish in time are not started, or, with --split, are saved under --work, where the same command
    continues. A run that fails is recorded with its reason, and the queue continues. The same command may be started several
    times, on one GPU or on several: each process takes what no other has."""

    names: tuple[str, ...] = option(positional=True, metavar="NAME", first=check_study, help=NAME)
    corpus: Path = like(CorpusOptions, "corpus", MISSING, help="corpus from `fathomlm data prepare`")
    work: Path = option(WORK, metavar="DIR", help="where runs keep their checkpoints")
    only: str | None = option(
        None,
        metavar="GLOB[,GLOB]",
        help="runs whose VARIANT or VARIANT/BUDGET/SEED matches one of these, such as 'mor-*' or '*/0'",
    )
    minutes: float | None = option(None, gt=0, metavar="M", help="stop before M minutes are over", default_text="no limit")
    split: bool = option(False, help="also start a run that will not finish in time; it is saved under --work")
    retry_failed: bool = option(False, help="repeat failed runs")
    keep: bool = option(False, help="keep the trained models under --work")
    tasks: Path | None = option(None, metavar="DIR", help="files of the tasks that the studies score, as eval --data")
    device: str = like(DeviceOptions, "device", "auto", help="auto, cpu, cuda or cuda:N", first=check_run_device)
    commit: str | None = option(None, metavar="HASH", help="commit for the records, where this is not a git checkout")
