"""`fathomlm study list`: the studies that come with FathomLM."""

from __future__ import annotations

import argparse
import json

from fathomlm.lab.cli.study_options import add_json, print_rows, read_studies

HELP = "the studies that come with FathomLM"
DESCRIPTION = "Lists the studies that come with FathomLM: what they compare, and in how many runs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    found = [
        {
            "name": study.name,
            "title": study.title,
            "thesis": list(study.thesis),
            "variants": len(study.variants),
            "budgets": len(study.budgets),
            "seeds": len(study.seeds),
            "runs": len(study.runs()),
        }
        for study in read_studies([])
    ]
    if args.json:
        print(json.dumps({"studies": found}))
        return 0
    header = ["study", "runs", "variants", "budgets", "seeds"]
    print_rows([header, *([str(study[key]) for key in ("name", *header[1:])] for study in found)])
    for study in found:
        print(f"\n{study['name']}: {study['title']} ({', '.join(study['thesis']) or 'ours'})")
    return 0
