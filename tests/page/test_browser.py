"""The page of `irc show --html` in a headless Chromium, opened from disk."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import irc
from irc.driver.history import history_of
from irc.page.write import page
from tests.chromium import CHROMIUM, Browser, browser
from tests.server.process import eventually

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
PIPELINE = 'shard{mesh="tp=2"}, fuse-gated-mlp, localize'
ATTACK = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>"
ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
LAYER = """
%g{n} = linear %{x}, @net.{n}.gate : f32[B, 96] loc("{attack}mlp.py":3 "net.{n}.mlp")
%s{n} = silu %g{n} : f32[B, 96] loc("{attack}mlp.py":3 "net.{n}.mlp")
%u{n} = linear %{x}, @net.{n}.up : f32[B, 96] loc("{attack}mlp.py":4 "net.{n}.mlp")
%m{n} = mul %s{n}, %u{n} : f32[B, 96] loc("{attack}mlp.py":4 "net.{n}.mlp")
%d{n} = linear %m{n}, @net.{n}.down : f32[B, 64] loc("mlp.py":5 "net.{n}.mlp.down")
%h{n} = add %{x}, %d{n} : f32[B, 64] loc("mlp.py":6 "net.{n}.add{attack}")
"""
LABELS = "[role=treeitem] span"
Show = Callable[..., Browser]


def write(path: Path, layers: int, attack: str = "", bug: str = "") -> Path:
    """A page about gated MLPs; `attack` is part of the names of scopes, files and the input.

    With a `bug` the only pass is cse, after which `bug` stands in place of `mul %s0, %u0`.
    """
    weights, body, shown = list[str](), list[str](), json.dumps(attack)[1:-1]
    x = first = f'"x{shown}"' if attack else "x"
    for n in range(layers):
        for name, shape in ("gate", "96, 64"), ("up", "96, 64"), ("down", "64, 96"):
            weights.append(f'weight @net.{n}.{name} : f32[{shape}] = unbound("{n}{name}")')
        body.append(LAYER.format(n=n, x=x, attack=shown))
        x = f"h{n}"
    head = f"func @main(%{first}: f32[B, 64]) -> (f32[B, 64]) {{"
    text = "\n".join(["module @mlps dims(B=1:2:8) {", *weights, head, *body, f"return %{x} }} }}"])
    history = history_of(irc.parse(text), "cse" if bug else PIPELINE)
    if bug:
        changed = history.records[1].text.replace("mul %s0, %u0", bug)
        history.records[1] = replace(history.records[1], text=changed)
    path.write_text(page(history, "mlps.irc"))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "page.html", 3)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as shown:
        for domain in "Runtime", "Log", "Page", "Network":
            shown.call(f"{domain}.enable")
        yield shown


@pytest.fixture
def show(tab: Browser, file: Path) -> Iterator[Show]:
    """Open a page at an address; afterwards there must be no error and no request."""

    def opened(address: str = "", path: Path = file, width: int = 1440) -> Browser:
        tab.resize(width, 900)
        tab.call("Page.navigate", url="about:blank")
        tab.call("Page.navigate", url=f"{path.as_uri()}#{address}")
        assert eventually(lambda: tab.value("document.readyState") == "complete")
        return tab

    tab.events.clear()
    yield opened
    assert not [event for event in tab.events if event["method"] in ERRORS]
    asked = [e["params"]["request"]["url"] for e in tab.events if "request" in e.get("params", {})]
    assert {url.partition(":")[0] for url in asked} <= {"file", "about"}


def texts(tab: Browser, selector: str) -> list[str]:
    """The texts of what a selector finds."""
    return tab.value(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def click(tab: Browser, selector: str, text: str = "", shift: bool = False) -> None:
    """Click the first element that a selector finds with this text in it."""
    event = f"new MouseEvent('click', {{bubbles: true, cancelable: true, shiftKey: {int(shift)}}})"
    found = f"[...document.querySelectorAll({selector!r})]"
    tab.value(f"{found}.find(e => e.textContent.includes({text!r})).dispatchEvent({event})")
    tab.value("new Promise(done => setTimeout(done, 30))")  # the address changes a moment later


def ops(tab: Browser, selector: str) -> list[str]:
    """The operations in lines of text."""
    return [text.split(" = ")[1].split()[0] for text in texts(tab, selector)]


def test_it_opens_with_the_graph_of_a_layer(show: Show) -> None:
    tab = show()
    assert tab.value("performance.now()") < 5000
    assert texts(tab, ".node text:not(.small)") == ["gated_mlp", "linear", "all_reduce", "add"]
    assert tab.value("document.querySelectorAll('.edge').length") == 5
    assert texts(tab, ".stub:not(:empty)") == [
        "%x",
        "%x",
    ]  # what gated_mlp and add take from outside
    assert tab.value("document.querySelectorAll('.edge.partial, .stripes').length") == 2
    assert "2 ranks" in " ".join(texts(tab, ".node .small"))


def test_it_opens_the_largest_layer_without_what_is_not_known(show: Show, tmp_path: Path) -> None:
    lines = "".join(
        f'%y{k + 1} = relu %y{k} : f32[N, 4] loc("m.py":1 "net.{layer}")\n'
        for k, layer in enumerate((0, 1, 1, 2))
    )
    text = f"module @m {{ func @main(%y0: f32[N, 4]) -> (f32[N, 4]) {{ {lines} return %y4 }} }}"
    page_of = tmp_path / "page.html"
    page_of.write_text(page(history_of(irc.parse(text), "cse"), "m.irc"))
    tab = show("", page_of)
    assert tab.value("now.scope") == "net.1" and len(texts(tab, ".node")) == 2
    assert texts(tab, "#side th") == ["operations"]
    tab = show("op=%25y4", page_of)
    assert not {"expected", "bytes"} & set(texts(tab, "#side th"))


def test_two_passes_are_compared(show: Show) -> None:
    tab = show("scope=")
    click(tab, "#passes a", "fuse-gated-mlp")
    click(tab, "#passes a", "shard", shift=True)
    assert ops(tab, ".removed") == ["linear", "silu", "linear", "mul"]  # one of three equal layers
    assert ops(tab, ".added") == ["gated_mlp"]
    assert "net.0 – 2: × 3" in " ".join(texts(tab, ".list b"))
    click(tab, ".added a", "#1")
    rewrites = [text for text in texts(tab, ".list > div > div") if "fuse_gated_mlp" in text]
    assert [text[:11] for text in rewrites] == [f"#{n}gated_mlp" for n in (1, 2, 3)]
    tab.value("history.back()")
    assert eventually(lambda: ops(tab, ".added") == ["gated_mlp"])
    tab.press("ArrowLeft")
    assert texts(tab, "#passes [aria-current]")[0].startswith("shard")
    tab.value("at('with').value = '0', at('with').dispatchEvent(new Event('change'))")
    assert ops(tab, ".added") == ["linear", "silu", "linear", "mul", "linear", "all_reduce"]


def test_another_operand_of_the_same_type_is_a_difference(show: Show, tmp_path: Path) -> None:
    tab = show("tab=diff", write(tmp_path / "page.html", 1, bug="mul %s0, %s0"))
    assert ops(tab, ".removed") == ops(tab, ".added") == ["mul"]
    tab = show("tab=diff", write(tmp_path / "page.html", 1, bug="mul %s0, %u0"))
    assert ops(tab, ".removed") == ops(tab, ".added") == []


def test_the_tree_folds_and_moves_by_keys(show: Show) -> None:
    tab, focused = show(), "document.activeElement.title"
    assert texts(tab, LABELS) == ["main", "net", "0", "mlp", "add", "0 – 2: 3 equal"]
    click(tab, "[role=treeitem]", "3 equal")
    assert texts(tab, LABELS)[-2:] == ["1", "2"]
    tab.value("document.querySelector('[role=treeitem][tabindex=\"0\"]').focus()")
    assert tab.value(focused) == "net.0"
    tab.press("ArrowLeft")
    assert texts(tab, LABELS) == ["main", "net", "0", "0 – 2: 3 equal", "1", "2"]
    tab.press("ArrowLeft")
    assert tab.value(focused) == "net"
    tab.press("End")
    tab.press("Enter")
    assert tab.value("now.scope") == "net.2" == tab.value(focused)


def test_an_operation_leads_to_its_operands_and_its_origin(show: Show) -> None:
    tab = show("scope=net.1")
    click(tab, ".node", "linear")
    name, [side] = tab.value("now.op"), texts(tab, "#side")
    assert texts(tab, "#side h2")[0] == texts(tab, ".chosen text")[0] == "linear"
    assert "partial overtp" in side and "mlp.py:5" in side and f"irc why mlps.irc {name}" in side
    click(tab, "#side pre a")
    assert texts(tab, ".chosen text")[0] == "gated_mlp" and "rewrite 2: " in texts(tab, "#side")[0]
    tab.value("history.back()")
    assert eventually(lambda: tab.value("now.op") == name)
    click(tab, "#side button", "mlp.py:5")
    assert texts(tab, "#found h2") == ["Operations (6)"]  # linear and all_reduce of three layers
    click(tab, "#side .copy button")
    assert tab.value("getSelection().toString()").startswith("irc why")


def test_search_finds_values_and_scopes(show: Show) -> None:
    tab = show()
    for key in "/h1":
        tab.press(key)
    assert texts(tab, "#found h2") == ["Operations (1)"]
    tab.press("Enter")
    assert eventually(lambda: tab.value("now.op") == "%h1")
    assert tab.value("now.scope") == "net.1"
    tab.value("searchFor('net.2.mlp')")
    assert texts(tab, "#found a")[0] == "net.2.mlp"
    tab.value("at('found').querySelector('a').focus()")
    tab.press("Escape")
    assert tab.value("at('found').hidden")


def test_every_view_has_its_content_and_a_command(show: Show) -> None:
    expected = {"text": "gated_mlp", "diff": "1 unchanged scope,", "pass": "localize"}
    expected |= {"kernels": "all_reduce", "memory": "the peak", "decisions": "shard"}
    for name, word in expected.items():
        tab = show(f"tab={name}")
        assert word in texts(tab, "#view")[0], name
        assert texts(tab, "#bar .copy code")[0].startswith("irc "), name
    assert texts(show("tab=kernels"), ".list .cell")[:4] == [
        "operation",
        "expected",
        "measured",
        "bytes",
    ]
    assert "workspace" not in texts(show("tab=memory"), "#view")[0]  # of a GPU
    assert "%h0" in texts(show("tab=text&op=%25h0"), ".list .on")[0]
    assert texts(show("over=us"), ".node [text-anchor=end]")[1].endswith("µs")


def test_hostile_names_are_only_text(show: Show, tmp_path: Path) -> None:
    path = write(tmp_path / "page.html", 2, ATTACK)
    for name in "graph", "text", "diff", "pass", "memory", "decisions":
        tab = show(f"tab={name}&scope=&with=0&op=%25h0", path)
        tab.value("searchFor('img')")
        assert tab.value("window.hacked") is None and texts(tab, "img, main script") == [], name
    assert "onerror" in " ".join(texts(tab, "#found a"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_all_widths_with_contrast(show: Show, tab: Browser, scheme: str) -> None:
    theme = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=theme)
    for width in 360, 900, 1440, 3840:
        for name in "graph", "diff", "memory":
            show(f"tab={name}", width=width)
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("at('facts').scrollWidth - at('facts').clientWidth") <= 0
            assert tab.value("Math.min(at('view').clientHeight, at('view').clientWidth)") > 340

    def luminance(name: str) -> float:
        color = "getComputedStyle(document.body).color.match(/[0-9.]+/g).map(Number)"
        parts = tab.value(f"document.body.style.color = 'var(--{name})', {color}")
        parts = [((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for ink in "ink", "soft", *(f"a{k}" for k in range(6)):
        for back in "back", "raised", *(["hit", "added", "removed"] if ink == "ink" else []):
            dark, light = sorted([luminance(ink), luminance(back)])
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, back)
    tab.call("Emulation.setEmulatedMedia", features=[])


def test_without_scripts_the_tables_remain(show: Show, tab: Browser) -> None:
    visible = "document.querySelector({!r}).checkVisibility()"
    assert not show().value(visible.format("#tables"))
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    show()
    tab.call("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.value(visible.format("#tables table")) and not tab.value(visible.format(".app"))


def test_126_layers_search_and_scroll_without_delay(show: Show, tmp_path: Path) -> None:
    tab = show("scope=net", write(tmp_path / "page.html", 126))
    assert texts(tab, ".node text:not(:empty)") == ["0 – 125", "4 operations each", "× 126"]
    tab.value("go({scope: '', tab: 'text'})")
    took = "(() => {{ const start = performance.now(); {}; return {} }})()"
    assert tab.value(took.format("searchFor('h7')", "performance.now() - start")) < 1000
    assert len(texts(tab, "#found a")) > 5
    frame = "new Promise(done => requestAnimationFrame(() => done(performance.now() - start)))"
    assert tab.value(took.format("document.querySelector('.list').scrollTop = 4000", frame)) < 1000
    assert tab.value("document.querySelectorAll('.list > div > *').length") < 300
    assert any("%h46" in text for text in texts(tab, ".list b"))
