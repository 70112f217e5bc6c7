"""`GenerationSession`: decoding with a compiled language model, as TensorRT-LLM's Python runtime.

One process runs all ranks of the artifact, so a session needs no mapping; irc's own launchers
(`irc generate --launcher mpi`) use several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

import irc
from irc.errors import Error
from irc.generation.inputs import multiple_of, rounded
from irc.generation.sampling import adjusted, draw, ends_with_any, log_probabilities
from irc.ir.dims import Dim

from ..dtypes import as_array
from ..engines import find_artifact
from .beams import Beams
from .configs import ModelConfig, SamplingConfig, words_of
from .rows import Rows

Array: TypeAlias = np.ndarray[Any, Any]
Hook: TypeAlias = Callable[..., Any]


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
        self.model_config, self.mapping = model_config, mapping
        self.vocab_size = model_config.vocab_size if model_config is not None else None
        self.new_tokens, self.beam_width, self.context_length = 0, 1, 0

    def setup(
        self,
        batch_size: int,
        max_context_length: int,
        max_new_tokens: int,
        beam_width: int = 1,
        **without_effect: Any,
    ) -> None:
        """Lengths of the following calls of decode. Buffers are allocated by irc itself."""
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
        config = sampling_config
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
        job = _Job(
            self,
            config,
            prompts,
            {name: as_array(value) for name, value in given.items() if value is not None},
            words_of(_or(stop_words_list, config.stop_words_list), len(prompts)),
            words_of(_or(bad_words_list, config.bad_words_list), len(prompts)),
            stopping_criteria,
            logits_processor,
            lambda array: like(array, input_ids),
        )
        as_dict = return_dict or config.return_dict
        with_lengths = output_sequence_lengths or config.output_sequence_lengths
        results = (job.result(as_dict, with_lengths) for _ in job.steps())
        if streaming:
            return results
        for _ in job.steps():
            pass
        return job.result(as_dict, with_lengths)

    def decode_batch(
        self, input_ids: Sequence[Any], sampling_config: SamplingConfig, *args: Any, **more: Any
    ) -> Any:
        """`decode` of a list of prompts of any lengths."""
        arrays = [as_array(each).reshape(-1) for each in input_ids]
        lengths = [len(each) for each in arrays]
        joined = like(np.concatenate(arrays).astype(np.int32), input_ids[0])
        return self.decode(joined, lengths, sampling_config, *args, **more)

    def decode_stream(self, *args: Any, **more: Any) -> Iterator[Any]:
        """`decode` with streaming."""
        return self.decode(*args, **more, streaming=True)

    def capacity(self, tokens: int) -> int:
        """The capacity of caches for so many tokens; an Error where the engine allows fewer."""
        ports, dims = self.artifact.program.ports, self.artifact.manifest["dims"]
        limits = [most for port in ports.states if (most := _limit(port.shape, dims))]
        most = min(limits, default=0)
        if most and tokens > most:
            raise Error(
                f"prompt and new tokens are {tokens}, but the caches of this engine hold {most}; "
                "ask for fewer, or build with a larger max_seq_len"
            )
        return rounded(tokens, most)


class _Job:
    """One call of decode: rows, their tokens so far, and what is returned of them."""

    def __init__(
        self,
        session: GenerationSession,
        config: SamplingConfig,
        prompts: list[list[int]],
        extra: dict[str, Array],
        stop: list[list[list[int]]],
        bad: list[list[list[int]]],
        criteria: Hook | None,
        processor: Hook | None,
        wrap: Callable[[Array], Any],
    ) -> None:
        self.session, self.config, self.prompts = session, config, prompts
        self.stop, self.bad, self.criteria, self.processor = stop, bad, criteria, processor
        self.wrap, self.width = wrap, int(config.num_beams)
        if self.width != session.beam_width:
            raise Error(
                f"num_beams is {self.width}, but setup was called with beam_width="
                f"{session.beam_width}; give one number to both"
            )
        longest = max(map(len, prompts)) + session.new_tokens
        self.rows = Rows(
            session.artifact.program,
            session.artifact.manifest["dims"],
            prompts,
            session.capacity(longest),
            extra,
            movable=self.width > 1,
        )
        self.tokens = [[list(prompt)] * self.width for prompt in prompts]
        self.log_probs: list[list[list[float]]] = [[[]] * self.width for _ in prompts]

    def steps(self) -> Generator[None]:
        """Decode; one step for each new token."""
        return self._search() if self.width > 1 else self._sample()

    def _sample(self) -> Generator[None]:
        config, ends = self.config, self.config.ends()
        sampling = [config.of_row(row) for row in range(len(self.prompts))]
        random = [config.random(row) for row in range(len(self.prompts))]
        done = [self.session.new_tokens == 0] * len(self.prompts)
        logits = self.rows.start() if not all(done) else np.zeros(0)
        step = 0
        while not all(done):
            logits = self._processed(step, logits)
            for row, is_done in enumerate(done):
                if is_done:
                    continue
                (tokens,), prompt = self.tokens[row], self.prompts[row]
                args = (sampling[row], tokens, len(prompt), ends, self.bad[row])
                scores = adjusted(logits[row], *args)
                token = draw(scores, sampling[row], random[row])
                tokens = [*tokens, token]
                self.tokens[row] = [tokens]
                chance = float(log_probabilities(logits[row])[token])
                self.log_probs[row] = [[*self.log_probs[row][0], chance]]
                new = tokens[len(prompt) :]
                done[row] = token in ends or ends_with_any(new, self.stop[row])
                done[row] |= len(new) == self.session.new_tokens
            yield
            step += 1
            if self._is_stopped(step, logits):
                return
            if not all(done):
                logits = self._cut(self.rows.step([each[0][-1:] for each in self.tokens]))

    def _search(self) -> Generator[None]:
        config, width = self.config, self.width
        beams = [
            Beams(
                prompt,
                width,
                self.session.new_tokens,
                config.of_row(row),
                config.ends(),
                float(as_array(config.length_penalty).reshape(-1)[0]),
                bool(as_array(config.early_stopping).reshape(-1)[0]),
                self.stop[row],
                self.bad[row],
            )
            for row, prompt in enumerate(self.prompts)
        ]
        logits = self._cut(self.rows.start())
        self.rows.select([row for row in range(len(beams)) for _ in range(width)])
        logits = logits.repeat(width, 0)
        step = 0
        while not all(each.done for each in beams):
            logits = self._processed(step, logits)
            order: list[int] = []
            for row, each in enumerate(beams):
                first = row * width
                if each.done:
                    order += range(first, first + width)
                    continue
                order += [first + at for at in each.advance(logits[first : first + width])]
            for row, each in enumerate(beams):
                self.tokens[row] = [found.tokens for found in each.results]
                self.log_probs[row] = [found.log_probs for found in each.results]
            yield
            step += 1
            if self._is_stopped(step, logits):
                return
            if not all(each.done for each in beams):
                self.rows.select(order)
                tokens = [[token] for each in beams for token in each.tokens]
                logits = self._cut(self.rows.step(tokens))

    def _cut(self, logits: Array) -> Array:
        return logits[:, : self.session.vocab_size]

    def _processed(self, step: int, logits: Array) -> Array:
        logits = self._cut(logits)
        if self.processor is None:
            return logits
        return as_array(self.processor(step, self._sequences(), self.wrap(logits)))

    def _is_stopped(self, step: int, logits: Array) -> bool:
        if self.criteria is None:
            return False
        return bool(self.criteria(step, self._sequences(), self.wrap(logits)))

    def _sequences(self) -> Any:
        return self.wrap(self._filled().reshape(len(self.prompts) * self.width, -1))

    def _filled(self) -> Array:
        """The tokens so far, with end_id (else pad_id) behind."""
        fill = next(iter([*self.config.ends(), self.config.pad_id or 0]))
        length = self.session.context_length + self.session.new_tokens
        longest = max(len(each) for rows in self.tokens for each in rows)
        shape = (len(self.prompts), self.width, max(length, longest))
        filled = np.full(shape, fill, np.int32)
        for row, every in enumerate(self.tokens):
            for beam, tokens in enumerate(every):
                filled[row, beam, : len(tokens)] = tokens
        return filled

    def result(self, as_dict: bool, with_lengths: bool) -> Any:
        """The tokens so far, in the form that was asked for."""
        ids = self.wrap(self._filled())
        if not as_dict:
            return ids
        found: dict[str, Any] = {"output_ids": ids}
        if with_lengths:
            lengths = [[len(each) for each in every] for every in self.tokens]
            found["sequence_lengths"] = self.wrap(np.array(lengths, np.int32))
        if self.config.output_cum_log_probs:
            sums = [[sum(each) for each in every] for every in self.log_probs]
            found["cum_log_probs"] = self.wrap(np.array(sums, np.float32))
        if self.config.output_log_probs:
            shape = (len(self.prompts), self.width, self.session.new_tokens)
            every = np.zeros(shape, np.float32)
            for row, beams in enumerate(self.log_probs):
                for beam, each in enumerate(beams):
                    every[row, beam, : len(each)] = each
            found["log_probs"] = self.wrap(every)
        return found


def open_engine(source: Any) -> irc.Artifact:
    """The artifact of an engine: itself, an engine, its bytes or file, or a folder."""
    if isinstance(source, irc.Artifact):
        return source
    found = getattr(source, "artifact", None)
    return find_artifact(source) if found is None else found


def prompts_of(ids: Array, lengths: Sequence[int]) -> list[list[int]]:
    """The tokens of each prompt, of padded rows [B, S] or of all rows joined, [T] or [1, T]."""
    if ids.ndim == 2 and len(ids) == len(lengths) and max(lengths) <= ids.shape[1]:
        return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    flat = ids.reshape(-1).tolist()
    if sum(lengths) != len(flat) or 0 in lengths:
        raise Error(
            f"input_ids has the shape {list(ids.shape)} and context_lengths is {list(lengths)}; "
            "expected rows [B, S] with B lengths of 1 to S, or the prompts of these lengths joined"
        )
    ends = np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def like(array: Array, given: Any) -> Any:
    """`array` as a tensor of PyTorch where `given` is one, on its device."""
    return given.new_tensor(array) if hasattr(given, "new_tensor") else array


def _or(first: Any, second: Any) -> Any:
    return second if first is None else first


def _limit(shape: Sequence[Any], dims: Mapping[str, Sequence[int]]) -> int:
    """The largest capacity of a cache: its second to last dimension; 0 where any will do."""
    dim = shape[-2]
    if not isinstance(dim, Dim):
        return int(dim)
    found = multiple_of(dim)
    return int(dims[found[0]][2]) * found[1] if found and found[0] in dims else 0
