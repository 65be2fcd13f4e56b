"""One task of `free_tasks.py` from training to times, in several processes, within a time limit.

    python benchmarks/free_tasks.py prepare --tasks TASKS --out data/free                                  # no GPU
    python benchmarks/free_tasks_run.py translation --data data/free --out OUT --minutes 7.5 --seeds 0     # 15 variants
    python benchmarks/free_tasks_run.py summary     --data data/free --out OUT --minutes 6.6 --workers 9
    python benchmarks/free_tasks_run.py translation --data data/free --out OUT --minutes 8 --only 'calm*' --seeds 0 1 2
    tar xzf OUT/free-translation.tgz                                                                       # no GPU
    fathomlm study merge ledger/free-translation.json && fathomlm study report
    python benchmarks/free_tasks_report.py data/free benchmarks/results/free_tasks_h200 KEPT lines/*.jsonl --keep-lines KEPT

Several processes train the variants of the task's study, each what no other has; small models alone do not fill a GPU, so
they share it by NVIDIA's multi-process service where that is there. A model is decoded as soon as it is trained, and a
process records its steps for timing and waits. When all texts are decoded, or `--timing` seconds before the end, all else
ends, and the variants are timed one after another, those first that promise most, with nothing else on the device.

What is there is packed into OUT/free-TASK.tgz (ledger, lines, logs, metrics) again and again, so that a machine that
ends early loses little. Every variant is trained with each of `--seeds`, or of the study's. A decoder that fails goes on
with the reference, timing without compiled layers; a trainer that fails is started again, `--retries` times. Models stay
under `--work`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
from free_tasks import CALM, MAIN, TASKS, named, places

Record = dict[str, Any]
RESERVE = 15.0
"""Seconds that `study run --minutes` keeps for itself."""
PACKED_EVERY = 45.0
TOLD_EVERY = 30.0
LAST_TURN = 12.0
"""Seconds before the end in which no variant's timing begins."""
DEFAULTS = {"translation": (100, 62.0, 20.0), "summary": (32, 95.0, 55.0)}
"""By task: texts that are timed, seconds for timing, seconds between training and timing."""
CONTEXT = """
import ctypes
cuda, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
found = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(pointer), 0), cuda.cuCtxSetCurrent(pointer)]
found.append(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)))
raise SystemExit(any(found))
"""
"""Whether a process gets a context on the device and memory."""


