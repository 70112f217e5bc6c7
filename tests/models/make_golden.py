"""Write golden.npz: results of transformers for the checkpoints of golden.py.

python -m tests.models.make_golden        # from the repository root; needs torch, transformers
"""

import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np

from .golden import DECODED, GOLDEN, GREEDY, PROMPT, prompt, write_checkpoint
from .shapes import SHAPES


def main() -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    found: dict[str, np.ndarray] = {}
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = write_checkpoint(Path(folder) / name, name)
            model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            ids = torch.tensor(prompt(name, PROMPT + DECODED))
            found[f"{name}_logits"] = model(ids).logits.numpy()
            tokens = ids[:, :PROMPT]
            for _ in range(GREEDY):
                chosen = model(tokens).logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, chosen], dim=1)
            found[f"{name}_greedy"] = tokens[:, PROMPT:].numpy().astype(np.int32)
    np.savez_compressed(GOLDEN, **found)  # type: ignore[arg-type]
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
