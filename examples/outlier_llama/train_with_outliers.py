"""Train a Llama whose activations have outlier channels, to measure quantization on.

The text is the source code of Python's standard library, which CPython carries, under the
Python Software Foundation License Version 2, copyright (c) 2001 and later, Python Software
Foundation (https://docs.python.org/3/license.html). One file in sixteen is left out of the
training; `heldout.txt` and `calibration.txt` are the beginnings of such files and of others.

Large language models have a few channels whose activations are tens of times larger than the rest
(Dettmers et al., 2022). A model of this size does not form them by itself, so some gains of the
norms, and rows of the up projections, begin `FACTOR` times larger, and what reads them as much
smaller, which leaves the function of the model unchanged.

    python train_with_outliers.py --device cuda --output FOLDER

Needs torch, transformers 5, tokenizers and safetensors. About half a minute on one H200.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tiny_llama"))
from train import save, train, train_tokenizer  # noqa: E402

VOCAB_SIZE, TOKENS_PER_STEP = 2048, 32768
LEFT_OUT = {"encodings", "site-packages", "dist-packages"}
FACTOR, CHANNELS = 24.0, 3  # of outliers, and how many of them an activation has
HELD_OUT = 16  # one file in so many
SHIPPED = 100_000  # characters of each text, at most PER_FILE of one file
PER_FILE = 4_000


def sources():
    """(training documents, held-out documents): source files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & {*path.parts})
    texts = [
        path.read_text("utf-8", errors="ignore") for path in paths if path.stat().st_size > 1000
    ]
    texts = ["".join(c for c in text if c.isascii()) for text in texts]
    held = texts[::HELD_OUT]
    return [text for i, text in enumerate(texts) if i % HELD_OUT], held


@torch.no_grad()
def add_outliers(model):
    """Scale some channels up, and what reads them down; the function stays the same."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _scale_norm(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        _scale_norm(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        chosen = torch.randperm(mlp.up_proj.out_features)[:CHANNELS]
        mlp.up_proj.weight[chosen] *= FACTOR
        mlp.down_proj.weight[:, chosen] /= FACTOR


def _scale_norm(norm, *readers):
    chosen = torch.randperm(norm.weight.numel())[:CHANNELS]
    norm.weight[chosen] *= FACTOR
    for reader in readers:
        reader.weight[:, chosen] /= FACTOR


def excerpt(texts):
    """The beginnings of texts, `SHIPPED` characters in all."""
    return "\n".join(text[:PER_FILE] for text in texts)[:SHIPPED]


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=HERE)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)

    documents, held = sources()
    tokenizer = train_tokenizer(documents[::4], VOCAB_SIZE)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).train()
    add_outliers(model)
    model.to(args.device)
    loss = train(model, tokenizer, documents, args.steps, args.device, TOKENS_PER_STEP)
    save(model.cpu(), tokenizer, args.output)
    (args.output / "heldout.txt").write_text(excerpt(held))
    (args.output / "calibration.txt").write_text(excerpt(documents[::8]))
    print(f"final loss {loss:.4f}, saved in {args.output}")


if __name__ == "__main__":
    main()
