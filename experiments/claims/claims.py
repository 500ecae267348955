"""Every claim of the three documents, once: what is said, what checks it, what the check shows."""

from typing import NamedTuple

DOCUMENTS = {
    "frameworks": "Why do PyTorch's and TensorFlow's layers give different results?",
    "one_head": "Are eight heads of 64 one head of 512?",
    "blog": "A walk through multi-head attention for those who implement it",
}
MODULES = {  # with the checks of each
    "frameworks": ("frameworks",),
    "one_head": ("one_head",),
    "blog": ("similarity", "blog", "modules"),
}


class Claim(NamedTuple):
    """Attributes:
    text: what the document says, in our words.
    check: function of one of the document's modules, which returns a `Found`.
    evidence: a sentence, filled with the check's numbers.
    """

    text: str
    check: str
    evidence: str


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "frameworks": (
        Claim(
            "PyTorch's and TensorFlow's layers give different results for the same inputs",
            "different_results",
            "as drawn {unrelated:.2g} apart; weights converted and the mask passed on as it is "
            "{inverted:.2g}; weights and mask converted {converted:.0e}",
        ),
        Claim(
            "Both follow one principle: project, attend, concatenate, project",
            "same_principle",
            "with converted weights outputs are {apart:.0e} apart",
        ),
        Claim(
            "They can have a significant impact on convergence and performance",
            "convergence",
            "looked for in starts only, in one small model: {gap:.1f} points of accuracy apart, "
            "where seeds spread by {spread:.1f}; that shows no impact, and not that there can be "
            "none ([training](../initialisation/))",
        ),
        Claim(
            "Both initialise with Xavier (Glorot)",
            "xavier",
            "the largest weight against Glorot's bound: only q, k, v of nn.MultiheadAttention (as "
            "one matrix of D by 3D) and Keras reach it; nn.Linear and torch's output layers are "
            "within 1/sqrt(D) = {bound:.3f}, not {glorot:.3f}",
        ),
        Claim(
            "Initialisation is designed for stable training",
            "stable_training",
            "loss falls in {fell} of {count} runs, of one start for each formula "
            "([training](../initialisation/))",
        ),
        Claim(
            "Deviations of initialisation are slight",
            "slight_deviations",
            "standard deviation of weights {torch:.4f} and {keras:.4f}, of biases {bias:.4f} and "
            "{keras_bias:.1g}, of outputs {torch_out:.2f} and {keras_out:.2f} "
            "([every scheme](../initialisation/))",
        ),
        Claim(
            "Slight deviations compound through many layers",
            "compounding",
            "weights changed by 1e-6: outputs {one:.1e} apart after one layer, {six:.1e} after six, "
            "{times:.1f} times as far",
        ),
        Claim(
            "The same seed in both reduces the difference",
            "seeds",
            "sum of differences {same:.0f} with seed 42 in both, {least:.0f} to {most:.0f} with "
            "others; numbers drawn from one seed correlate by {correlation:.3f}, and "
            "`tf.random.set_seed` does not even fix Keras' weights (again: {again:.0f})",
        ),
        Claim(
            "The same seed in both does not remove the difference",
            "seeds_leave_a_difference",
            "outputs are {apart:.2g} apart",
        ),
        Claim(
            "What is left after seeding is due to implementation and numerics",
            "intrinsic",
            "weights of their own: sum of differences {own:.0f}; one set of weights in both: "
            "{copied:.1e}, largest {largest:.1e}; with the mask of ones that the third example "
            "passes (one axis more) {masked:.2g} apart, since the second reads it the other way "
            "round ([step by step](../attribution/))",
        ),
        Claim(
            "The examples run as printed",
            "as_printed",
            "their masks of (B, T) do not broadcast: a {first} in torch, an {second} in TensorFlow; the "
            "third example runs the first",
        ),
        Claim(
            "A mask of (B, T) with one more axis masks padding",
            "inserted_axis",
            "where B = N it runs, and the mask of one sequence reaches another's head: its output "
            "moves by {other:.2g}; with two more axes by {right:.0g}",
        ),
        Claim(
            "In PyTorch, True in a Boolean mask means attend",
            "true_attends",
            "nn.MultiheadAttention means the opposite: the same mask puts it {wrong:.2g} off",
        ),
        Claim(
            "PyTorch replaces masked logits by about -1e9",
            "large_negative",
            "the example does, so that rows without keys are the mean of values (all rows within "
            "{rows:.0e}); the library takes -inf, and they are NaN or 0",
        ),
        Claim(
            "Masked positions then have a negligible effect",
            "negligible",
            "other features there move the rest by {some:.0e}; rows without keys by {nothing:.2g}",
        ),
        Claim(
            "TensorFlow takes a float mask",
            "float_mask",
            "of any dtype, read as zero or not: 0.3 is as good as 1, and a mask of 0 and -1e9 to be "
            "added is inverted ({added:.2g} off)",
        ),
        Claim(
            "In TensorFlow's mask 0 is masked and 1 is valid",
            "zero_masks",
            "the example attends to what is 0: {printed:.2g} from the first example with the same "
            "mask, {inverted:.0e} with the inverted one",
        ),
        Claim(
            "A mask of ones is no mask",
            "no_mask_is_ones",
            "the second example adds -1e9 to every logit, which swallows them: {second:.2g} off, and "
            "all rows are the same mean of values (within {rows:.0e})",
        ),
        Claim(
            "Equivalent masks still vary numerically",
            "equivalent_masks",
            "not in float32: bit by bit the same; a constant within reach of the logits leaks "
            "(float16: {leak:.1g} of the weight on a masked key)",
        ),
        Claim(
            "PyTorch stays close to native CUDA or its own backend, and TensorFlow has its own "
            "library",
            "backends",
            "float32 products on CPU run in {torch} for torch and {tensorflow} for TensorFlow; "
            "what both call on a GPU is not checked here, both builds being for CPU",
        ),
        Claim(
            "The order of operations changes results a little",
            "order_of_sums",
            "512 numbers summed from either end: {sums:.0e}; both examples with the same weights: "
            "{outputs:.0e}",
        ),
        Claim(
            "These differences significantly alter the output",
            "significant",
            "{single:.0e} of the output in float32 and {half:.1g} in bfloat16; [how that grows]"
            "(../numerics/)",
        ),
    ),
    "one_head": (
        Claim(
            "Attention is two products of matrices and a softmax",
            "two_products",
            "within {apart:.0e} of torch's own function",
        ),
        Claim(
            "The script runs as posted",
            "script_runs",
            "brackets are missing; with them `view` after `transpose` raises a {error}",
        ),
        Claim(
            "It prints True: the outputs are equal",
            "prints_true",
            "for {equal} of 40 seeds, and for {xavier} of 40 when matrices have negative entries: "
            "logits up to {largest:.0e} make the softmax one-hot ([all of it](../heads/))",
        ),
        Claim(
            "Eight heads of 64 give the same tensor as one head of 512",
            "same_tensor",
            "{xavier:.2g} apart for Xavier matrices, {normal:.2g} for normal ones",
        ),
        Claim(
            "They differ in nothing but how heads are optimised",
            "only_optimisation",
            "outputs are {output:.2g} apart before any step",
        ),
        Claim(
            "Heads have another gradient",
            "other_gradients",
            "{q:.2g}, {k:.2g} and {v:.2g} apart for Wq, Wk, Wv",
        ),
        Claim(
            "The outputs are certainly different",
            "certainly_different",
            "{apart:.2g} apart, but for special cases ({most:.0e}): one key, Wq = 0, equal tokens, "
            "one block in all heads with Wq / sqrt(8)",
        ),
        Claim(
            "A head's logits sum over a subset of the components",
            "subset_of_components",
            "{terms} of {all}; the products of all heads add up to those of one head within "
            "{apart:.0e}, their softmaxes do not",
        ),
        Claim(
            "The shapes of the attention weights differ",
            "shapes_of_weights",
            "{eight} for 8 heads, {one} for one",
        ),
        Claim(
            "Projections are the same for any number of heads",
            "same_projections",
            "{count} of 3 are, bit by bit",
        ),
    ),
    "blog": (
        Claim(
            "Attention is softmax(q k / sqrt(d)) v",
            "formula",
            "SDPA is within {apart:.0e} of it",
        ),
        Claim(
            "A mask adds -inf, which becomes 0 after the softmax",
            "minus_infinity",
            "a row in which all keys are masked becomes {row}",
        ),
        Claim(
            "Each query is a lookup of its own: a weighted mean of values",
            "lookups",
            "a query alone gives the same row (within {apart:.0e}), inside the range of values",
        ),
        Claim(
            "Products and weights are of q_len by kv_len, the output of q_len by v_dim",
            "shapes_of_nodes",
            "weights {weights}, output {out}",
        ),
        Claim(
            "Keys may be of another number than queries, and values of another width than keys",
            "own_lengths",
            "SDPA gives {shape}; in the module `vdim` is a width of the input: a head's values "
            "stay {head} wide",
        ),
        Claim(
            "Queries and keys have one width, and keys and values one number",
            "same_widths",
            "SDPA refuses other widths, but one value fewer than keys {fewer} on CPU; with kdim the "
            "module projects keys of width {key} to {query}",
        ),
        Claim(
            "A dot product is the cosine times both lengths",
            "cosine",
            "within {apart:.0e} over 1000 pairs",
        ),
        Claim(
            "The cosine ignores lengths",
            "cosine_ignores_lengths",
            "within {apart:.0e} for vectors 1000 times as long",
        ),
        Claim(
            "A dot product is as good a measure of similarity as the cosine, and counts lengths",
            "finds_similar",
            "the most similar of 200 vectors is the vector itself for {same:.0%} where lengths "
            "are equal, for {other:.0%} where they are 1 to 16 times as long: the longest win",
        ),
        Claim(
            "A dot product is cheaper than the cosine",
            "cheaper",
            "operations that XLA counts: a cosine takes {one:.1f} times as many for one pair, "
            "{many:.2f} times for 512 queries by 512 keys, each length taken once",
        ),
        Claim(
            "Products grow with the width, and 1/sqrt(d) keeps their variance",
            "scaling",
            "variance {narrow:.0f} at width 16, {wide:.0f} at 512, {scaled:.2f} scaled",
        ),
        Claim(
            "A softmax keeps the order, is positive and sums to 1",
            "softmax_properties",
            "in float32 far logits become zeros and ties: {far}",
        ),
        Claim(
            "A softmax is a soft argmax, and a lookup with one weight of 1 its limit",
            "soft_argmax",
            "of two largest it makes {tied}",
        ),
        Claim(
            "Dividing by the sum would do so too",
            "plain_normalisation",
            "not where signs differ: {mixed}",
        ),
        Claim(
            "MHA projects, splits heads, attends, joins heads, projects",
            "steps",
            "nn.MultiheadAttention is within {apart:.0e} of that in float64 ([node by "
            "node](../dataflow/))",
        ),
        Claim(
            "Heads act as one more axis of the batch",
            "heads_are_batch",
            "SDPA of B by N, and of B N rows, are within {apart:.0e}",
        ),
        Claim(
            "Each head can capture different features",
            "other_features",
            "in a trained encoder one head gives {previous:.0%} to the previous token, one "
            "{next:.0%} to the next, one {same:.0%} to equal ones, one {named:.0%} to [CLS] and "
            "[SEP]; but {special} of {count} give over half to the last "
            "([pictures](../pictures/))",
        ),
        Claim(
            "Grouped queries share key and value heads",
            "grouped",
            "SDPA is {apart:.0e} from repeated heads",
        ),
        Claim(
            "There are far more efficient implementations than the reference",
            "far_more_efficient",
            "Flax Linen, which takes the steps one by one, needs {short:.1f} to {shortest:.1f} "
            "times the time of the fastest, {long:.1f} to {longest:.1f} times from T = 2048 on "
            "([measured](../benchmarks/))",
        ),
        Claim(
            "SDPA takes a faster kernel such as flash where there is one",
            "flash_where_available",
            "on CPU if values are as wide as keys (its choice: {same}, else {wide}; 1 is flash)",
        ),
        Claim(
            "In SDPA's Boolean mask True means attend",
            "sdpa_true",
            "within {apart:.0e} of those keys",
        ),
        Claim(
            "That may be the opposite in other frameworks, such as JAX",
            "jax_is_opposite",
            "jax.nn is {apart:.0e} from SDPA's meaning; the odd one out is torch's own module",
        ),
        Claim(
            "The module computes what multi_head_attention_forward does",
            "module_is_function",
            "bit by bit off the fast path, within {apart:.0e} on it; but with "
            "need_weights=False a row without keys is {fast} there and {slow} in the function",
        ),
        Claim(
            "Under some conditions the module just calls that function",
            "calls_function",
            "in training it does; on the fast path it is {fast}",
        ),
        Claim(
            "The fast path is faster",
            "fast_path",
            "off it, time is {no_weights_short:.2f} and {no_weights_long:.2f} times that on it "
            "without weights (short, long), {weights_short:.2f} and {weights_long:.2f} times "
            "with them ([dataflow](../dataflow/))",
        ),
        Claim(
            "Sequences come first by default, and batch_first=True swaps",
            "batch_is_second",
            "the wrong order raises nothing and is {wrong:.2g} off",
        ),
        Claim(
            "With need_weights the softmax is returned",
            "returns_weights",
            "in training after dropout: rows sum to {least:.2g} up to {most:.2g}",
        ),
        Claim(
            "That needs the softmax in memory, which flash skips",
            "materialised",
            "the largest tensor that an operation returns is {on:.2g} times B N T S with "
            "weights, {off:.2g} times without",
        ),
        Claim(
            "average_attn_weights averages over heads",
            "averaged",
            "the mean of all heads, of shape {shape}",
        ),
        Claim("need_weights is on by default", "weights_are_default", "its default is {default}"),
        Claim(
            "need_weights forces a much slower computation",
            "slower_with_weights",
            "{long:.1f} to {longest:.1f} times the time from T = 2048 on, {short:.2f} to "
            "{shortest:.2f} in batches of shorter ones ([measured](../benchmarks/)); one sequence of "
            "T = 1024 is slower too ([dataflow](../dataflow/))",
        ),
        Claim(
            "It can be turned off in production",
            "off_in_production",
            "outputs are {apart:.0e} apart, but a row without keys is {on} with it and {off} "
            "without",
        ),
        Claim(
            "Projections are packed if widths agree, and separate if not",
            "packed",
            "in_proj_weight of {shape}, else q_, k_ and v_proj_weight",
        ),
        Claim(
            "Unused keyword arguments are None",
            "unused_are_none",
            "{unused} are, each in the other's case; the bias stays one vector of {biases} D in "
            "both",
        ),
        Claim(
            "Nested tensors are for the fast path only",
            "nested",
            "off it the module raises {error}",
        ),
        Claim(
            "The code calls lengths tgt_seq_len and src_seq_len",
            "lengths_names",
            "those names occur {longer} times in multi_head_attention_forward; tgt_len and "
            "src_len {names} times",
        ),
        Claim(
            "The literature calls lengths tgt_seq_len and src_seq_len",
            "literature_names",
            "no paper is searched here",
        ),
        Claim(
            "The module is torch.nn.MultiHeadAttention",
            "spelling",
            "there is no such name: it is {there}",
        ),
    ),
}
