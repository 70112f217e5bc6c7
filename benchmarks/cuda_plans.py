"""Plans of the backend cuda for models of real shapes: counts, host time, and machine code.

    python -m benchmarks.cuda_plans                              every model: a table
    python -m benchmarks.cuda_plans --models "Llama 8B" --schemes bf16 --tp 1
    python -m benchmarks.cuda_plans --json plans.json --code code.json
    python -m benchmarks.cuda_plans --against plans.json code.json    what differs from these files

No GPU is needed. Weights are random numbers by reference, and nothing is loaded. Milliseconds are
of CPU time: of the first plan of a model with what comes before it, and of a plan at a new size of
the same kind, the least of three. `--code` compiles the kernels of the Llamas for an H200 and
writes a hash of the machine code of each of their products, attentions, cache updates and
collectives, by case, what it computes, and launch.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoints import config
from benchmarks.cubin import facts_of
from irc.backends.cuda.execute.compile import Compiler, default_folder, key_of
from irc.backends.cuda.plan import Launch, Plan
from irc.backends.cuda.plan.build import Planner
from irc.driver.build import prepare
from irc.ir.core import Module

SCHEMES = {"bf16": "", "FP8": "w8a16_fp8", "W4A16": "w4a16"}
BATCHES = (1, 16, 17, 32)
PROMPTS = (128, 2048)
NEW_PROMPTS = (777, 778, 779, 780)  # the first is a new kind of plan, each further one a new size
CAPACITY = 1024  # tokens that the caches of a decode step have room for
H200 = 90
# How names of kernels start whose machine code is compared, and what such a kernel computes.
ROLES = {
    "linear": "product",
    "moe": "experts",
    "decode_attention": "decode attention",
    "prefill_attention": "prefill attention",
    "attention": "attention",
    "head_rows": "rope and caches",
    "rope_and_cache": "rope and caches",
    "all_reduce": "sum over ranks",
    "all_gather": "gather over ranks",
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Row:
    """Counts of a plan. `bytes`: what a step reads and writes; `arena`: for values in between."""

    kernels: int
    launches: int
    calls: int
    bytes: int
    arena: int


Sizes = dict[str, dict[str, int]]  # the cases of a model by name


def decoder_sizes() -> Sizes:
    """Steps of a decoder."""
    steps = {f"batch {b}": {"B": b, "S": 1, "T": 1, "C": CAPACITY} for b in BATCHES}
    prompts = {f"prefill {n}": {"B": 1, "S": n, "T": 1, "C": max(512, n)} for n in PROMPTS}
    return steps | prompts


def models(
    schemes: Iterable[str] = SCHEMES, tp: Iterable[int] = (1, 2), layers: int = 0
) -> Iterator[tuple[str, Callable[[Path], Module], Sizes]]:
    """(name, function that makes the module in an empty folder, cases); of so many layers, or of
    all of them."""
    fewer = {"num_hidden_layers": layers} if layers else {}

    def decoder(tp: int = 1, scheme: str = "bf16", **settings: Any) -> Callable[[Path], Module]:
        options: dict[str, Any] = {"mesh": f"tp={tp}"} if tp > 1 else {}
        if SCHEMES[scheme]:  # but the head
            options |= {"quantize": SCHEMES[scheme], "exclude": ["*lm_head"]}
        options["dims"] = {"B": (1, 1, 64), "C": (1, 8192, 8192)}
        given = settings | fewer
        return lambda folder: _from_config(given, folder, next_tokens=True, **options)

    llamas = {"Llama 1B": config("1b", "bf16"), "Llama 8B": config("8b", "bf16")}
    for name, settings in llamas.items():
        for scheme in schemes:
            for ranks in tp:
                made = decoder(ranks, scheme, **settings)
                yield f"{name} {scheme} tp={ranks}", made, decoder_sizes()
    large = llamas["Llama 8B"]
    for ranks in (1, 8):
        made = decoder(ranks, **large | LLAMA_70B)
        yield f"Llama 70B bf16 tp={ranks}", made, decoder_sizes()
    yield "Mixtral 8x7B bf16", decoder(**large | MIXTRAL), decoder_sizes()
    yield "DLRM bf16", dlrm, {f"batch {b}": {"B": b} for b in (*BATCHES, 8192)}
    cases = {f"batch {b}": {"B": b, "S": 128} for b in BATCHES}
    cases |= {f"length {n}": {"B": 1, "S": n} for n in PROMPTS}
    yield "BERT bf16", lambda folder: _from_config(BERT | fewer, folder, dtype="bf16"), cases


def _from_config(settings: Mapping[str, Any], folder: Path, **options: Any) -> Module:
    (folder / "config.json").write_text(json.dumps(settings))
    return prepare(folder, backend="cuda", random_weights=0, **options).module


def dlrm(folder: Path) -> Module:
    """The DLRM of benchmarks/dlrm_gpu.py."""
    import irc
    from benchmarks.dlrm_gpu import DENSE, ROWS, Dlrm
    from irc.frontends import random_weights

    inputs = {"dense": irc.Spec("bf16", ("B", DENSE)), "ids": irc.Spec("i32", ("B", len(ROWS)))}
    module = irc.trace(Dlrm(), inputs, {"B": (1, 8192, 65536)})
    return prepare(random_weights(module, 0), backend="cuda").module


def row_of(plan: Plan) -> Row:
    """The counts of a plan."""
    launches = sum(isinstance(step, Launch) for step in plan.steps)
    nbytes = sum(step.work.nbytes for step in plan.steps)
    return Row(len(plan.kernels), launches, len(plan.steps) - launches, nbytes, plan.arena)


def milliseconds(module: Module, sizes: Sizes) -> dict[str, float]:
    """CPU time of planning: the first plan, and plans at new sizes."""

    def timed(work: Callable[[], Any]) -> float:
        gc.collect()
        start = time.process_time()
        work()
        return round((time.process_time() - start) * 1e3, 1)

    first = next(iter(sizes.values()))
    taken = {"first": timed(lambda: Planner(module).plan(first))}
    planner = Planner(module)
    planner.plan(first)
    longer = [size | {"C": size["C"] + n} if "C" in size else size | {"B": n + 2}
              for n, size in enumerate([first] * 3, 1)]  # fmt: skip
    taken["new size"] = min(timed(lambda size=size: planner.plan(size)) for size in longer)
    if "C" in first:
        prompts = [first | {"S": n, "C": CAPACITY} for n in NEW_PROMPTS]
        times = [timed(lambda size=size: planner.plan(size)) for size in prompts]
        taken |= {"first prompt": times[0], "new prompt": min(times[1:])}
    return taken


def code_of(plan: Plan, compiler: Compiler) -> dict[str, list[str]]:
    """Hash, registers and shared memory of the kernels to compare: of each launch, by role."""
    wanted = {name: kernel for name, kernel in plan.kernels.items() if role_of(name)}
    images = compiler.images(wanted.values())
    known = {n: facts_of(images[key_of(kernel)], kernel.name) for n, kernel in wanted.items()}
    found: dict[str, list[str]] = {}
    for step in plan.steps:
        if isinstance(step, Launch) and step.kernel in known:
            facts = known[step.kernel]
            words = f"{facts.code}, {facts.registers} registers x {step.block}"
            words += f", {facts.shared + step.shared} B shared, grid {list(step.grid)}"
            found.setdefault(role_of(step.kernel), []).append(words)
    return found


def role_of(kernel: str) -> str:
    """What a kernel computes whose machine code is compared; nothing for others."""
    return next((role for start, role in ROLES.items() if kernel.startswith(start)), "")


def differences(now: Any, before: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """What two files say differently: times, which never agree, apart."""
    if "ms" in path:
        return
    if isinstance(now, dict) and isinstance(before, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from differences(now.get(key), before.get(key), (*path, key))
    elif isinstance(now, list) and isinstance(before, list) and now != before:
        left, right = Counter(before), Counter(now)
        for sign, words in (("-", left - right), ("+", right - left)):
            yield from (f"{': '.join(path)}: {sign} {n} x {w}" for w, n in words.items())
        if left == right:
            yield f"{': '.join(path)}: another order"
    elif now != before:
        yield f"{': '.join(path)}: {before} -> {now}"


def table(plans: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| model | case | kernels | launches | library calls | MB per step | MB of arena |"
    yield "|---|---|---|---|---|---|---|"
    for name, model in plans.items():
        for case, row in model["cases"].items():
            size, arena = f"{row['bytes'] / 1e6:.1f}", f"{row['arena'] / 1e6:.1f}"
            counts = f"{row['kernels']} | {row['launches']} | {row['calls']}"
            yield f"| {name} | {case} | {counts} | {size} | {arena} |"
    yield ""
    yield "| model | first plan, ms | a new size | first prompt | a new length |"
    yield "|---|---|---|---|---|"
    for name, model in plans.items():
        yield f"| {name} | {' | '.join(map(str, model['ms'].values()))} |"


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans, and machine code of the Llamas of up to 8B, by model and case."""
    plans: dict[str, Any] = {}
    code: dict[str, Any] = {}
    compiler = Compiler(H200, default_folder()) if options.code or options.against else None
    for name, make, cases in models(options.schemes, options.tp):
        if not name.startswith(tuple(options.models)):
            continue
        with TemporaryDirectory() as folder:
            module = make(Path(folder))
        planner = Planner(module)
        made = {case: planner.plan(sizes) for case, sizes in cases.items()}
        rows = {case: asdict(row_of(plan)) for case, plan in made.items()}
        plans[name] = {"cases": rows, "ms": milliseconds(module, cases)}
        if compiler is not None and name.startswith(("Llama 1B", "Llama 8B")):
            code[name] = {case: code_of(plan, compiler) for case, plan in made.items()}
        print(f"{name}: {plans[name]['ms']}", flush=True)
    return plans, code


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=[""], metavar="START", help="how names of models start")
    add("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="of Llamas")
    add("--tp", nargs="+", type=int, default=[1, 2], help="of Llamas")
    add("--json", type=Path, help="write the plans to this file")
    add("--code", type=Path, help="write the machine code's hashes to this file")
    add("--against", nargs=2, type=Path, metavar=("PLANS", "CODE"), help="files to compare with")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    plans, code = measured(options)
    print("\n".join(table(plans)))
    for path, data in ((options.json, plans), (options.code, code)):
        if path is not None:
            path.write_text(json.dumps(data, indent=1) + "\n")
    for path, data in zip(options.against or (), (plans, code), strict=False):
        before = {k: v for k, v in json.loads(path.read_text()).items() if k in data}
        lines = list(differences(data, before))
        print(f"{len(lines)} differences from {path}", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
