"""The files with which onnxruntime-genai generates text by an artifact for CPUs.

genai gives an attention mask [B, tokens so far] in place of `past_lengths` and `logit_positions`,
takes logits of all tokens, and binds each cache to the result that updates it. Prompts that genai
pads have masks with fewer tokens than ids: a Gather beyond its data stops the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.errors import Error

_INPUTS = {"input_ids", "positions", "past_lengths", "logit_positions"}
_GRAPH = """
adapter (int32[B, S] input_ids, int32[B, L] attention_mask)
    => (int32[B] past_lengths, int32[B, S] logit_positions) {
  rows = Constant <value_ints = [1]> ()
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  counts = ReduceSum <keepdims = 0> (attention_mask, rows)
  size = Shape <start = 1, end = 2> (input_ids)
  new = Cast <to = 6> (size)
  past = Sub (counts, new)
  least = ReduceMin <keepdims = 0> (past)
  nothing = Cast <to = 6> (zero)
  padded = Less (least, nothing)
  place = Cast <to = 7> (padded)
  rest = Unsqueeze (nothing, zero)
  [prompts_of_a_batch_have_one_length] more = Gather (rest, place)
  past_lengths = Add (past, more)
  end = Squeeze (size)
  steps = Range (zero, end, one)
  steps32 = Cast <to = 6> (steps)
  shape = Shape (input_ids)
  logit_positions = Expand (steps32, shape)
}"""


def write_genai(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write genai.onnx, whose weights are those of rank0.onnx, and genai_config.json.

    An Error where the artifact whose manifest has these `facts` is not a language model of one
    rank.
    """
    import onnx
    from onnx import compose, parser

    states, caches = facts["states"], range(len(facts["states"]) // 2)
    wanted = {f"{kind}{i}" for i in caches for kind in "kv"}
    one = facts["backend"] == "onnx" and not facts["mesh"]
    ports = {*facts["inputs"], *states, *facts["outputs"]}
    if not one or not states or ports != {*_INPUTS, *wanted, "logits"}:
        raise Error(
            "--layout genai takes a language model for one rank of the backend onnx, with the "
            f"inputs {', '.join(sorted(_INPUTS))} and caches k0, v0, ..., and the result logits; "
            f"found {', '.join(sorted(ports))} for "
            f"{facts['backend']} {facts['mesh']}".rstrip()
        )
    model = onnx.load(folder / "rank0.onnx", load_external_data=False)
    before = compose.add_prefix_graph(parser.parse_graph(_GRAPH), "genai.")
    names = {f"genai.{name}": name for name in (*_INPUTS, "attention_mask")}
    for node in before.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    nodes, inputs = [*before.node, *model.graph.node], [*model.graph.input, before.input[1]]
    inputs[-1].name = "attention_mask"
    for field, kept in (("node", nodes), ("input", inputs)):
        del getattr(model.graph, field)[:]
        getattr(model.graph, field).extend(
            arg for arg in kept if arg.name not in ("past_lengths", "logit_positions")
        )
    logits = next(value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_param = "S"
    del model.graph.value_info[:]
    (folder / "genai.onnx").write_bytes(model.SerializeToString())
    text = json.dumps(_config(facts, len(caches)), indent=2)
    (folder / "genai_config.json").write_text(text + "\n", encoding="utf-8")


def _config(facts: Mapping[str, Any], layers: int) -> dict[str, Any]:
    heads, longest, width = _shape(facts["states"]["k0"])[1:]
    ends = list(facts["end_tokens"])
    decoder = {
        "filename": "genai.onnx",
        "session_options": {"provider_options": []},
        "num_hidden_layers": layers,
        "num_key_value_heads": int(heads),
        "head_size": int(width),
        "inputs": {
            "input_ids": "input_ids",
            "position_ids": "positions",
            "attention_mask": "attention_mask",
            "past_key_names": "k%d",
            "past_value_names": "v%d",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "k%d.out",
            "present_value_names": "v%d.out",
        },
    }
    most = facts["dims"][longest][2] if longest in facts["dims"] else int(longest)
    vocabulary = int(_shape(facts["outputs"]["logits"])[-1])
    # "llama" is what genai calls any decoder whose inputs are these
    model = {"type": "llama", "vocab_size": vocabulary, "context_length": most, "decoder": decoder}
    model |= {"eos_token_id": ends, "pad_token_id": ends[0] if ends else 0}
    search = {"max_length": most, "past_present_share_buffer": True}
    return {"model": model, "search": search}


def _shape(text: str) -> list[str]:
    """The sizes in the text of a type."""
    return text.partition("[")[2].rstrip("]").split(", ")
