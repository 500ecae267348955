"""Builds the `load_into` function of every framework; `matching` is imported at the first call."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from jaxmha.converters.layout.api import described

if TYPE_CHECKING:
    from jaxmha.checkpoint import Lazy
    from jaxmha.converters.matching import Plan


@runtime_checkable
class LoadInto(Protocol):
    """The signature of `load_into` in every framework module."""

    def __call__(
        self,
        model: Any,
        source: Any,
        plan: "Plan | None" = None,
        *,
        dtype: str | None = None,
        unused: Literal["refuse", "keep"] = "refuse",
        missing: Literal["refuse", "keep"] = "refuse",
        packing: Literal["ask", "concatenated"] = "ask",
    ) -> Any:
        """Fills a model with the arrays of a source.

        It prints nothing: remarks, such as on settings that cannot be compared, are in `notes` of the
        plan that `match` returns, and of the proof that `prove` returns for the filled model.

        Args:
          model: a model of the framework.
          source: a file, a folder of `save_pretrained`, `hf://org/model[@revision]`, a dict of
            arrays, or a model.
          plan: the plan from `jaxmha.converters.matching.match`; None creates it.
          dtype: the dtype of every floating array; None keeps the model's dtypes, and raises if one
            cannot represent all values of the source's dtype.
          unused: "keep" leaves out source arrays that the plan does not use; "refuse" raises.
          missing: "keep" does not change model arrays without a line in the plan, also where the plan
            has a question without candidates; "refuse" raises.
          packing: order of packed projections, as in `match`; used only without a plan.

        Returns:
          The model of torch, Keras or nnx, filled in place; for linen and equinox a new tree.

        Raises:
          ValueError: the plan has an open question (if `missing` is "keep", one with candidates),
            arrays are unused or missing, a shape, head count or dtype does not fit, or attention of
            the model states other settings than that of the source, such as a soft cap. These checks
            precede the first write.
          TypeError: the model is of another framework, or a class.
          CheckpointError: the source cannot be read. If only a later array cannot be read, a model
            that is filled in place keeps the arrays written until then.
        """
        ...


def make_load_into(made_for: str, expected: str, effect: str) -> LoadInto:
    """Makes the `load_into` function of one framework.

    Args:
      made_for: name of the function in `matching.filling` that writes arrays into the model.
      expected: the kinds of model that it accepts, for its docstring and its errors.
      effect: the first sentence of its docstring.
    """

    def load_into(
        model: Any,
        source: Any,
        plan: "Plan | None" = None,
        *,
        dtype: str | None = None,
        unused: Literal["refuse", "keep"] = "refuse",
        missing: Literal["refuse", "keep"] = "refuse",
        packing: Literal["ask", "concatenated"] = "ask",
    ) -> Any:
        from jaxmha.converters.matching import filling, loading

        _check_model(made_for, expected, model)
        write: Callable[[Any, Lazy], Any] = getattr(filling, made_for)
        with loading.prepared(
            model, source, plan, dtype=dtype, unused=unused, missing=missing, packing=packing
        ) as ready:
            return write(model, ready)

    terms = {
        "Fills a model with the arrays of a source.": effect,
        "a model of the framework": expected,
    }
    load_into.__doc__ = described(LoadInto.__call__.__doc__, terms)
    return load_into


def _check_model(made_for: str, expected: str, model: object) -> None:
    """Raises TypeError if the model is a class, a file, or of another framework."""
    if isinstance(model, type):
        raise TypeError(
            f"model must be {expected}, got the class {model.__name__}: pass an instance of it"
        )
    from jaxmha.converters.layout.arrays import framework_of

    framework = framework_of(model)
    tree = framework not in ("torch", "keras") and not isinstance(model, str | Path)
    fits = {
        "into_torch": framework == "torch",
        "into_keras": framework == "keras",
        "into_flax": framework == "flax" or isinstance(model, tuple | Mapping),
        "into_tree": tree,
    }
    if not fits[made_for]:
        kind = f"{framework}'s " * bool(framework) + type(model).__name__
        raise TypeError(f"model must be {expected}, got {kind}: are model and source swapped?")
