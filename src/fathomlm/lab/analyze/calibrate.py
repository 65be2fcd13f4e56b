"""`fathomlm calibrate MODEL --data F`: learn the confidence threshold for early exit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import make_directories
from fathomlm.cli.common import read_documents, threshold_file
from fathomlm.cli.display import progress_bar
from fathomlm.decode.calibration import FILE, Calibration, calibrate
from fathomlm.decode.generation import Generation
from fathomlm.decode.prompts import chat_prompt, encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.threshold import LEAST_SEQUENCES, RULES, ThresholdEstimator
from fathomlm.decode.threshold_samples import STEPS
from fathomlm.errors import OptionError, writing
from fathomlm.lab.analyze.options import Calibrate
from fathomlm.lab.analyze.pictures import draw_threshold
from fathomlm.lab.drawing import check_matplotlib
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel


def run(options: Calibrate) -> int:
    out, layer = _out_directory(options), _one_layer(options)
    if options.chat and options.prompt_tokens is not None:
        raise OptionError("--chat cannot be combined with --prompt-tokens")
    check_matplotlib()
    documents = read_documents(options.data, options.column, options.prompts)
    model = options.load_any(exits=options.exits, any_base=options.any_base)
    prompts = [
        chat_prompt(model, [{"role": "user", "content": text}]) if options.chat else _beginning(model, text, options)
        for text in documents
    ]
    with progress_bar("calibrating", "prompts") as update:

        def on_text(text: Generation, estimator: ThresholdEstimator) -> None:
            update(estimator.sequences, len(prompts), f", threshold {estimator.threshold:.3f}")

        found = calibrate(
            model, prompts, Sampling(max_new_tokens=options.max_new_tokens), exit_layer=layer,
            confidence=options.confidence, options=replace(options.rule, calibrating_sequences=len(prompts)),
            on_text=on_text,
        )  # fmt: skip
    with writing(out):
        make_directories(out)
    found.save(out / FILE)
    picture = (out / FILE).with_suffix(".png")
    draw_threshold(found.estimator, picture, name=options.model)
    return options.answer(_record(found, out / FILE, picture), lambda record: print(_describe(record)))


def _one_layer(options: Calibrate) -> int | None:
    layers = options.exit_layers
    if layers is not None and len(layers) != 1:
        raise OptionError(f"--exit-layer takes one layer here, got {len(layers)}: a threshold belongs to one exit")
    return None if layers is None else layers[0]


def _out_directory(options: Calibrate) -> Path:
    if options.out is not None:
        return options.out
    path = threshold_file(options.model, options.exits).parent
    if options.exits is None and not (path / "config.json").is_file():
        raise OptionError(f"{options.model} is not a directory to write a threshold into; give --out DIR")
    return path


def _beginning(model: FathomModel, text: str, options: Calibrate) -> list[int]:
    most = options.prompt_tokens or (512 if isinstance(model, FathomForSeq2SeqLM) else 32)
    return encode_prompt(model, text)[:most]


def _record(found: Calibration, path: Path, picture: Path) -> dict[str, Any]:
    estimator = found.estimator
    last = estimator.history[-1]
    return {
        "threshold": estimator.threshold,
        "exit_layer": found.exit_layer,
        "confidence": found.confidence,
        "texts": estimator.sequences,
        "counted": estimator.texts.count,
        "agreements": last.agreements,
        "disagreements": last.disagreements,
        "agree": {"alpha": last.agree.alpha, "beta": last.agree.beta},
        "disagree": {"alpha": last.disagree.alpha, "beta": last.disagree.beta},
        **{name: getattr(estimator.options, name) for name in ("rule", "risk", "level", "condition", "priors")},
        "rules": {rule: _rule(estimator, rule) for rule in RULES},
        "history": [{"text": refit.sequence, "threshold": refit.threshold} for refit in estimator.history],
        "file": str(path),
        "picture": str(picture),
    }


def _describe(record: dict[str, Any]) -> str:
    samples = record["agreements"] + record["disagreements"]
    part = record["agreements"] / samples if samples else 0.0
    rules = [_describe_rule(name, found, record) for name, found in record["rules"].items() if name != "public"]
    if record["rule"] == "public":
        rules.append(_describe_rule("public", record["rules"]["public"], record))
    lines = [
        f"threshold {record['threshold']:.3f}: confidence '{record['confidence']}' after layer {record['exit_layer']}",
        *rules,
        f"{record['texts']} prompts, {samples} tokens; the exit agreed with the full model at {part:.1%} of them",
        _beta("agreed", record["agreements"], record["agree"]),
        _beta("did not", record["disagreements"], record["disagree"]),
        f"wrote {record['file']} and {record['picture']}",
    ]
    return "\n".join(lines)


def _rule(estimator: ThresholdEstimator, rule: str) -> dict[str, float]:
    """What a rule says, and what would come of it on these texts; at the next lower threshold that is counted."""
    threshold = estimator.threshold if rule == estimator.options.rule else estimator.by(rule)
    texts, at = estimator.texts, int(threshold * STEPS + 1e-9)  # 0.57 * 200 is a little less than 114
    return {"threshold": threshold, "exiting": texts.exiting(at), "wrong": texts.share(at)}


def _describe_rule(name: str, found: dict[str, float], record: dict[str, Any]) -> str:
    if name == "risk":
        said = f"wrong below {record['risk']:.3g} of all tokens, confidence level {record['level']:g}"
        if record["counted"] < LEAST_SEQUENCES:
            said += f"; that takes {LEAST_SEQUENCES} prompts or more"
        elif found["threshold"] == 1:
            said += "; that takes more prompts, or a higher --risk"
    else:
        said = f"agreement at least {record['condition']:g} likely, {record['priors']} priors"
    came = f"{found['exiting']:.1%} exit, {found['wrong']:.2%} of all wrong"
    return f"  rule {name:7} {found['threshold']:.3f}: {came} ({said})"


def _beta(name: str, count: int, fit: dict[str, float]) -> str:
    return f"  {name:8} {count:>6} tokens, Beta({fit['alpha']:.3g}, {fit['beta']:.3g})"
