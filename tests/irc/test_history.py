"""What a recorded run says of its passes, against the texts before and after them."""

import itertools
import re
from pathlib import Path

import pytest

import irc
import irc.passes
from irc.driver.history import history_of, recorded_run, replay
from irc.errors import Error
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import DumpDir, Limit, Replay
from irc.pipeline.instruments.history import PassRecord
from irc.text.printer import print_module
from tests.cli.runner import works

assert irc.passes
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_llama"
MESHES = ["", "tp=2", "pp=2"]


@pytest.fixture(scope="module", params=MESHES, ids=["one", "tp2", "pp2"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llama, compiled for a mesh."""
    folder = tmp_path_factory.mktemp("history") / "a"
    irc.compile(EXAMPLE, folder, mesh=request.param)
    return folder


def names(record: PassRecord) -> set[str]:
    """The values of a module's text: the arguments, and the results of operations."""
    values: set[str] = set()
    module = irc.parse(record.text)
    for name, body in re.findall(r"  func @([^(]+)(\(.*\n(?:    .*\n)*)", record.text):
        prefix = "" if name == module.main.name else f"@{name} "
        header = body.partition("->")[0]
        values |= {prefix + value for value in re.findall(r"(%[\w.]+):", header)}
        for line in body.splitlines()[1:]:
            results = line.partition(" = ")[0] if line.startswith("    %") else ""
            values |= {prefix + value for value in re.findall(r"%[\w.]+", results)}
    return values


def test_every_value_comes_from_values_of_the_text_before(artifact: Path) -> None:
    records = replay(artifact).records
    for before, after in itertools.pairwise(records):
        earlier = names(before)
        assert set(after.origins) == names(after)
        for value, origin in after.origins.items():
            assert set(origin.values) <= earlier, (after.pass_, value)
            assert (origin.how == "kept") <= (origin.values == (value,))
            assert (origin.hit is not None) <= (origin.how == "rewritten")


def test_the_last_text_is_that_of_the_artifact(artifact: Path) -> None:
    history = replay(artifact)
    assert history.steps[-1].text == (artifact / "module.irc").read_text()
    assert history.input.text == (artifact / "input.irc").read_text()


def test_a_gated_mlp_is_a_rewrite_of_the_product_that_it_replaces(artifact: Path) -> None:
    steps = [step for step in replay(artifact).steps if step.name == "fuse-gated-mlp"]
    hits = [hit for hit in steps[0].hits if hit.rule == "gated_mlp"]
    assert [hit.number for hit in hits] == [1, 2, 3, 4]
    for layer, hit in enumerate(hits):
        assert hit.where.endswith(f"model.layers.{layer}.mlp")
        assert hit.before.startswith("%_ = mul ")
        (value,) = hit.values
        assert re.search(rf"{re.escape(value)} = gated_mlp ", steps[0].text)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_a_rewrite_is_that_of_the_limit(artifact: Path, count: int) -> None:
    module, pipeline = recorded_run(artifact)
    run_pipeline(module, pipeline, [Limit({"fuse-gated-mlp": count})])
    assert sum(op.opname == "gated_mlp" for op in module.ops()) == count
    again = history_of(*recorded_run(artifact))
    made = [hit for step in again.steps for hit in step.hits if step.name == "fuse-gated-mlp"]
    assert [hit.number for hit in made] == list(range(1, len(made) + 1))


def test_merged_and_new_values_have_origins() -> None:
    module = irc.parse(
        """module @m {
        func @f(%x: f32[4]) -> (y: f32[4]) {
        %a = neg %x : f32[4]
        %b = neg %x : f32[4]
        %c = add %a, %b : f32[4]
        %d = silu %c : f32[4]
        return %d } }"""
    )
    merged, expanded = history_of(module, "cse, expand").steps
    assert merged.hits[0].before.startswith("%b = neg")
    assert "%b" not in merged.origins
    origin = expanded.origins["%d"]
    assert (origin.how, origin.values, origin.hit) == ("rewritten", ("%d",), 1)
    sigmoid = next(name for name, o in expanded.origins.items() if o.hit == 1 and name != "%d")
    assert f"{sigmoid} = sigmoid" in expanded.text


def test_dumps_are_replayed(artifact: Path, tmp_path: Path) -> None:
    module, pipeline = recorded_run(artifact)
    run_pipeline(module, pipeline, [DumpDir(tmp_path, Replay())])
    assert replay(tmp_path).steps[-1].text == print_module(module, locs=True)


def test_another_result_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    irc.compile(EXAMPLE, folder)
    text = (folder / "input.irc").read_text()
    (folder / "input.irc").write_text(text.replace("eps=1e-05", "eps=1e-03", 1))
    with pytest.raises(Error, match="give another module than"):
        replay(folder)
    (folder / "input.irc").unlink()
    with pytest.raises(Error, match=r"has no input\.irc"):
        replay(folder)


def test_a_bundle_is_replayed(tmp_path: Path) -> None:
    works("compile", EXAMPLE, "-o", tmp_path / "a", "--bundle")
    assert replay(tmp_path / "a").steps
