"""What the tests of patterns and of the rewrite driver share."""

from collections.abc import Callable
from typing import Any

from irc.ir.core import Op, Value
from irc.ir.verify import verify
from irc.ops import Relu
from irc.rewrite import P, Pattern, Rule, apply_rules, rule
from irc.rewrite.patterns import captured_names, variants
from irc.text import parse_module


def module(body: str, args: str = "%x: f32[8], %y: f32[8], %z: f32[8]", result: str = "f32[8]"):
    weights = 'weight @w : f32[8, 8] = random("w", 1, 1.0)\n weight @b : f32[8] = unbound("b")'
    return parse_module(f"module @m {{ {weights}\n func @f({args}) -> ({result}) {{ {body} }} }}")


def rewritten(body: str, *rules: Rule, result: str = "f32[8]") -> list[str]:
    """The operations after the rules, as text; the module is verified."""
    found = module(body, result=result)
    apply_rules(found, rules)
    verify(found)
    lines = str(found).splitlines()
    return [line.strip().partition(" : ")[0] for line in lines if line.startswith("    ")]


def rule_of(pattern: Pattern, build: Callable[[], None]) -> Rule:
    """A rule whose function takes whatever the pattern captures."""
    names = dict.fromkeys(n for v in variants(pattern) for n in captured_names(v))
    scope: dict[str, Any] = {"build": build}
    exec(f"def call({', '.join(names)}): return build()", scope)
    return Rule(pattern, scope["call"])


def hits(body: str, pattern: Pattern, result: str = "f32[8]") -> int:
    """How many roots a pattern matches, whatever it captures."""
    found, seen = module(body, result=result), list[int]()
    apply_rules(found, [rule_of(pattern, lambda: seen.append(1))])
    verify(found)
    return len(seen)


@rule(P.mul(P.silu("x"), "x"))
def to_relu(x: Value) -> Op:
    return Relu(x)
