"""`GenerationSession`: decoding with a compiled language model, as TensorRT-LLM's Python runtime.

One process runs all ranks of the artifact, so a session needs no mapping; irc's own launchers
(`irc generate --launcher mpi`) use several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from irc.errors import Error, did_you_mean
from irc.generation.decoding import Decoding
from irc.generation.inputs import vocabulary
from irc.generation.rows import check_language_model
from irc.generation.search import Beams, DecodingRules, Sampled
from irc.source import here

from ..dtypes import as_array, torch_of
from .configs import ModelConfig, SamplingConfig, Words, words_of
from .session import Session, like, open_engine

Array: TypeAlias = np.ndarray[Any, Any]
Hook: TypeAlias = Callable[..., Any]
# Inputs that an engine may lack because its results do not need them.
_MAY_BE_UNUSED = {"tasks", "prompt_vocab_size", "encoder_input_lengths"}
_WINDOW, _SINK = "host_max_attention_window_size", "host_sink_token_length"
# Attributes of a session that are fields of its ModelConfig under another name.
_RENAMED = {
    "use_gpt_attention_plugin": "gpt_attention_plugin",
    "use_lora_plugin": "lora_plugin",
    "num_heads_kv": "num_kv_heads",
    "last_layer": "num_layers",
}


class LogitsProcessor:
    """Changes logits [rows, V] before tokens are chosen, by (step, input_ids, scores)."""

    def __call__(self, step: int, input_ids: Any, scores: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__(step, input_ids, scores)")


class LogitsProcessorList(list[Hook], LogitsProcessor):
    """Several processors, each of which gets the logits of the one before."""

    def __call__(self, step: int, input_ids: Any, scores: Any) -> Any:
        for processor in self:
            scores = processor(step, input_ids, scores)
        return scores


class StoppingCriteria:
    """Whether decoding ends, by (step, input_ids, scores)."""

    def __call__(self, step: int, input_ids: Any, scores: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__(step, input_ids, scores)")


class StoppingCriteriaList(list[Hook], StoppingCriteria):
    """Decoding ends where one of these says so."""

    def __call__(self, step: int, input_ids: Any, scores: Any) -> Any:
        return any(criteria(step, input_ids, scores) for criteria in self)


class GenerationSession:
    """An engine that continues prompts, with the fields of its ModelConfig as attributes.

    `engine_buffer` is an artifact, its folder, or what a build script wrote as an engine.
    """

    first_layer = 0

    def __init__(
        self,
        model_config: ModelConfig | None,
        engine_buffer: Any,
        mapping: Any = None,
        debug_mode: bool = False,
        debug_tensors_to_save: Sequence[str] | None = None,
    ) -> None:
        if debug_mode or debug_tensors_to_save:
            raise Error(
                "debug_mode is not supported; irc run --backend reference and "
                "runtime.Session return the outputs that a network registers"
            )
        self.artifact, self.mapping = open_engine(engine_buffer), mapping
        self._model_config = model_config or ModelConfig()
        self._ports = self.artifact.program.ports
        check_language_model(self._ports, caches=False)
        self._known = [port.name for port in self._ports.inputs]
        self.max_new_tokens, self.beam_width, self.max_context_length = 0, 1, 0
        self._limits: dict[str, Array] = {}

    def __getattr__(self, name: str) -> Any:
        config: Any = vars(self).get("_model_config")
        fields = {*vars(config), *_RENAMED} if config else {}
        if name not in fields:
            near = did_you_mean(name, fields)
            raise AttributeError(f"GenerationSession has no attribute {name!r}{near}")
        return getattr(config, _RENAMED.get(name, name))

    @property
    def vocab_size_padded(self) -> int | None:
        """The number of logits."""
        return vocabulary(self._ports)

    @property
    def dtype(self) -> Any:
        """The dtype of PyTorch of the activations."""
        return torch_of(self._model_config.dtype or self.artifact.manifest["dtype"])

    @property
    def use_kv_cache(self) -> bool:
        """Whether the engine has KV caches."""
        return bool(self._ports.states) or any(n.startswith("past_key") for n in self._known)

    @property
    def gather_context_logits(self) -> bool:
        """Whether the engine returns the logits of all tokens of a prompt."""
        shapes = {port.name: port.shape for port in (*self._ports.inputs, *self._ports.outputs)}
        ids, logits = shapes["input_ids"], shapes.get("logits", ())
        return len(logits) > len(ids) and logits[-2] == ids[-1]

    @property
    def gather_generation_logits(self) -> bool:
        """Whether results have the logits of all new tokens."""
        config = self._model_config
        return bool(config.gather_generation_logits or config.gather_all_token_logits)

    def setup(
        self,
        batch_size: int,
        max_context_length: int,
        max_new_tokens: int,
        beam_width: int = 1,
        max_attention_window_size: Any = None,
        sink_token_length: int | None = None,
    ) -> None:
        """Lengths of the following calls of decode. Buffers are allocated by irc itself.

        A window smaller than they are needs an engine with an input for it.
        """
        for name, value, least in (
            ("max_context_length", max_context_length, 1),
            ("max_new_tokens", max_new_tokens, 0),
            ("beam_width", beam_width, 1),
        ):
            if int(value) < least:
                raise Error(f"{name} is {value}; expected {least} or more", loc=here())
        self.max_new_tokens, self.beam_width = int(max_new_tokens), int(beam_width)
        self.max_context_length, self._limits = int(max_context_length), {}
        longest = self.max_context_length + self.max_new_tokens
        for begin, given, off in (
            (_WINDOW, max_attention_window_size, longest),
            (_SINK, sink_token_length, 0),
        ):
            values = as_array(off if given is None else given).reshape(-1)
            ports = [port for port in self._ports.inputs if port.name.startswith(begin)]
            for at, port in enumerate(ports):
                size = int(np.prod([int(str(dim)) for dim in port.shape]))
                self._limits[port.name] = np.resize(values[at % len(values) :], size)
            if not ports and (values < longest if begin == _WINDOW else values != 0).any():
                raise Error(
                    f"this engine has no input {begin}, so that it attends to all tokens; build "
                    f"it with that input, or leave out the argument, which is {given}",
                    loc=here(),
                )

    def decode(
        self,
        input_ids: Any,
        context_lengths: Any,
        sampling_config: SamplingConfig,
        prompt_embedding_table: Any = None,
        tasks: Any = None,
        prompt_vocab_size: Any = None,
        stop_words_list: Any = None,
        bad_words_list: Any = None,
        no_repeat_ngram_size: Any = None,
        streaming: bool = False,
        output_sequence_lengths: bool = False,
        return_dict: bool = False,
        encoder_output: Any = None,
        encoder_input_lengths: Any = None,
        stopping_criteria: Hook | None = None,
        logits_processor: Hook | None = None,
        cross_attention_mask: Any = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns the prompts and their continuations, filled with end_id.

        i32 [B, beams, max_context_length + max_new_tokens]. `input_ids` is [B, S] padded behind,
        or all prompts joined, with `context_lengths` [B]. With `return_dict` the result is a dict
        of `output_ids`, `sequence_lengths` [B, beams], and the log-probabilities and logits that
        were asked for. With `streaming` it is an iterator of such results, one after each token.
        `inputs` are further inputs of the engine by name. Results are tensors of PyTorch where
        `input_ids` is one.
        """
        if self.max_context_length == 0:
            raise Error("call setup(batch_size, max_context_length, max_new_tokens) first")
        config = copy(sampling_config)
        if no_repeat_ngram_size is not None:
            config.no_repeat_ngram_size = no_repeat_ngram_size
        given = {
            "prompt_embedding_table": prompt_embedding_table,
            "tasks": tasks,
            "prompt_vocab_size": prompt_vocab_size,
            "encoder_output": encoder_output,
            "encoder_input_lengths": encoder_input_lengths,
            "cross_attention_mask": cross_attention_mask,
            **(inputs or {}),
        }
        arrays = {name: as_array(value) for name, value in given.items() if value is not None}
        if unknown := arrays.keys() - {*self._known, *_MAY_BE_UNUSED}:
            raise Error(
                f"the engine has no input called {', '.join(sorted(unknown))}; leave it out, or "
                "build the engine with it",
                loc=here(),
            )
        prompts = prompts_of(as_array(input_ids), as_array(context_lengths).reshape(-1).tolist())
        lists = (stop_words_list, config.stop_words_list), (bad_words_list, config.bad_words_list)
        words = [
            words_of(own if own is not None else default, len(prompts)) for own, default in lists
        ]
        searches = [self._search(config, row, each, words) for row, each in enumerate(prompts)]
        answer = _Answer(self, config, lambda array: like(array, input_ids))
        answer.as_dict = return_dict or config.return_dict
        answer.with_lengths = output_sequence_lengths or config.output_sequence_lengths
        answer.decoding = Decoding(
            self.artifact.program,
            self.artifact.manifest["dims"],
            searches,
            {**self._limits, **arrays},
            self._model_config.vocab_size,
            answer.hooked(logits_processor, as_array),
            answer.hooked(stopping_criteria, bool),
        )
        if streaming:
            return answer.after_each_step()
        for _ in answer.steps():
            pass
        return answer.result()

    def decode_batch(
        self,
        input_ids: Sequence[Any],
        sampling_config: SamplingConfig,
        streaming: bool = False,
        **more: Any,
    ) -> Any:
        """`decode` of a list of prompts of any lengths."""
        arrays = [as_array(each).reshape(-1) for each in input_ids]
        lengths = [len(each) for each in arrays]
        joined = like(np.concatenate(arrays), input_ids[0])
        return self.decode(joined, lengths, sampling_config, streaming=streaming, **more)

    def _search(
        self, config: SamplingConfig, row: int, prompt: list[int], words: list[list[Words]]
    ) -> Sampled | Beams:
        width, (stop, bad) = int(config.num_beams), words
        if width != self.beam_width:
            raise Error(
                f"num_beams is {width}, but setup was called with beam_width={self.beam_width}; "
                "give one number to both"
            )
        sampling = config.of_row(row)
        rules = DecodingRules(sampling, self.max_new_tokens, config.ends(), stop[row], bad[row])
        if width == 1:
            return Sampled(prompt, rules, config.random(row))
        penalty, early = (
            as_array(x).reshape(-1)[0] for x in (config.length_penalty, config.early_stopping)
        )
        return Beams(prompt, rules, width, float(penalty), bool(early))


