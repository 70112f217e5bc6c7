"""`Session`: an engine on arrays by name, and the shapes and dtypes that it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

import irc
from irc.errors import Error
from irc.frontends.tensorrt_llm.runtime import Session, TensorInfo
from irc.generation.inputs import complete
from tests.fresh import fresh, session_seed
from tests.frontends.tensorrt_llm.decoders import HEADS, LONGEST, SIZE, Oracle, artifact
from tests.tiny_checkpoint import write_checkpoint

SEED = session_seed()


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact("growing", SEED, tmp_path_factory.mktemp("growing") / "engine")


def growing_inputs(prompt: list[int]) -> dict[str, np.ndarray]:
    """The inputs of the engine "growing" for a prompt."""
    count = len(prompt)
    return {
        "input_ids": np.array([prompt], np.int32),
        "position_ids": np.arange(count, dtype=np.int32)[None],
        "last_token_ids": np.array([count], np.int32),
        "attention_mask": np.ones((1, count), np.int32),
        "past_key_value_0": np.zeros((1, 2, HEADS, 0, SIZE), np.float32),
    }


def test_a_session_runs_any_engine_on_arrays(growing: Path) -> None:
    oracle = Oracle(SEED)
    (prompt,) = oracle.prompts(fresh(1), 1)
    inputs, session = growing_inputs(prompt), Session.from_engine(growing)
    infos = session.infer_shapes([TensorInfo(n, x.dtype, x.shape) for n, x in inputs.items()])
    outputs = {info.name: np.empty(info.shape, np.float32) for info in infos}
    assert outputs["present_key_value_0"].shape == (1, 2, HEADS, len(prompt), SIZE)
    assert session.run(inputs, outputs)
    np.testing.assert_allclose(outputs["logits"][0], oracle.logits(prompt), rtol=1e-4, atol=1e-4)
    with pytest.raises(Error, match="no output 'nothing'"):
        session.run(inputs, {"nothing": np.zeros(1)})
    with pytest.raises(Error, match=r"logits has the shape .*, but the buffer for it \[1, 2\]"):
        session.run(inputs, {"logits": np.zeros((1, 2))})


@pytest.mark.parametrize(
    ("count", "change", "message"),
    [
        (3, {"input_ids": np.zeros(3, np.int32)}, r"\[3\], but it must be i32\[B, S\]"),
        (3, {"position_ids": np.zeros((1, 2), np.int32)}, "position_ids has the shape"),
        (LONGEST + 1, {}, "has S=33, but the model was compiled for S=1 to 32"),
    ],
)
def test_shapes_that_an_engine_does_not_take(
    count: int, change: dict[str, np.ndarray], message: str, growing: Path
) -> None:
    inputs = growing_inputs([0] * count) | change
    session = Session.from_engine(growing)
    for use in (session.set_shapes, session.run):
        with pytest.raises(Error, match=message):
            use(inputs)


def test_a_session_refuses_ids_that_are_no_integers(growing: Path) -> None:
    inputs = {**growing_inputs([1, 2]), "input_ids": np.array([[1.5, 2]])}
    with pytest.raises(Error, match="input_ids is float64, but it must be i32"):
        Session.from_engine(growing).run(inputs)


def test_a_session_reports_indices_out_of_range(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", SEED)
    irc.compile(checkpoint, tmp_path / "e", backend="reference", outside="error")
    program = irc.load(tmp_path / "e").program
    inputs = complete(program.ports, {"input_ids": [[1, 2]]})
    inputs["input_ids"][0, 1] = 10**6
    with pytest.raises(Error, match=r"indices from the input input_ids are out of range \(1 of"):
        Session.from_engine(tmp_path / "e").run(inputs)


@pytest.mark.oracle
@pytest.mark.parametrize("backend", ["onnx", "reference"])
def test_results_and_inputs_have_dtypes_of_their_own(backend: str, tmp_path: Path) -> None:
    import torch

    kinds = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2")
    casts = " ".join(f'%{kind}_y = cast %h {{dtype="{kind}"}} : {kind}[3]' for kind in kinds)
    module = irc.parse(f"""module @m {{ func @forward(%ids: i32[2], %h: bf16[3])
      -> (ids: i32[2], {", ".join(f"{kind}: {kind}[3]" for kind in kinds)}) {{
        {casts} return %ids, {", ".join(f"%{kind}_y" for kind in kinds)} }} }}""")
    folder = tmp_path / "engine"
    irc.compile(module, folder, backend=backend)
    session = Session.from_engine(folder)
    x = torch.tensor([0.3, -1.7, 300.0]).bfloat16()
    inputs = {"ids": torch.tensor([5, 6], dtype=torch.int32), "h": x}
    wanted = {"ids": inputs["ids"], "f32": x.float(), "f16": x.half(), "bf16": x}
    wanted |= {"f8e4m3": x.to(torch.float8_e4m3fn), "f8e5m2": x.to(torch.float8_e5m2)}
    for given in (inputs, dict(reversed(inputs.items()))):
        results = session.run(given)
        buffers = {name: torch.empty_like(each) for name, each in wanted.items()}
        assert session.run(given, buffers)
        for name, want in wanted.items():
            for found in (results[name], buffers[name]):
                assert found.dtype == want.dtype and torch.equal(found.float(), want.float())


def test_tensors_of_bytes_are_8_bit_floats(tmp_path: Path) -> None:
    """As scripts use them that are older than the dtype of PyTorch."""
    inputs = {"x": irc.Spec("f8e4m3", (2,))}
    model = irc.trace(lambda x: {"y": x.cast("f32").cast("f8e4m3")}, inputs)
    irc.compile(model, tmp_path, backend="reference")
    codes, copy = torch.tensor([0x38, -0x40], dtype=torch.int8), torch.zeros(2, dtype=torch.int8)
    assert Session(tmp_path).run({"x": codes}, {"y": copy}) and codes.tolist() == copy.tolist()
