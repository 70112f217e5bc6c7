"""What the tests of patterns and of the rewrite driver share."""

from collections.abc import Callable

from irc.ir.core import Op, Value
from irc.ir.verify import verify
from irc.ops import Relu
from irc.rewrite import P, Rule, apply_rules, rule
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


def hits(body: str, pattern: object, result: str = "f32[8]") -> int:
    """How many roots a pattern matches, whatever it captures."""
    found = module(body, result=result)
    names = dict.fromkeys(n for v in variants_of(pattern) for n in captured_of(v))
    scope: dict[str, Callable[..., None]] = {}
    seen: list[int] = []
    exec(f"def count({', '.join(names)}): return note()", {"note": lambda: seen.append(1)}, scope)
    apply_rules(found, [Rule(pattern, scope["count"])])  # type: ignore[arg-type]
    verify(found)
    return len(seen)


def variants_of(pattern: object) -> list[object]:
    from irc.rewrite.patterns import variants

    return list(variants(pattern))  # type: ignore[arg-type]


def captured_of(pattern: object) -> list[str]:
    from irc.rewrite.patterns import captured_names

    return list(captured_names(pattern))  # type: ignore[arg-type]


@rule(P.mul(P.silu("x"), "x"))
def to_relu(x: Value) -> Op:
    return Relu(x)
