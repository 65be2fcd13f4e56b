"""The objective: which outputs it weighs by how much, and that its sums are those of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import OptionError, PlanError
from fathomlm.model.decoder import Decoder
from fathomlm.train.losses.exits import exit_depths, exit_steps, exit_weights
from fathomlm.train.losses.head import IGNORE
from fathomlm.train.losses.layerwise import monotone_map
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.recipe import DistillRecipe, ExitRecipe, LayerwiseRecipe, LossRecipe
from train.exit_runs import SHAPE, batch, entropy

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHITECTURE = Architecture(family="llama", **SHAPE)
PLAIN, LOOPED = DepthPlan.vanilla(4), DepthPlan.build("cycle", 2, 4)


def decoder(plan=LOOPED, seed=0, exits=(), rank=0):
    made = Decoder(ARCHITECTURE, plan.with_exits(exits), exit_rank=rank)
    made.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(seed))
    for head in made.exit_heads.values():
        torch.nn.init.normal_(head.b, std=0.1, generator=torch.Generator().manual_seed(seed))
    return made


def outputs(model, tokens, keep):
    """The normed state after every step, as `forward` runs them, read by hooks."""
    states = []
    hooks = [layer.register_forward_hook(lambda module, inputs, out: states.append(out)) for layer in model.layers]
    last = model(tokens, keep_BS=keep)
    for hook in hooks:
        hook.remove()
    normed = [model.norm(state) for state in states]
    assert torch.equal(normed[-1], last)
    return normed


def kl(student, taught, targets):
    """Forward KL, teacher first."""
    p, log_q = taught.detach().softmax(-1), student.log_softmax(-1)
    return (p * (p.log() - log_q)).sum(-1)[targets != IGNORE].sum()


@pytest.mark.parametrize(
    ("weights", "depths", "wanted"),
    [
        ("weighted", (1, 2, 3), (1 / 6, 2 / 6, 3 / 6)),
        ("weighted", (8, 30), (8 / 38, 30 / 38)),  # L_S / (L + L_S) and L / (L + L_S)
        ("unweighted", (1, 2, 3, 4), (0.25, 0.25, 0.25, 0.25)),
        ("aggressive", (1, 2, 3), (0.3, 0.3, 1.0)),
    ],
)
def test_weights_of_exits(weights, depths, wanted):
    assert exit_weights(ExitRecipe(weights=weights, coefficient=0.3), depths) == pytest.approx(wanted)


def test_where_exits_are_and_how_deep():
    recursions, steps = ExitRecipe(), ExitRecipe(at=[6, 2])
    plan = DepthPlan.build("middle-cycle", 3, 8)
    assert exit_steps(recursions, plan) == (2, 4)
    assert exit_depths(recursions, plan) == (1, 2, 3)
    assert exit_steps(steps, plan) == (1, 5)
    assert exit_depths(steps, plan) == (2, 6, 8)


@pytest.mark.parametrize(
    ("recipe", "plan", "error", "message"),
    [
        (ExitRecipe(), PLAIN, OptionError, "at: recursions requires a model with recursions >= 2"),
        (ExitRecipe(), DepthPlan.build("sequence", 2, 4), PlanError, "recursions have no outputs under sequence"),
        (ExitRecipe(at=[]), LOOPED, OptionError, "must name at least one step"),
        (ExitRecipe(at=[4]), LOOPED, PlanError, "steps 1 to 3 of 4, got 4"),
        (ExitRecipe(at=[0]), LOOPED, PlanError, "steps 1 to 3 of 4, got 0"),
    ],
)
def test_exits_that_no_model_has(recipe, plan, error, message):
    with pytest.raises(error, match=message):
        exit_steps(recipe, plan)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (LossRecipe(), ("next_token",)),
        (LossRecipe(distill=DistillRecipe(source="x")), ("next_token", "distill")),
        (LossRecipe(exits=ExitRecipe()), ("next_token", "exit_2")),
        (
            LossRecipe(exits=ExitRecipe(at=[1, 3], distill="forward_kl"), layerwise=LayerwiseRecipe(shallow=1)),
            ("next_token", "exit_1", "exit_1_distill", "exit_3", "exit_3_distill", "layerwise"),
        ),
    ],
)
def test_parts_have_names(recipe, names):
    tokens, targets, keep = batch()
    objective = Objective(decoder(), recipe, teacher=decoder(PLAIN))
    assert objective.names == names
    _, parts = objective(tokens, targets, keep)
    assert parts.shape == (len(names),)
    assert not parts.requires_grad
    assert (parts > 0).all()


def test_the_plain_objective_is_the_models_cross_entropy():
    model, (tokens, targets, keep) = decoder(), batch()
    total, parts = Objective(model, LossRecipe(chunk=7))(tokens, targets, keep)
    wanted = entropy(model.logits(model(tokens, keep_BS=keep)), targets)
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(parts, wanted[None])


def gradients(model, total):
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def same(model, found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    for one, other in zip(gradients(model, found), gradients(model, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["weighted", "unweighted", "aggressive"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("distill", [None, "forward_kl"])
def test_exits_by_hand(weights, rank, distill):
    model, (tokens, targets, keep) = decoder(exits=(0, 1), rank=rank), batch()
    recipe = ExitRecipe(at=[1, 2], weights=weights, coefficient=0.2, distill=distill, distill_weight=0.6, head_rank=rank)
    found, parts = Objective(model, LossRecipe(exits=recipe, chunk=7))(tokens, targets, keep)
    states = outputs(model, tokens, keep)
    last = model.logits(states[-1])
    share = {"weighted": (1 / 7, 2 / 7, 4 / 7), "unweighted": (1 / 3,) * 3, "aggressive": (0.2, 0.2, 1.0)}[weights]
    wanted, own = share[2] * entropy(last, targets), [entropy(last, targets)]
    for index in (0, 1):
        logits = model.logits(states[index])
        if rank:
            head = model.exit_delta(index)
            logits = logits + states[index] @ head.a.T @ head.b.T
        own.append(entropy(logits, targets))
        wanted = wanted + share[index] * own[-1]
        if distill:
            own.append(kl(logits, last, targets))
            wanted = wanted + share[index] * 0.6 * own[-1]
    torch.testing.assert_close(parts, torch.stack(own).detach(), rtol=1e-5, atol=1e-4)
    same(model, found, wanted)


def test_a_teacher_beside_the_student_by_hand():
    model, teacher, (tokens, targets, keep) = decoder(), decoder(PLAIN, seed=1), batch()
    recipe = LossRecipe(distill=DistillRecipe(source="x", weight=0.4), chunk=7)
    objective = Objective(model, recipe, teacher=teacher)
    found, _ = objective(tokens, targets, keep)
    logits = model.logits(model(tokens, keep_BS=keep))
    taught = teacher.logits(teacher(tokens, keep_BS=keep))
    same(model, found, entropy(logits, targets) + 0.4 * kl(logits, taught, targets))
    objective(tokens, targets, keep)[0].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert {id(p) for p in objective.parameters()} == {id(p) for p in model.parameters()}


def test_distillation_of_the_last_output_beside_exits_counts_as_much_as_the_last_output_does():
    model, teacher, (tokens, targets, keep) = decoder(), decoder(PLAIN, seed=1), batch()
    recipe = LossRecipe(distill=DistillRecipe(source="x"), exits=ExitRecipe(weights="weighted"))
    objective = Objective(model, recipe, teacher=teacher)
    found, parts = objective(tokens, targets, keep)
    part = dict(zip(objective.names, parts, strict=True))
    torch.testing.assert_close(found.detach(), (2 * (part["next_token"] + part["distill"]) + part["exit_2"]) / 3)


@pytest.mark.parametrize("mapping", ["last", "last_pair", "unif", "dyna", "dyna_equation"])
def test_the_shallow_deep_objective_by_hand(mapping):
    """(L_S CE_S + L CE_D) / (L + L_S) + KD (thesis 2)."""
    model, (tokens, targets, keep) = decoder(PLAIN), batch()
    recipe = LossRecipe(
        exits=ExitRecipe(at=[2], weights="weighted"), layerwise=LayerwiseRecipe(shallow=2, mapping=mapping, weight=0.5)
    )
    found, parts = Objective(model, recipe)(tokens, targets, keep)
    states = outputs(model, tokens, keep)
    shallow, deep = states[:2], [states[3]] if "last" in mapping else [states[1], states[3]]
    counted = targets != IGNORE
    errors = torch.stack(
        [torch.stack([((s - d.detach()) ** 2).mean(-1).mul(counted).sum(-1) for d in deep], -1) for s in shallow], 1
    )
    nearest = {"dyna": errors.mT, "dyna_equation": errors}.get(mapping)
    chosen = [[0, 0 if mapping == "last" else 1]] * 3 if nearest is None else monotone_map(nearest.detach()).tolist()
    summed = errors.mT if mapping == "dyna" else errors
    if mapping == "last_pair":
        kd = errors[:, 1, 0].sum()
    else:
        kd = sum(summed[b, i, j] for b, row in enumerate(chosen) for i, j in enumerate(row)) / 2
    ce_s, ce_d = (entropy(model.logits(states[i]), targets) for i in (1, 3))
    torch.testing.assert_close(parts[-1], kd.detach())
    same(model, found, (2 * ce_s + 4 * ce_d) / 6 + 0.5 * kd)


def test_frozen_exit_heads_learn_alone():
    model, (tokens, targets, keep) = decoder(exits=(1,), rank=3), batch()
    choose_trained(model, "exit_heads")
    recipe = ExitRecipe(at=[2], distill="forward_kl", head_rank=3)
    Objective(model, LossRecipe(exits=recipe))(tokens, targets, keep)[0].backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {"exit_heads.1.a", "exit_heads.1.b"}


def test_self_distillation_leaves_the_last_output_alone():
    """With weight on the divergence only, what lies behind the exit gets no gradient, and the head only the exit's."""
    model, (tokens, targets, keep) = decoder(PLAIN), batch()
    recipe = ExitRecipe(at=[2], weights="aggressive", coefficient=0.5, distill="forward_kl", distill_weight=1.0)
    objective = Objective(model, LossRecipe(exits=recipe))
    total, parts = objective(tokens, targets, keep)
    states = outputs(model, tokens, keep)
    last, early = (model.logits(states[i]) for i in (3, 1))
    rest = total - entropy(last, targets) - 0.5 * entropy(early, targets)
    torch.testing.assert_close(rest.detach(), 0.5 * parts[2], rtol=1e-4, atol=1e-3)
    by_name = dict(zip((name for name, _ in model.named_parameters()), gradients(model, rest), strict=True))
    behind = [gradient for name, gradient in by_name.items() if name.startswith(("layers.2.", "layers.3."))]
    assert max(gradient.abs().max() for gradient in behind) < 1e-5
    assert by_name["layers.0.mlp.up.weight"].abs().max() > 1e-2


