"""Builds the `load_into` function of every framework; `matching` is imported at the first call."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

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
    ) -> Any: ...


_DOC = """{effect}

    Args:
      model: {model}.
      source: a file, a folder of `save_pretrained`, `hf://org/model[@revision]`, a dict of arrays,
        or a model.
      plan: the plan from `jaxmha.converters.matching.match`; None creates it.
      dtype: the dtype of every floating array; None keeps the model's, which must hold all values.
      unused: "keep" leaves out source arrays that the plan does not use.
      missing: "keep" leaves arrays of the model as they are if the plan has nothing for them.
      packing: order of packed projections, as in `match`; used only without a plan.

    Raises:
      ValueError: the plan has an open question, arrays are unused or missing, or a shape or dtype
        does not fit. All of this is checked before the first array is written.
      CheckpointError: the source cannot be read. If this happens while arrays are read, those
        written before it keep their new values in a model that is filled in place.
    """


def make_load_into(fill: str, model: str, effect: str) -> LoadInto:
    """Makes the `load_into` function of one framework.

    Args:
      fill: name of the function in `matching.loading` that writes arrays into the model.
      model: the kinds of model that it accepts, for its docstring.
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
        from jaxmha.converters.matching import loading

        write: Callable[[Any, Lazy], Any] = getattr(loading, fill)
        with loading.prepared(
            model, source, plan, dtype=dtype, unused=unused, missing=missing, packing=packing
        ) as ready:
            return write(model, ready)

    load_into.__doc__ = _DOC.format(effect=effect, model=model)
    return load_into
