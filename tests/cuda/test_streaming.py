"""Streaming products on the host, with all threads of their blocks, against numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from irc.backends.cuda.codegen.norms import rms_norm
from irc.backends.cuda.codegen.streaming.choices import (
    H200,
    Choice,
    Target,
    candidates,
    one_row,
    use,
)
from irc.backends.cuda.codegen.streaming.products import Product, chosen, product_of
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Kernel
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.template import Fused, Template
from irc.ops import Linear
from irc.text import parse_module
from tests.cuda.emulate import prepare, run_templates
from tests.cuda.streaming_cases import SCHEMES, Case, fused
from tests.fresh import fresh

assert rms_norm
SMALL = Target(multiprocessors=3)
OLD = Target(80, 3, 163 << 10)
NARROW = Target(89, 3, 99 << 10)
ARCHITECTURES = {
    "sm_80": Target(80, 108, 163 << 10),
    "sm_89": Target(89, 142, 99 << 10),
    "sm_90": H200,
    "sm_100": Target(100, 148, 227 << 10),
    "sm_120": Target(120, 170, 99 << 10),
}
CASES = [
    (SMALL, Case("float", "bf16", "norm", 1, 37, 1024)),
    (SMALL, Case("float", "bf16", "norm gated bias", 1, 101, 2048)),
    (SMALL, Case("float", "f16", "bias residual", 1, 120, 1792)),
    (SMALL, Case("float", "f16", "norm gated", 16, 101, 1024)),
    (SMALL, Case("float", "bf16", "residual", 3, 2, 64)),
    (OLD, Case("float", "bf16", "norm residual", 1, 37, 192)),
    (NARROW, Case("float", "bf16", "norm gated", 13, 70, 3072)),
    *((SMALL, Case(scheme, "bf16", "norm", 1, 101, 1024)) for scheme in SCHEMES),
    *((SMALL, Case(scheme, "f16", "gated bias", 5, 37, 512)) for scheme in SCHEMES),
    *((NARROW, Case(scheme, "bf16", "norm residual", 16, 70, 1536)) for scheme in SCHEMES),
    *((OLD, Case(scheme, "f16", "norm", 2, 70, 768)) for scheme in SCHEMES),
]


@pytest.fixture(autouse=True)
def _target() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    use(H200)


def template_of(case: Case) -> Template:
    found = fused(case)
    assert isinstance(found, Fused), found
    (template,) = found.templates
    assert isinstance(template, Template)
    return template


@pytest.fixture(scope="module")
def compiled() -> None:
    """All cases compiled at once, which is faster."""
    kernels: list[Kernel] = []
    for target, case in CASES:
        use(target)
        kernels.append(template_of(case).kernel)
    prepare(kernels)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("target", "case"), CASES, ids=[f"{t.capability} {c}" for t, c in CASES])
def test_results_are_those_of_numpy(target: Target, case: Case) -> None:
    use(target)
    template = template_of(case)
    inputs = case.inputs(template.reads, fresh())
    found = run_templates([template], inputs, {"B": case.rows})[template.writes[0]]
    assert case.error(found, case.expected(inputs)) <= 1, template.kernel.name


def test_numbers_that_f16_cannot_hold_are_scaled() -> None:
    use(SMALL)
    case = Case("int8", "bf16", "", 2, 33, 256)
    template = template_of(case)
    inputs = case.inputs(template.reads, fresh())
    x = next(value for value in inputs if value.name == "x")
    inputs[x] = (inputs[x] * np.array([[2.0**40], [2.0**-60]])).astype(inputs[x].dtype)
    found = run_templates([template], inputs, {"B": 2})[template.writes[0]]
    sizes = np.array([[2.0**40], [2.0**-60]], np.float32)
    assert case.error(found.astype(np.float32) / sizes, case.expected(inputs) / sizes) <= 1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("target", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_blocks_have_a_multiprocessor_of_their_own(scheme: str, rows: int, target: Target) -> None:
    """With two blocks on some multiprocessors and none on others, a step takes a fifth longer."""
    use(target)
    for form, n, k in (("norm gated", 14336, 4096), ("residual", 4096, 14336), ("", 128256, 2048)):
        found = fused(Case(scheme, "bf16", form, rows, n, k))
        assert isinstance(found, Fused)
        (template,) = found.templates
        assert isinstance(template, Template)
        assert template.grid({}) == (target.multiprocessors, 1, 1)
        by_registers = scheme == "float" and rows > 4  # their operands take more than half of them
        assert by_registers or target.shared / 2 < template.shared({}) <= target.shared


@pytest.mark.parametrize("scheme", SCHEMES)
def test_candidates_give_the_same_results(scheme: str, rng: np.random.Generator) -> None:
    """For a number of rows that is drawn: one, of a gated product, or of the most."""
    use(SMALL)
    rows = int(rng.choice([1, 3, 16]))
    case = Case(scheme, "bf16", "gated" if rows == 3 else "bias", rows, 37, 1024)
    product = case.product()
    found = candidates(37, 1024, len(product.matrices) == 2, product.codes, rows, SMALL)
    templates = [product.template(each) for each in found if isinstance(each, Choice)]
    assert len(templates) > 1
    prepare([each.kernel for each in templates])
    inputs = case.inputs(templates[0].reads, fresh())
    for each in templates:
        got = run_templates([each], inputs, {"B": rows})[each.writes[0]]
        assert case.error(got, case.expected(inputs)) <= 1, each.kernel.name


def test_rings_have_two_stages_or_more() -> None:
    for k in range(1024, 40000, 128):
        found = one_row(4096, k, False, H200)
        assert isinstance(found, str) or found.constants["STAGES"] >= 2


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("float", "bf16", "", 17, 64, 64), "17 rows are more than the 16"),
        (Case("float", "bf16", "", 1, 64, 48), "rows of 48 weights of 16 bits cannot be cut"),
        (Case("int8", "bf16", "", 1, 64, 48), "rows of 48 weights of 8 bits cannot be cut"),
        (Case("float", "bf16", "", 2, 64, 0), "bf16[64, 0] is empty"),
    ],
)
def test_reasons(case: Case, reason: str) -> None:
    found = fused(case)
    assert isinstance(found, str)
    assert reason in found


MODEL = """module @m dims(B=1:1:64) {
  file @c = "c"
  weight @gain : bf16[1024] = @c["gain"]
  weight @a : bf16[1024, 1024] = @c["a"]
  weight @b : bf16[1024, 1024] = @c["b"]
  weight @d : bf16[1024, 1024] = @c["d"]
  func @main(%x: bf16[B, 1024]) -> (bf16[B, 1024]) {
    %o = linear %x, @a : bf16[B, 1024]
    %h, %t = add_rms_norm %o, %x, @gain {eps=1e-05} : bf16[B, 1024], bf16[B, 1024]
    %g = linear %h, @b : bf16[B, 1024]
    %u = linear %h, @d : bf16[B, 1024]
    %s = silu %g : bf16[B, 1024]
    %m = mul %s, %u : bf16[B, 1024]
    %y = linear %m, @a : bf16[B, 1024]
    %z = add %y, %t : bf16[B, 1024]
    return %z
  }
}"""


def test_a_decoder_layer_is_three_products() -> None:
    """Nothing is left between them: norms are inside, and the norm of its own has no reader."""
    launches = Planner(parse_module(MODEL, "m")).plan({"B": 1}).steps
    names = [getattr(step, "kernel", "") for step in launches]
    assert [name.startswith("linear_rows") for name in names] == [True] * 3


COMPUTED = """module @m dims(B=1:1:64) {{
  file @c = "c"
  weight @w : i8[256, 1024] = @c["w"]
  weight @scale : f32[256, 1] = @c["scale"]
  weight @gain : f32[1024] = @c["gain"]
  func @main(%x: bf16[B, 1024], %s: bf16[256, 1], %g: bf16[1024]) -> (bf16[B, 256]) {{
    {computed}
    %d = dequantize @w, {scale} : bf16[256, 1024]
    %n = rms_norm %x, {gain} {{eps=1e-05}} : bf16[B, 1024]
    %y = linear %n, %d : bf16[B, 256]
    return %y
  }}
}}"""


@pytest.mark.parametrize(
    ("computed", "scale", "gain"),
    [
        ("", "%s", "%g"),
        ('%c = cast @scale {dtype="bf16"} : bf16[256, 1]', "%c", "%g"),
        ('%c = cast @gain {dtype="bf16"} : bf16[1024]', "%s", "%c"),
    ],
)
def test_what_is_computed_is_waited_for(computed: str, scale: str, gain: str) -> None:
    """The kernel reads weights at once, so no other kernel may be writing them."""
    text = COMPUTED.format(computed=computed, scale=scale, gain=gain)
    module = parse_module(text, "m")
    op = module.main.returned[0].producer
    assert isinstance(op, Linear)
    found = product_of(op)
    assert isinstance(found, Product)
    choice = chosen(found, 1)
    assert isinstance(choice, Choice)
    assert found.template(choice).waits == (not computed)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sources_compile(architecture: str) -> None:
    use(ARCHITECTURES[architecture])
    schemes = {"float": 8, "int8": 1, "fp8": 16, "uint4": 8, "mxfp4": 1}
    cases = [Case(s, "bf16", "norm gated bias", r, 512, 1024) for s, r in schemes.items()]
    for case in (*cases, Case("float", "f16", "residual", 1, 512, 1024)):
        assert compile_kernel(template_of(case).kernel, architecture)