@pytest.mark.parametrize("relax", [None, "lora", "encoding", "prefix"])
@pytest.mark.parametrize("recompute", ["recursion", "layer"])
def test_recomputation_changes_nothing(recompute, relax):
    relaxation = build_relaxation(
        ARCHITECTURE.linears(), relax, 2 if relax == "lora" else None, 2 if relax == "prefix" else None
    )
    model = Decoder(ARCHITECTURE, LOOPED, relaxation)
    torch.manual_seed(0)
    model.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    tokens, targets, keep = batch()
    recipe = LossRecipe(exits=ExitRecipe(), layerwise=LayerwiseRecipe(shallow=1))
    totals, slopes = [], []
    for kind in ("none", recompute):
        total, _ = Objective(model, recipe, recompute=kind)(tokens, targets, keep)
        totals.append(total.item())
        slopes.append(gradients(model, total))
    assert totals[0] == totals[1]
    assert all(torch.equal(one, other) for one, other in zip(*slopes, strict=True))


def test_recomputation_keeps_less():
    """Bytes that autograd keeps for the backward pass, weights left out."""
    model, (tokens, targets, _) = decoder(PLAIN), batch(length=60)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}
    for kind in ("none", "layer"):
        seen = {}

        def note(tensor, seen=seen):
            if tensor.data_ptr() not in own:
                seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total, _ = Objective(model, LossRecipe(), recompute=kind)(tokens, targets.clamp_min(0))
        kept[kind] = sum(seen.values())
        del total
    assert kept["layer"] < kept["none"] / 2


