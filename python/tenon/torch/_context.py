"""What is active in this thread: the recipe, and the promise that weights are unchanged."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from .recipe import Recipe

__all__ = [
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "quantized_model_init",
    "weights_unchanged",
]

# A private function of torch: the number of the backward pass that runs in this thread, or -1.
in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Active:
    """The settings of an `autocast`. Equal settings are the same object."""

    __slots__ = ("__weakref__", "calibrating", "group", "recipe", "text")

    def __init__(self, recipe: Recipe, calibrating: bool, group: Any) -> None:
        self.recipe, self.calibrating, self.group = recipe, calibrating, group
        # The settings as a text, for the guards of compiled graphs.
        self.text = f"{recipe.text()} {calibrating} {None if group is None else id(group)}"


_actives: WeakValueDictionary[Any, Active] = WeakValueDictionary()
by_text: WeakValueDictionary[str, Active] = WeakValueDictionary()


def active_of(recipe: Recipe, calibrating: bool = False, group: Any = None) -> Active:
    known = recipe.__dict__.get("_active")  # faster than the hash of a recipe
    last: Active | None = known and known()
    if last is not None and last.calibrating == calibrating and last.group is group:
        return last
    key = (recipe, calibrating, group)
    found = _actives.get(key)
    if found is None:
        found = _actives[key] = Active(recipe, calibrating, group)
        by_text[found.text] = found
    recipe.__dict__["_active"] = weakref.ref(found)
    return found


class InGraphs:
    """The delayed states that graphs of torch.compile use. A graph may use them at any time."""

    def __init__(self) -> None:
        self.states: tuple[Any, ...] = ()
        # Whether the graph that is traced now updates them. Then it must see new ones.
        self.updating = False


class _Local(threading.local):
    """The state of one thread."""

    active: Active | None
    depth = 0  # of autocasts
    grad_at_entry = True  # whether gradients were on when the outermost one was entered
    updates = True  # whether it updates scales
    # The promise about weights: None (none), False and True (is_first_microbatch), or a block of
    # weights_unchanged.
    weights: Any = None
    # Of quantized_model_init: the recipe, and whether initial values are kept.
    model_init: tuple[Recipe, bool] | None = None
    # The call of a fuser that runs, and the checkpoint that it is in.
    call: Any = None
    replay: Any = None
    # The delayed states that were used since the last update, with their autocast.
    used: dict[Any, tuple[Any, Active | None]]

    in_graphs: InGraphs

    def __init__(self) -> None:
        self.used = {}
        self.in_graphs = InGraphs()
        # torch.compile guards attributes of the object, not of the class.
        self.active = None


local = _Local()


def check_flags(told: str, **flags: Any) -> None:
    """Raises an error for a flag that is no bool, e.g. a recipe in the place of `enabled`."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{told}: {name}={value!r}; it must be True or False (a recipe is given by name)"
            )


def check_recipe(recipe: Any, told: str) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{told}: recipe is a {type(recipe).__name__}; it must be one of tenon.torch.recipe, "
            "e.g. recipe.DelayedScaling()"
        )


class autocast:
    """Within it, the linears of this thread quantise as `recipe` says.

    `recipe=None` is the default recipe of the machine. `calibrating=True` with enabled=False
    computes in high precision and collects the amax of a delayed recipe. On entering the outermost
    autocast with gradients on, the scales of all delayed states that this thread has used since the
    last update are updated, with one reduction over `amax_reduction_group` (None: the default group
    if torch.distributed is initialised). With update="manual" call `update_scales` instead.
    Contexts may be nested; the inner one holds. The backward pass uses what its forward pass used.
    """

    __slots__ = ("_active", "_before", "_entered", "_update")

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        update: str = "auto",
    ) -> None:
        check_flags("autocast", enabled=enabled, calibrating=calibrating)
        if update not in ("auto", "manual"):
            raise ValueError(f"autocast: update={update!r}; it must be 'auto' or 'manual'")
        if recipe is not None:
            check_recipe(recipe, "autocast")
        self._active: Active | None = None
        if enabled or calibrating:
            if recipe is None:
                from ._available import get_default_recipe

                recipe = get_default_recipe()
            self._active = active_of(recipe, calibrating and not enabled, amax_reduction_group)
        self._update = update == "auto"
        self._entered = False
        self._before: Any = None

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError(
                "autocast: this object is entered already; make one for each `with`: "
                "autocast(recipe=recipe)"
            )
        if local.depth == 0:
            grad = torch.is_grad_enabled()
            if grad and self._update and self._active is not None:
                traced = torch.compiler.is_dynamo_compiling()
                if traced or in_backward() < 0:
                    from ._delayed import update_scales

                    update_scales()
                if traced:
                    local.in_graphs.updating = True
            local.grad_at_entry, local.updates = grad, self._update
        self._before = local.active
        self._entered = True
        local.active = self._active
        local.depth += 1

    def __exit__(self, *exception: Any) -> None:
        local.active, self._before = self._before, None
        local.depth -= 1
        if local.depth == 0 and local.in_graphs.updating:
            local.in_graphs.updating = False
        self._entered = False


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> autocast:
    """`autocast` by its older name in Transformer Engine."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


class quantized_model_init:
    """Weights of linears that are made within it are quantised tensors: `recipe` encodes them.

    An optimiser step encodes them again. Under a delayed recipe they have the scale of current
    scaling, since their numbers are known. Without autocast, products read the same codes. With
    `preserve_high_precision_init_val` a weight keeps its initial values on the CPU, e.g. for the
    master weights of an optimiser: weight.get_high_precision_init_val() gives them, and
    weight.clear_high_precision_init_val() drops them.
    """

    __slots__ = ("_before", "_init")

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        keep = preserve_high_precision_init_val
        check_flags("quantized_model_init", enabled=enabled, preserve_high_precision_init_val=keep)
        if recipe is not None:
            check_recipe(recipe, "quantized_model_init")
        elif enabled:
            from ._available import get_default_recipe

            recipe = get_default_recipe()
        self._init = (recipe, preserve_high_precision_init_val) if enabled and recipe else None
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(local.model_init)
        local.model_init = self._init

    def __exit__(self, *exception: Any) -> None:
        local.model_init = self._before.pop()


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """`quantized_model_init` by its older name in Transformer Engine."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


class microbatch:
    """A call with is_first_microbatch."""

    __slots__ = ("_before", "_first")

    def __init__(self, first: bool) -> None:
        if not isinstance(first, bool):
            raise TypeError(f"tenon: is_first_microbatch={first!r}; it must be True, False or None")
        self._first, self._before = first, local.weights

    def __enter__(self) -> None:
        local.weights = self._first

    def __exit__(self, *exception: Any) -> None:
        local.weights = self._before


class weights_unchanged:
    """Promises that no weight changes within it: each is quantised by its first forward pass only.

    Weights are quantised again if a delayed scale changes.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(local.weights)
        # A nested block continues the outer one.
        if local.weights is None or isinstance(local.weights, bool):
            local.weights = object()

    def __exit__(self, *exception: Any) -> None:
        local.weights = self._before.pop()
