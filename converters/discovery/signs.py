"""Table of config keys and tensor names that reveal computations around projections (`PARTS`)."""

from typing import Any, NamedTuple

# Part -> a description of its computation, and the remedy where a conversion cannot carry it over.
PARTS = {
    "rotary": (
        "rotary positions (queries and keys are turned by angles)",
        "do it with jaxmha.rope between project and dot_product_attention",
    ),
    "alibi": ("ALiBi (a bias by head and distance, added to the logits)", "give it as bias="),
    "relative": (
        "relative positions (a term by distance or place, added to the logits)",
        "give it as bias= where it is a bias",
    ),
    "window": (
        "windows (some layers attend nearby positions alone)",
        "give them as a mask: masks_of(folder) of jaxmha.converters has those that are known",
    ),
    "soft_cap": ("a soft cap of the logits", "set Semantics(logits_soft_cap=)"),
    "qk_norm": ("norms of queries and keys", "set Semantics(qk_norm=) where it is such a norm"),
    "scale": ("a scale of the logits other than H ** -0.5", "set Semantics(scale=)"),
    "query_scale": (
        "a factor of the logits or queries that depends on the position",
        "multiply the queries between project and dot_product_attention",
    ),
    "sinks": (
        "attention sinks (a learned logit per head, or a position, that every query attends)",
        "set MHAParams.sinks where it is a logit per head",
    ),
    "gate": (
        "a gate on the output of the heads, or of the layer",
        (
            "set MHAParams.gate where it is a sigmoid, or multiply between dot_product_attention and "
            "combine"
        ),
    ),
    "clip": ("clipped projections", "set Semantics(clip_qkv=)"),
    "multiplier": (
        "factors on the inputs or outputs of attention",
        "multiply before project or after combine",
    ),
    "layers": (
        "layers of another form than softmax attention, left as they are",
        "write them by hand",
    ),
    "mask": ("a mask of its own, neither full nor causal", "give it as mask="),
    "heads": (
        "parts with another head count than the configuration gives",
        "write a plan and set num_heads for each module",
    ),
    "form": (
        "attention of another form than plain projections, a softmax over all keys, and an output layer",
        "read the blocks by import_params, and write that form around them",
    ),
}


class Sign(NamedTuple):
    """A key of a config.json that implies a part, unless its value is in `off`.

    `decides`: a value in `off` shows that the part is absent, even if the model type usually has
      it.
    """

    part: str
    keys: str
    off: tuple[Any, ...] = ()
    decides: bool = False


