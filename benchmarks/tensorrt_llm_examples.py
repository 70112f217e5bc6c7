"""NVIDIA's example scripts with tiny weights: their commands, and what transformers computes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 32  # tokens that run.py generates
PROMPTS = ((5, 17, 200, 31, 64, 9), (12, 7, 90))  # of different lengths
VOCABULARY = 320
_COMMON = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
           "max_position_embeddings": 128, "vocab_size": VOCABULARY}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
_LLAMA = _COMMON | {"intermediate_size": 96, "num_key_value_heads": 2}
# family -> (class and configuration in transformers, sizes)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "gpt": ("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", _GPT | {"rotary_dim": 8}),
    "gptneox": ("GPTNeoXForCausalLM", "GPTNeoXConfig",
                _COMMON | {"intermediate_size": 256, "rotary_pct": 0.5}),
    "opt": ("OPTForCausalLM", "OPTConfig", _COMMON | {"ffn_dim": 256, "word_embed_proj_dim": 64}),
    "bloom": ("BloomForCausalLM", "BloomConfig", _GPT | {"hidden_size": 64}),
    "falcon": ("FalconForCausalLM", "FalconConfig",
               _COMMON | {"new_decoder_architecture": False, "alibi": False, "bias": False}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig",
              _LLAMA | {"num_key_value_heads": 1, "head_dim": 16}),
    "phi": ("PhiForCausalLM", "PhiConfig",
            _COMMON | {"intermediate_size": 256, "partial_rotary_factor": 0.5}),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
            "decoder_start_token_id": 0, "vocab_size": VOCABULARY}),
    "bert": ("BertModel", "BertConfig", _COMMON | {"intermediate_size": 256}),
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """Commands of one example, and what their results are compared with.

    Words of commands may name {model}, {out}, {checkpoint}, {prompts} (a CSV file of ids) and
    {tokens} (the file that run.py writes). A command is a script below the release's folder, or
    `irc` and its arguments.
    """

    name: str
    family: str
    commands: tuple[str, ...]
    check: str = "tokens"  # or logits
    bits: int = 0  # of weights that are rounded per output channel
    sources: bool = False  # the model's class is NVIDIA's

    @property
    def tp_size(self) -> int:
        """How many ranks share a layer."""
        return math.prod(map(int, re.findall(r"--tp_size (\d)", self.commands[0])))

    @property
    def ranks(self) -> int:
        """How many ranks the commands build."""
        sizes = re.findall(r"--[tp]p_size (\d)", " ".join(self.commands))
        return math.prod(map(int, sizes))


def examples(release: str) -> Iterator[Example]:
    """Every example of a release that the corpus runs."""
    number = tuple(map(int, release.split(".")))
    return _of_build_scripts(number) if number < (0, 8) else _of_checkpoints(number)


_SIZES = "--max_batch_size 2 --max_input_len 16"
_BUILD = (
    "examples/{family}/build.py --model_dir {model} --dtype float32 --output_dir {out} "
    f"{_SIZES} --max_output_len 40"
)
_CONVERT = (
    "examples/{family}/convert_checkpoint.py --model_dir {model} --dtype float32 "
    "--output_dir {checkpoint}"
)
_IRC_BUILD = f"irc build --checkpoint_dir {{checkpoint}} --output_dir {{out}} {_SIZES} "
_INT4 = "--use_weight_only --weight_only_precision int4"
_PLUGINS = "--use_gpt_attention_plugin float32 --use_gemm_plugin float32"
_TP2 = "--world_size 2 --tp_size 2 --pp_size 1"
_LLAMA_FLAGS: dict[str, tuple[str, int]] = {  # of build.py, and the bits of weights
    "plain": ("", 0),
    "plugins": (f"{_PLUGINS} --use_rmsnorm_plugin float32", 0),
    "int8": ("--use_weight_only", 8),
    "int4": (_INT4, 4),
    "tp2, parallel embedding by rows": (
        f"{_TP2} --use_parallel_embedding --embedding_sharding_dim 0",
        0,
    ),
    "tp2, parallel embedding by columns": (
        f"{_TP2} --use_parallel_embedding --embedding_sharding_dim 1",
        0,
    ),
    "tp2": (_TP2, 0),
    "tp2 pp2, plugins": (f"--world_size 4 --tp_size 2 --pp_size 2 {_PLUGINS}", 0),
    "tp2 int8, plugins": (f"{_TP2} {_PLUGINS} --use_weight_only", 8),
    "packed, plugins": (f"{_PLUGINS} --remove_input_padding", 0),
    "--enable_debug_output": ("--enable_debug_output", 0),
    "--visualize": ("--visualize", 0),
}
_CHECKPOINT_FLAGS: dict[str, tuple[str, int]] = {  # of convert_checkpoint.py
    "plain": ("", 0),
    "int8": ("--use_weight_only", 8),
    "int4": (_INT4, 4),
    "tp2": ("--tp_size 2", 0),
    "tp2 pp2": ("--tp_size 2 --pp_size 2", 0),
    "tp2, parallel embedding": ("--tp_size 2 --use_parallel_embedding", 0),
}


def _of_sources(family: str, name: str, *commands: str) -> Example:
    """An example whose model's class is NVIDIA's, compared by logits."""
    return Example(f"{family}/{name}".strip(), family, commands, "logits", sources=True)


def _of_build_scripts(number: tuple[int, ...]) -> Iterator[Example]:
    """The scripts of 0.5 to 0.7, which build engines."""
    run = "examples/run.py" if number >= (0, 7) else "examples/llama/run.py"
    prompts = "--input_file" if number >= (0, 7) else "--input_tokens"
    run += f" --engine_dir {{out}} --tokenizer_dir {{model}} --max_output_len {STEPS} "
    run += f"{prompts} {{prompts}} --output_npy {{tokens}}"
    # of 0.6, whose default is not that of the checkpoint
    more = f" --vocab_size {VOCABULARY}" if number[:2] == (0, 6) else ""
    for name, (flags, bits) in _LLAMA_FLAGS.items():
        build = f"{_BUILD} {flags}{more}"
        yield Example(f"llama/build.py {name}", "llama", (build, run), bits=bits)
    if number < (0, 7):
        return
    of_family = {"gptj": " --rotary_dim 8", "gptneox": "", "falcon": " --parallel_attention"}
    for family, own in of_family.items():
        yield _of_sources(family, "build.py plain", _BUILD + own)
        yield _of_sources(family, "build.py plugins", f"{_BUILD} {_PLUGINS}{own}")
    convert = "examples/gpt/hf_gpt_convert.py -i {model} -o {checkpoint} --storage-type float32"
    gpt = _BUILD.replace("{model}", "{checkpoint}/1-gpu")
    yield _of_sources("gpt", "build.py plain", convert, gpt)
    yield _of_sources("gpt", "build.py plugins", convert, f"{gpt} {_PLUGINS}")
    build = f"{_IRC_BUILD} --max_output_len 40 --gpt_attention_plugin float32"
    for family in ("opt", "bloom"):
        yield _of_sources(family, "convert_checkpoint.py", _CONVERT, build)
    bert = (
        "examples/bert/build.py --dtype float32 --model BertModel --n_layer 4 --n_embd 64 "
        f"--n_head 4 --n_positions 128 --vocab_size {VOCABULARY} {_SIZES} --output_dir {{out}}"
    )
    yield _of_sources("bert", "build.py plain", bert)
    yield _of_sources("bert", "build.py plugin", f"{bert} --use_bert_attention_plugin float32")


def _of_checkpoints(number: tuple[int, ...]) -> Iterator[Example]:
    """The scripts of 0.8 to 0.16, which convert checkpoints for `irc build`."""
    build = f"{_IRC_BUILD} --max_seq_len 64"
    run = (
        f"examples/run.py --engine_dir {{out}} --tokenizer_dir {{model}} --max_output_len {STEPS} "
        "--input_file {prompts} --output_npy {tokens} --use_py_session"
    )
    for name, (flags, bits) in _CHECKPOINT_FLAGS.items():
        commands = (f"{_CONVERT} {flags}", build, run)
        yield Example(f"llama/convert_checkpoint.py {name}", "llama", commands, bits=bits)
    if number < (0, 16):
        return
    for family in ("gpt", "falcon", "phi", "qwen"):
        yield _of_sources(family, "convert_checkpoint.py", _CONVERT, build)
    gemma = (
        "examples/gemma/convert_checkpoint.py --ckpt-type hf --model-dir {model} --dtype float32 "
        "--output-model-dir {checkpoint}"
    )
    yield _of_sources("gemma", "convert_checkpoint.py", gemma, build)
    t5 = "examples/enc_dec/convert_checkpoint.py --model_type t5 --model_dir {model} "
    t5 += "--dtype float32 --output_dir {checkpoint}"
    encoder, decoder = (
        build.replace("{checkpoint}", f"{{checkpoint}}/{part}").replace("{out}", f"{{out}}/{part}")
        for part in ("encoder", "decoder")
    )
    commands = (t5, encoder, f"{decoder} --max_encoder_input_len 16")
    yield Example("enc_dec/convert_checkpoint.py t5", "t5", commands, "logits", sources=True)


def make_model(family: str, folder: Path) -> None:
    """Write a tiny model of a family, with a tokenizer, as transformers saves it."""
    import io

    import sentencepiece  # pyright: ignore[reportMissingImports]
    import torch
    import transformers

    cls, configuration, sizes = FAMILIES[family]
    model = _random(cls, configuration, sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif "bias" in name:
                parameter.normal_(0, 0.05)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, safe_serialization=True)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=VOCABULARY,
        model_type="bpe", minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    tokenizer = transformers.LlamaTokenizer(str(folder / "tokenizer.model"), legacy=False)
    tokenizer.save_pretrained(folder)


def _random(cls: str, configuration: str, sizes: dict[str, Any]) -> Any:
    import torch
    import transformers

    more = {"add_pooling_layer": False} if cls == "BertModel" else {}
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, configuration)(**sizes), **more).eval()


def check(example: Example, model: Path, out: Path, tokens: Path) -> str:
    """How results differ from those of transformers; "" where they do not."""
    import torch
    import transformers

    cls, configuration, sizes = FAMILIES[example.family]
    if example.family == "bert":
        theirs = _random(cls, configuration, sizes)  # the script makes the same one
    else:
        theirs = getattr(transformers, cls).from_pretrained(model).float().eval()
    if example.bits:
        _round(theirs, example.bits, example.tp_size)
    with torch.no_grad():
        if example.check == "tokens":
            return _differing_tokens(theirs, np.load(tokens))
        return _differing_logits(theirs, out, example.family)


def _differing_tokens(model: Any, generated: np.ndarray) -> str:
    import torch

    end = model.config.eos_token_id
    for prompt, row in zip(PROMPTS, generated.tolist(), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + STEPS and ids[-1] != end:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found = row[-STEPS:] if len(row) == STEPS else row[len(prompt) : len(ids)]
        if found[: len(ids) - len(prompt)] != ids[len(prompt) :]:
            return f"tokens {found[:8]}... differ from {ids[len(prompt) :][:8]}..."
    return ""


def _round(model: Any, bits: int, tp_size: int) -> None:
    """Round the weights of all layers as weight-only quantization does: per output channel, and per
    rank where the ranks split the inputs."""
    import torch

    limit = 2 ** (bits - 1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            ranks = tp_size if name.endswith(("o_proj", "down_proj")) else 1
            for shard in module.weight.detach().chunk(ranks, 1):
                scale = shard.abs().amax(1, keepdim=True) / limit
                shard.copy_((shard / scale).round().clamp(-limit, limit - 1) * scale)


def _differing_logits(model: Any, out: Path, family: str) -> str:
    """Compare the logits of prompts and STEPS more tokens, or the hidden states of BERT."""
    import torch

    from irc.frontends.tensorrt_llm.engines import find_artifact
    from irc.generation.rows import Rows

    if family == "bert":
        ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
        states = _encoded(out, ids)["hidden_states"]
        return _differing(states, model(ids).last_hidden_state)
    prompts = [list(prompt) for prompt in PROMPTS]
    extra: dict[str, Any] = {}
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    if family == "t5":
        extra["encoder_output"] = _encoded(out / "encoder", ids)["encoder_output"]
        extra["encoder_input_lengths"] = np.full(2, ids.shape[1], np.int32)
        extra["cross_attention_mask"] = np.ones((2, ids.shape[1]), bool)
        extra["encoder_max_input_length"] = np.zeros(ids.shape[1], np.int32)
        prompts, out = [[0], [0]], out / "decoder"
    artifact = find_artifact(out)
    inputs = {port.name for port in artifact.program.ports.inputs}
    extra = {name: array for name, array in extra.items() if name in inputs}
    if any(port.name.startswith("past_key") for port in artifact.program.ports.inputs):
        prompts = [prompts[0], prompts[0][::-1]]  # without plugins, rows have one length
    rows = Rows(artifact.program, artifact.manifest["dims"], prompts, 48, extra)
    logits = rows.start()
    for _ in range(STEPS):
        for row, prompt in enumerate(prompts):
            sequence = torch.tensor([prompt])
            call = (
                {"input_ids": ids[row : row + 1], "decoder_input_ids": sequence}
                if family == "t5"
                else {"input_ids": sequence}
            )
            if difference := _differing(logits[row], model(**call).logits[0, -1]):
                return f"after {len(prompt)} tokens: {difference}"
            prompt.append(int(logits[row].argmax()))
        logits = rows.step([prompt[-1:] for prompt in prompts])
    return ""


def _differing(results: Any, expected: Any) -> str:
    results = np.asarray(results, np.float32)[..., : expected.shape[-1]]
    difference = float(np.abs(results - expected.numpy()).max() / expected.abs().max())
    # gelu of TensorRT-LLM is the approximation by tanh, which differs from gelu by up to 5e-4
    return "" if difference < 1e-3 else f"results differ by {difference:.1e} of the largest"


def _encoded(folder: Path, ids: Any) -> dict[str, Any]:
    """The outputs of an encoder."""
    from irc.frontends.tensorrt_llm.engines import find_artifact

    program = find_artifact(folder).program
    ids = ids.numpy().astype(np.int32)
    every = {
        "input_ids": ids,
        "input_lengths": np.full(len(ids), ids.shape[1], np.int32),
        "token_type_ids": 0 * ids,
        "position_ids": np.arange(ids.shape[1], dtype=np.int32)[None].repeat(len(ids), 0),
    }
    return program.run({port.name: every[port.name] for port in program.ports.inputs})
