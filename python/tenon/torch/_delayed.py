"""The state of delayed scaling: histories and scales in the buffers of an op, and their update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import _lib
from . import _call
from ._context import Active, in_backward, local
from ._quantized import FP8
from .quantizer import Float8Quantizer, updated
from .recipe import DelayedScaling

__all__ = ["check_state", "create_state", "update_scales"]

MODES = ("forward", "backward")


class Epoch:
    """The time between two updates of a state. Forward passes hold the one in which they ran."""

    __slots__ = ("__weakref__", "scales")

    def __init__(self) -> None:
        # The scales of forward tensors, once they have been updated.
        self.scales: torch.Tensor | None = None


class State:
    """The delayed state of one op, for forward tensors and for gradients.

    The tensors are buffers of the op: `<mode>_amax_history` [L, n] and `<mode>_scale` [n].
    """

    def __init__(self, op: torch.nn.Module, counts: dict[str, int]) -> None:
        self.buffers = op._buffers
        self._op = weakref.ref(op)
        self.counts = {mode: n for mode, n in counts.items() if n}
        self.recipe: DelayedScaling | None = None  # the last one that it was fitted to
        self._dtypes: dict[str, str] = {}  # the formats that the scales are for
        self._epoch: Any = None  # a weak reference
        # Whether it is in `local.in_graphs` of some thread, and the autocast of that graph.
        self.in_graphs = False
        self.active: Active | None = None
        self._calls: Any = None
        # Whether the buffers came from elsewhere, e.g. a checkpoint, possibly with amax that wait
        # for an update.
        self.loaded = bool(own_buffers(op))

    def alive(self) -> bool:
        return self._op() is not None

    def enter_graphs(self) -> None:
        """From now on, updates in this thread include it."""
        if not self.in_graphs:
            self.in_graphs = True
            local.in_graphs.states += (self,)

    def shapes(self, state_dict: dict[str, Any], prefix: str) -> dict[str, torch.Size]:
        """The shapes of the buffers in a checked state dict. Empty if it has no state of the op."""
        names = [f"{mode}_{end}" for mode in self.counts for end in _ENDS]
        return {n: state_dict[prefix + n].shape for n in names if prefix + n in state_dict}

    def tensors(self, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(history, scale)"""
        buffers: Any = self.buffers
        return buffers[f"{mode}_amax_history"], buffers[f"{mode}_scale"]

    def epoch(self) -> Epoch:
        found: Epoch | None = self._epoch and self._epoch()
        if found is None:
            found = Epoch()
            self._epoch = weakref.ref(found)
        return found

    def end_epoch(self, scales: torch.Tensor | None = None) -> None:
        """Before the scales change: keeps them for forward passes that still need them."""
        found: Epoch | None = self._epoch and self._epoch()
        self._epoch = None
        if found is not None:
            found.scales = self.tensors("forward")[1].clone() if scales is None else scales

    @torch.inference_mode(False)  # the buffers are for training too
    def fit(self, recipe: DelayedScaling, device: torch.device) -> None:
        """Makes the buffers as the recipe wants them. Existing numbers are kept."""
        length = recipe.amax_history_len
        for mode, n in self.counts.items():
            history = self.buffers.get(f"{mode}_amax_history")
            if history is None:
                op: Any = self._op()
                if list(op.parameter_holder().parameters()):
                    device = op.home()
                zeros = torch.zeros(length, n, dtype=torch.float32, device=device)
                ones = torch.ones(n, dtype=torch.float32, device=device)
                op.register_buffer(f"{mode}_amax_history", zeros)
                op.register_buffer(f"{mode}_scale", ones)
            elif len(history) != length:
                self.buffers[f"{mode}_amax_history"] = _resized(history, length)
            elif history.device != device and not history.is_meta and self._moves():
                for end in _ENDS:
                    name = f"{mode}_{end}"
                    self.buffers[name] = self.buffers[name].to(device)  # type: ignore[union-attr]
        old, self._dtypes = self._dtypes, {m: recipe.fp8_dtype(_TYPES[m]) for m in self.counts}
        if old and old != self._dtypes:
            # The largest number of one format becomes the largest number of the other.
            self.end_epoch()
            for mode, dtype in self._dtypes.items():
                if dtype != old[mode]:
                    self.tensors(mode)[1].mul_(_largest(dtype) / _largest(old[mode]))
        self.recipe = recipe
        self._calls = None
        op = self._op()
        if op is not None:
            op.__dict__["_fitted"] = recipe.text()
            if "backward" in self.counts:
                make_leaf(op)

    def _moves(self) -> bool:
        """Whether the op has no parameters, so that nobody knew its device before a call."""
        op: Any = self._op()
        return not list(op.parameter_holder().parameters())

    def quantizers(self, recipe: DelayedScaling) -> dict[str, list[Float8Quantizer]]:
        """The quantizers of the op. They read and write the buffers."""
        made: dict[str, list[Float8Quantizer]] = {}
        for mode, n in self.counts.items():
            history, scale = self.tensors(mode)
            dtype = recipe.fp8_dtype(_TYPES[mode])
            made[mode] = [
                Float8Quantizer(scale[i : i + 1], history[0, i : i + 1], dtype) for i in range(n)
            ]
        return made

    def on_cpu(self) -> bool:
        return all([self.tensors(mode)[1].is_cpu for mode in self.counts])

    def update_here(self) -> None:
        """Updates in place on the CPU."""
        self.end_epoch()
        buffers, known = self.buffers, self._calls
        if known is None or any([buffers[name] is not t for name, t in known[1]]):
            known = self._calls = self._make_calls()
        for call in known[0]:
            code = _lib.lib.tenon_delayed_update(*call)
            if code:
                _lib.check(code)

    def _make_calls(self) -> tuple[list[tuple[Any, ...]], list[tuple[str, torch.Tensor]]]:
        """The arguments of the updates, and the buffers that they are for."""
        recipe = self.recipe
        assert recipe is not None
        calls = []
        for mode in self.counts:
            history, scale = self.tensors(mode)
            code = _call.DTYPES[FP8[recipe.fp8_dtype(_TYPES[mode])]]
            recent = int(recipe.amax_compute_algo == "most_recent")
            rows = _call.view(history, "history"), _call.view(scale.reshape(1, -1), "scale")
            calls.append((*rows, code, recipe.margin, recent, None))
        return calls, [(n, t) for n, t in self.buffers.items() if n in _NAMES and t is not None]


