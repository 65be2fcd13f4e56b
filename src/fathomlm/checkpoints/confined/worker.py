"""What runs in the confined process: started as a script, with the standard library, jinja2 and tokenizers only.

It reads one JSON request a line and answers each with one line. Limits are the operating system's (memory, CPU seconds), so
they hold whatever a template or a tokenizer does; one that passes them takes this process down and nothing else.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
from typing import Any

MAX_TEXT = 16 << 20
"""Characters that a chat template may make."""
MAX_GROWTH = 64
"""How many times longer than its input the normaliser, the decoder or the post-processor may make a text."""
SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs, and it's 4,096 fathoms deep!\n\n"
    "\tif (x == [1, 2]): return {'a': \"b\"}  # ok\r\n"
    "Stra\u00dfe, \u00e9cole, e\u0301, \u0130stanbul, \u0645\u0631\u062d\u0628\u0627, \u4f60\u597d\uff0c\u4e16\u754c, "
    "\u3053\u3093, \uc548\ub155, \u0928\u092e\u0938\u094d\u0924\u0947, \u0e2a\u0e27\u0e31, "
    "\U0001f600\U0001f469\u200d\U0001f680, \ufb01, \u2581_\u0120\u00a0\u200b"
)
RUNS = ("a", " ", "\n", "1", "!", "aA", "a b", "\u00e9", "\u4f60")
"""Repeated, they find rules whose cost grows faster than a text."""


def main() -> None:
    memory, cpu = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = memory if held == resource.RLIM_INFINITY else min(memory, held)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The soft limit ends the process; it is moved on with each request.
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + cpu, resource.RLIM_INFINITY))
        try:
            answer = {"text": TASKS[(task := json.loads(line))["task"]](task)}
        except MemoryError:
            answer = {"error": f"it requires more than {memory >> 20} MiB of memory"}
        except RecursionError:
            answer = {"error": "it calls itself without end"}
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def render(task: dict[str, Any]) -> str:
    """A chat template with its values."""
    text: str = _compiled(task["template"]).render(**task["values"])
    if len(text) > MAX_TEXT:
        raise ValueError(f"it renders a text of {len(text):,} characters; at most {MAX_TEXT:,} are taken")
    return text


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """As transformers compiles it, so that both render the same."""
    import datetime

    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """The tag {% generation %}, which marks a reply and renders as what is in it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

        def _inside(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore."""

        def __init__(*args: Any, **values: Any) -> None:
            self, args = args[0], args[1:]
            given = dict(*args, **values)
            for name in given:
                _plain(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _plain(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _plain(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    class Dict:
        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    return environment.from_string(template)


def try_tokenizer(task: dict[str, Any]) -> str:
    """Load a tokenizer.json, bound what it may make of a text, and encode and decode samples with it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(task["path"])
    patterns: list[str] = []
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if (found := getattr(tokenizer, part)) is None:
            continue
        record = json.loads(found.__getstate__())
        patterns += _patterns(record)
        if (growth := _growth(record)) > MAX_GROWTH:
            raise ValueError(f"its {part} may make a text {growth:,} times longer; at most {MAX_GROWTH} times are allowed")
    for sample in (SAMPLE, *(run * (2000 // len(run)) for run in RUNS), *(pattern * 20 for pattern in patterns[:200])):
        tokenizer.decode(tokenizer.encode(sample[:20_000]).ids, skip_special_tokens=False)
    return ""


def _growth(record: Any) -> int:
    """The product over all steps that follow one another; what cannot be told from a pattern is taken at its worst."""
    if not isinstance(record, dict):
        return 1
    kind = record.get("type")
    if kind == "Replace":
        pattern, content = record.get("pattern", {}), len(record.get("content", ""))
        length = len(pattern["String"]) if "String" in pattern else 0
        return max(1, -(-content // length)) if length else content + 1
    if kind == "TemplateProcessing":
        return max(1, *(sum("Sequence" in piece for piece in record.get(name, ())) for name in ("single", "pair")))
    product = 1
    for inner in ("normalizers", "decoders", "processors", "pretokenizers"):
        for step in record.get(inner, ()):
            product = min(product * _growth(step), 10**9)
    return product


def _patterns(record: Any) -> list[str]:
    """The texts that its rules look for: a rule for a rare character must be tried with that character."""
    if isinstance(record, list):
        return [pattern for item in record for pattern in _patterns(item)]
    if not isinstance(record, dict):
        return []
    found = [text for text in (record.get("pattern"), record.get("content")) if isinstance(text, str)]
    if isinstance(pattern := record.get("pattern"), dict):
        found += [text for text in pattern.values() if isinstance(text, str)]
    inner = [item for item in record.values() if isinstance(item, dict | list)]
    return [text for text in found if text] + _patterns(inner)


TASKS = {"render": render, "tokenizer": try_tokenizer}

if __name__ == "__main__":
    main()
