"""`irc generate`: continues prompts with a compiled language model, token by token."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Error
from ..npz import read_npz
from ..pipeline.options import settings_of
from ..report import paint
from .arguments import Usage, add_json, add_runtime, add_settings, given_settings, runtime_options
from .console import Progress, print_json, warn
from .ranks import add_launcher, of_rank, over_ranks, ranks_of, shared
from .texts import given_text, parse_ids, read_lines, read_text, shared_json

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator
    from ..generation.model import Model
    from ..generation.search import Completion
    from ..generation.settings import GenerationSettings

EXAMPLES = """
  irc generate build/tiny_llama --prompt "Beautiful is better"
  irc generate build/llama_tp2 --prompt "Beautiful is better" --launcher mpi
  irc generate build/llama --prompts questions.txt --temperature 0.7 --top-p 0.9 --json
  cat question.txt | irc generate build/llama --prompt - --max-new-tokens 200
  irc generate build/llama --chat --system "Answer in one sentence."
  irc generate build/decoder --encoder build/encoder --prompt "translate English to German: Hi"
  irc generate build/llama --prompt "1 15043 29892" --raw-ids
"""
_FILES = ("json_schema", "grammar")  # settings whose value may be the name of a file
_LENGTHS = ("max_new_tokens", "max_length")


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc generate`."""
    from ..generation.settings import GenerationSettings

    add = parser.add_argument
    add("source", metavar="DIR", help="an artifact folder of a language model")
    what = "may be repeated; - reads standard input"
    add("--prompt", metavar="TEXT", action="append", default=[], help=what)
    what = 'one prompt a line, or .jsonl with "prompt" or "messages"; - is standard input'
    add("--prompts", metavar="FILE", help=what)
    what = "answer each line of standard input, by the chat template and with the history"
    add("--chat", action="store_true", help=what)
    add("--system", metavar="TEXT", default="", help="the system message of --chat")
    add("--raw-ids", action="store_true", help="prompts are token ids, and so is the output")
    add("--encoder", metavar="DIR", help="the encoder of a decoder: part=encoder of its checkpoint")
    what = "what an encoder reads in place of text, such as input_features of speech"
    add("--inputs", metavar="FILE.npz", help=what)
    add("--draft", metavar="DIR", help="a small model whose guesses are checked at once")
    group = parser.add_argument_group("settings (default: those of generation_config.json)")
    add_settings(group, settings_of(GenerationSettings).values())
    add_runtime(parser)
    add_launcher(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Stream the text to standard output, and the rates to standard error."""
    hint = "irc generate --help lists the options"
    ways = [bool(args.prompt), args.prompts is not None, args.chat]
    if sum(ways) > 1 or not (any(ways) or args.inputs):
        raise Usage("expected --prompt TEXT, --prompts FILE or --chat", hint)
    if (args.inputs and not args.encoder) or (args.system and not args.chat):
        raise Usage("--inputs needs --encoder, and --system needs --chat", hint)
    if args.chat and (args.draft or args.encoder or args.raw_ids):
        raise Usage("--chat takes no --draft, --encoder or --raw-ids", hint)
    return over_ranks(args, _run, reads=args.chat or "-" in (*args.prompt, args.prompts))


def _run(args: Namespace, communicator: Communicator | None) -> int:
    from ..generation.encoder_decoder import EncoderDecoder
    from .chat import chat

    asked: dict[str, Any] = shared_json(communicator, lambda: _asked(args))
    inputs = shared(communicator, lambda: read_npz(Path(args.inputs))) if args.inputs else {}
    with Progress() as progress:

        def load(folder: str) -> Model:
            progress(f"loading {folder}")
            return _load(args, folder, communicator)

        model, draft = load(args.source), load(args.draft) if args.draft else None
        if args.encoder:
            model = EncoderDecoder(load(args.encoder), model)
    settings = model.defaults.changed(asked["settings"])
    _tell_defaults(model, settings, asked["settings"])
    if args.chat:
        chosen = settings.max_new_tokens != type(settings).max_new_tokens or settings.max_length
        if "max_new_tokens" not in asked["settings"] and not chosen:
            settings = settings.changed({"max_new_tokens": 2**31})  # the cache ends an answer
        return chat(model, settings, communicator, args.system, args.json)
    ids = [_ids_of(args, model, prompt) for prompt in asked["prompts"]]
    answers = _Answers(args, asked["prompts"], settings, model)
    try:
        completions = model.completions(ids, settings, emit=answers.emit, extra=inputs, draft=draft)
    finally:
        answers.end()
    answers.report([len(prompt) for prompt in ids], completions)
    return 0


def _asked(args: Namespace) -> dict[str, Any]:
    """The prompts, texts or messages, and the settings on the command line; files are read."""
    from ..generation.settings import GenerationSettings

    settings = given_settings(args, settings_of(GenerationSettings))
    for name in _FILES:
        if (value := settings.get(name)) and not value.lstrip().startswith("{"):
            settings[name] = read_text(value) if os.path.isfile(value) else value
    prompts = [given_text(prompt, "the prompt") for prompt in args.prompt] or [""]
    if args.prompts is not None:
        prompts = read_lines(args.prompts, prompt=str, messages=list)
    return {"settings": settings, "prompts": prompts}


def _load(args: Namespace, folder: str, communicator: Communicator | None) -> Model:
    """The model of a folder, of one rank or as many as there are processes."""
    from ..artifact.folder import ArtifactFolder
    from ..driver import open_model

    artifact = args.artifact if folder == args.source else ArtifactFolder.find(Path(folder))
    is_alone = artifact is not None and ranks_of(artifact.manifest) == 1
    options = runtime_options(args) | of_rank(None if is_alone else communicator)
    return open_model(artifact or folder, args.backend, **options)


def _ids_of(args: Namespace, model: Model, prompt: str | list[Any]) -> Sequence[int]:
    """The token ids of a prompt, or of the messages of a chat."""
    if isinstance(prompt, str):
        return parse_ids(prompt) if args.raw_ids else model.encoded(prompt)
    if model.chat_template is None:
        raise Error(f"{model.folder} has no chat template; give prompts in place of messages")
    return model.tokenizer.encode(model.chat_template.render(prompt), special=False)


def _tell_defaults(model: Model, settings: GenerationSettings, given: dict[str, Any]) -> None:
    """A line about settings of the checkpoint that change which tokens are chosen."""
    plain = vars(type(settings)())
    changed = [
        f"{name}={value}"
        for name, value in vars(settings).items()
        if name not in (*given, *_LENGTHS) and value != plain[name]
    ]
    if changed:
        warn(f"generation_config.json of {model.folder}: {', '.join(changed)}")


class _Answers:
    """Prints answers: one while it is generated, several in the order of their prompts."""

    def __init__(
        self, args: Namespace, prompts: Sequence[Any], settings: GenerationSettings, model: Model
    ) -> None:
        self.args, self.prompts, self.settings, self.ends = args, prompts, settings, model.ends
        is_one = len(prompts) == settings.num_return_sequences == settings.num_beams == 1
        self.streams = is_one and not args.json
        self.began = time.perf_counter()
        self.first: float | None = None  # the moment of the first token
        if self.streams:
            self._say(self._shown(prompts[0]))

    def emit(self, row: int, token: int, text: str) -> None:
        """A new token, see `Model.completions`."""
        if self.first is None and token >= 0:
            self.first = time.perf_counter()
        if self.streams:
            self._say(self._ids([token]) if self.args.raw_ids else text)

    def end(self) -> None:
        """The end of the text that is streamed, complete or not."""
        if self.streams:
            self._say("\n")

    def report(self, lengths: Sequence[int], completions: Sequence[Sequence[Completion]]) -> None:
        """Print what was not streamed, and the rates; `lengths` are those of the prompts."""
        done = time.perf_counter()
        first = self.began if self.first is None else self.first  # beams tell no first token
        answers = [answer for of_prompt in completions for answer in of_prompt]
        count, new = sum(lengths), sum(len(answer.tokens) for answer in answers)
        prefill = count / max((first if self.first else done) - self.began, 1e-9)
        decode = max(new - len(answers), 0) / max(done - first, 1e-9)
        triples = [*zip(self.prompts, lengths, completions, strict=True)]
        if self.args.json:
            facts = [
                {"prompt": prompt, "prompt_tokens": length, "answers": [*map(vars, of_prompt)]}
                for prompt, length, of_prompt in triples
            ]
            print_json({"prompts": facts, "prefill_rate": prefill, "decode_rate": decode})
            return
        for prompt, _, of_prompt in () if self.streams else triples:
            for answer in of_prompt:
                text = self._ids(answer.tokens) if self.args.raw_ids else answer.text
                self._say(f"{self._shown(prompt)}{text}\n")
        why = f" ({self._why(lengths[0], answers[0])})" if len(answers) == 1 else ""
        rates = f"{count} tokens of prompt at {prefill:.1f} tokens/s, {new} new at {decode:.1f}"
        warn(f"{rates} tokens/s{why}")

    def _why(self, length: int, answer: Completion) -> str:
        if answer.finish != "length":
            stopped = "--stop" if self.settings.stop else "the text is complete"
            return "end of text" if answer.finish == "end" else stopped
        is_full = len(answer.tokens) < self.settings.limit(length)
        return "the cache is full" if is_full else "--max-new-tokens"

    def _shown(self, prompt: Any) -> str:
        """The prompt in front of the text that continues it."""
        continued = isinstance(prompt, str) and not (self.args.raw_ids or self.args.encoder)
        return paint(prompt, "dim") if continued else ""

    def _ids(self, tokens: Sequence[int]) -> str:
        return "".join(f"{t} " for t in tokens if t >= 0 and t not in self.ends)

    def _say(self, text: str) -> None:
        print(text, end="", flush=True)
