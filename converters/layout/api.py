"""Builds `import_params` and `export_params` of a framework from its layouts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout import fill, fold, states, transform
from jaxmha.converters.layout.arrays import NDArray, kept, to_numpy
from jaxmha.converters.layout.base import Layout, choose


@runtime_checkable
class Import(Protocol):
    """The type of every module's `import_params`."""

    def __call__(
        self,
        state: Mapping[str, Any],
        *,
        layout: str | None = None,
        num_heads: int | None = None,
        prefix: str = "",
    ) -> tuple[MHAParams, Semantics]:
        """Parameters from a dict of arrays by one of the layouts of the module.

        Args:
          state: arrays or tensors by key; `prefix` and `.` or `/` stand before each key. In a nested
            tree, the names and indices on the way to an array make its key.
          layout: its name; default: the first whose required keys are present.
          num_heads: needed where no shape holds the head count, checked where one does.
          prefix: takes only the keys below it.

        Raises:
          TypeError: the state is not a dict, but a live layer or a path, for example.
          ValueError: a key, shape or head count does not fit; the message names key and axes.

        In `flax`, `equinox` and `haiku`, arrays that jit, grad or vmap traces stay traced.
        """
        ...


@runtime_checkable
class Export(Protocol):
    """The type of every module's `export_params`."""

    def __call__(
        self,
        params: MHAParams,
        semantics: Semantics = Semantics(),
        *,
        layout: str | None = None,
        prefix: str = "",
        fold_scale: bool = False,
        fill_bias: str | None = None,
    ) -> dict[str, NDArray]:
        """A flat dict of NumPy arrays in one of the layouts of the module.

        Args:
          params, semantics: the layer to export.
          layout: its name; default the first that can hold the parameters.
          prefix: goes before every key.
          fold_scale: True: if the layout has another scale, multiplies the queries by the quotient.
          fill_bias: "zeros" fills in biases of zeros that the layout requires and params lack.

        Raises:
          ValueError: no layout can hold the parameters or the behaviour; the message gives the
            reason for each.

        In `flax`, `equinox` and `haiku`, arrays that jit, grad or vmap traces stay traced.
        """
        ...


def described(text: str | None, terms: Mapping[str, str]) -> str:
    """Replaces each key of `terms` in the docstring of a protocol by its value for one module.

    The API reference shows the resulting text.

    >>> described(Import.__call__.__doc__, {"of the module": "torch"}).partition(".")[0]
    'Parameters from a dict of arrays by one of the layouts torch'
    """
    text = text or ""  # None under python -OO, which removes docstrings
    for term, instead in terms.items():
        text = text.replace(term, instead)
    return text


def make_api(
    layouts: Sequence[Layout], by_name: Sequence[Layout] = (), *, traced: bool = False
) -> tuple[Import, Export]:
    """Returns `import_params` and `export_params` for `layouts` and, only if named, `by_name`.

    If the caller names no layout, import uses the first whose required keys are all present, and
    export the first that can hold the parameters. `traced`: also take arrays that JAX traces, and
    return such arrays.
    """
    every, take = (*layouts, *by_name), kept if traced else to_numpy
    names = ", ".join(layout.name for layout in layouts)
    if by_name:
        names += f", or if named {', '.join(layout.name for layout in by_name)}"

    def importer(
        state: Mapping[str, Any],
        *,
        layout: str | None = None,
        num_heads: int | None = None,
        prefix: str = "",
    ) -> tuple[MHAParams, Semantics]:
        if not isinstance(prefix or "", str):
            raise TypeError(f"prefix: expected a string, got {type(prefix).__name__}")
        return transform.import_params(
            layouts if layout is None else every,
            states.flat(state, layouts[0].separator),
            layout=layout,
            num_heads=num_heads,
            prefix=prefix,
            take=take,
        )

    def exporter(
        params: MHAParams,
        semantics: Semantics = Semantics(),
        *,
        layout: str | None = None,
        prefix: str = "",
        fold_scale: bool = False,
        fill_bias: str | None = None,
    ) -> dict[str, NDArray]:
        def export(chosen: Layout) -> dict[str, NDArray]:
            whole, _ = fill.filled(params, chosen, fill_bias)
            own = fold.fold(whole, semantics, chosen) if fold_scale else (whole, semantics)
            return transform.export_params(chosen, *own, prefix=prefix, take=take)

        return first_that_holds(layouts if layout is None else [choose(every, [], layout)], export)

    terms = {"of the module": names, "`.` or `/`": f"`{layouts[0].separator}`"}
    importer.__doc__ = described(Import.__call__.__doc__, terms)
    exporter.__doc__ = described(Export.__call__.__doc__, terms)
    importer.__name__, exporter.__name__ = "import_params", "export_params"
    return importer, exporter


def first_that_holds(
    layouts: Sequence[Layout], export: Callable[[Layout], dict[str, NDArray]]
) -> dict[str, NDArray]:
    """Returns the first export that succeeds; raises ValueError with all reasons if none does."""
    errors = []
    for layout in layouts:
        try:
            return export(layout)
        except ValueError as error:
            errors.append(error)
    if len(set(map(str, errors))) == 1:
        raise errors[0]
    raise ValueError("\n".join(["no layout holds this:", *map(str, errors)]))
