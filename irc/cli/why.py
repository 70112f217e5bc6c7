"""`irc why`: where a value of an artifact comes from, through every pass, to the script's line."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ..report import Report
from .arguments import add_json
from .console import answer

EXAMPLES = """
  irc why build/llama %mlp
  irc why build/llama @model.layers.0.self_attn.q_proj.weight
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc why`."""
    add = parser.add_argument
    add("source", metavar="DIR", help="an artifact folder, or a folder of --dump-dir")
    add("value", metavar="VALUE", help="a name in its final text, such as %%mlp or @weight")
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the value, what each pass did to it, and where the script has it."""
    from ..debug.why import why
    from ..driver.history import replay

    facts = why(replay(args.source), args.value)
    text = [facts["text"]]
    for row in facts["changes"]:
        sources = f" from {', '.join(row['sources'])}" if row["sources"] else ""
        text += [f"{row['index']:3} {row['pass']}: {row['value']} is {row['how']}{sources}"]
        text += [
            f"    {line}" for line in (row["rewrite"], row["text"]) if line and line != text[0]
        ]
    text += ["before the passes:" if facts["input"] else "the passes made it"]
    for row in facts["input"]:
        text += [f"    {row['text']}"] + [f"        {row['where']}"] * bool(row["where"])
    return answer(args, Report(facts, text))