def raise_amax(target: torch.Tensor, amax: torch.Tensor) -> None:
    """target = max(target, amax), compared as bits, so that NaN is the largest."""
    bits = torch.maximum(target.view(torch.int32), amax.view(torch.int32))
    target.copy_(bits.view(torch.float32))


def make_leaf(op: Any) -> None:
    """Makes the tensor whose gradient is the amax of the gradient of the output of `op`.

    A graph of torch.compile gives the amax of a gradient in this way.
    """
    known = op.__dict__.get("_gradient_amax")
    device = op.home()
    if known is not None and known.device == device:
        return
    leaf = torch.zeros(1, requires_grad=True, device=device)
    of = weakref.ref(op)

    def deliver(leaf: torch.Tensor) -> None:
        op, amax = of(), leaf.grad
        leaf.grad = None
        if op is None or amax is None:
            return
        own = op._quantizers["backward"].get(0)
        target = op._buffers["backward_amax_history"][0, :1] if own is None else own.amax
        with torch.no_grad():
            raise_amax(target, amax.to(target.device))

    leaf.register_post_accumulate_grad_hook(deliver)
    op.__dict__["_gradient_amax"] = leaf


_TYPES = {"forward": "input", "backward": "grad_output"}
_ENDS = ("amax_history", "scale")
_NAMES = tuple(f"{mode}_{end}" for mode in _TYPES for end in _ENDS)


