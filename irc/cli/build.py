"""`irc build`: compiles a checkpoint folder with the flags of trtllm-build."""

from __future__ import annotations

import io
import json
import shlex
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

from ..errors import Error
from ..json_files import read_object
from .arguments import Parser, Usage, add_quantization, quantization_options, whole_number, word_of
from .console import table

EXAMPLES = """
  irc build --checkpoint_dir llama_tp4 --output_dir build/llama --max_batch_size 8
  irc build --checkpoint_dir llama_tp4 --output_dir build/llama --mesh tp=2 --max_seq_len 4096
  irc build --checkpoint_dir llama --gemm_plugin auto --kv_cache_type paged --dry_run
  irc build --model_config config.json --output_dir build/llama --random-weights 0
"""
STORED = "build_flags.json"
_QUIET, _VERBOSE = ("internal_error", "error"), ("verbose", "debug", "trace")


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc build`: irc's own, and the flags of trtllm-build."""
    from ..frontends.tensorrt_llm.build_flags import ALIASES, FLAGS

    add = parser.add_argument
    what = "ranks by axes, as in tp=2,pp=2 (default: those of the checkpoint)"
    add("--mesh", metavar="AXES", help=what)
    add("--backend", metavar="NAME", default="onnx", help="what to compile for (default: onnx)")
    add("--random-weights", metavar="SEED", type=whole_number(), help="for --model_config")
    add_quantization(parser)
    group = parser.add_argument_group("flags of trtllm-build").add_argument
    for flag in FLAGS.values():
        names = [f"--{flag.name}", *(f"--{a}" for a, name in ALIASES.items() if name == flag.name)]
        note = {"honoured": "", "ignored": "no effect: ", "refused": "refused: "}[flag.use]
        options: dict[str, Any] = {"dest": flag.name, "default": SUPPRESS}
        if flag.takes == "-":
            options["action"] = "store_true"
        else:
            options["metavar"] = flag.takes if not flag.words else "WORD"
            options |= {"type": whole_number()} if flag.takes == "INT" else {}
            options |= {"type": word_of(*flag.words)} if flag.words else {}
            options |= {"nargs": "+"} if flag.takes == "LIST" else {}
        group(*names, help=(note + flag.why).replace("%", "%%"), **options)


def run(args: Namespace) -> int:
    """Translate the flags into `irc compile`, run it, and print and store what they became."""
    from ..frontends.tensorrt_llm.build_flags import FLAGS, check, flags_of
    from . import compile

    given = {name: value for name, value in vars(args).items() if name in FLAGS}
    if "build_config" in given:
        given = {**flags_of(read_object(Path(given["build_config"]))), **given}
    check(given)
    with tempfile.TemporaryDirectory() as folder:
        source = _source(given, args, Path(folder))
        request = _Request(given, read_object(source / "config.json"), args)
        words = [str(source), *request.words(source)]
        parser = Parser("compile", "compile", "")
        compile.configure(parser)
        forwarded = parser.parse(words)
        forwarded.load, forwarded.process = args.load, args.process
        forwarded.limits = request.limits()
        quiet = request.level in _QUIET
        if not quiet:
            print(table(request.rows(), ("flag", "requested", "effective")))
            print(f"the same as: irc compile {shlex.join(words)}\n")
        with redirect_stdout(io.StringIO()) if quiet else nullcontext(), catch_warnings():
            filterwarnings("ignore", "config.json has quant_algo")  # --quantize is in the words
            status = compile.run(forwarded)
    if not given.get("dry_run"):
        request.store(Path(forwarded.output))
    if given.get("monitor_memory"):
        print(f"peak of host memory: {_peak_memory()}")
    return status


def _source(given: dict[str, Any], args: Namespace, folder: Path) -> Path:
    """The folder to compile; one with only a config.json for --model_config."""
    if "checkpoint_dir" in given and Path(given["checkpoint_dir"]).suffix != ".json":
        return Path(given["checkpoint_dir"])
    config = given.get("model_config") or given.get("checkpoint_dir")
    if config is None:
        raise Usage("no model: give --checkpoint_dir DIR", "irc build --help lists the flags")
    if args.random_weights is None:
        raise Error(
            f"{config} describes a model without weights; give --checkpoint_dir DIR, or "
            "--random-weights SEED to try it out"
        )
    text = json.dumps(read_object(Path(config)))
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


class _Request:
    """The flags that were given, and what they become for the model of a config."""

    def __init__(self, given: dict[str, Any], config: dict[str, Any], args: Namespace) -> None:
        self.given, self.config, self.args = given, config, args
        self.level = given.get("log_level", "info")
        self.dims = self._dims()

    def words(self, source: Path) -> list[str]:
        """The options of irc compile."""
        given, args = self.given, self.args
        words = ["--dry-run"] if given.get("dry_run") else []
        words += ["-o", given.get("output_dir", "engine_outputs")] if not words else []
        words += ["--backend", args.backend]
        words += ["--mesh", self.mesh()] if self.mesh() else []
        words += ["--dims", ",".join(self.dims.values())] if self.dims else []
        words += ["--dump-dir", given["visualize_network"]] if "visualize_network" in given else []
        words += ["--explain"] if self.level in _VERBOSE else []
        if args.random_weights is not None:
            words += ["--random-weights", str(args.random_weights)]
        for name, value in self._quantization(source).items():
            values: list[Any] = [value] if not isinstance(value, list) else [*value] or [""]
            for each in values:
                words += [f"--{name.replace('_', '-')}", str(each)]
        if self._has_engines():
            words += ["--strip"] if given.get("strip_plan") else []
            words += ["--weight-streaming"] if given.get("weight_streaming") else []
        return words

    def mesh(self) -> str:
        """The axes of ranks: those given, or those of the checkpoint."""
        if self.args.mesh is not None:
            return self.args.mesh
        mapping: dict[str, Any] = self.config.get("mapping") or {}
        sizes = {axis: int(mapping.get(f"{axis}_size", 1)) for axis in ("pp", "tp")}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)

    def limits(self) -> dict[str, int]:
        """The passes that do nothing."""
        return {"fuse-gated-mlp": 0} if self.given.get("use_fused_mlp") == "disable" else {}

    def _quantization(self, source: Path) -> dict[str, Any]:
        """The options given, and the scheme where config.json wants float weights quantized."""
        from ..frontends.tensorrt_llm.checkpoint import scheme_of_floats

        found = quantization_options(self.args)
        if "quantize" in found or self.args.random_weights is not None:
            return found
        scheme = scheme_of_floats(source)
        return {**found, "quantize": scheme} if scheme else found

    def rows(self) -> list[tuple[str, str, str]]:
        """(flag, requested, effective) of every flag that was given, and of the mesh."""
        found = [(f"--{name}", str(x), self._effective(name)) for name, x in self.given.items()]
        return [*found, ("--mesh", self.args.mesh or "as stored", self.mesh() or "one rank")]

    def store(self, folder: Path) -> None:
        """Write the rows into the artifact."""
        rows = [{"flag": a, "requested": b, "effective": c} for a, b, c in self.rows()]
        (folder / STORED).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")

    def _effective(self, name: str) -> str:
        from ..frontends.tensorrt_llm.build_flags import FLAGS, asks

        flag, value = FLAGS[name], self.given[name]
        dim = _DIMS.get(name)
        if dim is not None:
            return f"{self.dims[dim]} ({flag.why})"
        if name == "kv_cache_type":
            return f"continuous ({flag.why})"
        if name in ("strip_plan", "weight_streaming") and not self._has_engines():
            return f"no effect: {self.args.backend} builds no TensorRT engine"
        if flag.use == "ignored":
            return f"no effect: {flag.why}"
        if not asks(value):
            return "off"
        return flag.why if flag.takes == "-" else str(value)

    def _has_engines(self) -> bool:
        return self.args.backend.startswith("tensorrt")

    def _dims(self) -> dict[str, str]:
        """The ranges of B, S, T and C, as min:typical:max, of those that flags state."""
        given = self.given
        if given.get("kv_cache_type") == "disabled":
            raise Error(
                "--kv_cache_type disabled: irc's language models always have caches; expected "
                "continuous or paged. A caller that needs one call only may drop the caches"
            )
        longest = int(self.config.get("max_position_embeddings") or 2048)
        whole = given.get("max_seq_len") or longest
        if whole > longest:
            raise Error(
                f"--max_seq_len {whole} is more than max_position_embeddings={longest} of the "
                f"model; give at most {longest}"
            )
        beams = given.get("max_beam_width") or 1
        rows = (given.get("max_batch_size") or 8) * beams
        limits = [given.get(name) or whole for name in ("max_input_len", "max_num_tokens")]
        tokens = min(whole, *limits)
        found: dict[str, str] = {}
        if given.keys() & {"max_batch_size", "max_beam_width", "opt_batch_size"}:
            found["B"] = _range("B", min((given.get("opt_batch_size") or 1) * beams, rows), rows)
        if given.keys() & {"max_input_len", "max_num_tokens", "opt_num_tokens", "max_seq_len"}:
            typical = min(given.get("opt_num_tokens") or (1 + tokens) // 2, tokens)
            found["S"] = _range("S", typical, tokens)
            found["T"] = _range("T", 1, tokens)
        if "max_seq_len" in given:
            found["C"] = _range("C", whole, whole)
        return found


_DIMS = {
    "max_batch_size": "B",
    "max_beam_width": "B",
    "opt_batch_size": "B",
    "max_input_len": "S",
    "max_num_tokens": "S",
    "opt_num_tokens": "S",
    "max_seq_len": "C",
}


def _range(name: str, typical: int, most: int) -> str:
    return f"{name}=1:{typical}:{most}"


def _peak_memory() -> str:
    """The most memory that this process has used."""
    from ..analysis.units import amount

    if sys.platform == "win32":
        return "unknown on this system"
    from resource import RUSAGE_SELF, getrusage

    return amount(getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
