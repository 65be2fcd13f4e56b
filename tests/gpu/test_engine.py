"""The engine on a GPU: captured decode steps, compiled code and Triton kernels choose what the reference decoder chooses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import build, exiting, mixing_threshold
from engine.test_engine import NEW, many
from engine.test_engine_exits import model as gated
from engine.test_engine_exits import threshold
from engine.test_engine_injected import model as injected
from engine.test_engine_injected import setting as between_loops
from engine.test_engine_prefix import PREFIX
from engine.test_engine_prefix import model as prefixed
from engine.test_engine_prefix import threshold as prefix_threshold
from engine.test_engine_windows import ALIKE, BOTH
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Session, generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.engine import burst_length
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request
from fathomlm.engine.runner import Runner
from fathomlm.engine.sampler import Mode, SamplerState, sample
from fathomlm.engine.session import EngineSession
from fathomlm.kernels.paged_write import FLOAT8
from fathomlm.lab.bench.models import random_model
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import LOOPS, WINDOWS, model_of, routed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES: dict[str, Any] = {"page_size": 16, "batch_size": 4, "prefill_chunk": 5, "max_length": 48}
MODES = ("full", "static", "state-copy", "parallel", "speculative")


def on_gpu(model: FathomForCausalLM) -> FathomForCausalLM:
    return copy.deepcopy(model).cuda()


@pytest.fixture(autouse=True)
def _exact() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


CASES: dict[str, Any] = {
    "whole": (lambda: build("vanilla"), None),
    "whole, lora": (lambda: build("lora"), None),
    "routed": (lambda: model_of(routed()), None),
    "routed, shared": (lambda: model_of(routed("expert", "share")), None),
    "routed, hybrid": (lambda: model_of(routed("expert", "hybrid")), None),
    "token": (lambda: model_of(routed("token")), None),
    "routed, windows": (lambda: model_of(routed(), architecture=WINDOWS), None),
    "routed, windows alike": (lambda: model_of(routed("expert", "cache", "cycle"), architecture=ALIKE), None),
    "routed, windows, shared": (lambda: model_of(routed("expert", "share", "cycle"), architecture=WINDOWS), None),
    "routed, windows, hybrid": (lambda: model_of(routed("token", "hybrid"), architecture=WINDOWS), None),
    "routed, windows, some layers still": (lambda: model_of(routed(), architecture=BOTH), None),
    "prefix": (lambda: build("prefix"), None),
    "prefix, windows": (lambda: prefixed("plain, windows"), None),
    "prefix, routed, windows": (lambda: model_of(routed(), PREFIX, WINDOWS), None),
    "prefix, routed, shared": (lambda: model_of(routed("expert", "share", "cycle"), PREFIX, WINDOWS), None),
    "prefix, exits, one pass": (
        lambda: prefixed("three loops, windows"),
        lambda: Exiting(
            mode="parallel", exit_layers=(2, 4), threshold=prefix_threshold("three loops, windows", (2, 4)), max_stack=2
        ),
    ),
    "exits, one pass, windows": (
        lambda: model_of(LOOPS["cycle"], architecture=WINDOWS),
        lambda: Exiting(mode="parallel", exit_layers=(4,), threshold=0.05, max_stack=3),
    ),
    "exits, injected": (lambda: injected("norm"), lambda: between_loops("norm", None, "kl")),
    "exits, injected, two passes": (lambda: injected("windows"), lambda: between_loops("windows", (1, 3), "gap")),
    "exits, two passes": (
        lambda: build("vanilla"), lambda: exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla"), max_stack=4)
    ),
    "exits, one pass": (
        lambda: build("lora"), lambda: exiting("lora", "parallel", threshold=mixing_threshold("lora"), max_stack=4)
    ),
    "exits, several": (
        lambda: build("vanilla"),
        lambda: Exiting(mode="parallel", exit_layers=(1, 3, 5), threshold=threshold("vanilla", (1, 3, 5)), max_stack=2),
    ),
    "exits, several in one pass": (
        lambda: build("four-loops"),
        lambda: Exiting(mode="parallel", exit_layers=(2, 4, 6), threshold=threshold("four-loops", (2, 4, 6)), max_stack=2),
    ),
    "exits, a layer of its own": (
        lambda: build("own-layer"),
        lambda: exiting("own-layer", "parallel", threshold=mixing_threshold("own-layer"), max_stack=4),
    ),
    "exits, a gate": (
        lambda: gated("gate"), lambda: Exiting(mode="parallel", threshold=0.75, confidence="gate", max_stack=2)
    ),
    "whole, norms behind each half": (lambda: gated("ouro"), None),
    "exits, entries copied": (
        lambda: gated("ouro"), lambda: Exiting(mode="entry-copy", threshold=0.85, confidence="gate")
    ),
    "exits, states copied": (
        lambda: gated("ouro"), lambda: Exiting(mode="state-copy", threshold=0.85, confidence="gate")
    ),
    "drafts": (
        lambda: build("own-layer"), lambda: exiting("own-layer", "speculative", threshold=0.0, max_stack=4)
    ),
    "draft layer": (lambda: build("draft"), lambda: exiting("draft", "speculative", threshold=0.0, max_stack=4)),
    "draft layer, a tree": (lambda: build("draft"), lambda: Exiting(mode="speculative", draft_tree=(3, 2, 1))),
    "draft layer, a tree, windows": (lambda: build("draft-gemma3"), lambda: Exiting(mode="speculative", draft_tree=(3, 2))),
    "drafts, one pass": (lambda: build("lora"), lambda: exiting("lora", "speculative", threshold=0.0, max_stack=4)),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["parallel", "state-copy"])
@pytest.mark.parametrize("name", ["encoding", "loop-shared-kv", "four-loops", "four-loops-shared-kv"])
def test_rows_of_both_sides_of_an_exit_stay_in_their_planes(name: str, mode: str) -> None:
    model, setting = build(name), exiting(name, mode, threshold=mixing_threshold(name))
    wanted = [generate(model, [prompt], max_new_tokens=NEW, exiting=setting)[0] for prompt in many(model)]
    engine = Engine(on_gpu(model), exiting=setting, compile=False, memory=10**6, **SIZES)
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]


def test_a_page_outside_the_pool_fails_its_request_and_no_other() -> None:
    model = build("vanilla")
    wanted = [generate(model, [prompt], max_new_tokens=NEW)[0].tokens for prompt in many(model)]
    engine = Engine(on_gpu(model), compile=False, **(SIZES | {"batch_size": 8, "prefill_chunk": 64, "memory": 10**6}))
    told = engine.runner.state.apply

    def spoilt(*given: Any) -> None:
        told(*given)
        engine.runner.state.tables_STP[1].fill_(10**6)

    engine.runner.state.apply = spoilt  # type: ignore[method-assign]
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert [result.finish.reason == "error" for result in results] == [i == 1 for i in range(len(wanted))]
    assert [r.tokens for i, r in enumerate(results) if i != 1] == [w for i, w in enumerate(wanted) if i != 1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fuse", [True, False])
def test_tokens_are_the_reference_decoders(name: str, fuse: bool) -> None:
    make, leave = CASES[name]
    model: FathomForCausalLM = make()
    setting: Exiting | None = None if leave is None else leave()
    wanted = [generate(model, [prompt], max_new_tokens=NEW, exiting=setting)[0] for prompt in many(model)]
    engine = Engine(on_gpu(model), exiting=setting, fuse=fuse, compile=fuse, **SIZES)
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    if setting is None:
        assert [result.depths for result in results] == [result.depths for result in wanted]
    while engine.busy:
        engine.step()
    counters = engine.counters()
    assert counters.pages_used == counters.pages_cached


@pytest.mark.parametrize(
    ("mode", "name", "compile"),
    [(mode, name, False) for mode in MODES for name in ("vanilla", "own-layer")]
    + [("static", "vanilla", True), ("parallel", "own-layer", True), ("speculative", "vanilla", True)],
)
def test_one_sequence_says_what_the_reference_says(mode: str, name: str, compile: bool) -> None:
    """Where exits are asked the host chooses passes, each captured with a few numbers of rows."""
    sure = {"threshold": mixing_threshold(name)} if mode in ("state-copy", "parallel", "speculative") else {}
    stack = {"max_stack": 6} if mode in ("parallel", "speculative") else {}
    model, setting = build(name), None if mode == "full" else exiting(name, mode, **sure, **stack)
    engine = Engine(
        on_gpu(model), exiting=setting, compile=compile, always_draft=True, page_size=16, max_sequences=1, max_length=48,
        batch_size=6 if stack else 1,
    )  # fmt: skip
    for prompt in many(model):
        (wanted,) = generate(model, [prompt], max_new_tokens=NEW, exiting=setting)
        (found,) = engine.generate([prompt], max_new_tokens=NEW)
        assert found.tokens == wanted.tokens
        if mode not in ("full", "speculative"):
            assert found.depths == wanted.exit_layers


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_a_conversation_says_what_the_reference_says(mode: str) -> None:
    model = build("vanilla")
    setting = None if mode == "full" else exiting("vanilla", mode, threshold=mixing_threshold("vanilla"))
    session, slow = EngineSession(on_gpu(model), exiting=setting), Session(model)
    turns = many(model)[0]
    for _ in range(3):
        wanted = slow.generate(turns, max_new_tokens=NEW)
        assert session.generate(turns, max_new_tokens=NEW).tokens == wanted.tokens
        turns = [*turns, *wanted.tokens, 7]


float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="the GPU does not know float8"
)
FLOAT8_CASES = ("whole", "routed", "routed, shared", "exits, two passes", "exits, one pass")


@float8
@pytest.mark.parametrize("name", FLOAT8_CASES)
@pytest.mark.parametrize("fuse", [True, False])
def test_entries_in_float8_are_the_plain_twins(name: str, fuse: bool) -> None:
    """Sums differ in their last bits, so next to a tie a number may go to float8's next: log probabilities of first tokens
    may be 0.5 apart in these models, whose random weights are large, and later tokens may be others."""
    make, leave = CASES[name]
    model: FathomForCausalLM = make()
    setting: Exiting | None = None if leave is None else leave()
    told = []
    for here, sizes in ((model, SIZES), (on_gpu(model), SIZES | {"compile": fuse})):
        engine = Engine(here, exiting=setting, fuse=fuse, kv_dtype="fp8", **sizes)
        assert engine.runner.pages.at(0, 0)[0].dtype == FLOAT8
        told.append(engine.generate(many(model), max_new_tokens=NEW, logprobs=5))
        counters = engine.counters()
        assert counters.pages_used == counters.pages_cached
    for slow, fast in zip(*told, strict=True):
        assert fast.finish.reason in ("length", "eos")
        assert slow.logprobs is not None
        assert fast.logprobs is not None
        wanted, got = dict(slow.logprobs[0].top), dict(fast.logprobs[0].top)
        assert len(wanted.keys() & got.keys()) >= 3
        assert all(abs(wanted[token] - got[token]) < 0.5 for token in wanted.keys() & got.keys())
    first = [slow.tokens[0] == fast.tokens[0] for slow, fast in zip(*told, strict=True)]
    assert sum(first) >= len(first) - 2


@float8
@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_half_precision_with_entries_in_float8_runs_to_the_end(name: str) -> None:
    make, leave = CASES[name]
    model = on_gpu(make()).bfloat16()
    setting: Exiting | None = None if leave is None else leave()
    memory = 200_000
    auto, narrow = (Engine(model, exiting=setting, kv_dtype=kind, memory=memory, **SIZES) for kind in ("auto", "fp8"))
    for few, more in zip(auto.runner.sizes.pool_pages, narrow.runner.sizes.pool_pages, strict=True):
        assert more in (2 * few, 2 * few + 1)
    results = narrow.generate(many(model), max_new_tokens=NEW)
    assert {result.finish.reason for result in results} <= {"length", "eos"}


def test_sampling_does_not_depend_on_the_batch() -> None:
    model = on_gpu(model_of(routed()))
    settings = [Sampling(max_new_tokens=NEW, temperature=0.9, seed=i, top_k=(0, 20)[i % 2]) for i in range(len(many(model)))]
    engine = Engine(model, compile=False, **SIZES)
    together = engine.run([Request(id=i, prompt=tuple(p), sampling=settings[i]) for i, p in enumerate(many(model))])
    again = Engine(model, compile=False, **(SIZES | {"batch_size": 2, "max_sequences": 3}))
    alone = again.run([Request(id=i, prompt=tuple(p), sampling=settings[i]) for i, p in enumerate(many(model))])
    assert [result.tokens for result in together] == [result.tokens for result in alone]


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("mode", ["plain", "filtered"])
def test_compiled_sampling_draws_the_same_from_a_whole_vocabulary(rows: int, mode: Mode) -> None:
    """A vocabulary as long as real ones: torch 2.11 could not compile the running sum of so many chances."""
    vocab, device = 49152, torch.device("cuda")
    state = SamplerState(rows, vocab, device, 0, penalties=False)
    for slot in range(rows):
        how = Sampling(temperature=0.7 + slot % 5 / 4, seed=slot, top_p=(1.0, 0.9)[mode == "filtered"])
        state.place(slot, Request(id=slot, prompt=(1, 2), sampling=how))
    logits_NV = 3 * torch.randn(rows, vocab, device=device, generator=torch.Generator(device).manual_seed(rows))
    slots_N = torch.arange(rows, device=device)
    wanted = sample(logits_NV, slots_N, slots_N, state, mode=mode)
    got = torch.compile(sample, dynamic=False, fullgraph=True)(logits_NV, slots_N, slots_N, state, mode=mode)
    # Chances are compared with sums of chances; a compiled softmax may round otherwise, and with it one draw in many.
    assert (got.tokens_N == wanted.tokens_N).sum() >= rows - rows // 32


@pytest.mark.parametrize(("kind", "rows"), [("vanilla", (32, 64)), ("routed", (32,))])
def test_few_sequences_run_in_fewer_rows(kind: str, rows: tuple[int, ...]) -> None:
    """A batch of 128 with 100 sequences at first and ever fewer: steps of 128 rows, then of 64 and 32; of a routed model of
    128 and 32."""
    model = build("vanilla") if kind == "vanilla" else model_of(routed())
    prompts = [[1 + n % 30, 2 + n % 7] for n in range(100)]
    lengths = [3 + n % 40 for n in range(100)]
    wanted = [generate(model, [p], max_new_tokens=n)[0].tokens for p, n in zip(prompts, lengths, strict=True)]
    engine = Engine(on_gpu(model), batch_size=128, max_length=64, page_size=16)
    assert engine.runner.row_counts == rows
    work = [
        Request(id=number, prompt=tuple(prompts[number]), sampling=Sampling(max_new_tokens=lengths[number]))
        for number in range(100)
    ]
    rows_for, chosen = engine.runner.rows_for, set[int | None]()

    def choose(sequences: int) -> int | None:
        chosen.add(rows_for(sequences))
        return rows_for(sequences)

    engine.runner.rows_for = choose  # type: ignore[method-assign]
    found = {result.id: result.tokens for result in engine.run(work)}
    assert [list(found[number]) for number in range(100)] == [list(tokens) for tokens in wanted]
    assert chosen == {None, *rows}


LONG = Architecture(
    family="llama", layers=8, hidden=192, intermediate=384, heads=6, kv_heads=2, head_dim=64, vocab=512,
    tied_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "kv"), [("vanilla", "cache"), ("cycle", "cache"), ("cycle", "share"), ("routed", "cache"), ("routed", "share")]
)
def test_long_prompts_in_half_precision(kind: str, kv: str) -> None:
    """Chunks of a thousand tokens, by a library's products and attention of tiles: what is said of the next token is what
    float32 says in short chunks. Depths are drawn, so that none is near a tie; layers add more to the stream than fresh ones
    do, so that what is seen counts."""
    plan = DepthPlan.vanilla(8) if kind == "vanilla" else DepthPlan.build("cycle", 2, 8).with_kv(kv)
    if kind == "routed":
        routing = build_routing("expert", 3, random=True)
        plan = DepthPlan.build("middle-cycle", 3, 8).with_kv(kv).with_routing(routing)
    model = random_model(LONG, plan, dtype=torch.float32, device=torch.device("cuda"))
    with torch.no_grad():
        model.decoder.head_weight.mul_(8.0)
        for layer in model.decoder.layers:
            for linear, by in ((layer.attn.q, 4), (layer.attn.v, 4), (layer.attn.o, 16), (layer.mlp.down, 8)):
                linear.weight.mul_(by)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (400, 130, 2, 257, 90)]
    settings: dict[str, Any] = {"batch_size": 4, "max_length": 512, "memory": 10**8, "compile": False}
    slow = Engine(model, prefill_chunk=48, **settings).generate(prompts, max_new_tokens=2, logprobs=5)
    fast = Engine(model.bfloat16(), **settings).generate(prompts, max_new_tokens=2, logprobs=5)
    for one, other in zip(slow, fast, strict=True):
        assert one.logprobs
        assert other.logprobs
        wanted, got = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
        assert len(wanted.keys() & got.keys()) >= 4
        assert all(abs(wanted[token] - got[token]) < 0.1 for token in wanted.keys() & got.keys())
    assert len({result.tokens[0] for result in slow}) > 3, "prompts that nothing tells apart show nothing"


@pytest.mark.parametrize("mode", ["full", "parallel", "speculative", "draft layer"])
def test_captured_prompts_say_what_the_reference_says(mode: str) -> None:
    """A size's first pass is launched as it is, the second is captured, and later ones are replayed."""
    name = "draft" if mode == "draft layer" else "vanilla"
    setting = None
    if mode != "full":
        sure = 0.0 if name == "draft" else mixing_threshold(name)
        setting = exiting(name, "speculative" if name == "draft" else mode, threshold=sure, max_stack=4)
    prompts = [[1 + (7 * number + at) % 20 for at in range(3 + 5 * number)] for number in range(5)]
    wanted = [w.tokens for w in generate(build(name), prompts, max_new_tokens=8, exiting=setting, ignore_eos=True)]
    engine = Engine(
        on_gpu(build(name)), exiting=setting, always_draft=True, **SIZES | {"prefill_chunk": 100, "max_length": 64}
    )
    for _ in range(4):
        found = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
        assert [r.tokens for r in found] == wanted
    assert engine.runner.short_prefill is not None
    assert engine.runner.short_prefill._graphs


@pytest.mark.parametrize("name", ["whole", "routed"])
def test_longer_bursts_choose_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the host is slower than the device; sometimes it is, sometimes not."""
    looks, lengths = iter(range(10_000)), set[int]()
    monkeypatch.setattr(burst_length, "LATE", 1)
    monkeypatch.setattr(burst_length, "PATIENCE", 3)
    monkeypatch.setattr(Runner, "idle", property(lambda runner: next(looks) % 9 < 5))
    model = CASES[name][0]()
    prompts = 3 * many(model)
    wanted = [result.tokens for result in generate(model, prompts, max_new_tokens=36 - max(map(len, prompts)))]
    engine = Engine(on_gpu(model), compile=False, memory=10**7, prefix_caching=False, **SIZES)
    assert engine.runner.sizes.longest_burst == 4 * engine.runner.sizes.burst
    launch = engine.runner.launch_burst
    monkeypatch.setattr(engine.runner, "launch_burst", lambda steps, *rest: (lengths.add(steps), launch(steps, *rest))[1])
    found = engine.generate(prompts, max_new_tokens=36 - max(map(len, prompts)))
    assert [tuple(result.tokens) for result in found] == wanted
    assert {4, 8, 16} <= lengths