class SharedDevice:
    """NVIDIA's multi-process service, if there is one and it answers; otherwise processes take turns on the device."""

    def __init__(self, environment: dict[str, str]) -> None:
        pipe = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", Path(tempfile.gettempdir(), "mps")))
        log = Path(environment.get("CUDA_MPS_LOG_DIRECTORY", f"{pipe}log"))
        self._own = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        self._environment = environment
        self._started = False

    def start(self) -> bool:
        if shutil.which("nvidia-cuda-mps-control") is None:
            return False
        for place in self._own.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        started = self._control(["-d"])  # refuses where one runs already
        self._started = started is not None and started.returncode == 0
        if self._answers():
            self._environment |= self._own
            return True
        self.stop()
        return False

    def stop(self) -> None:
        if self._started:
            self._control([], "quit\n")
            self._started = False

    def _control(self, words: list[str], text: str | None = None) -> subprocess.CompletedProcess[str] | None:
        command, environment = ["nvidia-cuda-mps-control", *words], self._environment | self._own
        try:
            return subprocess.run(command, input=text, env=environment, timeout=20, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return None

    def _answers(self) -> bool:
        command, environment = [sys.executable, "-c", CONTEXT], self._environment | self._own
        try:
            return subprocess.run(command, env=environment, timeout=40, capture_output=True).returncode == 0
        except subprocess.TimeoutExpired:
            return False


class TaskRun:
    """The processes of one task, and where they leave their results."""

    def __init__(self, args: argparse.Namespace) -> None:
        from fathomlm.lab.study.spec import read_study

        self.args, self._began = args, time.monotonic()
        self.work: Path = args.work
        self.ledger, self.lines, self.logs = (self.work / name for name in ("ledger", "lines", "logs"))
        for place in (self.ledger, self.lines, self.logs, args.out):
            place.mkdir(parents=True, exist_ok=True)
        self.study = args.study or TASKS[args.task].study
        if args.seeds:
            self.study = with_seeds(self.study, args.seeds, self.work / "study.yaml")
        study = read_study(self.study)
        self._name, self._variants = study.name, [variant.name for variant in study.variants]
        self._first_seed = study.seeds[0]
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work.resolve() / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "3",
        }
        self.end = 60 * args.minutes
        self.quiet_at = self.end - args.timing
        self.train_until = self.quiet_at - args.decoding
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._failed: set[str] = set()
        self._turns: dict[str, IO[str]] = {}
        self._retries = args.retries

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def say(self, *words: object) -> None:
        print(f"[{self.now:5.0f}]", *words, flush=True)

    # Processes.

    def start(self, name: str, *command: str) -> None:
        with (self.logs / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def alive(self, *kinds: str) -> list[str]:
        return [name for name, process in self.processes.items() if name.startswith(kinds) and process.poll() is None]

    def send(self, names: Iterable[str], what: signal.Signals) -> None:
        for name in names:
            try:
                os.killpg(self.processes[name].pid, what)
            except ProcessLookupError:
                continue

    def train(self, number: int) -> None:
        args = self.args
        minutes = max(1.0, self.train_until - self.now + RESERVE) / 60
        command = ["-m", "fathomlm", "study", "run", self.study, "--corpus", str(args.data / args.task / "corpus"), "--keep"]
        command += ["--work", str(self.work / "study"), "--ledger", str(self.ledger), "--minutes", f"{minutes:.3f}"]
        command += ["--only", args.only] if args.only else []
        command += ["--commit", args.commit] if args.commit else []
        self.start(f"train-{number}", *command)

    def decode(self, variant: str) -> None:
        """Decode a trained variant, and prepare for its timing."""
        args, parts = self.args, self.args.parts if many_settings(variant) else 1
        common = [args.task, "--data", str(args.data), "--work", str(self.work / "study"), "--only", variant]
        common += ["--study", self.study]
        for part in range(parts):
            name = f"decode-{variant}-{part}"
            options = ["--texts", str(args.texts), "--batch", str(args.batch), "--part", f"{part}/{parts}"]
            options += ["--validation", str(args.validation)]
            options += ["--seconds", self._decoding_seconds(), "--out", str(self.lines / f"{name}.jsonl")]
            self.start(name, str(Path(__file__).with_name("free_tasks.py")), "decode", *common, *options)
        turn = self.work / f"turn-{variant}"
        self._turns[variant] = turn.open("w")
        fcntl.flock(self._turns[variant], fcntl.LOCK_EX)
        options = ["--texts", str(args.timed), "--turn", str(turn), "--out", str(self.lines / f"speed-{variant}.jsonl")]
        options += ["--compile"] if args.compile else []
        self.start(f"speed-{variant}", str(Path(__file__).with_name("free_tasks.py")), "speed", *common, *options)

    def _decoding_seconds(self) -> str:
        return f"{max(5.0, self.quiet_at - self.now - LAST_TURN):.0f}"

    def restart(self, name: str) -> None:
        """What a failed process is replaced by, if there is something simpler or another try."""
        command = [str(word) for word in list(self.processes[name].args)[1:]]  # type: ignore[arg-type]
        if name.startswith("train") and self._retries > 0 and self.now < self.train_until - 40:
            self._retries -= 1
            self.train(100 + self._retries)
        elif name.startswith("decode") and "--reference" not in command:
            command[command.index("--seconds") + 1] = self._decoding_seconds()
            self.start(f"{name}-reference", *command, "--reference")
        elif name.startswith("speed") and "--compile" in command:
            command.remove("--compile")
            self.start(f"{name}-plain", *command)
            self.processes[name] = self.processes[f"{name}-plain"]

    def attend(self) -> None:
        """Tell of processes that failed, once each, and replace them."""
        for name in [n for n, p in self.processes.items() if p.poll() not in (None, 0) and n not in self._failed]:
            self._failed.add(name)
            tail = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-700:]
            self.say("failed:", name, self.processes[name].returncode, tail)
            self.restart(name)

    # Results.

    def trained(self) -> dict[str, Record]:
        """The finished runs whose models are here."""
        try:
            runs = json.loads((self.ledger / f"{self._name}.json").read_text(encoding="utf-8"))["runs"]
        except (OSError, ValueError):
            return {}
        asked = argparse.Namespace(task=self.args.task, work=self.work / "study", study=self.study, only=None)
        here = places(asked)
        finished = {named(run["variant"], run["seed"], self._first_seed): run for run in runs if run["status"] == "finished"}
        return {name: run for name, run in finished.items() if name in here}

    def progress(self) -> str:
        steps = []
        for path in sorted((self.work / "study").glob("*/*/metrics.jsonl")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            last = json.loads(lines[-1]) if lines else {}
            if "loss" in last:
                steps.append(f"{path.parent.name}:{last['step']}:{last['loss']:.2f}")
        counts = [f"{len(self.alive(kind))} {word}" for kind, word in (("train", "train"), ("decode", "decode"))]
        return ", ".join([*counts, f"{len(self.alive('speed'))} wait for timing", *steps])

    def pack(self) -> None:
        out = self.args.out / f"free-{self.args.task}.tgz"
        with tarfile.open(f"{out}.part", "w:gz") as tar:
            for place in (self.ledger, self.lines, self.logs):
                tar.add(place, arcname=place.name)
            for path in sorted((self.work / "study").glob("*/*/metrics.jsonl")):
                tar.add(path, arcname=f"metrics/{path.parent.name}.jsonl")
        os.replace(f"{out}.part", out)

    def pack_again_and_again(self, over: threading.Event) -> None:
        while not over.wait(PACKED_EVERY):
            try:
                self.pack()
            except OSError as error:  # a file that was written meanwhile; the next one will do
                self.say("packing failed:", error)

    def most_promising(self) -> list[str]:
        """Variants by the layers that the fastest of their settings runs which keeps the quality: nothing is timed yet. In
        the study's order where texts cannot be scored."""
        from free_tasks_report import KEPT, TaskResults, read_results

        files = [path for path in self.lines.glob("decode-*.jsonl") if path.stat().st_size]
        try:
            results = read_results(self.args.data, files)[0][self.args.task] if files else TaskResults(self.args.task)
        except ImportError as error:  # what counts BLEU or ROUGE is not installed here
            self.say("not scored here:", error)
            return self._variants
        cost: dict[str, float] = {}
        for variant, label in results.texts:
            kept = results.kept(variant, label)
            if kept is None or kept[0] < KEPT or not label.startswith(("static", "parallel")):
                continue
            layers = float(results.texts[variant, label].record["mean_exit_layer"])
            cost[variant] = min(cost.get(variant, layers), layers)
        return sorted(cost, key=lambda name: cost[name])

    def report(self) -> bool:
        """The times, and what they keep, as far as this machine can score; whether there is anything."""
        from free_tasks_report import kept_record, read_results

        files = [path for path in self.lines.glob("*.jsonl") if path.stat().st_size]
        if not files:
            self.say("nothing was decoded")
            return False
        try:
            record = kept_record(*read_results(self.args.data, files))[self.args.task]
        except ImportError:
            return True
        for name, found in record["speed"].items():
            kept = (record["settings"].get(name) or {}).get("kept") or ["-"]
            faster = found["speedup_against_fastest_full"]
            self.say(f"{name}: {found['ms_per_token']} ms, {faster} times per token, kept {kept[0]}")
        self.say("fastest at 99 %:", record["speedup_at_99"], record["best_at_99"])
        return True

    # The course of it.

    def run(self) -> bool:
        over, device = threading.Event(), SharedDevice(self.environment)
        self.say("multi-process service:", "used" if self.args.mps and device.start() else "not used")
        threading.Thread(target=self.pack_again_and_again, args=(over,), daemon=True).start()
        try:
            self.train_and_decode()
            self.end_others()
            self.time_in_turns()
        finally:
            self.send(self.alive(""), signal.SIGKILL)
            over.set()
            device.stop()
            self.pack()
        return self.report()

    def train_and_decode(self) -> None:
        args, started, seen, told = self.args, 0, set[str](), 0.0
        while self.now < self.quiet_at:
            if started < args.workers and (started == 0 or self.now > args.stagger + 0.3 * started):
                self.train(started)
                started += 1
            for variant, record in self.trained().items():
                if variant not in seen:
                    seen.add(variant)
                    self.say(f"trained {variant}: {record['seconds']:.0f} s, loss {record['loss']:.3f}")
                    self.decode(variant)
            self.attend()
            if self.now > told + TOLD_EVERY:
                told = self.now
                self.say(self.progress())
            if started >= args.workers and not self.alive("train", "decode") and set(self.trained()) <= seen:
                break
            time.sleep(0.3)

    def end_others(self) -> None:
        """Trainers and decoders were told when to end; this is for those that did not."""
        self.send(self.alive("train", "decode"), signal.SIGINT)
        patience = self.now + 8
        while self.alive("train", "decode") and self.now < patience:
            time.sleep(0.2)
        self.send(self.alive("train", "decode"), signal.SIGKILL)

    def time_in_turns(self) -> None:
        promising = self.most_promising()
        order = [*promising[:3], MAIN, CALM, *promising[3:], *self._turns]
        for variant in dict.fromkeys(name for name in order if name in self._turns):
            if self.now > self.end - LAST_TURN:
                self.say("no time left for the timing of", variant)
                continue
            began = self.now
            fcntl.flock(self._turns[variant], fcntl.LOCK_UN)
            while self.alive(f"speed-{variant}") and self.now < self.end - LAST_TURN / 2:
                time.sleep(0.1)
                self.attend()
            self.say("timed", variant, f"{self.now - began:.1f} s, exit status {self.processes[f'speed-{variant}'].poll()}")


def many_settings(variant: str) -> bool:
    """Whether a variant has so many settings, or some that the engine cannot decode, that they are split over processes."""
    return variant == MAIN or variant.startswith(CALM)


def with_seeds(study: str, seeds: list[int], path: Path) -> str:
    """The file of a study that is the same but for its seeds; its runs are known by their settings, so they merge."""
    import yaml

    from fathomlm.lab.study.spec import shipped_studies
    from fathomlm.train.reading import read_yaml

    values = read_yaml(Path(shipped_studies().get(study, study)))
    path.write_text(yaml.safe_dump(values | {"seeds": seeds}, sort_keys=False), encoding="utf-8")
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", choices=list(TASKS))
    add("--data", type=Path, required=True, help="what `free_tasks.py prepare` made")
    add("--out", type=Path, required=True, help="folder of the packed results")
    add("--minutes", type=float, required=True, help="all ends within these")
    add("--work", type=Path, default=Path("runs/free"), help="models, logs and lines; default: %(default)s")
    add("--study", metavar="FILE", help="YAML in place of the shipped study")
    add("--only", metavar="GLOB[,GLOB]", help="variants, as `fathomlm study run --only`; default: all, in the study's order")
    add("--seeds", type=int, nargs="*", help="in place of the study's; the first one's models have their variants' names")
    add("--workers", type=int, default=8, help="processes that train; default: %(default)s")
    add("--stagger", type=float, default=0.0, help="seconds that the first one compiles alone; default: %(default)s")
    add("--texts", type=int, default=500, help="test texts to decode; default: %(default)s")
    add("--validation", type=int, default=0, help="validation texts, for what is timed; default: %(default)s")
    add("--batch", type=int, default=250, help="texts at once; default: %(default)s")
    add("--parts", type=int, default=3, help=f"processes for the decoding of {MAIN}*, of {CALM}*; default: %(default)s")
    add("--timed", type=int, help="test texts to time, one at a time; default: 100, of summaries 32")
    add("--timing", type=float, metavar="SECONDS", help="for timing, at the end; default: 62, of summaries 95")
    add("--decoding", type=float, metavar="SECONDS", help="between training and timing; default: 20, of summaries 55")
    add("--retries", type=int, default=2, help="of trainers that fail; default: %(default)s")
    add("--commit", metavar="HASH", help="for the records, where this is not a git checkout")
    add("--no-compile", dest="compile", action="store_false", help="time without compiled layers")
    add("--no-mps", dest="mps", action="store_false", help="without NVIDIA's multi-process service")
    args = parser.parse_args()
    for name, value in zip(("timed", "timing", "decoding"), DEFAULTS[args.task], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if 60 * args.minutes <= args.timing + args.decoding:
        parser.error("--minutes must leave time for training beside --timing and --decoding")
    raise SystemExit(0 if TaskRun(args).run() else 1)


if __name__ == "__main__":
    main()
