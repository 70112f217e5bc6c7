"""Segments of a model between its collectives: their values, memory and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.onnx_ml_pb2 import ModelProto

from irc.backends.onnxruntime.execution import States, run_parts
from irc.backends.onnxruntime.segments import Collective, Segment, divide, model_of, types_of
from irc.backends.onnxruntime.session import Part, Parts
from irc.backends.ranks.threads import ThreadWorld
from irc.ir.core import Module
from tests.backends.checked_models import emit_checked
from tests.backends.ranks import agrees, drawn, loaded
from tests.backends.text import module as text_module
from tests.fresh import fresh

REDUCE = '{axis="tp", group_size=2}'


def module(body: str, results: str) -> Module:
    weight = '  weight @w : bf16[4, 4]{varies tp} = random("w", 1, 0.5)'
    return text_module(
        "%x: f32[S, 4]{varies tp}", results, body, "local mesh(tp=2) dims(S=1:3:9)", weight
    )


def model(m: Module, folder: Path) -> ModelProto:
    emit_checked(m, folder)
    return onnx.load(str(folder / "rank0.onnx"), load_external_data=False)


TWICE = module(
    f"""
    %wide = cast @w {{dtype="f32"}} : f32[4, 4]{{varies tp}}
    %a = linear %x, %wide : f32[S, 4]{{varies tp}}
    %b = all_reduce %a {REDUCE} : f32[S, 4]
    %c = linear %b, %wide : f32[S, 4]{{varies tp}}
    %d = add %c, %x : f32[S, 4]{{varies tp}}
    %e = all_reduce %wide {REDUCE} : f32[4, 4]
    %f = linear %d, %e : f32[S, 4]{{varies tp}}
    %z = full {{value=2.0, shape=[3]}} : f32[3]
    return %f, %z, %b
    """,
    "f32[S, 4]{varies tp}, f32[3], f32[S, 4]",
)


def test_constants_stay_where_they_are_needed(tmp_path: Path) -> None:
    steps = divide(model(TWICE, tmp_path))
    kinds = [
        [node.op_type for node in step.nodes] if isinstance(step, Segment) else step.call.operation
        for step in steps
    ]
    assert kinds == [
        ["Cast", "Gemm"],
        "all_reduce",
        ["Cast", "Gemm", "Add"],  # the weight is cast again; its sum over the ranks needs it too
        "all_reduce",
        ["ConstantOfShape", "Gemm"],
    ]
    segments = [step for step in steps if isinstance(step, Segment)]
    assert [segment.inputs for segment in segments] == [["x"], ["result2", "x"], ["d", "e"]]
    assert segments[1].outputs == ["wide", "d"] and segments[2].outputs == ["result1", "result0"]
    agrees(TWICE, {"x": drawn(fresh(1), "f32", (3, 4), 2)}, tmp_path)


def test_segments_hold_their_own_weights(tmp_path: Path) -> None:
    whole = model(TWICE, tmp_path)
    types = types_of(whole)
    found = [model_of(step, whole, types) for step in divide(whole) if isinstance(step, Segment)]
    for part in found:
        onnx.shape_inference.infer_shapes(part, check_type=True, strict_mode=True)
    held = [[t.name for t in part.graph.initializer if t.external_data] for part in found]
    assert held == [["w"], ["w"], []]


def test_unused_operations_are_left_out(tmp_path: Path) -> None:
    m = module(
        f"""
        %a = neg %x : f32[S, 4]{{varies tp}}
        %b = all_reduce %a {REDUCE} : f32[S, 4]
        %c = neg %b : f32[S, 4]
        %d = all_reduce %x {REDUCE} : f32[S, 4]
        %e = neg %c : f32[S, 4]
        return %d
        """,
        "f32[S, 4]",
    )
    assert [type(step) for step in divide(model(m, tmp_path))] == [Collective]
    agrees(m, {"x": drawn(fresh(6), "f32", (3, 4), 2)}, tmp_path)


def test_places_name_the_line_of_the_script(tmp_path: Path) -> None:
    m = module(
        f'%b = all_reduce %x {REDUCE} : f32[S, 4] loc("model.py":7 "layers.0")\nreturn %b',
        "f32[S, 4]",
    )
    (step,) = divide(model(m, tmp_path))
    assert isinstance(step, Collective)
    assert step.call.place == "layers.0/all_reduce/DistCollective.result0 (model.py:7)"
    assert (step.call.group, step.call.root, step.call.reduce_op) == ((0, 1), -1, "sum")


# -- memory between steps


def test_values_are_freed_after_their_last_use(tmp_path: Path) -> None:
    models, inputs = loaded(TWICE, tmp_path).models, {"x": np.ones((3, 4), np.float32)}
    assert models[0].parts.unused == ((), ("a",), ("x",), ("wide",), ("d", "e"))
    for left in ThreadWorld(2, 100).run(
        lambda c: run_parts(models[c.rank].parts, inputs, States(), c)
    ):
        assert set(left) == {"result0", "result1", "result2"}


HIDDEN = module(
    f"""
    %i = iota {{size=S, dtype="f32"}} : f32[S]
    %b = all_reduce %x {REDUCE} : f32[S, 4]
    %c = reshape %i {{shape=[S, 1]}} : f32[S, 1]
    %d = mul %b, %c : f32[S, 4]
    return %d
    """,
    "f32[S, 4]",
)


def test_shapes_known_only_at_run_time(tmp_path: Path) -> None:
    stream = loaded(HIDDEN, tmp_path).open({})
    for size in (3, 7, 7, 2):
        x = fresh(size).standard_normal((size, 4)).astype(np.float32)
        wanted = 2 * x * np.arange(size, dtype=np.float32)[:, None]
        np.testing.assert_allclose(stream.step({"x": x})["result0"], wanted, rtol=1e-5)


# -- sessions


def sessions(parts: Parts) -> list[Any]:
    return [step.session for step in parts.steps if isinstance(step, Part)]


def test_sessions_sleep_and_keep_no_memory(tmp_path: Path) -> None:
    program = loaded(TWICE, tmp_path, threads=4, low_memory=True)
    for session in sessions(program.models[0].parts):
        options = session.get_session_options()
        assert options.intra_op_num_threads == 2 and not options.enable_cpu_mem_arena
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert options.get_session_config_entry("session.disable_prepacking") == "1"


def test_threads_of_all_sessions_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irc.backends.onnxruntime.session.MOST_THREADS", 10)
    program = loaded(TWICE, tmp_path, threads=8)
    for session in sessions(program.models[1].parts):
        assert session.get_session_options().intra_op_num_threads == 2  # 5 steps, 2 ranks
