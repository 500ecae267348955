"""Changes to the tiling and the layer, each measured once, taken or not."""

TRIED = (
    (
        "heads of T = 512 in one kernel",
        "4 take 0.9 to 1 of the time of 2, with the gradient 0.87 to 0.94",
    ),
    (
        "bands of causal rows of a few heads, which XLA works on side by side",
        "0.77 of the time of blocks at T = 2048; the same bands one after another none less",
    ),
    (
        "masked logits chosen (`where`) instead of -inf added that is made of the mask",
        "0.9 of the time of such bands, 0.98 of that of blocks",
    ),
    (
        "heads side by side instead of one after another",
        (
            "0.8 to 0.95 of the time forward while all scores take up to 16 MiB; 1.5 to 1.7 at "
            "T = 2048, where temporaries leave the caches; little with the gradient, which takes "
            "twice as long to compile"
        ),
    ),
    (
        "masks as arrays: rows with the narrowest of a few widths of keys, in one softmax",
        "45 to 54 ms against 45 of blocks at T = 2048: not taken",
    ),
    (
        "tiles of 256 x 256, for which XLA makes one kernel of products and softmax",
        (
            "1.2 ns a score against 1.45 to 1.6 of larger ones; joined, with no maximum and sums by a "
            "column of ones, 1.35 to 1.6 against 1.43 to 1.6 of whole rows; with a maximum or any "
            "other second output XLA makes no such kernel: not taken"
        ),
    ),
    (
        "bands in the gradient",
        "10 % faster at T = 2048, and 3.4 s instead of 1.5 s to compile: not taken",
    ),
    (
        "sums of products of two arrays as `(x * y).sum(-1)`",
        (
            "XLA makes a loop of it that takes 10 times as long as a product and 5 times the memory: "
            "products instead"
        ),
    ),
    (
        "gradients reuse the buffers of their primals",
        (
            "temporaries at T = 2048 fall from 44 to 28 MiB, which the allocator keeps: 12,900 page faults "
            "a call became none"
        ),
    ),
    (
        "at least 1024 rows forward and 512 in the gradient, up to 16 MiB, without bias and dropout",
        "0.95 of the time at T = 4096 and 0.85 at 8192, forward and backward 0.95 and 0.7",
    ),
    (
        "blocks of 8 MiB in the gradient with a bias or dropout",
        "1.1 to 1.2 times as long: the temporaries no longer fit the caches; not taken",
    ),
    (
        "queries transposed in the gradient, so that every product is of row-major matrices",
        "with the line above forward and backward take 0.77 to 0.83 of the time at T >= 1024",
    ),
    (
        "blocks of 64 rows and keys within windows of up to 256 keys",
        "0.4 to 0.75 of the time of blocks of 256",
    ),
    (
        "a softmax that subtracts no maximum, where logits are known to be small",
        "0.92 to 1.0 of the time of products and softmax at T = 1024 to 4096: not worth a second program",
    ),
    (
        "one matrix product for query, key and value",
        (
            "1.1 to 1.34 of the time of three, at 64 to 4096 rows and E of 256 to 1024; with kernels "
            "stored together already 1.02 to 1.34, and 0.84 at 64 rows of E = 256"
        ),
    ),
    (
        "outputs reuse the buffers of queries",
        "0.94 of the time of the core at B = 32 and T = 512, no less elsewhere: not taken",
    ),
    (
        "heads of few keys together in the gradient, up to 8 MiB",
        "0.87 to 0.92 of the time of a layer that attends to 77 keys",
    ),
    (
        "an exponential of a polynomial instead of XLA's",
        (
            "alone 0.94 to 1 of the time, the whole softmax 1.5: it is not in YNNPACK's kernel of maximum "
            "and exponential; not taken"
        ),
    ),
    (
        "the layer one batch row after another, forward",
        (
            "0.82 of the time at B = 32 and T = 512, 0.8 to 1 of padded batches, 1.3 to 1.4 at T < 256: "
            "most of it is memory that is not allocated, which settings of the allocator save too; "
            "gradients need all of it: not taken"
        ),
    ),
)
