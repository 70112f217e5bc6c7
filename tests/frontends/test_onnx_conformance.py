"""ONNX's own backend tests: most are read and computed, none is wrong, the others are refused.

So are they with symbolic sizes, with constants in place of inputs, and damaged.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

import irc
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.frontends.onnx import import_onnx
from tests.frontends.onnx_models import on_emitted, saved

pytestmark = pytest.mark.slow
# How many pass, of onnx 1.23.2. ONNX Runtime 1.31 passes 1516 of these 2024.
PASSING = {"node": 1325, "simple": 3, "pytorch-converted": 82, "pytorch-operator": 35}
# How many of the nodes and operators pass where sizes are symbols, and where inputs are constants.
FORMS = {"symbols": 1085, "constants": 1340}
HALF_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # the distance of two numbers from 1 on


@pytest.mark.parametrize("kind", list(PASSING))
def test_backend_tests_of_onnx(kind: str, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for case in cases(kind):
        path = saved(model_of(case), tmp_path)
        outcome = outcome_of(path, case, data_of(case), tmp_path)
        counts[outcome] += 1
        if outcome == "pass":
            outcome = outcome_on_runtime(path, case, tmp_path)
        wrong += [case.name] if outcome == "wrong" else []
    assert not wrong
    assert counts["pass"] >= PASSING[kind], counts


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_inputs(form: str, tmp_path: Path) -> None:
    """Every size of an input is a symbol, or every input is folded as a constant."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for case in [*cases("node"), *cases("pytorch-operator")]:
        model, (given, wanted) = model_of(case), data_of(case)[0]
        if form == "symbols":
            for value in model.graph.input:
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_value > 1:
                        dim.dim_param = f"n{dim.dim_value}"
        elif all(isinstance(x, np.ndarray) for x in given):
            names = [value.name for value in model.graph.input]
            model.graph.initializer.extend(map(numpy_helper.from_array, given, names))
            del model.graph.input[:]
            given = []
        outcome = outcome_of(saved(model, tmp_path), case, [(given, wanted)], tmp_path)
        counts[outcome] += 1
        wrong += [case.name] if outcome == "wrong" else []
    assert not wrong
    assert counts["pass"] >= FORMS[form], counts


WORDS = ("none", "linear", "ab,bc->ac", ",->", "constant", "add", "-1")


def damage(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Change operands or attributes of a node, sizes of inputs, or the opset."""
    node = model.graph.node[int(rng.integers(len(model.graph.node)))]
    operands, attributes = list(node.input), list(node.attribute)
    kind = rng.choice(["order", "operand", "attribute", "sizes", "opset"])
    if kind == "order":
        order = rng.permutation(len(operands))[: rng.integers(len(operands) + 1)]
        node.input[:] = [operands[i] for i in order]
    elif kind == "operand" and operands:
        node.input[int(rng.integers(len(operands)))] = ""
    elif kind == "attribute" and attributes:
        attribute = attributes[int(rng.integers(len(attributes)))]
        attribute.i += int(rng.integers(-3, 4))
        attribute.s = str(rng.choice(WORDS)).encode()
        numbers = [n + int(rng.integers(-2, 3)) for n in attribute.ints]
        attribute.ints[:] = numbers[: rng.integers(1, 6)]
    elif kind == "sizes":
        for dim in (d for v in model.graph.input for d in v.type.tensor_type.shape.dim):
            if rng.random() < 0.4:
                dim.dim_value = int(rng.integers(5))
            elif rng.random() < 0.2:
                dim.dim_param = "n"
    else:
        model.opset_import[0].version = int(rng.integers(7, 27))


def test_damaged_models_give_a_module_or_an_error(tmp_path: Path) -> None:
    rng, read = np.random.default_rng(91), 0
    for _ in range(500):
        some = cases(rng.choice(["node", "pytorch-operator"]))
        model = model_of(some[int(rng.integers(len(some)))])
        damage(model, rng)
        try:
            import_onnx(saved(model, tmp_path))
            read += 1
        except Error:
            continue
    assert read > 50  # not all is nonsense


def model_of(case: Any) -> onnx.ModelProto:
    """A copy of the model of a case."""
    stored = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
    return onnx.ModelProto.FromString(stored.SerializeToString())


def outcome_of(path: Path, case: Any, data: list[Any], folder: Path) -> str:
    """What the module of a case gives: pass, rounded, wrong, or refused with an Error."""
    try:
        module = import_onnx(path)
        found = [(computed(module, given, folder), wanted) for given, wanted in data]
    except Error as error:
        assert error.message
        return "refused"
    return min((compared(got, wanted, case) for got, wanted in found), key=ORDER.index)


def outcome_on_runtime(path: Path, case: Any, folder: Path) -> str:
    """What ONNX Runtime gives for the file that irc writes of the module of a case."""
    module = import_onnx(path)
    given, wanted = data_of(case)[0]
    named = {str(arg.name): x for arg, x in zip(module.main.args, given, strict=False)}
    return compared(on_emitted(module, named, folder), wanted, case)


ORDER = ["wrong", "rounded", "pass"]


@cache
def cases(kind: str) -> list[Any]:
    """The cases of one kind, whose models ONNX makes when they are loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model_tests(kind=kind)


def data_of(case: Any) -> list[tuple[list[Any], list[Any]]]:
    """The inputs and outputs that a case is shipped with."""
    if case.data_sets is not None:
        return [([*map(array, given)], [*map(array, wanted)]) for given, wanted in case.data_sets]

    def stored(folder: Path, kind: str) -> list[Any]:
        files = sorted(
            folder.glob(f"{kind}_*.pb"), key=lambda file: int(file.stem[len(kind) + 1 :])
        )
        return [array(TensorProto.FromString(file.read_bytes())) for file in files]

    folders = sorted(Path(case.model_dir).glob("test_data_set*"))
    return [(stored(folder, "input"), stored(folder, "output")) for folder in folders]


def array(value: Any) -> Any:
    """A tensor as an array; sequences stay as they are."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def computed(module: irc.Module, inputs: list[Any], folder: Path) -> list[Any]:
    """What the reference computes."""
    names = [arg.name for arg in module.main.args]
    given = {str(name): np.asarray(each) for name, each in zip(names, inputs, strict=False)}
    return list(evaluate(module, given, folder).values())


def compared(found: list[Any], wanted: list[Any], case: Any) -> str:
    """How results are: "pass" by the tolerance of the case, "rounded" within two steps of a half.

    Where the shipped results of f16 and bf16 are rounded after every operation, the tolerance of
    ONNX is less than one step of the dtype.
    """
    outcome = "pass"
    for got, want in zip(found, map(np.asarray, wanted), strict=True):
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return "wrong"
        if got.dtype.kind == "V" or got.dtype.name in HALF_STEPS:
            step = HALF_STEPS.get(got.dtype.name, 0.0)
            got, want = got.astype(np.float32), want.astype(np.float32)
            if np.allclose(got, want, 2 * step, 2 * step, equal_nan=True):
                close = np.allclose(got, want, case.rtol, case.atol, equal_nan=True)
                outcome = outcome if close else "rounded"
                continue
        if not np.allclose(got, want, case.rtol, case.atol, equal_nan=True):
            return "wrong"
    return outcome
