"""What people see: marked tokens, readable colours, pages in which text stays text, pictures that are there."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fathomlm.cli.display import label, pieces, token_text, visible
from fathomlm.depth.colours import depth_colours, ink, luminance
from fathomlm.errors import OutputError
from fathomlm.lab.analyze import kv, kv_report, routing, routing_report
from fathomlm.lab.analyze.kv_report import draw_kv, kv_page, write_kv
from fathomlm.lab.analyze.pictures import lay
from fathomlm.lab.analyze.report import About
from fathomlm.lab.analyze.routing import RoutingNumbers, ShownToken
from fathomlm.lab.analyze.routing_meters import TokenDepth
from fathomlm.lab.analyze.routing_report import draw_scaling, draw_scores, routing_page, write_routing
from fathomlm.lab.common import check_directory
from fathomlm.lab.token_rows import find, read_rows
from fathomlm.train.data.tokenizers import byte_tokenizer
from fathomlm.train.report import strict
from lab.analyze.tiny import model_of, text_file

pytestmark = pytest.mark.usefixtures("one_thread")
ABOUT = About(
    model="runs/<b>&$x$", name="<b>&$x$", plan="8 layers", dtype="float32", device="cpu", data=["a<i>.txt"], version="0"
)
NASTY = "<script>alert('1 & \"2\"')</script>"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> RoutingNumbers:
    model = model_of()
    rows = read_rows(find([text_file(tmp_path_factory.mktemp("data"))]), model, context=32, rows=4)
    found = routing.measure(model, rows, samples=1, seen=2)
    token = ShownToken(token=7, text=NASTY, depth=2, scores=[0.91, 0.25, None])
    named = TokenDepth(token=7, text="</td>" + NASTY, count=3, mean_depth=1.5)
    return dataclasses.replace(found, samples=[[*found.samples[0], token]], deepest=[named], shallowest=[named])


@pytest.fixture(scope="module")
def kv_numbers(tmp_path_factory: pytest.TempPathFactory) -> kv.KVNumbers:
    model = model_of(kv="share")
    return kv.measure(model, read_rows(find([text_file(tmp_path_factory.mktemp("data"))]), model, context=32, rows=2))


class Page(HTMLParser):
    """A page as a browser takes it: its elements, its text, and whether they nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.titles: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.titles += [value or "" for name, value in attrs if name == "title"]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_routing_page_is_text_and_runs_nothing(numbers: RoutingNumbers) -> None:
    html = routing_page(numbers, ABOUT, {"scores.png": b"one", "scaling.png": b"two", "text.png": b"three"})
    assert "<script" not in html
    assert "<b>" not in html
    assert "<i>" not in html
    page = Page(html)
    assert page.open == []
    assert "script" not in page.tags
    assert NASTY in page.text
    assert "</td><script>alert('1␣&␣\"2\"')</script>" in page.text
    assert "a<i>.txt" in page.text
    assert (
        page.titles[-1]
        == "depth 2; token 7; router scores: recursion 1: 0.910, recursion 2: 0.250, recursion 3: not reached"
    )
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert "http://" not in html
    assert "https://" not in html
    assert html.count("data:image/png;base64,") == 2
    for depth, colour in enumerate(depth_colours(3)):
        assert f".d{depth} {{ background: {colour}; color: {ink(colour)}; }}" in html


def test_the_text_of_a_page_is_the_text(numbers: RoutingNumbers) -> None:
    html = routing_page(numbers, ABOUT, {"scores.png": b"", "scaling.png": b""})
    between = html.split('<pre class="text">')[1].split("</pre>")[0]
    assert Page(between).text == "".join(visible(token.text) for token in numbers.samples[0])


def test_token_choice_has_words_of_its_own(tmp_path: Path) -> None:
    model = model_of("token")
    found = routing.measure(model, read_rows(find([text_file(tmp_path)]), model, context=32, rows=2), seen=99)
    page = Page(routing_page(found, ABOUT, {"scores.png": b"", "scaling.png": b""}))
    for shown in ("MaxVio", "entropy (at most 1.099)", "No token does: give more text."):
        assert shown in page.text
    for absent in ("sampling accuracy", "top-k"):
        assert absent not in page.text


def test_a_kv_page(kv_numbers: kv.KVNumbers) -> None:
    html = kv_page(kv_numbers, ABOUT, {"kv.png": b"one"})
    page = Page(html)
    assert page.open == []
    assert "<b>" not in html
    assert "the router stopped" in page.text
    assert html.count("data:image/png;base64,") == 1


def test_pieces_join_to_the_text() -> None:
    tokenizer = byte_tokenizer()
    text = "né\n日 x"
    ids = tokenizer(text)["input_ids"]
    assert "".join(pieces(tokenizer, ids)) == text
    assert pieces(tokenizer, ids)[:3] == ["n", "", "é"]
    assert pieces(tokenizer, [*b"a", 256, *b"b"]) == ["a", "<|endoftext|>", "b"]
    assert pieces(tokenizer, [0xE6, 0x97])[-1] != ""  # a character that never ends is shown as broken
    assert pieces(tokenizer, []) == []


