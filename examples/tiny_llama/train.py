"""Train the tiny Llama checkpoint of this folder from scratch, on text that comes with Python.

The text is the prose of Python's own documentation, as every CPython installation carries it:
the help topics of `pydoc_data.topics` (the language reference), the docstrings of the standard
library's modules and classes, and the Zen of Python (`this`). It is part of Python and free to
use under the Python Software Foundation License Version 2, copyright (c) 2001 and later, Python
Software Foundation (https://docs.python.org/3/license.html). Code and markup are left out.

The checkpoint is in Hugging Face format: config.json, generation_config.json, model.safetensors
(bfloat16), tokenizer.json and tokenizer_config.json.

    python train.py --device cuda          # writes beside this script
    python train.py --steps 200 --output FOLDER

Needs torch, transformers 5, tokenizers and safetensors. The same seed, device, versions and
Python release give the same checkpoint; another Python release has other text.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

import argparse
import ast
import codecs
import json
import math
import pydoc_data.topics
import re
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

END = "<|end|>"  # id 0: between documents, both bos and eos
VOCAB_SIZE = 1531
TOKENS_PER_STEP, LEARNING_RATE = 4096, 3e-3
NOISE = 0.05  # the fraction of input tokens replaced by random ones, for robustness to prompts
WINDOWS = (128, 256, 512)  # the sequence lengths of the steps, taken in turn
PROMPTS = ("The Python", "A function is", "An object", "Beautiful is", "When a class")

PUNCTUATION = {0x2013: "-", 0x2014: " - ", 0x2018: "'", 0x2019: "'"}
PUNCTUATION |= {0x201C: '"', 0x201D: '"', 0x2026: "..."}
LEFT_OUT = ["encodings", "idlelib", "lib2to3", "site-packages", "test", "tkinter", "turtledemo"]
LISTED = r"\s*(?:[*+-]|\d+\.) "  # how a list's item begins
NOT_PROSE = re.compile(r"(Changed|New|Deprecated|Added) (in|since) |(See|Module|Copyright) ")


def prose(text):
    """The paragraphs of `text` that are plain English sentences, one line of ASCII each."""
    found = []
    for block in re.split(rf"\n\s*\n|\n(?={LISTED})", text.translate(PUNCTUATION)):
        lines = [line for line in block.split("\n") if line.strip()]
        indents = [len(line) - len(line.lstrip()) for line in lines]
        if len(lines) > 1 and indents[1] > indents[0] and not re.match(LISTED, lines[0]):
            lines = lines[1:]  # the term of a definition list
        line = " ".join(line.strip() for line in lines)
        line = re.sub("^" + LISTED, "", line)
        line = re.sub(r"(?<=\w-) (?=[a-z])(?!(?:and|or) )", "", line)  # a word cut at a hyphen
        line = re.sub(r'(?<![\w"*])\*\*?(\w[^*"]*)\*\*?(?![\w"])', r"\1", line)  # *emphasis*
        line = re.sub(r"``?([^`]*)``?", r"\1", line)
        line = re.sub(r" ?\[\d+\]", "", line)  # footnotes
        line = re.sub(r" \(?[Ss]ee(?: also)?(?: the)? (?:section|chapter)s? [^().]*\)", "", line)
        line = re.sub(r'"([\w.]+(?:\(\))?)"', r"\1", line)  # "literal"
        line = re.sub(r"\s+", " ", line).strip()
        plain = len(re.findall(r"[A-Za-z ,.']", line)) >= 0.95 * len(line)
        sentence = re.fullmatch(r"[A-Z][a-z]* .*\.", line) and len(line.split()) >= 10
        code = NOT_PROSE.match(line) or re.search(r"::|>>>|http|@", line)
        if plain and sentence and line.isascii() and not code:
            found.append(line)
    return found


def corpus():
    """The documents to train on: paragraphs joined by newlines, no paragraph twice."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    for path in sorted([*library.glob("[a-z]*.py"), *library.glob("[a-z]*/*.py")]):
        if path.parent.name not in LEFT_OUT:
            nodes = ast.walk(ast.parse(path.read_bytes()))
            documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef)]
            texts.append("\n\n".join(ast.get_docstring(node) or "" for node in documented))
    seen, documents = set(), []
    for text in texts:
        paragraphs = [p for p in prose(text) if not (p in seen or seen.add(p))]
        if paragraphs:
            documents.append("\n".join(paragraphs))
    zen = (library / "this.py").read_text("utf-8").split('"""')[1]
    return [*documents, codecs.decode(zen, "rot13").split("\n\n")[1]]


def train_tokenizer(documents, size=VOCAB_SIZE):
    """A byte-level BPE tokenizer of `size` tokens. It adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, **settings)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def train(model, tokenizer, documents, steps, device, tokens=TOKENS_PER_STEP):
    """Train `model` in place and return its mean loss over the last 100 steps."""
    stream = tokenizer.encode(END.join(["", *documents, ""]), add_special_tokens=False).ids
    breaks = {tokenizer.token_to_id(END), *tokenizer.encode("\n").ids}
    starts = torch.tensor([i + 1 for i, token in enumerate(stream) if token in breaks][:-1])
    size = len(stream)
    data = torch.tensor(stream + stream[1 : max(WINDOWS) + 1])  # windows run past the end
    print(f"{len(documents)} documents, {sum(map(len, documents))} characters, {size} tokens")
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.3)
    warmup = max(1, min(200, steps // 10))
    losses, mean, began = [], math.nan, time.time()
    for step in range(steps):
        progress = max(0.0, (step - warmup) / max(1, steps - warmup))
        rate = min((step + 1) / warmup, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        window = WINDOWS[step % len(WINDOWS)]
        first = torch.randint(size, (tokens // window,))
        first[::2] = starts[torch.randint(len(starts), first[::2].shape)]  # paragraphs' starts
        batch = data[first[:, None] + torch.arange(window)].to(device)
        noise = torch.randint_like(batch, model.config.vocab_size)
        noisy = torch.where(torch.rand(batch.shape, device=device) < NOISE, noise, batch)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=noisy, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            mean = sum(losses[-100:]) / len(losses[-100:])
            print(f"step {step + 1}  loss {mean:.4f}  {time.time() - began:.0f} s", flush=True)
    return mean


def save(model, tokenizer, folder):
    """Write the checkpoint to `folder`, the weights in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # Readers older than transformers 5 want these names; the newer ones stay beside them.
    config.update(rope_theta=10000.0, rope_scaling=None, torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    settings |= {"bos_token": END, "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "model.safetensors").chmod(0o644)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def show(folder):
    """Print greedy text from the saved checkpoint, computed in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        for _ in range(60):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        print(f"[{prompt}]{tokenizer.decode(ids).removeprefix(prompt)}\n")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)

    documents = corpus()
    tokenizer = train_tokenizer(documents)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=408,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).train().to(args.device)
    loss = train(model, tokenizer, documents, args.steps, args.device)
    save(model.cpu(), tokenizer, args.output)
    print(f"final loss {loss:.4f}, saved in {args.output}")
    show(args.output)


if __name__ == "__main__":
    main()
