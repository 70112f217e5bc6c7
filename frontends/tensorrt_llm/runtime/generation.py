"""`GenerationSession` and `ModelRunner`: decoding with a compiled language model; its settings.

One process runs all ranks of the artifact, so a session needs no mapping; irc's own launchers
(`irc generate --launcher mpi`) use several processes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from irc.errors import Error, did_you_mean
from irc.generation.decoding import Decoding
from irc.generation.inputs import cache_range, split_prompts, vocabulary
from irc.generation.rows import check_language_model
from irc.generation.rules import DecodingRules
from irc.generation.sampling import random_of_row
from irc.generation.search import Beams, Sampled
from irc.generation.settings import GenerationSettings
from irc.generation.words import WordLists, word_array, words_of
from irc.json_files import read_object

from ..api import api, fields, release
from ..dtypes import as_array, torch_of
from ..errors import ScriptError
from ..quantization import QuantMode
from .session import Session, like, open_engine

Array: TypeAlias = np.ndarray[Any, Any]
Hook: TypeAlias = Callable[..., Any]
# Inputs that an engine may lack because its results do not need them.
_MAY_BE_UNUSED = {"tasks", "prompt_vocab_size", "encoder_input_lengths"}
_WINDOW, _SINK = "host_max_attention_window_size", "host_sink_token_length"
# Fields of SamplingConfig that are those of GenerationSettings.
_SETTINGS = (
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "no_repeat_ngram_size", "length_penalty",
)  # fmt: skip
_ENDLESS = 2**31  # the limit of tokens is that of the session
# Attributes of a session that are fields of its ModelConfig under another name.
_RENAMED = {
    "use_gpt_attention_plugin": "gpt_attention_plugin",
    "use_lora_plugin": "lora_plugin",
    "num_heads_kv": "num_kv_heads",
    "last_layer": "num_layers",
}


@api("runtime.generation.LogitsProcessor")
@api("runtime.generation.StoppingCriteria")
class GenerationHook:
    """Changes logits [rows, V] before tokens are chosen, or says whether decoding ends."""

    def __call__(self, step: int, input_ids: Any, scores: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__(step, input_ids, scores)")


@api("runtime.generation.GenerationSession")
class GenerationSession:
    """An engine that continues prompts, with the fields of its ModelConfig as attributes.

    `engine_buffer` is an artifact, its folder, or what a build script wrote as an engine.
    """

    first_layer = 0

    def __init__(
        self, model_config: ModelConfig | None, engine_buffer: Any, mapping: Any = None
    ) -> None:
        self.artifact, self.mapping = open_engine(engine_buffer), mapping
        self.config = model_config or ModelConfig.from_folder(self.artifact.folder)
        self.ports = self.artifact.program.ports
        check_language_model(self.ports, caches=False)
        self.max_new_tokens, self.beam_width, self.max_context_length = 0, 1, 0
        self._limits: dict[str, Array] = {}

    def __getattr__(self, name: str) -> Any:
        if "config" not in vars(self):
            raise AttributeError(name)
        value = getattr(self.config, _RENAMED.get(name, name))
        return bool(value) if name.startswith("use_") else value

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens."""
        return self.config.vocab_size or self.vocab_size_padded

    @property
    def vocab_size_padded(self) -> int | None:
        """The number of logits."""
        return vocabulary(self.ports)

    @property
    def dtype(self) -> Any:
        """The dtype of PyTorch of the activations."""
        return torch_of(self.config.dtype or self.artifact.manifest["dtype"])

    @property
    def use_kv_cache(self) -> bool:
        """Whether the engine has KV caches."""
        names = [port.name for port in self.ports.inputs]
        return bool(self.ports.states) or any(name.startswith("past_key") for name in names)

    @property
    def gather_context_logits(self) -> bool:
        """Whether the engine returns the logits of all tokens of a prompt."""
        shapes = {port.name: port.shape for port in (*self.ports.inputs, *self.ports.outputs)}
        ids, logits = shapes["input_ids"], shapes.get("logits", ())
        return len(logits) > len(ids) and logits[-2] == ids[-1]

    @property
    def gather_generation_logits(self) -> bool:
        """Whether results have the logits of all new tokens."""
        return bool(self.config.gather_generation_logits or self.config.gather_all_token_logits)

    def setup(
        self,
        batch_size: int,
        max_context_length: int,
        max_new_tokens: int,
        beam_width: int = 1,
        max_attention_window_size: Any = None,
        sink_token_length: int | None = None,
        max_kv_cache_length: Any = None,
    ) -> None:
        """Lengths of the following calls of decode. Buffers are allocated by irc itself.

        A window smaller than they are, and sink tokens, need an engine with an input for them.
        """
        lengths = {"max_context_length": (max_context_length, 1), "beam_width": (beam_width, 1)}
        for name, (value, least) in {**lengths, "max_new_tokens": (max_new_tokens, 0)}.items():
            if int(value) < least:
                raise ScriptError(f"{name} is {value}; expected {least} or more")
        self.max_new_tokens, self.beam_width = int(max_new_tokens), int(beam_width)
        self.max_context_length, self._limits = int(max_context_length), {}
        longest = max_context_length + max_new_tokens
        self._limit(_WINDOW, max_attention_window_size or max_kv_cache_length, longest)
        self._limit(_SINK, sink_token_length, 0)

    def _limit(self, begin: str, given: Any, off: int) -> None:
        """Feed the inputs whose names begin so; without any, `given` must have no effect."""
        values = as_array(off if given is None else given).reshape(-1)
        ports = [port for port in self.ports.inputs if port.name.startswith(begin)]
        for at, port in enumerate(ports):
            size = int(np.prod([int(str(dim)) for dim in port.shape]))
            self._limits[port.name] = np.resize(values[at % len(values) :], size)
        if not ports and (values < off if off else values != 0).any():
            raise ScriptError(
                f"this engine has no input {begin}, so that it attends to all tokens; build it "
                f"with that input, or leave out the argument, which is {given}"
            )

    def decode(
        self,
        input_ids: Any,
        context_lengths: Any,
        sampling_config: SamplingConfig,
        streaming: bool = False,
        output_sequence_lengths: bool = False,
        return_dict: bool = False,
        stopping_criteria: Hook | None = None,
        logits_processor: Hook | None = None,
        inputs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """Returns the prompts and their continuations, filled with end_id.

        i32 [B, beams, max_context_length + max_new_tokens]. `input_ids` is [B, S] padded behind,
        or all prompts joined, with `context_lengths` [B]. With `return_dict` the result is a dict
        of `output_ids`, `sequence_lengths` [B, beams], and the log-probabilities and logits that
        were asked for, `generation_logits` [B, beams, steps, V] among them. With `streaming` it is
        an iterator of such results, one after each token. `inputs`, and other arguments such as
        `prompt_embedding_table`, are further inputs of the engine by name. Results are tensors of
        PyTorch where `input_ids` is one.
        """
        if self.max_context_length == 0:
            raise Error("call setup(batch_size, max_context_length, max_new_tokens) first")
        config = copy(sampling_config)
        for name in ("no_repeat_ngram_size", "stop_words_list", "bad_words_list"):
            if (value := fields.pop(name, None)) is not None:
                setattr(config, name, value)
        given = {n: as_array(x) for n, x in {**fields, **(inputs or {})}.items() if x is not None}
        if unknown := given.keys() - {*_MAY_BE_UNUSED, *(port.name for port in self.ports.inputs)}:
            raise ScriptError(
                f"the engine has no input called {', '.join(sorted(unknown))}; leave it out, or "
                "build the engine with it"
            )
        prompts = split_prompts(as_array(input_ids), as_array(context_lengths).reshape(-1).tolist())
        self._check_length(max(map(len, prompts)) + self.max_new_tokens)
        is_masked = any(port.name == "attention_mask" for port in self.ports.inputs)
        if is_masked and any(config.pad_id in prompt[1:] for prompt in prompts):
            raise ScriptError(
                f"a prompt has the token {config.pad_id}, which is pad_id: leave padding out of "
                "context_lengths, or give SamplingConfig another pad_id"
            )
        lists = (config.stop_words_list, config.bad_words_list)
        words = (words_of(as_array(x) if hasattr(x, "shape") else x, len(prompts)) for x in lists)
        hooks = (
            None if hook is None else partial(_on_arrays, hook, input_ids)
            for hook in (logits_processor, stopping_criteria)
        )
        decoding = Decoding(
            self.artifact.program,
            self.artifact.manifest["dims"],
            [self._search(config, *row) for row in zip(count(), prompts, *words, strict=False)],
            {**self._limits, **given},
            self.vocab_size,
            *hooks,
            fill=next(iter([*config.ends(), config.pad_id or 0])),
            width=self.max_context_length + self.max_new_tokens,
        )
        asked = {
            "output_ids": True,
            "sequence_lengths": output_sequence_lengths or config.output_sequence_lengths,
            "cum_log_probs": config.output_cum_log_probs,
            "log_probs": config.output_log_probs,
        }
        logits: list[Array] = []

        def result() -> Any:
            """The tokens so far, in the form that was asked for."""
            arrays: dict[str, Any] = decoding.arrays()
            if not (return_dict or config.return_dict):
                return like(arrays["output_ids"], input_ids)
            arrays = {name: arrays[name] for name, is_on in asked.items() if is_on}
            if self.gather_generation_logits:
                rows = np.stack(logits, 1) if logits else decoding.logits[:, None][:, :0]
                shape = (len(prompts), decoding.width, *rows.shape[1:])
                arrays["generation_logits"] = rows.reshape(shape)
            results = {name: like(array, input_ids) for name, array in arrays.items()}
            if self.gather_context_logits and decoding.prompt_logits is not None:
                of_prompts = [like(rows, input_ids) for rows in decoding.prompt_logits]
                results["context_logits"] = of_prompts
            return results

        def results() -> Iterator[Any]:
            """The results after each step, with the logits of all; up to 0.7 not of the first."""
            for step in decoding.steps():
                if self.gather_generation_logits and (step or release() > 7):
                    logits.append(decoding.logits)
                yield result() if streaming else None

        if streaming:
            return results()
        for _ in results():
            pass
        return result()

    def _check_length(self, longest: int) -> None:
        """An Error where the caches hold fewer tokens."""
        dims = self.artifact.manifest["dims"]
        grown = [port for port in self.ports.inputs if port.name.startswith("past_key")]
        sizes = [int(dims[size][2]) for port in grown if (size := str(port.shape[3])) in dims]
        sizes += [size for size in [cache_range(self.ports, dims)[1]] if size]
        if longest > min(sizes, default=longest):
            raise ScriptError(
                f"prompt and new tokens are {longest}, but the caches of this model hold "
                f"{min(sizes)}; build it with a larger max_seq_len, or ask for fewer tokens"
            )

    def decode_batch(
        self,
        input_ids: Sequence[Any],
        sampling_config: SamplingConfig,
        streaming: bool = False,
        **more: Any,
    ) -> Any:
        """`decode` of a list of prompts of any lengths."""
        arrays = [as_array(prompt).reshape(-1) for prompt in input_ids]
        joined = like(np.concatenate(arrays), input_ids[0])
        lengths = [len(prompt) for prompt in arrays]
        return self.decode(joined, lengths, sampling_config, streaming=streaming, **more)

    def _search(
        self, config: SamplingConfig, row: int, prompt: list[int], stop: WordLists, bad: WordLists
    ) -> Sampled | Beams:
        width = int(config.num_beams)
        if width != self.beam_width:
            raise Error(
                f"num_beams is {width}, but setup was called with beam_width={self.beam_width}; "
                "give one number to both"
            )
        rules = DecodingRules(
            config.of_row(row), self.max_new_tokens, config.ends(), stop, bad, counts_prompt=True
        )
        return Beams(prompt, rules) if width > 1 else Sampled(prompt, rules, config.random(row))


def _on_arrays(hook: Hook, given: Any, step: int, ids: Array, logits: Array) -> Any:
    """What a hook of the script, which takes what `given` is, returns for arrays."""
    return as_array(hook(step, like(ids, given), like(logits, given)))


@api("runtime.model_runner_cpp.ModelRunnerCpp")
@api("runtime.model_runner.ModelRunner")
class ModelRunner:
    """Continues batches of prompts with the language model in an artifact folder.

    It has the attributes of its session too, such as `vocab_size`.
    """

    def __init__(self, session: GenerationSession) -> None:
        self.session = session

    @classmethod
    def from_dir(cls, engine_dir: str | PathLike[str]) -> ModelRunner:
        """The runner of the engine, or artifact, in a folder. All ranks run in this process."""
        return cls(GenerationSession(ModelConfig.from_folder(Path(engine_dir)), engine_dir))

    @classmethod
    def from_engine(cls, engine: Any) -> ModelRunner:
        """The runner of an Engine."""
        return cls(GenerationSession(None, engine))

    def __getattr__(self, name: str) -> Any:
        if "session" not in vars(self):
            raise AttributeError(name)
        return getattr(self.session, name)

    @property
    def max_sequence_length(self) -> int | None:
        """The most tokens of a sequence."""
        config = self.session.config
        return config.max_seq_len or (config.max_input_len or 0) + (config.max_output_len or 0)

    def generate(
        self,
        batch_input_ids: Sequence[Any],
        sampling_config: SamplingConfig | None = None,
        prompt_table: Any = None,
        prompt_tasks: str | None = None,
        prompt_table_path: Any = None,
        streaming: bool = False,
        stopping_criteria: Hook | None = None,
        logits_processor: Hook | None = None,
        **fields: Any,
    ) -> Any:
        """What `GenerationSession.decode` returns for prompts of any lengths.

        `prompt_table` is an array [tasks, tokens, hidden], or the .npy file of one. `fields` are
        those of SamplingConfig, which override `sampling_config`, such as `max_new_tokens`.
        """
        lengths = [as_array(prompt).size for prompt in batch_input_ids]
        if not lengths or 0 in lengths:
            raise Error("generate got an empty prompt; expected a list of prompts with tokens")
        given: dict[str, Any] = {"end_id": None, "pad_id": None}
        if sampling_config is not None:
            given.update(vars(sampling_config))
        config = SamplingConfig(**given | fields)
        counts = (len(lengths), max(lengths), int(config.max_new_tokens), int(config.num_beams))
        self.session.setup(*counts, config.max_attention_window_size, config.sink_token_length)
        table = prompt_table if prompt_table_path is None else prompt_table_path
        inputs: dict[str, Any] = {} if table is None else _prompt_table(table)
        if prompt_tasks is not None:
            inputs["tasks"] = [int(task) for task in str(prompt_tasks).split(",")]
        hooks = {"stopping_criteria": stopping_criteria, "logits_processor": logits_processor}
        return self.session.decode_batch(
            batch_input_ids, config, streaming=streaming, inputs=inputs, **hooks
        )


def _prompt_table(given: Any) -> dict[str, Any]:
    """The inputs of a table [tasks, tokens, hidden], or of the .npy file of one."""
    table = np.load(str(given)) if isinstance(given, str | Path) else as_array(given)
    if table.ndim != 3:
        raise Error(f"prompt_table has the shape {list(table.shape)}; expected [tasks, tokens, H]")
    flat = table.reshape(-1, table.shape[-1])
    return {"prompt_embedding_table": flat, "prompt_vocab_size": np.array([table.shape[1]])}


@api("runtime.generation._prepare_attention_mask")
def _prepare_attention_mask(input_ids: Any, pad_id: int | None = None) -> Any:
    """i32 [B, S]: 1 for a token, 0 for padding; the first of a row is always a token."""
    ids = as_array(input_ids)
    mask = np.ones(ids.shape, np.int32) if pad_id is None else (ids != pad_id).astype(np.int32)
    mask[:, 0] = 1
    return like(mask, input_ids)


@api("runtime.generation._Runtime")
class _Runtime:
    """An engine as TensorRT-LLM's tests of models call it: contexts that keep buffers by name."""

    def __init__(self, engine_buffer: Any, mapping: Any) -> None:
        self.session = Session(engine_buffer)
        self.engine = self.session.engine
        self.context_0, self.context_1 = SimpleNamespace(buffers={}), SimpleNamespace(buffers={})
        self.ctx_context = self.context_1

    def _set_shape(self, context: Any, shape_dict: Mapping[str, Sequence[int]]) -> None:
        """Let the inputs of a context have these shapes, whatever those of their buffers."""
        self.session.check_shapes(shape_dict)
        context.shapes = shape_dict

    def _set_buffer(self, context: Any, buffer_dict: dict[str, Any]) -> None:
        """Let a context read its inputs from these tensors, and write its outputs into them."""
        context.buffers = buffer_dict

    def _run(self, context: Any, stream: Any = None) -> bool:
        """Run once; outputs without a buffer are added to those of the context."""
        inputs = dict(context.buffers)
        for name, shape in context.shapes.items():
            if name not in inputs:  # of which the engine may have no need
                continue
            inputs[name] = inputs[name].reshape(-1)[: math.prod(shape)].reshape(shape)
        for name, result in self.session.run(inputs).items():
            if name in context.buffers:
                context.buffers[name][...] = result
            else:
                context.buffers[name] = result
        return True


# -- settings of a generation, by the names of TensorRT-LLM


class _Record:
    """Fields as attributes; those that were not given have the defaults of the table."""

    path: str

    def __init__(self, **given: Any) -> None:
        vars(self).update({name: value for name, value in given.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        defaults = fields(self.path, every=True)
        if name not in defaults:
            title = self.path.rpartition(".")[2]
            raise AttributeError(f"{title} has no field {name!r}{did_you_mean(name, defaults)}")
        return defaults[name]


@api("runtime.generation.SamplingConfig")
class SamplingConfig(_Record):
    """How tokens are chosen. An unknown field, or one that would not be honoured, is an Error.

    `end_id` ends a sequence (-1: none does), `pad_id` is accepted: outputs are filled with end_id.
    Numbers may be given per row, as arrays.
    """

    path = "runtime.generation.SamplingConfig"

    def __setattr__(self, name: str, value: Any) -> None:
        type(self)(**{"end_id": None, "pad_id": None, name: value})  # checks it
        vars(self)[name] = value

    def update(self, **given: Any) -> dict[str, Any]:
        """Set the fields that there are; returns the others."""
        names = given.keys() & fields(self.path, every=True).keys()
        for name in names:
            setattr(self, name, given[name])
        return {name: value for name, value in given.items() if name not in names}

    def of_row(self, row: int) -> GenerationSettings:
        """The settings of one row of the batch; a temperature of 0 takes the likeliest token."""
        values: dict[str, Any] = {}
        defaults = GenerationSettings()
        for name in _SETTINGS:
            if getattr(self, name) is not None:
                values[name] = type(getattr(defaults, name))(self._at(name, row))
        temperature, beams = values["temperature"], int(self.num_beams)
        for name in ("presence_penalty", "frequency_penalty"):  # of logits that are divided already
            values[name] *= temperature
        if values["top_p"] == 0:  # no limit; without any, the most likely token
            values |= {"top_p": 1.0, "temperature": temperature if values["top_k"] else 0.0}
        if beams > 1:
            if temperature not in (0, 1):
                raise Error(f"temperature is {temperature}; expected 1, as there are {beams} beams")
            values |= {"temperature": 0.0, "num_beams": beams}
            values["early_stopping"] = bool(self._at("early_stopping", row))
        least = max(int(self._at("min_length", row)) - 1, 0)  # an end token is a token
        return GenerationSettings(min_new_tokens=least, max_length=_ENDLESS, **values)

    def random(self, row: int) -> np.random.Generator:
        """The random numbers of one row; the same for one seed, whatever the other rows are."""
        return random_of_row(int(self._at("random_seed", row) or 0), row)

    def _at(self, name: str, row: int) -> Any:
        """The value of a field for a row."""
        array = as_array(getattr(self, name)).reshape(-1)
        if len(array) != 1 and row >= len(array):
            raise Error(f"{name} has {len(array)} values; expected one, or one for each prompt")
        return array[row % len(array)] if array.dtype == object else array[row % len(array)].item()

    def ends(self) -> tuple[int, ...]:
        """The token that ends a sequence, if there is one."""
        return () if self.end_id is None or self.end_id < 0 else (int(self.end_id),)


@api("runtime.generation.ModelConfig")
class ModelConfig(_Record):
    """What a script says about its engine, as attributes.

    The artifact states the facts, so that only `vocab_size`, behind which logits are padding, and
    `gather_generation_logits` (`gather_all_token_logits`) change what a session returns.
    """

    path = "runtime.generation.ModelConfig"
    quant_mode = QuantMode(0)
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_seq_len: int | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """What the config.json in the folder of an engine says; sizes are those of a rank."""
        path = folder / "config.json"
        config: dict[str, Any] = read_object(path) if path.is_file() else {}
        given: dict[str, Any] = config.get("builder_config", {})
        plugins: dict[str, Any] = config.get("plugin_config", {})
        tp = given.get("tensor_parallel", 1)
        if "pretrained_config" in config:
            model, build = config["pretrained_config"], config.get("build_config", {})
            plugins, tp = build.get("plugin_config", {}), model.get("mapping", {}).get("tp_size", 1)
            given = build | {_NEW_NAMES.get(str(name), str(name)): x for name, x in model.items()}
        given = {**given, **plugins}
        given |= {name: given[name] // tp for name in ("num_heads", "hidden_size") if name in given}
        given["num_kv_heads"] = -(-(given.get("num_kv_heads") or tp) // tp)
        given["dtype"] = given.get("dtype") or given.get("precision")
        mode = given.get("quant_mode")
        given["quant_mode"] = QuantMode(mode) if isinstance(mode, int) else None
        record = cls.__new__(cls)  # the table's names of one release do not bind it
        vars(record).update({name: value for name, value in given.items() if value is not None})
        return record


# The names of fields in config.json since 0.8.
_NEW_NAMES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_hidden_layers": "num_layers",
    "architecture": "model_name",
}


@api("runtime.generation.decode_words_list")
def decode_words_list(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> list[WordLists]:
    """The tokens of the words of each row; texts are encoded by `tokenizer`."""

    def encoded(word: Any) -> list[int]:
        if not isinstance(word, str | bytes):
            return list(word)
        if tokenizer is None:
            raise ScriptError("the words are texts; give a tokenizer to encode them")
        text = word.decode() if isinstance(word, bytes) else word
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return [[tokens for word in row if (tokens := encoded(word))] for row in word_dict]


@api("runtime.generation.to_word_list_format")
def to_word_list_format(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> np.ndarray[Any, Any]:
    """i32 [B, 2, n] of the words of each row, see `words_of`.

    Texts are encoded by `tokenizer`; a row of one text is a line of CSV.
    """
    split: list[Sequence[Any]] = []
    for row in word_dict:
        text = row[0].decode() if isinstance(row[0], bytes) else row[0]
        split.append(next(csv.reader([text])) if len(row) == 1 and isinstance(text, str) else row)
    return word_array(decode_words_list(split, tokenizer, add_special_tokens))
