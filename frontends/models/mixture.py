"""`Mixture`: the mixture of experts of a layer, and where checkpoints have its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import Error
from ...weights import Ref
from ..layers.moe import ClampedSwiGLU, MixtureOfExperts, Names, Routing
from .config_reader import REQUIRED, ConfigReader
from .stored import LAYER, MLP, Stored, in_turn, joined

# where DeepSeek and models after it have the shared experts, which are one feed-forward
SHARED_EXPERTS = (Stored(f"{MLP}shared_expert", f"{MLP}shared_experts"),)
_MOST_EXPERTS = 1 << 16  # of all layers
_TRAINING = """
    aux_loss_alpha ep_size norm_topk_eps output_router_logits router_aux_loss_coef
    router_jitter_noise seq_aux
"""


@dataclass(frozen=True)
class Mixture:
    """The options of the MixtureOfExperts of a layer, by the names that it gives them."""

    intermediate_size: int
    experts: int
    chosen: int
    routing: Routing = field(default_factory=Routing)
    act: str | ClampedSwiGLU = "silu"
    bias: bool = False
    weigh_inputs: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    names: Names = ("gate_proj", "up_proj", "down_proj")

    def layer(self, hidden_size: int, dtype: str) -> MixtureOfExperts:
        """The layer, its weights as in a checkpoint that stores every expert separately."""
        return MixtureOfExperts(hidden_size, **vars(self), dtype=dtype)


def read_mixture(
    config: ConfigReader,
    size: str = "moe_intermediate_size",
    count: str = "num_experts",
    defaults: tuple[Any, Any] = (REQUIRED, REQUIRED),
    **more: Any,
) -> Mixture:
    """The mixture of a config whose keys for the width and the number of experts are these.

    transformers 5 also calls that number num_local_experts. `defaults` are those of the number of
    experts and of the chosen ones; `more` are fields that are not read.
    """
    config.ignore(_TRAINING)
    count = config.key(f"{count}|num_local_experts")
    experts = config.integer(count, defaults[0])
    chosen = config.integer("num_experts_per_tok", defaults[1])
    layers = config.layers()
    if not 1 <= chosen <= experts:
        raise Error(f"num_experts_per_tok {chosen} lies outside 1 to {count} {experts}")
    if layers * experts > _MOST_EXPERTS:
        raise Error(
            f"config.json has {experts} experts in {layers} layers; expected at most "
            f"{_MOST_EXPERTS} in all"
        )
    act, width = more.pop("act", None) or config.word("hidden_act", "silu"), config.integer(size)
    if shared := config.integer("n_shared_experts", 0):
        more["shared_size"] = width * shared
    return Mixture(width, experts, chosen, act=act, **more)


def read_sparse_step(
    config: ConfigReader, layers: Sequence[Mapping[str, Any]] = ()
) -> tuple[Mapping[str, Any], ...]:
    """`layers` of Qwen, of which those between the steps have a plain feed-forward."""
    step, dense = config.integer("decoder_sparse_step", 1), config.numbers("mlp_only_layers")
    numbers = [i for i in range(config.layers()) if i in dense or (i + 1) % max(1, step)]
    return _with_dense(config, numbers, layers)


def read_first_dense(config: ConfigReader) -> tuple[Mapping[str, Any], ...]:
    """The options of layers of which the first have a plain feed-forward, as in DeepSeek-V2."""
    return _with_dense(config, range(config.integer("first_k_dense_replace", 0)))


def _with_dense(
    config: ConfigReader, numbers: Sequence[int], layers: Sequence[Mapping[str, Any]] = ()
) -> tuple[Mapping[str, Any], ...]:
    """The options of layers of which those of these numbers have a plain feed-forward."""
    if not numbers:
        return tuple(layers)
    others = layers or [dict[str, Any]()] * config.layers()
    return tuple({**x, "mixture": None} if i in numbers else x for i, x in enumerate(others))


def read_group_routing(config: ConfigReader, default: Any = REQUIRED) -> Routing:
    """The routing of DeepSeek-V3 and of models after it; `default` is that of its numbers."""
    return Routing(
        normalize=config.flag("norm_topk_prob", True),
        scoring="sigmoid",
        scale=config.number("routed_scaling_factor", default),
        correction=True,
        groups=config.integer("n_group", default),
        chosen_groups=config.integer("topk_group", default),
        group_best=2,
        dtype="f32",
    )


def joined_experts(
    mixture: Mixture,
    transposed: bool = False,
    interleaved: bool = False,
    path: str = "mlp",
    stored: str = "mlp",
) -> list[Stored]:
    """The tensors of checkpoints that have one for all experts, with gate and up joined.

    `transposed`: [experts, in, out]. `interleaved`: outputs of gate and up take turns, else they
    follow each other. `path` is that of the mixture in a layer of the model, `stored` that in
    the checkpoint.
    """
    width, layout = mixture.intermediate_size, dict[str, Any](transposed=transposed, dim=1)
    own, key = f"{LAYER}{path}.experts.", f"{LAYER}{stored}.experts."
    ranges = in_turn(width, width)
    if interleaved:
        ranges, layout["step"] = [[(i, 2 * width)] for i in range(2)], 2
    return [
        *joined(own, "gate up", f"{key}gate_up_proj", ranges, **layout),
        *joined(own, "gate_bias up_bias", f"{key}gate_up_proj_bias", ranges, **layout),
        Stored(f"{own}down", f"{key}down_proj", transposed=transposed, dim=1),
        Stored(f"{own}down_bias", f"{key}down_proj_bias"),
    ]


def joined_alternatives(config: Any, path: str = "mlp") -> Mapping[str, Ref]:
    """Where transformers 5 has the weights of experts: joined."""
    references: dict[str, Ref] = {}
    for i, options in enumerate(config.of_layers()):
        mixture: Mixture | None = options.mixture
        if mixture is None:
            continue
        count, width = mixture.experts, mixture.intermediate_size
        wide, narrow = (count, width, config.hidden_size), (count, config.hidden_size, width)
        shapes = {"gate": wide, "up": wide, "down": narrow}
        names = {f"model.layers.{i}.{path}.experts.{name}": shape for name, shape in shapes.items()}
        for entry in joined_experts(mixture, path=path):
            refs = {name: entry.reference(name, shape) for name, shape in names.items()}
            references |= {name: ref for name, ref in refs.items() if ref is not None}
    return references
