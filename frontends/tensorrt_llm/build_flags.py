"""The flags of trtllm-build: what each takes, and what it means to irc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import Error
from ...json_files import read_object
from .build_config import BuildConfig

Use = Literal["honoured", "ignored", "refused"]
OFF = ("disable", "disabled", "", "none", False, None, 0, 1)  # values that ask for nothing


@dataclass(frozen=True)
class Flag:
    """A flag: `takes` is INT, a word for text, a|b for one of these, or - for a switch.

    `use` says whether its value counts, has no effect, or is refused unless it is OFF; `why` is the
    effect, the reason, or what to do instead.
    """

    name: str
    takes: str
    use: Use
    why: str

    @property
    def words(self) -> list[str]:
        """The values of a flag that takes one of some words."""
        return self.takes.split("|") if "|" in self.takes else []

    @property
    def expected(self) -> str:
        """The values that the flag takes, in words."""
        kinds = {"-": "true or false", "INT": "a whole number, 0 or more", "LIST": "a list"}
        return " or ".join(self.words) or kinds.get(self.takes, "a text")

    def fits(self, value: Any) -> bool:
        """Whether a value of a JSON file is one that the flag takes."""
        if self.words:
            return value in self.words
        if self.takes == "INT":
            return type(value) is int and value >= 0
        return isinstance(value, {"-": bool, "LIST": list}.get(self.takes, (str, int)))


_PLUGIN = "auto|float16|float32|bfloat16|int32|fp8|nvfp4|disable"
_SWITCH = "enable|disable"
_KERNELS = "kernels are chosen by the backend"
_SAME = "the result is the same either way"
_LEVELS = "internal_error|error|warning|info|verbose|debug|trace"
# names, takes, use, why
_TABLE = f"""
checkpoint_dir            DIR   honoured  the checkpoint folder: config.json, rank0.safetensors, ...
model_config              FILE  honoured  its config.json alone; needs --random-weights or --dry_run
build_config              FILE  honoured  a BuildConfig as JSON; flags of the command line win
output_dir                DIR   honoured  the artifact folder (default: engine_outputs)
max_batch_size            INT   honoured  the largest batch; times max_beam_width the range of B
max_input_len             INT   honoured  the most tokens of a call: the range of S
max_seq_len               INT   honoured  the tokens of a sequence: the range of C, the cache
max_decoder_seq_len       INT   refused   give --max_seq_len
max_beam_width            INT   honoured  beams are rows of the batch
max_num_tokens            INT   honoured  limits max_input_len; inputs are padded, not packed
opt_num_tokens            INT   honoured  the typical S, for which engines are tuned
opt_batch_size            INT   honoured  the typical B, for which engines are tuned
strip_plan                -     honoured  leave weights out of engines
weight_streaming          -     honoured  let weights of engines exceed the GPU's memory
visualize_network         DIR   honoured  the module after every pass, as text
dry_run                   -     honoured  run all passes and write nothing
log_level                 {_LEVELS} honoured verbose, debug and trace: what passes decided
use_fused_mlp             {_SWITCH} honoured fuse the two matrices of gated feed-forwards
kv_cache_type  continuous|paged|disabled honoured caches are contiguous, one slot after another
gather_context_logits,gather_generation_logits,gather_all_token_logits - honoured \
ask for any tokens with logit_positions when it runs
max_prompt_embedding_table_size,max_multimodal_len INT refused \
trace a script that uses PromptTuningEmbedding
model_cls_file,model_cls_name NAME refused trace the script that uses the class: irc compile SCRIPT
enable_debug_output       -     refused   irc run --backend reference runs module.irc in numpy
lora_dir                  LIST  refused   merge the adapters into the checkpoint
speculative_decoding_mode MODE  refused   logit_positions gives the logits of draft tokens
max_draft_len             INT   refused   logit_positions gives the logits of draft tokens
auto_parallel             INT   refused   give --mesh tp=N; irc forecast compares meshes
streamingllm              {_SWITCH} refused irc's language models keep all tokens
max_encoder_input_len     INT   ignored   irc's language models have no encoder
paged_kv_cache,use_paged_context_fmha {_SWITCH} ignored caches are contiguous, without pages
tokens_per_block          INT   ignored   caches are contiguous, without blocks
input_timing_cache,output_timing_cache FILE ignored whole engines are kept (irc cache)
profiling_verbosity layer_names_only|detailed|none ignored engines keep the names of operations
weight_sparsity           -     ignored   {_SAME}
reduce_fusion,user_buffer {_SWITCH} ignored {_SAME}
fast_build                -     ignored   weights stay outside engines where that is faster
workers                   INT   ignored   one engine serves all ranks of a stage
monitor_memory            -     ignored   the system reports the peak, as in /usr/bin/time -v
logits_dtype              float16|float32 ignored logits are float32
lora_ckpt_source          hf|nemo ignored it is for lora_dir
lora_target_modules       LIST  ignored   it is for lora_dir
max_lora_rank             INT   ignored   it is for lora_dir
lora_plugin               {_PLUGIN} ignored it is for lora_dir
gpus_per_node             INT   ignored   hosts are known when ranks are launched
cluster_key               NAME  ignored   a topology is an option of irc forecast
bert_attention_plugin,gpt_attention_plugin,gemm_plugin,gemm_swiglu_plugin {_PLUGIN} ignored \
{_KERNELS}
fp8_rowwise_gemm_plugin,moe_plugin,mamba_conv1d_plugin {_PLUGIN} ignored {_KERNELS}
low_latency_gemm_plugin,low_latency_gemm_swiglu_plugin {_PLUGIN} ignored {_KERNELS}
context_fmha,bert_context_fmha_fp32_acc {_SWITCH} ignored {_KERNELS}
nccl_plugin               {_PLUGIN} ignored collectives have the dtype of their tensors
remove_input_padding      {_SWITCH} ignored inputs are padded: [B, S]
use_fp8_context_fmha      {_SWITCH} ignored give --kv-cache fp8 for caches in FP8
multiple_profiles         {_SWITCH} ignored one profile has the whole range
paged_state               {_SWITCH} ignored irc's language models have no recurrent state
pp_reduce_scatter         {_SWITCH} ignored give --sequence to shard activations between blocks
"""
FLAGS: Mapping[str, Flag] = {
    name: Flag(name, takes, use, why)  # pyright: ignore[reportArgumentType]
    for names, takes, use, why in (line.split(None, 3) for line in _TABLE.strip().splitlines())
    for name in names.split(",")
}


def flags_of(path: Path) -> dict[str, Any]:
    """The flags that say the same as a BuildConfig in a JSON file; an Error about other keys."""
    config = read_object(path)
    try:
        fields = BuildConfig.from_dict(config).to_dict()
    except Error as error:
        raise Error(f"{path}: {error.message}") from None
    plugins: dict[str, Any] = config.get("plugin_config") or {}
    found: dict[str, Any] = {}
    for name in {**plugins, **config}:
        value = {**fields["plugin_config"], **fields}[name]
        flag = FLAGS.get("strip_plan" if name == "use_strip_plan" else name)
        if flag is None or value is None or (value is False and flag.takes != "-"):
            continue
        value = "enable" if value is True and "enable" in flag.words else value
        if not flag.fits(value):
            raise Error(f"{path}: {name} is {value!r}; expected {flag.expected}")
        found[flag.name] = value
    return found


def asks(value: Any) -> bool:
    """Whether the value of a flag asks for something."""
    return value is True or value not in OFF


def check(given: Mapping[str, Any]) -> None:
    """One Error about all flags that are refused, with what to do instead."""
    error = Error("irc build refuses these flags; leave them out")
    for name, value in given.items():
        if FLAGS[name].use == "refused" and asks(value):
            error.add_note(f"--{name} {value}: {FLAGS[name].why}")
    if hasattr(error, "__notes__"):
        raise error