class _Answer:
    """One call of decode, and its results in the form that was asked for."""

    decoding: Decoding
    as_dict: bool
    with_lengths: bool

    def __init__(
        self, session: GenerationSession, config: SamplingConfig, wrap: Callable[[Array], Any]
    ) -> None:
        self.session, self.config, self.wrap = session, config, wrap
        self.longest = session.max_context_length + session.max_new_tokens
        self.fill = next(iter([*config.ends(), config.pad_id or 0]))
        self.logits: list[Any] = []

    def hooked(self, hook: Hook | None, convert: Callable[[Any], Any]) -> Hook | None:
        """A hook of Decoding that calls one of the script, with arrays as the script has them."""
        if hook is None:
            return None

        def call(step: int, tokens: list[list[int]], logits: Array) -> Any:
            ids = self.wrap(filled(tokens, self.longest, self.fill, np.int32))
            return convert(hook(step, ids, self.wrap(logits)))

        return call

    def steps(self) -> Iterator[int]:
        """Decode, and keep the logits that were asked for."""
        for step in self.decoding.steps():
            if self.session.gather_generation_logits:
                self.logits.append(self.wrap(self.decoding.logits))
            yield step

    def after_each_step(self) -> Iterator[Any]:
        """The result after each step."""
        return (self.result() for _ in self.steps())

    def result(self) -> Any:
        """The tokens so far, in the form that was asked for."""
        every, config = self.decoding.results, self.config

        def wrapped(value: Callable[[Any], Any], width: int, fill: Any, dtype: Any) -> Any:
            rows = filled([value(x) for beams in every for x in beams], width, fill, dtype)
            return self.wrap(rows.reshape(len(every), self.decoding.width, -1))

        ids = wrapped(lambda x: x.tokens, self.longest, self.fill, np.int32)
        if not self.as_dict:
            return ids
        results: dict[str, Any] = {"output_ids": ids}
        if self.with_lengths:
            results["sequence_lengths"] = wrapped(lambda x: [len(x.tokens)], 1, 0, np.int32)[..., 0]
        if config.output_cum_log_probs:
            sums = wrapped(lambda x: [sum(x.log_probs)], 1, 0, np.float32)
            results["cum_log_probs"] = sums[..., 0]
        if config.output_log_probs:
            width = self.session.max_new_tokens
            results["log_probs"] = wrapped(lambda x: x.log_probs, width, 0, np.float32)
        if self.session.gather_context_logits and self.decoding.prompt_logits is not None:
            results["context_logits"] = [self.wrap(each) for each in self.decoding.prompt_logits]
        if self.session.gather_generation_logits:
            results["generation_logits"] = self.logits
        return results


