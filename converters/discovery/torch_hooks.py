"""Refuses torch modules whose hooks change what they compute, or recompute a parameter."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Methods by which a torch module computes its output.
COMPUTING = ("forward", "__call__", "_wrapped_call_impl", "_call_impl", "_compiled_call_impl")


def refuse_hooks(module: "torch.nn.Module", path: str) -> None:
    """Raises ValueError if a module, or every module of torch, has hooks that run with forward.

    `path`: the module in an expression of Python, for the message.
    """
    import torch

    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if hooks:
        recomputed = list(_recomputed(hooks, path))
        raise ValueError(
            "; ".join(recomputed)
            if len(recomputed) == len(hooks)
            else f"{path} has forward hooks, whose effect is not known: remove them first"
        )
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        raise ValueError(
            "all modules of torch have forward hooks (register_module_forward_hook or "
            "register_module_forward_pre_hook), whose effect is not known: remove them first"
        )


def _recomputed(hooks: tuple[Any, ...], path: str) -> Iterator[str]:
    """Says which parameter each hook of torch.nn.utils computes before forward, and the remedy.

    Other hooks are left out.
    """
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    for hook in hooks:
        if isinstance(hook, BasePruningMethod):
            name, how, remove = hook._tensor_name, "prune", "prune.remove"
        elif isinstance(hook, WeightNorm):
            name, how, remove = hook.name, "weight_norm", "remove_weight_norm"
        elif isinstance(hook, SpectralNorm):
            name, how, remove = hook.name, "spectral_norm", "remove_spectral_norm"
        else:
            continue
        yield (
            f"torch.nn.utils.{how} computes {path}.{name} anew before each call: store its values "
            f"first by torch.nn.utils.{remove}({path}, {name!r})"
        )