def test_packed_documents_are_as_if_alone():
    model = decoder()
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(0, SHAPE["vocab"], (n + 1,), generator=generator) for n in (6, 9))
    tokens = torch.cat((first[:-1], second[:-1]))[None]
    documents = torch.tensor([[0] * 6 + [1] * 9], dtype=torch.int32)
    ends = {}
    for at in range(15):  # the loss of each token by itself
        targets = torch.full((1, 15), IGNORE)
        targets[0, at] = torch.cat((first[1:], second[1:]))[at]
        ends[at] = [Objective(model, LossRecipe())(tokens, targets, None, d)[0].item() for d in (documents, None)]
    alone = []
    for document in (first, second):
        logits = model.logits(model(document[None, :-1]))[0]
        alone += F.cross_entropy(logits, document[1:], reduction="none").tolist()
    assert [with_mask for with_mask, _ in ends.values()] == pytest.approx(alone, rel=1e-4)
    assert [without for _, without in ends.values()] != pytest.approx(alone, rel=1e-2)


def test_padding_changes_no_sum():
    model, (tokens, targets, keep) = decoder(), batch()
    recipe = LossRecipe(exits=ExitRecipe(distill="reverse_kl"), layerwise=LayerwiseRecipe(shallow=2))
    _, whole = Objective(model, recipe)(tokens, targets, keep)
    rows = []
    for i, length in enumerate(keep.sum(-1).tolist()):
        rows.append(Objective(model, recipe)(tokens[i : i + 1, :length], targets[i : i + 1, :length])[1])
    torch.testing.assert_close(torch.stack(rows).sum(0), whole, rtol=1e-4, atol=1e-4)
