"""Model types of transformers 5.23 whose blocks have a layout's arrays, but another function."""

_AROUND = "read the other arrays by import_params, and compute the rest around"
# The step that the layout lacks, the function around which a caller adds it, and the model types.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "normalises values as well as queries and keys",
        "dot_product_attention",
        (
            "gemma3n_text gemma4_text gemma4_unified_text gemma4_vision embedding_gemma2_text "
            "diffusion_gemma_text"
        ),
    ),
    (
        "normalises queries and keys after their rotation",
        "dot_product_attention",
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text timesfm2_5",
    ),
    ("normalises the inputs of its projections", "project", "blt_local_encoder blt_local_decoder"),
    ("computes its mask from the values", "dot_product_attention", "doge"),
    ("convolves keys and values after their projections", "dot_product_attention", "inkling_text"),
    ("gates heads by a softplus", "combine", "laguna"),
    ("normalises heads before the gate", "combine", "muse_spark_text"),
    ("normalises heads before the output layer", "combine", "bitnet kosmos_2_text_model"),
    ("attends the keys that an indexer chooses", "dot_product_attention", "qwen4_exp_text"),
    ("attends its own and the encoder's keys in one softmax", "dot_product_attention", "t5gemma2_decoder"),
    ("attends context and noise by one mask and one rotation", "dot_product_attention", "muse_glimmer_assistant"),
    ("scales each feature of the queries by a learned softplus", "dot_product_attention", "timesfm"),
    ("gates its bias of relative positions by its inputs", "dot_product_attention", "wavlm"),
    ("adds a convolution of the values to its output", "combine", "fun_asr_nano_encoder"),
    ("puts heads of convolutions next to those of attention", "combine", "convbert"),
    ("adds the logits of text and layout to each other", "dot_product_attention", "lilt"),
    ("projects queries apart for every pair of words and entities", "dot_product_attention", "luke"),
)  # fmt: skip
# Functions that a caller cannot compute around the projections of a layout, and the model types.
FORMS: tuple[tuple[str, str], ...] = (
    ("weighs delays of a series instead of keys", "autoformer"),
    ("attends blocks of keys, some of them drawn at random", "big_bird bigbird_pegasus"),
    ("rotates values as well as queries and keys", "clvp_encoder"),
    ("subtracts one softmax from another", "diffllama"),
    ("pools queries where its stages change", "hiera sam2_hiera_det_model"),
    ("attends for few queries, and gives the others the mean of the values", "informer"),
    ("approximates the softmax by blocks of keys", "mra"),
    ("approximates the softmax by landmarks", "nystromformer"),
    ("attends keys of the own block and global tokens", "pegasus_x"),
    ("attends keys of equal hashes, or of neighbouring chunks", "reformer"),
    ("has linear attention", "SanaTransformer2DModel"),
    ("weighs values by the hashes of queries and keys", "yoso"),
)


def form(model_type: str) -> str:
    """The function of a model type that no layout can express; "" if nothing is known.

    >>> form("diffllama")
    'subtracts one softmax from another'
    """
    return next((does for does, types in FORMS if model_type in types.split()), "")


def why(model_type: str) -> str:
    """The step that a model type adds to the layout of its blocks, and the remedy; "" if unknown.

    >>> why("laguna").partition(":")[0]
    'laguna gates heads by a softplus'
    """
    for does, around, types in _REASONS:
        if model_type in types.split():
            return f"{model_type} {does}: {_AROUND} {around}"
    return ""
