"""Replaces modules of torch.nn by operations of Tenon, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _call, ops
from ._delayed import check_state
from .ops import _hooks

__all__ = ["convert"]

Filter = Callable[[str, torch.nn.Module], bool]

# Attributes of a module that its replacement makes itself.
_OWN = {"_parameters", "_modules", "_buffers", "training", "in_features", "out_features", "eps",
        "normalized_shape", "elementwise_affine"}  # fmt: skip


def convert(
    model: torch.nn.Module,
    recipe: Any = None,
    filter: Filter | None = None,
    *,
    log: Callable[[str], Any] | None = print,
) -> torch.nn.Module:
    """Replaces each nn.Linear, nn.LayerNorm and nn.RMSNorm in `model`, and returns it.

    The operations have the same Parameter objects, so optimizers stay valid, and the same names,
    state-dict keys, hooks and mode. Tied modules stay tied. Subclasses are left alone. `recipe` is
    that of the new linears. `filter(name, module)` selects modules. `log` gets a text of what was
    replaced and what was left alone, and why; None: nothing. If `model` itself is such a module,
    the result is its replacement. Converting again changes nothing.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert: model is a {type(model).__name__}; it must be a torch.nn.Module")
    if filter is not None and not callable(filter):
        raise TypeError(f"convert: filter={filter!r}; it must be a function of a name and a module")
    made: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}
    replaced: list[str] = []
    kept: list[str] = []
    # All are made before one is put in place, so that an error changes nothing.
    places = []
    for name, module in model.named_modules(remove_duplicate=False):
        maker = next((m for base, m in _MAKERS.items() if isinstance(module, base)), None)
        if maker is None or isinstance(module, ops.FusibleOperation):
            continue
        told = f"{name or 'the model'}: {type(module).__name__}"
        if id(module) not in made:
            why = _why_not(name, module, filter)
            if why:
                kept.append(f"{told}: {why}")
                continue
            made[id(module)] = module, maker(module, recipe)
        places.append((name, module))
        replaced.append(f"{told} -> ops.{type(made[id(module)][1]).__name__}")
    for module, new in made.values():
        _take_over(module, new)
    root = model
    for name, module in places:
        new = made[id(module)][1]
        if not name:
            root = new
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    if made:
        _hooks.count_attribute("forward")  # hooks came without being registered
        if root is model:
            model.register_load_state_dict_pre_hook(_check_state)
    if log is not None:
        lines = [f"convert: replaced {len(replaced)}, left alone {len(kept)}"]
        lines += [f"  {line}" for line in replaced] + [f"  left alone: {line}" for line in kept]
        log("\n".join(lines))
    return root


def _check_state(
    model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any
) -> None:
    """A wrong delayed state must be found before other parts of the model are loaded."""
    check_state(model, state_dict, prefix)


def _why_not(name: str, module: torch.nn.Module, filter: Filter | None) -> str:
    """Why a module is left alone. "" if it is replaced."""
    if type(module) not in _MAKERS:
        return "a subclass, which may compute something else"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module._modules or module._buffers:
        return "it has modules or buffers of its own"
    wanted = ["weight"] + ["bias"] * (not isinstance(module, torch.nn.RMSNorm))
    optional = ["bias"] * isinstance(module, torch.nn.Linear)
    for parameter in wanted:
        p = module._parameters.get(parameter)
        if p is None:
            if parameter in optional and parameter in module._parameters:
                continue
            computed = isinstance(getattr(module, parameter, None), torch.Tensor)
            return f"its {parameter} is computed" if computed else f"it has no {parameter}"
        if p.dtype not in _call.PLAIN:
            return f"its {parameter} is {p.dtype}, not float32, float16 or bfloat16"
        if type(p) is not torch.nn.Parameter:
            return f"its {parameter} is a {type(p).__name__}"
    others = set(module._parameters) - {"weight", "bias"}
    if others:
        return f"it has a parameter {sorted(others)[0]!r} of its own"
    if not module._parameters["weight"].numel():  # type: ignore[union-attr]
        return "it is empty"
    if filter is not None and not filter(name, module):
        return "by the filter"
    return ""


def _linear(module: Any, recipe: Any) -> ops.Linear:
    options = {} if recipe is None else {"recipe": recipe}
    return ops.Linear(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        device="meta",
        dtype=module.weight.dtype,
        **options,
    )


def _layer_norm(module: Any, recipe: Any) -> ops.LayerNorm:
    return ops.LayerNorm(module.normalized_shape, eps=module.eps, device="meta")


def _rms_norm(module: Any, recipe: Any) -> ops.RMSNorm:
    # None is the epsilon of float32, in which torch computes every dtype that is converted.
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return ops.RMSNorm(module.normalized_shape, eps=eps, device="meta")


_MAKERS: dict[type[torch.nn.Module], Callable[[Any, Any], torch.nn.Module]] = {
    torch.nn.Linear: _linear,
    torch.nn.LayerNorm: _layer_norm,
    torch.nn.RMSNorm: _rms_norm,
}


def _take_over(module: torch.nn.Module, new: torch.nn.Module) -> None:
    """Gives `new` the parameters, hooks, mode and attributes of `module`."""
    new.train(module.training)
    for name in new._parameters:
        new._parameters[name] = module._parameters[name]
    for name, value in module.__dict__.items():
        # The dicts of hooks are the same objects, so that handles of hooks still remove them.
        if name not in _OWN and (("_hook" in name and value) or name not in new.__dict__):
            new.__dict__[name] = value
