"""`irc models` lists what tests compare: `pytest --update` writes it from the tables of cases."""

import json

import pytest

from irc.frontends.models import described
from tests.cli.runner import refused, works
from tests.layout import ROOT

from .cases import CHECKED, checked


@pytest.mark.oracle
def test_the_list_is_what_tests_compare(request: pytest.FixtureRequest) -> None:
    """A family without a case is listed without claims."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in checked().items())
    text = f"{{\n{rows}\n}}\n"
    if request.config.getoption("--update"):
        CHECKED.write_text(text, encoding="utf-8")
    assert CHECKED.read_text(encoding="utf-8") == text


def test_a_family_in_full_and_one_of_a_user() -> None:
    page = works("models", "llama").out
    assert "LLaMAForCausalLM, LlamaForCausalLM" in page and "tp=2, tp=3, pp=2" in page
    assert "'llma'; did you mean" in refused("models", "llma")
    example = ROOT / "examples" / "custom_llm.py"
    rows = {row["model_type"]: row for row in works("models", "--load", example, "--json").json}
    assert rows["persimmon"]["architectures"] == ["PersimmonForCausalLM"]
    assert not (rows["persimmon"]["kind"] or rows["persimmon"]["meshes"])
    assert rows["llama"] == described()["llama"]
