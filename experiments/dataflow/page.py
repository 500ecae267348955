"""What the experiment found, in words; every number is from the result file."""

from typing import Any

from experiments.dataflow.choices import CHOICES, SHAPES, Choice, Ratio, ratio
from experiments.dataflow.walk import STEPS

QUESTION = "What happens to every tensor in multi-head attention, and what do torch's options cost?"
COMMAND = "python -m experiments.dataflow --write"


def _one(found: dict[str, Any], framework: str, shape: int, choice: Choice) -> Ratio:
    one = ratio(found, framework, SHAPES[shape].name, choice)
    assert one is not None
    return one


def conclusion(found: dict[str, Any]) -> str:
    """One or two sentences."""
    short, long = (_one(found, "torch", i, CHOICES[0]).middle for i in (0, 1))
    ours = [_one(found, "jaxmha", i, CHOICES[0]).middle for i in (0, 1)]
    most = {
        framework: max(
            max(one, 1 / one)
            for i in (0, 1)
            for choice in CHOICES[3:5]
            if (of := ratio(found, framework, SHAPES[i].name, choice)) is not None
            for one in [of.middle]
        )
        for framework in ("torch", "jaxmha")
    }
    return (
        f"Returning the weights takes torch {short:.2f} times as long at {SHAPES[0].name} and "
        f"{long:.2f} times at {SHAPES[1].name} (jaxmha {ours[0]:.2f} and {ours[1]:.2f} times), and "
        "changes its results, as the fast path does; axis order and packing change none and make a "
        f"factor of {most['torch']:.2f} at most (jaxmha {most['jaxmha']:.2f})."
    )


def _walk(found: dict[str, Any]) -> str:
    nodes = {node["name"]: node for node in found["flow"]["nodes"]}
    lines = [
        "| step of the document | its shape | here | shape | so? |",
        "|---|---|---|---|---|",
    ]
    for step in STEPS:
        here = "<br>".join(f"`{name}`" for name in step.nodes)
        shapes = "<br>".join(
            f"`{nodes[name]['axes']}` = {' × '.join(map(str, nodes[name]['shape']))}"
            for name in step.nodes
        )
        given = f"`{step.shape}`" if step.shape else "–"
        lines.append(f"| {step.name} | {given} | {here} | {shapes} | {step.verdict} |")
    return "\n".join(lines)


def _costs(found: dict[str, Any]) -> str:
    columns = [(framework, shape) for framework in found["seconds"] for shape in SHAPES]
    lines = [
        "| option | the document | "
        + " | ".join(f"{framework}, {shape.name}" for framework, shape in columns)
        + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for choice in CHOICES:
        cells = [str(ratio(found, f, s.name, choice) or "has none") for f, s in columns]
        lines.append(f"| {choice.name} | {choice.says} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    """The page."""
    flow, predicted = found["flow"], found["predicted"]
    short, long = (predicted[shape.name] for shape in SHAPES)
    sizes = flow["sizes"]
    off = [_one(found, "torch", i, CHOICES[5]).middle for i in (0, 1)]
    return f"""{conclusion(found)}

## Every tensor

One of the documents that this project grew from walks through attention node by node, for readers
who implement it. `jaxmha describe` makes that walk for any configuration: here {sizes["N"]} heads on
{sizes["Dq"]} features, {sizes["T"]} queries, {sizes["S"]} keys and a mask.

![The data flow of multi-head attention: projections, logits, mask, softmax, context, output](flow.svg)

{_walk(found)}

Shapes are those that `jax.eval_shape` gives for the public functions, and operations those that
XLA counts for the reference implementation; tests compare both. The graph also says where the work
is: at {SHAPES[0].name} the projections are {short["projections"]:.0%} of all operations, at
{SHAPES[1].name} {long["projections"]:.0%}; and what a fused implementation saves: with every
intermediate written to memory and read again, a layer moves {short["fused"]:.1f} times the bytes at
{SHAPES[0].name}, {long["fused"]:.1f} times at {SHAPES[1].name}.

```console
$ jaxmha describe --num-heads 8 --features 512 --query-len 10 --kv-len 12 --framework torch
```

## What the options cost

![Time with an option relative to the time without it, for torch and jaxmha](costs.svg)

{_costs(found)}

- **Weights.** The document is right that asking for them materialises the softmax, and that the
  default of torch asks. It does not say that the option changes results: a row with nothing left to
  attend is NaN with weights, and without them 0 before the output projection, so its bias; half precision has its softmax in half precision, and
  `is_causal` is read differently. jaxmha takes the implementation that materialises too, and means
  the same by it.
- **Layout and packing** are calling convention: the same products on the same numbers. jaxmha keeps
  three kernels, and packing them by hand is the column's ratio.
- **The fast path** computes the weights whether they are asked for or not: off it, without
  weights, torch takes {off[0]:.2f} times as long at {SHAPES[0].name} and {off[1]:.2f} times at
  {SHAPES[1].name} (below 1 the fast path is the slower one). It has semantics of its own:
  `is_causal=True` without a mask is ignored there, and raises everywhere else.

## How it was measured

Self-attention of {sizes["N"]} heads on {sizes["Dq"]} features in float32, {found["threads"]} threads, one
process for each framework and shape. All programs of a process run one after another in each of
{found["rounds"]} rounds, after a check that those compared compute the same; a ratio is of two times in
one round, and given as the median of the rounds with its quartiles. All is inference but what says
"forward and backward".
"""
