"""Records the softmax over keys in a run of a torch model, and inputs and outputs of its layers."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional


class Softmax:
    """One softmax whose result is multiplied with values.

    Attributes:
      time: when it ran, among all calls of the run.
      logits: its input, masks included: `... T S`.
      module: path of the innermost module that ran it.
    """

    def __init__(self, time: int, logits: Any, weights: Any, module: str) -> None:
        self.time, self.logits, self.weights, self.module = time, logits, weights, module
        self.used = False
        self.alone = False  # its module was called alone, without masks
        self.copies: list[Any] = []  # kept, so that no other tensor gets their memory


class Call(NamedTuple):
    """One call of a module."""

    start: int
    end: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _is_pointwise(module: Any) -> bool:
    sizes = getattr(module, "kernel_size", None)
    return isinstance(sizes, tuple) and {*sizes} == {1} and hasattr(module, "weight")


def _tokens(image: Any) -> Any:
    return image.flatten(2).mT


def _parameters(module: Any) -> tuple[tuple[str, int], ...]:
    return tuple((name, id(p)) for name, p in module.named_parameters(remove_duplicate=False))


class Run:
    """The record of one or several runs: softmaxes in order, and calls by path of the module."""

    def __init__(self, model: Any) -> None:
        # A module without parameters, such as a softmax, is a part of the one that calls it.
        # Modules with the same parameters, such as shared layers, have one path.
        first: dict[Any, str] = {}
        self.paths = {
            id(m): first.setdefault(_parameters(m), name)
            for name, m in model.named_modules()
            if any(True for _ in m.parameters())
        }
        self.weights = {
            id(p): name.rpartition(".")[0] for name, p in model.named_parameters() if p.ndim > 1
        }
        self.time = 0
        self.stack: list[tuple[str, int]] = []
        self.softmaxes: list[Softmax] = []
        self.paddings: list[Any] = []  # of tokens, `B S`, which the model was given
        self.narrow: set[str] = set()  # modules with a softmax over one key, which is not compared
        self.calls: dict[str, list[Call]] = {}
        self.pending: dict[int, Softmax] = {}
        self.inside = False

    def tick(self) -> int:
        self.time += 1
        return self.time

    def enter(self, module: Any, _: Any) -> None:
        self.stack.append(
            (self.paths.get(id(module), self.stack[-1][0] if self.stack else ""), self.tick())
        )

    def leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        path, start = self.stack.pop()
        if _is_pointwise(module):  # a linear layer of the features of each place
            args, kwargs = (_tokens(next(iter((*args, *kwargs.values())))),), {}
            output = _tokens(output)
        elif getattr(module, "weight", None) is not None and hasattr(output, "clone"):
            args = tuple(x.clone() if hasattr(x, "clone") else x for x in args)
            output = output.clone()  # an activation may write into it
        if self.paths.get(id(module)) == path:
            self.calls.setdefault(path, []).append(Call(start, self.tick(), args, kwargs, output))

    def forget(self, since: int) -> None:
        """Drops the calls of modules after a time: those of a run that failed."""
        kept = {path: [c for c in calls if c.start <= since] for path, calls in self.calls.items()}
        self.calls = {path: calls for path, calls in kept.items() if calls}

    def add(self, later: "Run") -> None:
        """Adds a later run of the same model."""
        for softmax in later.softmaxes:
            softmax.time += self.time
        self.softmaxes += later.softmaxes
        self.narrow |= later.narrow
        for path, calls in later.calls.items():
            moved = [c._replace(start=c.start + self.time, end=c.end + self.time) for c in calls]
            self.calls.setdefault(path, []).extend(moved)
        self.time += later.time

    def softmax(self, logits: Any, weights: Any) -> None:
        path = self.stack[-1][0] if self.stack else ""
        if logits.ndim < 3 or logits.shape[-1] < 2:
            self.narrow.add(path)
            return
        found = Softmax(self.tick(), logits.detach(), weights, path)
        self.softmaxes.append(found)
        self.pending[weights.untyped_storage().data_ptr()] = found

    def product(self, operands: Any) -> None:
        for one in operands:
            if hasattr(one, "untyped_storage"):
                found = self.pending.get(one.untyped_storage().data_ptr())
                if found is not None:
                    found.used = True


class Watch:
    """The run that is recorded now; None outside a record."""

    run: Run | None = None


def _softmax(watch: Watch, real: Any) -> Any:
    def patched(*args: Any, **kwargs: Any) -> Any:
        if (run := watch.run) is None:
            return real(*args, **kwargs)
        wide = [x for x in args if torch.is_tensor(x) and x.dtype == torch.float64]
        if wide and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        outermost, run.inside = not run.inside, True
        try:
            out = real(*args, **kwargs)
        finally:
            run.inside = not outermost
        given: Any = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if outermost and dim is not None and dim % given.ndim == given.ndim - 1:
            run.softmax(given, out)
        return out

    return patched


def _product(watch: Watch, real: Any) -> Any:
    def patched(*args: Any, **kwargs: Any) -> Any:
        run = watch.run
        for one in args if run is not None else ():
            assert run is not None
            run.product(one if isinstance(one, list | tuple) else (one,))
        return real(*args, **kwargs)

    return patched


def _linear(watch: Watch, real: Any) -> Any:
    """A product with an array of a module stands for a call of the module."""

    def patched(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(input, weight, *args, **kwargs)
        run = watch.run
        path = None if run is None else run.weights.get(id(weight))
        if run is not None and path is not None and all(path != p for p, _ in run.stack):
            start = run.tick()
            run.calls.setdefault(path, []).append(Call(start, run.tick(), (input,), {}, out))
        return out

    return patched


def _copied(watch: Watch, real: Any) -> Any:
    """A copy of weights in another dtype, or times a mask, stands for the weights."""

    def patched(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        run = watch.run
        if run is not None and run.pending and hasattr(out, "untyped_storage"):
            for one in args:
                if hasattr(one, "untyped_storage"):
                    found = run.pending.get(one.untyped_storage().data_ptr())
                    if found is not None:
                        run.pending[out.untyped_storage().data_ptr()] = found
                        found.copies.append(out)
        return out

    return patched


def _sdpa(watch: Watch, real: Any) -> Any:
    def patched(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        names = ("dropout_p", "is_causal", "scale", "enable_gqa")
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        if (run := watch.run) is None:
            return real(query, key, value, attn_mask=attn_mask, **kwargs)
        groups = query.shape[-3] // key.shape[-3] if key.ndim > 2 else 1
        keys = key.repeat_interleave(groups, -3) if groups > 1 else key
        scale = kwargs.get("scale")
        logits = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if kwargs.get("is_causal"):
            seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            logits = logits.masked_fill(~seen, -torch.inf)
        if attn_mask is not None:
            logits = (
                logits.masked_fill(~attn_mask, -torch.inf)
                if attn_mask.dtype == torch.bool
                else logits + attn_mask
            )
        run.softmax(logits, torch.empty(1))
        if run.softmaxes:
            run.softmaxes[-1].used = True
        return real(query, key, value, attn_mask=attn_mask, **kwargs)

    return patched


_COPIES = (
    "masked_fill", "to", "type_as", "type", "float", "double", "__mul__", "mul", "contiguous",
    "clone",
)  # fmt: skip


@contextmanager
def patching() -> Iterator[Watch]:
    """Lets a record see the functions of torch, under every name that a module gave them."""
    watch = Watch()
    wrapped: dict[int, Any] = {}
    with ExitStack() as stack:
        for owner, name, wrap in (
            (functional, "softmax", _softmax),
            (torch, "softmax", _softmax),
            (torch.Tensor, "softmax", _softmax),
            (torch, "matmul", _product),
            (torch, "bmm", _product),
            (torch, "einsum", _product),
            (torch.Tensor, "matmul", _product),
            (torch.Tensor, "bmm", _product),
            (torch.Tensor, "__matmul__", _product),
            (torch, "masked_fill", _copied),
            *((torch.Tensor, name, _copied) for name in _COPIES),
            (functional, "scaled_dot_product_attention", _sdpa),
            (functional, "linear", _linear),
        ):
            real = getattr(owner, name)
            wrapped[id(real)] = made = wrap(watch, real)
            stack.enter_context(mock.patch.object(owner, name, made))
        for module, name, real in _bound(wrapped):
            stack.enter_context(mock.patch.object(module, name, wrapped[id(real)]))
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        yield watch


def _bound(wrapped: Mapping[int, Any]) -> list[tuple[Any, str, Any]]:
    """Names of modules other than torch's that stand for one of these functions."""
    functions = frozenset(wrapped)
    return [
        (module, name, getattr(module, name))
        for path, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not path.startswith("torch.")
        for name in _names(module, functions)
    ]


@cache
def _names(module: ModuleType, functions: frozenset[int]) -> tuple[str, ...]:
    """Names in a module of the functions of these ids, which stay as its import made them."""
    found = list(vars(module).items())
    return tuple(name for name, value in found if id(value) in functions and callable(value))


@contextmanager
def watching(watch: Watch, model: Any) -> Iterator[Run]:
    """Records everything that a model runs inside."""
    from torch.nn.modules import module

    run = watch.run = Run(model)
    with ExitStack() as stack:
        for handle in (
            module.register_module_forward_pre_hook(run.enter),
            module.register_module_forward_hook(run.leave, with_kwargs=True),
        ):
            stack.callback(handle.remove)
        yield run
        run.pending.clear()
    watch.run = None


@contextmanager
def recording(model: Any) -> Iterator[Run]:
    """Records everything that a model runs inside, which is built already."""
    with patching() as watch, watching(watch, model) as run:
        yield run