NOTHING = (None, False, 0, "", "none", "None")
SIGNS = (
    Sign("rotary", r"(?!max_)\w*(rope|rotary)\w*"),
    Sign("alibi", r"(use_)?alibi|alibi_bias_max", decides=True),
    Sign("window", r"(use_)?sliding_window|attention_window|local_attention", decides=True),
    Sign("window", r"\w*sliding_window\w*|(pretrained_)?window_sizes?|window_size_per_stage"
         r"|attention_chunk_size"),
    Sign("window", r"\w*attention_context_(left|right)|local_attention_window_len|focal_windows"),
    Sign("window", r"window_block_ind(ic|ex)es|global_attn_ind(ic|ex)es|global_attn_every_n_layers"),
    Sign("relative", r"use_rel(ative)?_pos\w*|relative_attention|has_\w+_attention_bias",
         decides=True),
    Sign("relative", r"\w*relative_(attention|position|max|bias)\w*|\w*rel_pos\w*|\w*rel_2d\w*"),
    Sign("relative", r"position_bias(_\w+)?|num_relative_features|max_relative_positions"),
    Sign("soft_cap", r"\w*(attn|attention)_logit_?(softcap\w*|soft_cap|cap)|attn_soft_?cap\w*",
         decides=True),
    Sign("qk_norm", r"(use_)?(qk|query_key)_?(layer_?)?norms?", decides=True),
    Sign("scale", r"attention_multiplier|query_pre_attn_scalar|softmax_scale|qk_scale_factor"),
    Sign("scale", r"key_multiplier|attention_value_scale", (1,)),
    Sign("scale", r"scale_attn_by_inverse_layer_idx", decides=True),
    Sign("scale", r"scale_attn_weights", (True,)),
    Sign("query_scale", r"attn_temperature_tuning|llama_4_scaling_beta|log_scaling_\w+"
         r"|attn_scale|floor_scale"),
    Sign("sinks", r"\w*att(n|ention)_sinks?\w*|add_zero_attn|add_bias_kv|learnable_sink\w*"),
    Sign("gate", r"attn_output_gate|use_attention_gate|gated_attn|gated_attention|attn_gate\w*"),
    Sign("multiplier", r"attention_(in|out)_multiplier", (1,)),
    Sign("clip", r"clip_qkv"),
)  # fmt: skip
# Part -> a key that, if it is False, switches off all other keys of the part.
SWITCHES = {"window": "use_sliding_window", "relative": "relative_attention"}
# Key pattern -> pairs of a part and the pattern in the value of the key that implies this part.
VALUE_SIGNS = {
    r"layer_types|\w*attention_types?|attention_layers|attn_layers|attn_type|layer_block_types?": (
        ("window", r"sliding|local|chunk|window|swa"),
        ("form", r"sparse|lsh|prob"),
        ("layers", r"linear|indexed|compress"),
    ),
    r"pos\w*_(embedding|encoding|emb)s?_type|self_attention_type|position_embedding": (
        ("rotary", r"rot|rope"),
        ("alibi", r"alibi"),
        ("relative", r"rel"),
    ),
}
# Patterns of keys that could imply a part unknown to this table, and of keys known to imply none.
SUSPECT = r"rope|rotary|alibi|window|soft_?cap|scal|norm|sink|gate|multiplier|sparse"
ELSEWHERE = (
    r"norm\w*_(eps|epsilon|init|bias|momentum|mean|std|type|elementwise_affine)|(eps|std)$|embed|emb$"
    r"|rout|top_?k|moe|expert|batch_?norm|feat|conv|mamba|ssm|loss|final|head|residual|rescal"
    r"|layer_?scale|(pre|post|input|sandwich)_?(layer_?)?norm|norm_(first|before|after|strategy|pix)"
    r"|normalize|norm_before|layer_?norms?$|layer_norm|^(rms|layer|use)_?norm$|^norm$|image"
    r"|pixel|pool|scale_factor"
    r"|upscale|scaled|fpn|projector|mlp|ffn|gated_mlp|is_gated_act|sparse_step|noise|box|sinkhorn"
    r"|logit_scale|logits?_scaling|final_logit|time|sampling|patch|backbone|decoder_scale|upsample"
    r"|num_sparse_\w+_layers|scale_(decoder|depth|input|sqrt)|depth_scale|loc_scale|^scal(e|ing)s?$"
    r"|reg_"
    r"|channel_multiplier|sparse_pred|window_kernel|freeze|sigmoid_scale|output_multiplier|l2norm"
    r"|res2net|altup|width_multiplier|depth(wise)?_multiplier|gateway|keep_window|step_scale"
    r"|delta_scale"
    r"|task_norm|relation_bias|_rank$|kda|variance_scale|norm_rel_ebd|norm_reduction|add_out_norm"
    r"|(gate|output_logit)_soft_cap|softmax_in_fp32"
    r"|position_embedding|hidden_act|n_window|num_windows|max_window_layers|use_scale|decoder_offset"
)
# Keys that transformers writes into every configuration, and keys that do not concern the model.
OF_TRANSFORMERS = {"architectures", "transformers_version", "torch_dtype", "dtype"}
NOT_OF_MODELS = {"id2label", "label2id", "quantization_config", "task_specific_params"}

# Part, and the pattern of the names of tensors outside the blocks that reveals it.
TENSORS = (
    ("rotary", r"^(?!.*sinusoid).*inv_freq$|rotary|(^|[._])rope|freqs_cis|(sin|cos)_cached"),
    ("alibi", r"alibi|(^|\.)slopes$"),
    (
        "relative",
        (
            r"relative_attention_bias|relative_position|rel_pos|relative_bias|attention_biases"
            r"|distance_embedding|pos_bias_[uv]|linear_pos|position_bias|rel_embeddings"
            r"|att\w*[./]bias_[uv]$|relative_k_proj"
        ),
    ),
    ("sinks", r"att\w*[./](sinks?|bias_k|null_k\w*)($|\.)"),
    (
        "qk_norm",
        (
            r"att\w*[./](.*[._])?(q|k|query|key|qk)_?(layer_?)?norm\w*[./]|att\w*[./]norm_[qk]\b"
            r"|att\w*[./](logit_scale|tau)$"
        ),
    ),
    ("multiplier", r"att\w*[./]gamma\.weight$"),
    ("layers", r"[./]downsample[./]assign[./]"),
    ("gate", r"att\w*[./](.*[._])?(g_proj|gate\w*|gru_rel_pos\w*)([./]|$)|attn_gate$"),
)

# Model type, and the pattern of tensor names that occur only in the family of this type.
OF_TYPE = (
    ("gptj", r"(^|[./])h[./]\d+[./]mlp[./]fc_in[./]"),
    ("pegasus_x", r"(^|[./])embed_global[./]|global_self_attn_layer_norm"),
    ("longformer", r"[./](query|key|value)_global[./]"),
)
# Layouts of a single framework class, whose arguments determine everything that it computes.
CLASSES = frozenset(
    ("torch", "torch-separate", "keras", "keras-gqa", "keras-file", "keras-gqa-file", "flax",
     "equinox", "haiku")
)  # fmt: skip
# Layouts whose models mostly have these parts, even if no configuration says so.
IMPLIED = {"llama": "rotary positions", "gpt-neox": "rotary positions or ALiBi"}