def own_buffers(op: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of the state of an op."""
    return {n: t for n in _NAMES if (t := op._buffers.get(n)) is not None}


def _check_module(told: str, module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{told}: module is a {type(module).__name__}; it must be a torch.nn.Module"
        )


def check_state(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str = "") -> None:
    """Raises an error if `state_dict` has a wrong state of delayed scaling for a part of `module`.

    Nothing is changed. `load_state_dict` of ops and of Sequential calls it before anything is
    copied. Call it first for a model whose outermost module is another one.
    """
    _check_module("check_state", module)
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"check_state: state_dict is a {type(state_dict).__name__}; it must be a dict of names "
            "and tensors"
        )
    for name, op in module.named_modules(remove_duplicate=False):
        find = getattr(op, "delayed_state", None)
        if find is not None:
            begin = prefix + (name + "." if name else "")
            _check_state(type(op).__name__, find().counts, state_dict, begin)


def _check_state(
    told: str, counts: dict[str, int], state_dict: dict[str, Any], prefix: str
) -> None:
    keys = [f"{prefix}{mode}_{end}" for mode in counts for end in _ENDS]
    there = [key in state_dict for key in keys]
    if not any(there):
        return
    if not all(there):
        missing, given = keys[there.index(False)], keys[there.index(True)]
        raise ValueError(
            f"{told}: the state dict has {given!r} but not {missing!r}; give all of "
            f"{', '.join(keys)}, or none of them to keep the state"
        )
    for mode, n in counts.items():
        key = f"{prefix}{mode}_amax_history"
        history, scale = state_dict[key], state_dict[f"{prefix}{mode}_scale"]
        _check_numbers(told, key, history, "[L, n], L ≥ 1", 2, n)
        if not history.is_meta and bool((history < 0).any()):
            raise ValueError(f"{told}: {key!r} has a negative number; amax are at least 0")
        key = f"{prefix}{mode}_scale"
        _check_numbers(told, key, scale, "[n]", 1, n)
        if not scale.is_meta and not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(
                f"{told}: {key!r} is {scale.tolist()}; scales are finite and greater than 0"
            )


def _check_numbers(told: str, key: str, t: Any, kind: str, dims: int, n: int) -> None:
    if not isinstance(t, torch.Tensor) or t.dtype != torch.float32:
        found = str(t.dtype) if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"{told}: {key!r} is {found}; it must be a float32 tensor {kind}")
    if t.dim() != dims or t.shape[-1] != n or not t.numel():
        raise ValueError(
            f"{told}: {key!r} has the shape {tuple(t.shape)}; it must be {kind} with n = {n}"
        )


def _largest(dtype: str) -> float:
    return torch.finfo(FP8[dtype]).max


def _resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """Row 0 and the latest of the other rows, after zeros where it becomes longer."""
    made = history.new_zeros(length, history.shape[1])
    made[0] = history[0]
    kept = min(length, len(history)) - 1
    if kept:
        made[length - kept :] = history[len(history) - kept :]
    return made


def update_scales(module: torch.nn.Module | None = None) -> None:
    """Updates the scales of delayed scaling from the amax of the passes since the last update.

    `autocast` calls it unless update="manual". It updates all states that this thread has used
    since the last update, or those of `module`. Amax are first reduced over the group of their
    autocast.
    """
    if torch.compiler.is_dynamo_compiling():
        _update_in_graph(module)
        return
    if module is not None:
        _check_module("update_scales", module)
    used, chosen = local.used, {}
    if module is None:
        local.used = {}
    else:
        buffers = {id(m._buffers) for m in module.modules()}
    for key, (states, active) in list(used.items()):
        for state in states:
            if state.alive() and (module is None or id(state.buffers) in buffers):
                chosen[id(state)] = (state, active)
        if module is not None and all(id(s.buffers) in buffers for s in states):
            del used[key]
    if local.in_graphs.states:
        local.in_graphs.states = tuple([s for s in local.in_graphs.states if s.alive()])
        # A graph may serve modules that it was not made for, with the same autocast.
        known = next((s.active for s in local.in_graphs.states if s.active is not None), None)
        for state in local.in_graphs.states:
            if module is None or id(state.buffers) in buffers:
                chosen.setdefault(id(state), (state, state.active or known))
    if chosen:
        _update(chosen.values())


def _update_in_graph(module: torch.nn.Module | None) -> None:
    """The same as a part of a graph. It is traced: graphs get the buffers as arguments."""
    if module is not None:
        raise NotImplementedError(
            "update_scales(module) is not compiled; call update_scales(), or call it between graphs"
        )
    for state in local.in_graphs.states:
        recipe = state.recipe
        for mode in state.counts:
            history, scale = state.tensors(mode)
            top = _largest(recipe.fp8_dtype(_TYPES[mode])) * 2.0**-recipe.margin
            rolled, made = updated(
                history, scale.reshape(1, -1), top, recipe.amax_compute_algo == "max"
            )
            scale.copy_(made.reshape(-1))
            history.copy_(rolled)


def _update(chosen: Iterable[tuple[State, Active | None]]) -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        _reduce(chosen)
    batches: dict[Any, list[State]] = {}
    for state, _ in chosen:
        recipe = state.recipe
        if recipe is None:  # its buffers are new: the next forward pass updates it
            continue
        state.loaded = False
        if state.on_cpu():
            state.update_here()
            continue
        for mode in state.counts:
            history, _ = state.tensors(mode)
            rule = recipe.margin, recipe.amax_compute_algo, recipe.fp8_dtype(_TYPES[mode])
            batches.setdefault((mode, history.device, history.shape, rule), []).append(state)
    for (mode, _, _, (margin, algorithm, dtype)), states in batches.items():
        # As many kernels for many states as for one.
        tensors = [state.tensors(mode) for state in states]
        histories, scales = [h for h, _ in tensors], [s for _, s in tensors]
        before = torch.stack(scales)
        if mode == "forward":
            for state, old in zip(states, before.unbind(), strict=True):
                state.end_epoch(old)
        top = _largest(dtype) * 2.0**-margin
        history, scale = updated(
            torch.stack(histories), before.unsqueeze(1), top, algorithm == "max"
        )
        torch._foreach_copy_(histories, list(history.unbind()))
        torch._foreach_copy_(scales, list(scale.squeeze(1).unbind()))


def _reduce(chosen: Iterable[tuple[State, Active | None]]) -> None:
    """The maximum over ranks of the amax since the last update."""
    reduced: dict[Any, list[torch.Tensor]] = {}
    for state, active in chosen:
        group = None if active is None else active.group
        recipe = state.recipe
        if recipe is not None and recipe.reduce_amax:
            if torch.distributed.get_world_size(group) > 1:
                for mode in state.counts:
                    history, _ = state.tensors(mode)
                    reduced.setdefault((group, history.device), []).append(history[0])
    for (group, _), rows in reduced.items():
        # As integers, so that NaN is the largest.
        amax = torch.cat(rows).view(torch.int32)
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
        torch._foreach_copy_(rows, list(amax.view(torch.float32).split([len(r) for r in rows])))


def update_loaded(state: State, active: Active | None) -> None:
    """The update of a state that came from elsewhere, where the autocast could not do it."""
    if local.depth and local.updates and local.grad_at_entry and in_backward() < 0:
        _update([(state, active)])


def create_state(module: torch.nn.Module, recipe: DelayedScaling | None = None) -> None:
    """Makes the buffers of delayed scaling of all ops in `module`, as a first call would.

    So that a checkpoint is loaded in place, e.g. by torch.distributed.checkpoint, and that one
    graph of torch.compile serves all equal layers of a model.
    """
    _check_module("create_state", module)
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"create_state: recipe is a {type(recipe).__name__}; only DelayedScaling has state"
        )
    for op in module.modules():
        find = getattr(op, "under", None)
        if find is not None:
            applied = find(op.own_recipe() or recipe)  # type: ignore[operator]
            if applied.state is not None:
                applied.fit(op.home())  # type: ignore[operator]
                applied.state.enter_graphs()
