"""Activation checkpointing in which a recomputation sees the recipe and scales of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint as of_torch

from ._context import local

__all__ = ["checkpoint"]


class _Function:
    """A function that notes what its ops used in the first call. Later calls use the same."""

    def __init__(self, function: Callable[..., Any], tracker: Callable[[], Any] | None) -> None:
        self._function, self._get_tracker = function, tracker
        self._active, self._weights = local.active, local.weights
        self._moments: dict[Any, list[Any]] = {}
        self._left: dict[Any, Iterator[Any]] = {}
        self._random: Any = None
        self.again = False  # whether this is a recomputation

    def append(self, tracker: Any, moment: Any) -> None:
        self._moments.setdefault(tracker, []).append(moment)

    def next(self, tracker: Any) -> Any:
        left = self._left.get(tracker)
        if left is None:
            left = self._left[tracker] = iter(self._moments.get(tracker, ()))
        return next(left, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = local.replay, local.active, local.weights, self._left
        local.replay, self._left = self, {}
        then = None
        if self.again:
            local.active, local.weights = self._active, self._weights
        if self._get_tracker is not None:
            now = self._get_tracker().get_states()
            if self.again:
                self._get_tracker().set_states(self._random)
                then = now
            else:
                self._random = now
        try:
            return self._function(*args, **kwargs)
        finally:
            local.replay, local.active, local.weights, self._left = before
            self.again = True
            if then is not None and self._get_tracker is not None:
                self._get_tracker().set_states(then)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint.checkpoint for functions with quantised ops.

    A recomputation uses the recipe and the scales of its forward pass, also after updates of the
    scales in between, and whether or not an autocast is active.
    """
    if distribute_saved_activations or tp_group is not None:
        raise NotImplementedError(
            "checkpoint: distribute_saved_activations and tp_group are not offered; leave them out"
        )
    noted = _Function(function, get_rng_state_tracker)
    return of_torch.checkpoint(noted, *args, use_reentrant=use_reentrant, **kwargs)