def test_marks() -> None:
    assert visible("") == "·"
    assert visible("a b\n\t") == "a b↵\n⇥"
    assert visible("\x1b[0m\x00\u202e") == "⟨1B⟩[0m⟨00⟩⟨202E⟩"
    assert label(" a\n") == "␣a↵"
    assert token_text(byte_tokenizer(), 0xE6) == "æ"  # the byte's letter: by itself it is no character
    assert token_text(byte_tokenizer(), 256) == "<|endoftext|>"


@pytest.mark.parametrize("recursions", [1, 2, 3, 5, 12])
def test_letters_stand_out_on_every_depth(recursions: int) -> None:
    colours = depth_colours(recursions)
    assert len(set(colours)) == recursions + 1
    for colour in colours:
        lights = sorted((luminance(colour), luminance(ink(colour))))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5
    falling = [luminance(colour) for colour in colours[1:]]
    assert falling == sorted(falling, reverse=True)


def test_luminance_is_wcags() -> None:
    assert luminance("#ffffff") == pytest.approx(1.0)
    assert luminance("#000000") == 0.0
    assert luminance("#0072b2") == pytest.approx(0.153, abs=1e-3)


def test_text_is_cut_into_lines() -> None:
    tokens = [ShownToken(token=0, text=text, depth=d, scores=[]) for d, text in enumerate(["abcd", "efg\n", "h", ""])]
    laid = [(run.line, run.column, run.text, run.depth) for run in lay(tokens, columns=5)]
    assert laid == [(0, 0, "abcd", 0), (0, 4, "e", 1), (1, 0, "fg↵", 1), (2, 0, "h", 2), (2, 1, "·", 3)]


@pytest.mark.usefixtures("coarse_figures")
def test_all_files_of_an_analysis(numbers: RoutingNumbers, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "routing"
    files = write_routing(numbers, ABOUT, out)
    assert [file.name for file in files] == ["index.html", "routing.json", "scaling.png", "scores.png", "text.png"]
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("scores.png", "scaling.png", "text.png"))
    assert [path.name for path in out.parent.iterdir()] == ["routing"]


def test_a_directory_is_replaced_whole(kv_numbers: kv.KVNumbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_report, "draw_kv", lambda numbers, name, out: out.write_bytes(b"picture"))
    out = tmp_path / "kv"
    out.mkdir()
    write_kv(kv_numbers, ABOUT, out)  # an empty directory is as good as none
    with pytest.raises(OutputError, match="exists; choose another name, or --force"):
        check_directory(out, "kv", force=False)
    with pytest.raises(OutputError, match=r"does not look like a routing analysis \(no routing.json\)"):
        check_directory(out, "routing", force=True)
    (out / "old.txt").write_text("")
    check_directory(out, "kv", force=True)
    write_kv(kv_numbers, ABOUT, out, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "kv.json", "kv.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_a_picture_that_fails_leaves_nothing(
    numbers: RoutingNumbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(numbers: RoutingNumbers, name: str, out: Path) -> None:
        out.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(routing_report, "draw_scores", fail)
    with pytest.raises(OutputError, match="No space left on device; nothing was left behind"):
        write_routing(numbers, ABOUT, tmp_path / "new" / "routing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_pictures_bear_odd_numbers(numbers: RoutingNumbers, kv_numbers: kv.KVNumbers, tmp_path: Path) -> None:
    """No score at all, equal losses, no length, a step that nobody ran: drawn without a warning."""
    empty = [
        dataclasses.replace(each, selected=[0] * 40, unselected=[0] * 40, selected_mean=None, unselected_mean=None)
        for each in numbers.histograms
    ]
    equal = [dataclasses.replace(each, loss=2.0) for each in numbers.scaling]
    odd = dataclasses.replace(numbers, histograms=empty, scaling=equal)
    draw_scores(odd, "x" * 99, tmp_path / "scores.png")
    draw_scaling(odd, "$", tmp_path / "scaling.png")
    blank = [[None] * 16 for _ in range(8)]
    keys = dataclasses.replace(kv_numbers.key, by_position=blank, cosine=[[None] * 8] * 8, magnitude=[None] * 8)
    values = dataclasses.replace(kv_numbers.value, by_position=[[0.0] * 16] * 4 + [[1e6] * 16] * 4)
    draw_kv(dataclasses.replace(kv_numbers, key=keys, value=values), "x", tmp_path / "kv.png")


def test_json_has_no_nan() -> None:
    assert strict({"a": [1.0, float("nan")], "b": {"c": float("inf")}, "d": "x"}) == {
        "a": [1.0, None],
        "b": {"c": None},
        "d": "x",
    }
