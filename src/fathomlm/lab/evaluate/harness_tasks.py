"""Tasks of lm-evaluation-harness, run on a FathomLM model: their data come from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fathomlm.errors import DataError, OptionError, choices
from fathomlm.lab.evaluate.outputs import Output
from fathomlm.lab.evaluate.scoring import OnProgress
from fathomlm.lab.evaluate.tasks import GROUPS, TASKS, Metrics, accuracy_error
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.tokenizers import one_line, quiet_hub

EXTRA = "pip install 'fathomlm[eval]'"


class HarnessTasks:
    """Names that lm-eval knows. Made before a model is loaded, so that a slip costs no waiting."""

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        """`include` is a folder with task descriptions (YAML) of the user's own."""
        self.names = tuple(names)
        if include is not None and not include.is_dir():
            raise DataError(f"the folder {include} does not exist")
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise OptionError(_without(self.names)) from error
        with _quiet():
            self._manager: Any = TaskManager(include_path=None if include is None else str(include))
        known = self._manager.all_tasks
        for name in self.names:
            if name not in known:
                raise OptionError(choices("task", name, {*known, *GROUPS}))

    def run(
        self,
        model: FathomForCausalLM,
        outputs: Sequence[Output],
        *,
        batch: int,
        shots: int | None = None,
        limit: int | None = None,
        on_done: OnProgress | None = None,
    ) -> list[dict[str, Metrics]]:
        """For each output, the metrics of each task by name."""
        import lm_eval

        from fathomlm.lab.evaluate.harness import HarnessModel

        harness = HarnessModel(model, batch_size=batch, outputs=outputs, on_done=on_done)
        found = []
        for number in range(len(outputs)):
            harness.at = number
            try:
                with _quiet():
                    results = lm_eval.simple_evaluate(
                        model=harness,
                        tasks=list(self.names),
                        num_fewshot=shots,
                        limit=limit,
                        bootstrap_iters=0,
                        log_samples=False,
                        task_manager=self._manager,
                    )
            except Exception as error:
                if harness.inputs or isinstance(error, OptionError):
                    raise
                # Datasets, the hub and task scripts raise what they like.
                inputs = ", ".join(self.names)
                raise DataError(f"{inputs} could not be loaded: {one_line(error)}; --data DIR reads from files") from error
            found.append({name: _metrics(results, name) for name in self.names})
        return found


def _without(names: Sequence[str]) -> str:
    """The message where lm-eval is not installed; a name that only looks like one of ours is a slip first."""
    known = {*TASKS, *GROUPS}
    slip = next((name for name in names if name not in known), None)
    hint = "" if slip is None else f"{choices('task', slip, known)}. "
    return f"{hint}Tasks from the hub need lm-eval ({EXTRA}); --data DIR reads them from files without it"


def _metrics(results: dict[str, Any], name: str) -> Metrics:
    """A task's numbers without lm-eval's filter names; of a group, those that it has of its own."""
    counts = results.get("n-samples", {})
    mine = [name] if name in counts else [task for task in counts if task in _below(results, name)]
    many = sum(int(counts[task]["effective"]) for task in mine)
    found: Metrics = {"examples": many}
    for key, value in results["results"][name].items():
        metric, _, kept = key.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and kept and not metric.endswith("_stderr"):
            metric = metric if kept == "none" else f"{metric} ({kept})"
            found[metric] = float(value)
            if metric in ("acc", "acc_norm"):
                found[f"{metric}_stderr"] = accuracy_error(float(value), many)
    return found


def _below(results: dict[str, Any], name: str) -> set[str]:
    """The tasks under a group, at any depth."""
    under = results.get("group_subtasks", {}).get(name, ())
    return {task for child in under for task in ({child} | _below(results, child))}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval logs and prints at length, and standard output is ours; failures are reported once, by the error."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_hub(), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(before)