def filled(rows: Sequence[Sequence[Any]], width: int, fill: Any, dtype: Any) -> Array:
    """[rows, width or more] of lists of any lengths, with `fill` behind."""
    longest = max([width, *map(len, rows)])
    return np.array([[*row, *[fill] * (longest - len(row))] for row in rows], dtype)


def prompts_of(ids: Array, lengths: Sequence[int]) -> list[list[int]]:
    """The tokens of each prompt, of padded rows [B, S] or of all rows joined, [T] or [1, T]."""
    known = min(lengths, default=0) > 0
    if known and ids.ndim == 2 and len(ids) == len(lengths) and max(lengths) <= ids.shape[1]:
        return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    flat = ids.reshape(-1).tolist()
    if not known or sum(lengths) != len(flat):
        raise Error(
            f"input_ids has the shape {list(ids.shape)} and context_lengths is {list(lengths)}; "
            "expected rows [B, S] with B lengths of 1 to S, or the prompts of these lengths joined"
        )
    ends = np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _prepare_attention_mask(input_ids: Any, pad_id: int | None = None) -> Any:
    """i32 [B, S]: 1 for a token, 0 for padding; the first of a row is always a token."""
    ids = as_array(input_ids)
    mask = np.ones(ids.shape, np.int32) if pad_id is None else (ids != pad_id).astype(np.int32)
    mask[:, 0] = 1
    return like(mask, input_ids)


class _Runtime:
    """An engine as TensorRT-LLM's tests of models call it: contexts that keep buffers by name."""

    def __init__(self, engine_buffer: Any, mapping: Any) -> None:
        self.session, self.mapping = Session(engine_buffer), mapping
        self.engine = self.session.engine
        self.context_0, self.context_1 = SimpleNamespace(buffers={}), SimpleNamespace(buffers={})
        self.ctx_context = self.context_1

    def _set_shape(self, context: Any, shape_dict: Mapping[str, Sequence[int]]) -> None:
        """Check the shapes of inputs."""
        self.session.check_shapes(shape_dict)

    def _set_buffer(self, context: Any, buffer_dict: dict[str, Any]) -> None:
        """Let a context read its inputs from these tensors, and write its outputs into them."""
        context.buffers = buffer_dict

    def _run(self, context: Any, stream: Any = None) -> bool:
        """Run once; outputs without a buffer are added to those of the context."""
        results = self.session._debug_run(context.buffers)
        for name, result in results.items():
            if name in context.buffers:
                context.buffers[name][...] = result
            else:
                context.buffers[name] = result
        return True
