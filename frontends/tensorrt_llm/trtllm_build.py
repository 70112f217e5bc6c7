"""`irc build`: compiles a checkpoint folder with the flags of trtllm-build."""

from __future__ import annotations

import json
import shlex
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

from ...artifact.manifest import add_facts
from ...cli.arguments import (
    Parser,
    Usage,
    add_settings,
    add_tensorrt_llm,
    given_settings,
    whole_number,
    word_of,
)
from ...errors import Error, did_you_mean
from ...ir.mesh import Mesh
from ...json_files import read_object
from ...pipeline.options import Setting as Declared
from ...pipeline.options import settings_of
from ...report import table
from ..models.config_reader import ConfigReader
from .settings import BuildConfig, Setting, settings

EXAMPLES = """
  irc build --checkpoint_dir llama_tp4 --output_dir build/llama --max_batch_size 8
  irc build --checkpoint_dir llama_tp4 --output_dir build/llama --mesh tp=2 --max_seq_len 4096
  irc build --checkpoint_dir llama --gemm_plugin auto --kv_cache_type paged --dry_run
  irc build --model_config config.json --output_dir build/llama --random-weights 0
"""
STORED = "build_flags.json"
RELEASE = "0.16.0"  # of trtllm-build, whose flags these are
FLAGS = settings("flag")
OFF = ("disable", "disabled", "", "none", False, None, 0, 1)  # values that ask for nothing
# flag -> the dimension whose range it states
_DIMS = {
    "max_batch_size": "B",
    "max_beam_width": "B",
    "opt_batch_size": "B",
    "max_input_len": "S",
    "max_num_tokens": "S",
    "opt_num_tokens": "S",
    "max_seq_len": "C",
}
_OF_ENGINES = {"strip_plan": "--strip", "weight_streaming": "--weight-streaming"}


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc build`: irc's own, and the flags of trtllm-build."""
    add = parser.add_argument
    what = "ranks by axes, as in tp=2,pp=2 (default: those of the checkpoint)"
    add("--mesh", metavar="AXES", help=what)
    add("--backend", metavar="NAME", default="onnx", help="what to compile for (default: onnx)")
    add("--random-weights", metavar="SEED", type=whole_number(), help="for --model_config")
    add_settings(parser.add_argument_group("quantization"), _quantize().values())
    add_tensorrt_llm(parser)
    group = parser.add_argument_group("flags of trtllm-build").add_argument
    for flag in FLAGS.values():
        note = {"honoured": "", "refused": "refused: "}.get(flag.use, "no effect: ")
        options: dict[str, Any] = {"dest": flag.name, "default": SUPPRESS}
        if flag.takes == "-":
            options["action"] = "store_true"
        elif flag.words:
            options |= {"metavar": "WORD", "type": word_of(*flag.words)}
            if flag.takes == "SWITCH":  # older versions have --use_fused_mlp without a word
                options |= {"nargs": "?", "const": "enable"}
        else:
            options["metavar"] = flag.takes
            options |= {"INT": {"type": whole_number()}, "LIST": {"nargs": "+"}}.get(flag.takes, {})
        group(f"--{flag.name}", help=(note + flag.why).replace("%", "%%"), **options)


def _quantize() -> dict[str, Declared]:
    """The options of the pass `quantize`."""
    from ...passes.quantize import QuantizeModule

    return settings_of(QuantizeModule)


def run(args: Namespace) -> int:
    """Translate the flags into `irc compile`, run it, and print and store what they became."""
    from ...cli import compile

    given = {name: value for name, value in vars(args).items() if name in FLAGS}
    if "build_config" in given:
        given = {**_flags_of(Path(given["build_config"])), **given}
    _check(given)
    with tempfile.TemporaryDirectory() as folder:
        source = _source(given, args, Path(folder))
        if args.tensorrt_llm_sources and not _is_own(source):
            return _build_from_sources(given, args, source)
        request = _Request(given, read_object(source / "config.json"), args)
        words = [str(source), *request.words(source)]
        parser = Parser("compile", "compile", "", words)
        compile.configure(parser)
        forwarded = parser.parse(words)
        forwarded.load, forwarded.process = args.load, args.process
        if given.get("use_fused_mlp") == "disable":
            forwarded.limits = {"fuse-gated-mlp": 0}
        print(table(request.rows(), ("flag", "requested", "effective")))
        print(f"the same as: irc compile {shlex.join(words)}\n")
        with catch_warnings():
            filterwarnings("ignore", "config.json has quant_algo")  # --quantize is in the words
            status = compile.run(forwarded)
    if not given.get("dry_run"):
        keys = ("flag", "requested", "effective")
        rows = [dict(zip(keys, row, strict=True)) for row in request.rows()]
        path = Path(forwarded.output) / STORED
        path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        add_facts(path.parent, request.facts())
    return status


def _is_own(source: Path) -> bool:
    """Whether irc itself has the model of a folder, or reads it as one of transformers."""
    from ..checkpoints.tensorrt_llm import ARCHITECTURES

    architecture = read_object(source / "config.json").get("architecture")
    return architecture is None or architecture in ARCHITECTURES


def _build_from_sources(given: dict[str, Any], args: Namespace, source: Path) -> int:
    """Trace the model class of the user's copy of TensorRT-LLM, as trtllm-build does."""
    from .script import build_folder

    plugins = {name: given[name] for name in settings("plugin") if name in given}
    fields = {name: given[name] for name in settings("build") if name in given}
    output = None if given.get("dry_run") else given.get("output_dir", "engine_outputs")
    run = build_folder(
        source,
        output,
        Path(args.tensorrt_llm_sources),
        {**fields, "plugin_config": plugins},
        args.tensorrt_llm,
        options={"backend": args.backend},
        dry_run=output is None,
    )
    for name in run.engines:
        print(f"{name}: {run.session.engines[name].artifact or 'traced, and not compiled'}")
    for note in run.session.notes:
        print(f"note: {note}")
    return 0


def _flags_of(path: Path) -> dict[str, Any]:
    """The flags that say the same as a BuildConfig in a JSON file; an Error about other keys."""
    config = read_object(path)
    flags: dict[str, Any] = {}
    try:
        BuildConfig.from_dict({k: v for k, v in config.items() if k != "plugin_config"})
    except Error as error:
        raise Error(f"{path}: {error.message}") from None
    plugins: dict[str, Any] = config.get("plugin_config") or {}
    for name, value in {**plugins, **config}.items():
        flag = FLAGS.get("strip_plan" if name == "use_strip_plan" else name)
        if flag is None or value is None or (value is False and flag.takes != "-"):
            if name not in {**settings("plugin"), **settings("build")} and name != "plugin_config":
                raise Error(f"{path}: there is no switch {name!r}{did_you_mean(name, FLAGS)}")
            continue
        value = "enable" if value is True and "enable" in flag.words else value
        value = str(value).lower() if name == "kv_cache_type" else value
        _check_value(flag, value, f"{path}: {name}")
        flags[flag.name] = value
    return flags


def _check_value(flag: Setting, value: Any, what: str) -> None:
    """An Error where a flag does not take a value of a JSON file."""
    kinds: dict[str, tuple[Any, str]] = {
        "-": (bool, "true or false"),
        "INT": (int, "a whole number, 0 or more"),
        "LIST": (list, "a list"),
    }
    kind, expected = kinds.get(flag.takes, ((str, int), "a text"))
    fits = isinstance(value, kind) and not (flag.takes == "INT" and (value is True or value < 0))
    if value not in flag.words if flag.words else not fits:
        raise Error(f"{what} is {value!r}; expected {' or '.join(flag.words) or expected}")


def _asks(value: Any) -> bool:
    """Whether the value of a flag asks for something."""
    return value is True or value not in OFF


def _check(given: dict[str, Any]) -> None:
    """One Error about all flags that are refused, with what to do instead."""
    error = Error("irc build refuses these flags; leave them out")
    for name, value in given.items():
        if FLAGS[name].use == "refused" and _asks(value):
            error.add_note(f"--{name} {value}: {FLAGS[name].why}")
    if hasattr(error, "__notes__"):
        raise error


def _source(given: dict[str, Any], args: Namespace, folder: Path) -> Path:
    """The folder to compile; one with only a config.json for --model_config."""
    if "checkpoint_dir" in given:
        return Path(given["checkpoint_dir"])
    if "model_config" not in given:
        raise Usage("no model: give --checkpoint_dir DIR", "irc build --help lists the flags")
    if args.random_weights is None:
        raise Error(
            f"{given['model_config']} describes a model without weights; give --checkpoint_dir "
            "DIR, or --random-weights SEED to try it out"
        )
    text = json.dumps(read_object(Path(given["model_config"])))
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


class _Request:
    """The flags that were given, and what they become for the model of a config."""

    def __init__(self, given: dict[str, Any], config: dict[str, Any], args: Namespace) -> None:
        self.given, self.config, self.args = given, config, args
        self.has_engines = args.backend.startswith("tensorrt")
        self.mesh = args.mesh if args.mesh is not None else _stored_mesh(config)
        self.dims = self._dims()

    def words(self, source: Path) -> list[str]:
        """The options of irc compile."""
        given, args = self.given, self.args
        own: dict[str, Any] = {
            "-o": None if given.get("dry_run") else given.get("output_dir", "engine_outputs"),
            "--backend": args.backend,
            "--mesh": self.mesh,
            "--dims": ",".join(self.dims.values()),
            "--dump-dir": given.get("visualize_network"),
            "--random-weights": args.random_weights,
        }
        present = {name: str(value) for name, value in own.items() if value not in (None, "")}
        words = [word for pair in present.items() for word in pair]
        words += ["--dry-run"] if given.get("dry_run") else []
        words += ["--explain"] if given.get("log_level") in ("verbose", "debug", "trace") else []
        for name, value in self._quantization(source).items():
            values: list[Any] = [value] if not isinstance(value, list) else [*value] or [""]
            for each in values:
                words += [_quantize()[name].flag, str(each)]
        if self.has_engines:
            words += [option for name, option in _OF_ENGINES.items() if given.get(name)]
        return words

    def facts(self) -> dict[str, Any]:
        """What the scripts that run engines read in config.json, with the names of trtllm-build."""
        config, names = self.config, self.config.get("architectures") or [""]
        axes = dict(Mesh.parse(self.mesh).axes)
        sizes = {axis: axes.get(axis, 1) for axis in ("tp", "pp")}
        mapping = {f"{axis}_size": size for axis, size in sizes.items()}
        model = {"architecture": names[0], "dtype": config.get("torch_dtype", ""), **config}
        model["mapping"] = {"world_size": sizes["tp"] * sizes["pp"], **mapping}
        limits = {name: self.given[name] for name in _DIMS if name in self.given}
        return {"version": RELEASE, "pretrained_config": model, "build_config": limits}

    def rows(self) -> list[tuple[str, str, str]]:
        """(flag, requested, effective) of every flag that was given, and of the mesh."""
        found = [(f"--{name}", str(x), self._effective(name)) for name, x in self.given.items()]
        return [*found, ("--mesh", self.args.mesh or "as stored", self.mesh or "one rank")]

    def _quantization(self, source: Path) -> dict[str, Any]:
        """The options given, and the scheme where config.json wants float weights quantized."""
        from ..checkpoints.tensorrt_llm import scheme_of_floats

        found = given_settings(self.args, _quantize())
        if "quantize" in found or self.args.random_weights is not None:
            return found
        scheme = scheme_of_floats(source)
        return {**found, "quantize": scheme} if scheme else found

    def _effective(self, name: str) -> str:
        flag, value = FLAGS[name], self.given[name]
        if name in _DIMS:
            return f"{self.dims[_DIMS[name]]} ({flag.why})"
        if name == "kv_cache_type":
            return f"continuous ({flag.why})"
        if name in _OF_ENGINES and not self.has_engines:
            return f"no effect: {self.args.backend} builds no TensorRT engine"
        if flag.use in ("ignored", "fixed"):
            return f"no effect: {flag.why}"
        if not _asks(value):
            return "off"
        return flag.why if flag.takes == "-" else str(value)

    def _dims(self) -> dict[str, str]:
        """The ranges of B, S, T and C, as min:typical:max, of those that flags state."""
        given = self.given
        if given.get("kv_cache_type") == "disabled":
            raise Error(
                "--kv_cache_type disabled: irc's language models always have caches; expected "
                "continuous or paged. A caller that needs one call only may drop the caches"
            )
        for name in _DIMS:
            if given.get(name) == 0:
                raise Error(f"--{name} is 0; expected 1 or more")
        longest = ConfigReader(self.config).integer("max_position_embeddings", 0) or 2048
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
        typical = min(given.get("opt_num_tokens") or (1 + tokens) // 2, tokens)
        ranges = {
            "B": (min((given.get("opt_batch_size") or 1) * beams, rows), rows),
            "S": (typical, tokens),
            "T": (1, tokens),
            "C": (whole, whole),
        }
        stated = {dim for name, dim in _DIMS.items() if name in given}
        if stated & {"S", "C"}:
            stated |= {"S", "T"}
        return {name: f"{name}=1:{a}:{b}" for name, (a, b) in ranges.items() if name in stated}


def _stored_mesh(config: dict[str, Any]) -> str:
    """The axes of the ranks of a checkpoint."""
    mapping = ConfigReader(ConfigReader(config).inner("mapping"), "config.json: mapping")
    sizes = {axis: mapping.integer(f"{axis}_size", 1) for axis in ("pp", "tp")}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
