"""A routed model's texts for people: colours on a terminal that has them, elsewhere a raised number behind each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathomlm.cli.progress import amount

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fathomlm.cli.demo_routed import Shown, Told

RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def show(shown: Shown, console: Console) -> None:
    from rich.text import Text

    styles = _styles(shown.recursions) if _has_colours(console) else None
    size = f"{amount(shown.parameters)} parameters, {amount(shown.disk_bytes, 'B')} on disk"
    _print(console, Text(f"{shown.model}: {shown.plan}, {size}"))
    _print(console, _legend(shown, styles))
    for text in shown.texts:
        _print(console, Text("\n") + _coloured(text, styles))
    console.print(_table(shown, styles))
    _print(console, Text(_figures(shown)))
    # Not broken into lines, even on a narrow terminal: commands are there to be copied.
    console.print(Text(f"\n{shown.seconds:.0f} s in all. Try next:\n{_next_commands(shown.model)}"), soft_wrap=True)


def _figures(shown: Shown) -> str:
    speed = shown.tokens_per_second
    ratio = "" if speed.ratio is None else f" ({speed.ratio:.2f}x)"
    layers = f"{shown.layers_per_token:.1f} of {shown.layers} layers a token"
    return (
        f"mean depth {shown.mean_depth:.2f} of {shown.recursions}: {layers}\n"
        f"tokens/s, one row, this CPU: {speed.routed:.1f} as routed{ratio}, {speed.full_depth:.1f} at full depth"
    )


def _next_commands(model: str) -> str:
    from fathomlm.packaged import packaged_models

    served = "" if model in packaged_models()[:1] else f" {model}"
    return (
        f"  fathomlm serve{served}      # a page that colours your own texts\n"
        f"  fathomlm generate {model} -p 'The sea' --temperature 0.7 --top-p 0.9 --stream\n"
        f"  fathomlm generate {model} -p 'The sea' --max-depth 1      # one recursion for every token\n"
        f"  fathomlm analyze routing {model} --data FILE      # how well the routers decide, on a text of yours\n"
        "  fathomlm demo smollm2-135m      # a plain model made recursive\n"
        "(in this checkout the command is .venv/bin/fathomlm)"
    )


def _has_colours(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


def _print(console: Console, text: Text) -> None:
    """Lines are broken for a terminal only; a pipe gets them whole."""
    console.print(text, soft_wrap=not console.is_terminal, highlight=False)


def _styles(recursions: int) -> list[str]:
    from fathomlm.cli.colours import depth_colours, ink

    return [f"{ink(colour)} on {colour}" for colour in depth_colours(recursions)]


def _legend(shown: Shown, styles: Sequence[str] | None) -> Text:
    from rich.text import Text

    if styles is None:
        return Text(
            "The raised number behind a token is its depth: the recursions that ran to choose it. Prompts have none."
        )
    chips = [part for use in shown.depths for part in ((f" {use.depth} ", styles[use.depth]), " ")]
    return Text.assemble("Colours are depths: ", *chips, "recursions that ran to choose a token. Prompts have none.")


def _coloured(told: Told, styles: Sequence[str] | None) -> Text:
    from rich.text import Text

    from fathomlm.cli.shown import visible

    text = Text.assemble((told.prompt, "" if styles is None else "dim"))
    for piece, depth in zip(told.pieces, told.depths, strict=True):
        seen = visible(piece)
        if styles is not None:
            text.append(seen, style=styles[depth])
            continue
        body = seen.removesuffix("\n")
        text.append(body + _raised(depth) + seen[len(body) :])
    return text


def _raised(depth: int) -> str:
    return "".join(RAISED[int(digit)] for digit in str(depth))


def _table(shown: Shown, styles: Sequence[str] | None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("depth", "tokens", "share"):
        table.add_column(name, justify="right")
    table.add_column("such as", overflow="fold")
    for use in shown.depths:
        number = Text(f" {use.depth} ", style="" if styles is None else styles[use.depth])
        table.add_row(number, str(use.tokens), f"{use.share:.0%}", Text("  ".join(use.examples)))
    return table
