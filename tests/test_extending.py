"""docs/extending.md, done: each example is applied to a copy of the package, and what it adds is used from end to end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SETUP = """
import os, torch, fathomlm
assert fathomlm.__file__.startswith(os.getcwd())
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.depth.cost import count
from fathomlm.model import FathomConfig, FathomForCausalLM
from fathomlm.train.losses.head import IGNORE
from fathomlm.train.objective import Objective
from fathomlm.train.recipe import LossRecipe

torch.manual_seed(0)
torch.set_num_threads(1)
SHAPE = Architecture(
    family="llama", layers=4, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, vocab=37, context=64
)
TOKENS = torch.randint(0, 37, (2, 12))
base = FathomForCausalLM(FathomConfig.of(SHAPE, DepthPlan.vanilla(4))).eval()


def same(model, other):
    torch.testing.assert_close(model(TOKENS).logits, other(TOKENS).logits, rtol=0, atol=1e-5)


def learn(model, group):
    before = {name: value.detach().clone() for name, value in model.decoder.named_parameters() if name.startswith(group)}
    objective = Objective(model.decoder.train(), LossRecipe())
    optimizer = torch.optim.AdamW(model.decoder.parameters(), lr=0.1)
    total, parts = objective(TOKENS, TOKENS.roll(-1, 1))
    total.backward()
    optimizer.step()
    assert len(parts) == len(objective.names)
    after = dict(model.decoder.named_parameters())
    assert before and all(not torch.equal(value, after[name]) for name, value in before.items())
    model.eval()
"""
RELAXATION = """
relaxation = Relaxation(kind="scale")
plan = DepthPlan.build("cycle", 2, 4)
added = count(SHAPE, plan, relaxation=relaxation).relaxation_parameters
assert added == 4 * sum(linear.outputs for linear in SHAPE.linears())
model = fathomlm.convert(base, recursions=2, relax="scale")
same(model, fathomlm.convert(base, recursions=2))
assert sum(value.numel() for value in model.decoder.deltas.parameters()) == added
learn(model, "deltas.")
model.save_pretrained("saved")
loaded = fathomlm.load("saved")
assert loaded.relaxation == model.relaxation == relaxation
same(loaded, model)
fathomlm.export(model, "exported")
same(fathomlm.load("exported"), model)
"""
ROUTER = """
routing = build_routing("mean", 2)
plan = DepthPlan.build("cycle", 2, 4).with_routing(routing)
added = count(SHAPE, plan).router_parameters
model = fathomlm.convert(base, recursions=2, router="mean")
assert model.plan.routing == routing
assert sum(value.numel() for value in model.decoder.routers.parameters()) == added == 2 * 16
learn(model, "routers.")
model.save_pretrained("saved")
loaded = fathomlm.load("saved")
assert loaded.plan == model.plan
same(loaded, model)
done = fathomlm.generate(loaded, [[1, 2, 3]], max_new_tokens=4)
"""
SHARING = """
plan = DepthPlan.build("palindrome", 2, 4)
assert [step.layer for step in plan] == [0, 1, 1, 0]
assert plan.recursion_ends() == (1,)
model = fathomlm.convert(base, sharing="palindrome", recursions=2)
model.save_pretrained("saved")
same(fathomlm.load("saved"), model)
"""
FAMILY = """
import dataclasses
from fathomlm.depth import Architecture
shape = dataclasses.replace(SHAPE, family="olmo")
model = FathomForCausalLM(FathomConfig.of(shape, DepthPlan.vanilla(4))).eval()
fathomlm.export(model, "exported")
loaded = fathomlm.load("exported")
assert loaded.architecture.family == "olmo"
same(loaded, model)
"""
LOSS = """
from fathomlm.train.losses.divergence import DIVERGENCES
logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
taught = torch.randn(3, 7, dtype=torch.float64).log_softmax(-1)
value, slope = DIVERGENCES["squared"](logits.log_softmax(-1), taught)
(expected,) = torch.autograd.grad(value.sum(), logits)
torch.testing.assert_close(slope, expected)
from fathomlm.options import check
from fathomlm.train.recipe import DistillRecipe
check(DistillRecipe(source="teacher", kind="squared"))
"""
CHECK = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "fathomlm"]:
    del sys.modules[name]
sys.path.insert(0, "src")
exec(compile(open("check.py", encoding="utf-8").read(), "check.py", "exec"), {"__name__": "__main__"})
"""
"""In a process of its own that has imported what takes seconds, and then anew what is ours."""
CASES = {
    "A relaxation": (RELAXATION, 3),
    "A router": (ROUTER, 3),
    "A sharing strategy": (SHARING, 1),
    "A checkpoint family": (FAMILY, 2),
    "A loss": (LOSS, 1),
}


def blocks(title: str) -> list[tuple[str, str, str]]:
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{title}\n"))
    return BLOCK.findall(text)


def patched(text: str, change: str) -> str:
    """A file with the lines of a diff block put in; lines without a sign are there already and say where."""
    lines, at = text.splitlines(keepends=True), 0
    for line in change.splitlines(keepends=True):
        sign, rest = line[0], line[1:]
        if sign == "+" and not rest.strip():
            rest = "\n"
        if sign == "+":
            lines.insert(at, rest)
            at += 1
        else:
            at = lines.index(rest, at)
            del lines[at : at + (sign == "-")]
            at += sign == " "
    return "".join(lines)


def lead(text: str, change: str) -> int:
    """Where a diff that begins with new lines puts them: in front of the first line that is there already."""
    first = next(line[1:] for line in change.splitlines(keepends=True) if line[0] != "+")
    return text.index(first)


def apply(root: Path, kind: str, name: str, code: str) -> None:
    path = root / name
    if kind == "python":
        assert not path.exists()
        path.write_text(code, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    start = lead(text, code)
    path.write_text(text[:start] + patched(text[start:], code), encoding="utf-8")


@pytest.mark.parametrize("title", CASES)
def test_an_example_works_and_touches_few_files(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_python: Callable[..., Forked]
) -> None:
    examples = blocks(title)
    assert len({name for _, name, _ in examples}) == len(examples) <= CASES[title][1] <= 3
    assert sum(code.count("\n") for _, _, code in examples) < 60
    ignored = shutil.ignore_patterns("*.safetensors")  # bytecode goes along, so that nothing is compiled anew
    shutil.copytree(ROOT / "src" / "fathomlm", tmp_path / "src" / "fathomlm", ignore=ignored)
    for block in examples:
        apply(tmp_path, *block)
    (tmp_path / "check.py").write_text(SETUP + CASES[title][0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    check = start_python(CHECK)
    _, said = check.communicate()
    assert check.returncode == 0, said[-3000:]
