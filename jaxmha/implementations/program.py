"""Functions of scalars as jaxprs. Modules of JAX that load slowly are imported only when used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from jaxmha.implementations.varying import alike, varies

if TYPE_CHECKING:
    from jax.extend import core

# A `jax.extend.core.ClosedJaxpr`.
Closed: TypeAlias = Any


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Program:
    """A traced function of scalars; static under jit.

    Attributes:
      jaxpr: jaxpr of the function; its constvars are the captured arrays.
      arguments: one letter per argument: b, n, i, j; for a score function, x (the score) first.
      uses: the letters of the arguments that the value may depend on.
      floating: whether each captured array is floating.
    """

    jaxpr: "core.Jaxpr"
    arguments: str
    uses: str
    floating: tuple[bool, ...]

    def __deepcopy__(self, _: object) -> "Program":
        return self  # immutable, so that no copy is needed

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a traced function, such as that of a BlockMask, cannot be pickled: pickle the arrays "
            "that it was made of, and call jaxmha.mods.block_mask again"
        )

    @classmethod
    def of(cls, closed: Closed, arguments: str, floating: tuple[bool, ...]) -> "Program":
        """The program of a closed jaxpr, without its constants, with these attributes."""
        return cls(closed.jaxpr, arguments, _uses(closed.jaxpr, arguments), floating)

    def run(self, arrays: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> jax.Array:
        """Evaluates the function for scalar `arguments`; `arrays`: the captured arrays."""
        from jax.extend import core

        if varies((arrays, arguments)):
            found = _run_alike(self.jaxpr, arrays, arguments)[0]
        else:
            found = core.jaxpr_as_fun(core.ClosedJaxpr(self.jaxpr, arrays))(*arguments)[0]
        # If the function returns a constant, `found` may be a Python scalar.
        aval: Any = self.jaxpr.outvars[0].aval
        return jnp.asarray(found, aval.dtype)

    def grain(self, letter: str) -> int:
        """The size of the blocks of values of the argument `letter` within which the result is
        constant; 1: no such blocks are known."""
        from jaxmha.implementations import grain

        return grain.grain(self.jaxpr, self.arguments.index(letter))

    @property
    def adds_bias(self) -> bool:
        """True for a score function that, by its jaxpr, only adds or subtracts a function of b, n
        and the distance `j - i`."""
        from jaxmha.implementations import distances

        return self.arguments[0] == "x" and distances.adds_bias(self.jaxpr)

    def alike(self, other: "Program") -> bool:
        """True if the jaxprs of two programs are equal, apart from rules of custom derivatives."""
        from jaxmha.implementations import jaxpr_equality

        return jaxpr_equality.equal(self.jaxpr, other.jaxpr, jaxpr_equality.DERIVATIVES)

    def __eq__(self, other: object) -> bool:
        from jaxmha.implementations import jaxpr_equality

        return isinstance(other, Program) and jaxpr_equality.equal(self.jaxpr, other.jaxpr)

    def __hash__(self) -> int:
        from jaxmha.implementations import jaxpr_equality

        return hash(jaxpr_equality.outline(self.jaxpr))


# Primitives that call a jaxpr, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}


def _run_alike(
    jaxpr: "core.Jaxpr", arrays: Sequence[jax.Array], arguments: Sequence[jax.Array]
) -> list[jax.Array]:
    """Evaluates a jaxpr in the `jax.shard_map` of a caller that checks varying mesh axes.

    The jaxpr was traced with scalars that vary over no mesh axis; here, the operands of each
    primitive are cast to vary over the union of their mesh axes. Custom JVP rules are ignored: JAX
    differentiates the primitives of such a function instead.
    """
    from jax.extend import core

    values: dict[Any, Any] = dict(zip(jaxpr.constvars, arrays, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(x: Any) -> Any:
        if isinstance(x, core.Literal):
            return jnp.asarray(x.val, x.aval.dtype)  # type: ignore[attr-defined]
        return values[x]

    for eqn in jaxpr.eqns:
        operands = alike([read(x) for x in eqn.invars])
        called = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if called is not None:
            found = _run_alike(called.jaxpr, called.consts, operands)
        else:
            found = eqn.primitive.bind(*operands, **eqn.params)  # type: ignore[no-untyped-call]
        many = eqn.primitive.multiple_results
        values |= zip(eqn.outvars, found if many else [found], strict=True)
    return [read(x) for x in jaxpr.outvars]


def _uses(jaxpr: "core.Jaxpr", arguments: str) -> str:
    """The letters of the arguments on which the value may depend: equations lead from them to it."""
    from jax.extend import core

    needed: set[Any] = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(x for x in eqn.invars if not isinstance(x, core.Literal))
    variables = zip(arguments, jaxpr.invars, strict=True)
    return "".join(letter for letter, variable in variables if variable in needed)
