"""`GenerationSession`: decoding with a compiled language model, as TensorRT-LLM's Python runtime.

One process runs all ranks of the artifact, so a session needs no mapping; irc's own launchers
(`irc generate --launcher mpi`) use several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np

import irc
from irc.errors import Error
from irc.generation.inputs import cache_capacity, check_prompt, rounded, vocabulary
from irc.generation.rows import Rows, check_language_model
from irc.generation.search import Beams, Draws, Rules
from irc.source import here

from ..dtypes import as_array
from ..engines import find_artifact
from .configs import ModelConfig, SamplingConfig, Words, words_of

Array: TypeAlias = np.ndarray[Any, Any]
Hook: TypeAlias = Callable[..., Any]
# Inputs that an engine may lack because its results do not need them.
_MAY_BE_UNUSED = {"tasks", "prompt_vocab_size", "encoder_input_lengths"}


class GenerationSession:
    """An engine that continues prompts.

    `engine_buffer` is an artifact, its folder, or what a build script wrote as an engine. Of
    `model_config` only `vocab_size` is used. `mapping`, `stream` and `cuda_graph_mode` have no
    effect: the artifact has its mesh, and its backend its streams.
    """

    def __init__(
        self,
        model_config: ModelConfig | None,
        engine_buffer: Any,
        mapping: Any = None,
        debug_mode: bool = False,
        debug_tensors_to_save: Sequence[str] | None = None,
        cuda_graph_mode: bool = False,
        stream: Any = None,
    ) -> None:
        if debug_mode or debug_tensors_to_save:
            raise Error(
                "debug_mode is not supported; irc run --backend reference and "
                "runtime.Session return the outputs that a network registers"
            )
        self.artifact = open_engine(engine_buffer)
        check_language_model(self.artifact.program.ports)
        self.model_config, self.mapping = model_config, mapping
        self.vocab_size = model_config.vocab_size if model_config is not None else None
        self.new_tokens, self.beam_width, self.context_length = 0, 1, 0

    def setup(
        self,
        batch_size: int,
        max_context_length: int,
        max_new_tokens: int,
        beam_width: int = 1,
        *without_effect: Any,
        **more: Any,
    ) -> None:
        """Lengths of the following calls of decode. Buffers are allocated by irc itself."""
        for name, value, least in (
            ("max_context_length", max_context_length, 1),
            ("max_new_tokens", max_new_tokens, 0),
            ("beam_width", beam_width, 1),
        ):
            if int(value) < least:
                raise Error(f"{name} is {value}; expected {least} or more", loc=here())
        self.new_tokens, self.beam_width = int(max_new_tokens), int(beam_width)
        self.context_length = int(max_context_length)

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
        """Continue prompts: i32 [B, beams, max_context_length + max_new_tokens], ends behind.

        `input_ids` is [B, S] padded behind, or all prompts joined, with `context_lengths` [B].
        With `return_dict` the result is a dict of `output_ids`, `sequence_lengths` [B, beams] and
        the log-probabilities that were asked for. With `streaming` it is an iterator of such
        results, one after each token. `inputs` are further inputs of the engine by name. Results
        are tensors of PyTorch where `input_ids` is one.
        """
        if self.new_tokens == 0 and self.context_length == 0:
            raise Error("call setup(batch_size, max_context_length, max_new_tokens) first")
        config = copy(sampling_config)
        given = {
            "prompt_embedding_table": prompt_embedding_table,
            "tasks": tasks,
            "prompt_vocab_size": prompt_vocab_size,
            "encoder_output": encoder_output,
            "encoder_input_lengths": encoder_input_lengths,
            "cross_attention_mask": cross_attention_mask,
            **(inputs or {}),
        }
        if no_repeat_ngram_size is not None:
            config.no_repeat_ngram_size = no_repeat_ngram_size
        prompts = prompts_of(as_array(input_ids), as_array(context_lengths).reshape(-1).tolist())
        words = [
            words_of(getattr(config, name) if given is None else given, len(prompts))
            for name, given in (
                ("stop_words_list", stop_words_list),
                ("bad_words_list", bad_words_list),
            )
        ]
        arrays = {name: as_array(value) for name, value in given.items() if value is not None}
        ports = self.artifact.program.ports
        known = {port.name for port in ports.inputs} | _MAY_BE_UNUSED
        if unknown := arrays.keys() - known:
            raise Error(
                f"the engine has no input called {', '.join(sorted(unknown))}; leave it out, or "
                "build the engine with it",
                loc=here(),
            )
        tokens = vocabulary(ports)
        if tokens is not None:  # the rows of a prompt table have the ids behind the vocabulary
            tokens += len(arrays.get("prompt_embedding_table", ()))
        for prompt in prompts:
            check_prompt(prompt, tokens)
        job = _Job(self, config, prompts, words, arrays)
        job.wrap = lambda array: like(array, input_ids)
        job.criteria, job.processor = stopping_criteria, logits_processor
        as_dict = return_dict or config.return_dict
        with_lengths = output_sequence_lengths or config.output_sequence_lengths
        if streaming:
            return (job.result(as_dict, with_lengths) for _ in job.steps())
        for _ in job.steps():
            pass
        return job.result(as_dict, with_lengths)

    def decode_batch(
        self, input_ids: Sequence[Any], sampling_config: SamplingConfig, *args: Any, **more: Any
    ) -> Any:
        """`decode` of a list of prompts of any lengths."""
        arrays = [as_array(each).reshape(-1) for each in input_ids]
        lengths = [len(each) for each in arrays]
        joined = like(np.concatenate(arrays), input_ids[0])
        return self.decode(joined, lengths, sampling_config, *args, **more)


class _Job:
    """One call of decode: the rows of the engine, and how each prompt is continued."""

    wrap: Callable[[Array], Any]
    criteria: Hook | None
    processor: Hook | None

    def __init__(
        self,
        session: GenerationSession,
        config: SamplingConfig,
        prompts: list[list[int]],
        words: list[list[Words]],
        extra: dict[str, Array],
    ) -> None:
        self.session, self.config, self.width = session, config, int(config.num_beams)
        if self.width != session.beam_width:
            raise Error(
                f"num_beams is {self.width}, but setup was called with beam_width="
                f"{session.beam_width}; give one number to both"
            )
        stop, bad = words
        self.searches = [
            self._search(row, prompt, stop[row], bad[row]) for row, prompt in enumerate(prompts)
        ]
        artifact, longest = session.artifact, max(map(len, prompts)) + session.new_tokens
        dims = artifact.manifest["dims"]
        most = cache_capacity(artifact.program.ports.states, dims)
        if most and longest > most:
            raise Error(
                f"prompt and new tokens are {longest}, but the caches of this engine hold {most}; "
                "ask for fewer, or build with a larger max_seq_len"
            )
        slots = rounded(longest, most)
        movable = self.width > 1
        self.rows = Rows(artifact.program, dims, prompts, slots, extra, movable)

    def _search(self, row: int, prompt: list[int], stop: Words, bad: Words) -> Draws | Beams:
        config = self.config
        rules = Rules(config.of_row(row), self.session.new_tokens, config.ends(), stop, bad)
        if self.width == 1:
            return Draws(prompt, rules, config.random(row))
        penalty, early = (
            as_array(x).reshape(-1)[0] for x in (config.length_penalty, config.early_stopping)
        )
        return Beams(prompt, rules, self.width, float(penalty), bool(early))

    def steps(self) -> Generator[None]:
        """Decode; one step for each new token."""
        if all(each.done for each in self.searches):
            return
        width, step = self.width, 0
        logits = self.rows.start().repeat(width, 0)
        if width > 1:
            self.rows.select([row for row in range(self.rows.count) for _ in range(width)])
        while True:
            logits = logits[:, : self.session.vocab_size]
            if self.processor is not None:
                logits = as_array(self.processor(step, self._sequences(), self.wrap(logits)))
            order: list[int] = []
            for first, each in zip(range(0, len(logits), width), self.searches, strict=True):
                part = logits[first : first + width]
                origin = range(width) if each.done else each.advance(part)
                order += [first + at for at in origin]
            yield
            step += 1
            if self.criteria is not None and self.criteria(
                step, self._sequences(), self.wrap(logits)
            ):
                return
            if all(each.done for each in self.searches):
                return
            if width > 1:
                self.rows.select(order)
            logits = self.rows.step([[token] for each in self.searches for token in each.tokens])

    def _sequences(self) -> Any:
        return self.wrap(self._filled().reshape(len(self.searches) * self.width, -1))

    def _filled(self) -> Array:
        """The tokens so far, with end_id (else pad_id) behind."""
        fill = next(iter([*self.config.ends(), self.config.pad_id or 0]))
        tokens = [[each.tokens for each in search.results] for search in self.searches]
        return filled(tokens, self.session.context_length + self.session.new_tokens, fill, np.int32)

    def result(self, as_dict: bool, with_lengths: bool) -> Any:
        """The tokens so far, in the form that was asked for."""
        ids = self.wrap(self._filled())
        if not as_dict:
            return ids
        found: dict[str, Any] = {"output_ids": ids}
        every = [search.results for search in self.searches]
        if with_lengths:
            lengths = [[len(each.tokens) for each in results] for results in every]
            found["sequence_lengths"] = self.wrap(np.array(lengths, np.int32))
        log_probs = [[each.log_probs for each in results] for results in every]
        if self.config.output_cum_log_probs:
            sums = [[sum(each) for each in results] for results in log_probs]
            found["cum_log_probs"] = self.wrap(np.array(sums, np.float32))
        if self.config.output_log_probs:
            array = filled(log_probs, self.session.new_tokens, 0.0, np.float32)
            found["log_probs"] = self.wrap(array)
        return found


def filled(rows: Sequence[Sequence[Sequence[Any]]], width: int, fill: Any, dtype: Any) -> Array:
    """[rows, beams, width or more] of lists of any lengths, with `fill` behind."""
    longest = max([width, *(len(each) for beams in rows for each in beams)])
    padded = [[[*each, *[fill] * (longest - len(each))] for each in beams] for beams in rows]
    return np.array(padded, dtype)


def open_engine(source: Any) -> irc.Artifact:
    """The artifact of an engine: itself, an engine, its bytes or file, or a folder."""
    if isinstance(source, irc.Artifact):
        return source
    found = getattr(source, "artifact", None)
    return find_artifact(source) if found is None else found


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


def like(array: Array, given: Any) -> Any:
    """`array` as a tensor of PyTorch where `given` is one, on its device."""
    return given.new_tensor(array) if hasattr(given, "new_tensor") else array
