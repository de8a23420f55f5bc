"""Which quantizers ops use: those that were set, of their own recipe, or of the context."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..._plan import Format, OpFormats
from .. import _saved
from .._context import Active, in_backward, local
from .._delayed import update_loaded
from ..recipe import DelayedScaling, QuantizerRole, Recipe

if TYPE_CHECKING:
    from .._delayed import Epoch, State
    from .op import BasicOperation

__all__ = ["Applied", "Bound", "Moment", "Quantizers", "Tracker"]

# The tensors of the quantizers of an op, by mode and index.
_TENSORS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
# The same as a plan names them.
PLAN_NAMES = {("forward", 0): "x", ("forward", 1): "w", ("backward", 0): "dy"}
KEYS = {name: key for key, name in PLAN_NAMES.items()}
_MOST = 16  # recipes that an op remembers

Quantizers = dict[tuple[str, int], Any]


class Applied:
    """A recipe on one op."""

    def __init__(self, op: BasicOperation, recipe: Recipe) -> None:
        self.recipe = recipe
        self.state: State | None = None
        self.quantizers: Quantizers = {}
        if isinstance(recipe, DelayedScaling):
            self.state = op.delayed_state()
            return
        for mode in _TENSORS:
            count = op.num_quantizers(mode)
            if mode == "backward" and recipe.backward_override is not None:
                continue
            roles = op.get_quantizer_roles(mode)
            if roles is not None and len(roles) != count:
                raise ValueError(
                    f"{type(op).__name__}: get_quantizer_roles({mode!r}) gave {len(roles)} roles; "
                    f"it has {count} {mode} quantizers"
                )
            for i in range(count):
                tensor = _TENSORS[mode][i] if i < len(_TENSORS[mode]) else f"{mode} {i}"
                role = QuantizerRole(op.op_name or type(op).__name__, tensor, _name(op))
                if roles is not None:
                    role = roles[i]
                made = recipe.make_quantizer(role)
                if made is not None:
                    self.quantizers[mode, i] = made

    def format(self, key: tuple[str, int]) -> Format | None:
        """The format in a plan of a quantizer of a delayed recipe."""
        gradient = "grad_output" if key[0] == "backward" else "input"
        return Format("delayed", self.recipe.fp8_dtype(gradient))

    def fit(self, device: torch.device) -> None:
        """Makes the delayed state and its quantizers, if the state is another recipe's."""
        state, recipe = self.state, self.recipe
        if state is not None and (state.recipe is not recipe or not self.quantizers):
            assert isinstance(recipe, DelayedScaling)
            state.fit(recipe, device)
            made = state.quantizers(recipe)
            self.quantizers = {(m, i): q for m, each in made.items() for i, q in enumerate(each)}


def _name(op: BasicOperation) -> str:
    for part in (op, op.parameter_holder()):
        name = getattr(part, "name", None)
        if isinstance(name, str):
            return name
    return ""


class Bound:
    """The quantizers of a list of ops under one context."""

    def __init__(self, ops: Sequence[BasicOperation], active: Active | None) -> None:
        self.active = active
        self.calibrating = active is not None and active.calibrating
        self.given: list[Quantizers] = []  # by op: those that were set
        self.applied: list[Applied | None] = []
        for op in ops:
            applied = None
            if op.num_quantizers("forward") or op.num_quantizers("backward"):
                recipe = op.own_recipe() or (active.recipe if active is not None else None)
                applied = None if recipe is None else op.under(recipe)
            self.given.append(op.given_quantizers())
            self.applied.append(applied)
        self.on = any(a is not None for a in self.applied)
        # Ops with quantizers, and their formats in a plan.
        self.quantised = [
            i for i in range(len(ops)) if self.given[i] or self.applied[i] is not None
        ]
        self._two_operands = [op.num_quantizers("forward") > 1 for op in ops]
        self.delayed = [a for a in self.applied if a is not None and a.state is not None]
        self.states = [a.state for a in self.delayed if a.state is not None]
        # Whether formats and tensors of quantizers change only by `fit`, and how often they did.
        self.fixed = not any(self.given) and not any(
            a is not None and a.recipe.custom() for a in self.applied
        )
        self.fits = 0
        self.plain = Moment(self, [])

    def formats(self, i: int) -> OpFormats | None:
        """The formats of op `i`. None if a plan does not have them."""
        given, applied = self.given[i], self.applied[i]
        found: dict[str, Format | None] = {}
        if applied is not None and applied.state is not None:
            if self.calibrating:
                return None
            for mode in applied.state.counts:
                for k in range(applied.state.counts[mode]):
                    if (mode, k) in PLAN_NAMES:
                        found[PLAN_NAMES[mode, k]] = applied.format((mode, k))
        known = given if applied is None or self.calibrating else {**applied.quantizers, **given}
        for key, quantizer in known.items():
            made = getattr(quantizer, "plan_format", None)
            found[PLAN_NAMES.get(key, "")] = format_ = made and made()
            if format_ is None:
                return None
        override = None if applied is None else applied.recipe.backward_override
        if override == "high_precision" and self._two_operands[i] and found:
            return None  # a plan multiplies the operands of the forward pass in its backward pass
        return OpFormats(found.get("x"), found.get("w"), found.get("dy"))

    def quantizers(self, i: int) -> Quantizers:
        """The quantizers of op `i`."""
        applied = self.applied[i]
        if applied is None or self.calibrating:
            return self.given[i]
        return {**applied.quantizers, **self.given[i]} if self.given[i] else applied.quantizers

    def fit(self, device: torch.device) -> None:
        """Makes the delayed states fit. Their scales are updated by the next update."""
        for a, state in zip(self.delayed, self.states, strict=True):
            if state.recipe is not a.recipe or not a.quantizers:
                a.fit(device)
                self.fits += 1
            if state.loaded:
                update_loaded(state, self.active)
        local.used[self] = self.states, self.active


def may_be_recomputed() -> bool:
    """Whether this pass without gradients may be that of a reentrant checkpoint."""
    return local.depth > 0 and local.grad_at_entry and not torch.is_grad_enabled()


class Moment:
    """What forward passes use: quantizers, and scales up to the next update."""

    __slots__ = ("__weakref__", "bound", "epochs")

    def __init__(self, bound: Bound, epochs: list[Epoch]) -> None:
        self.bound, self.epochs = bound, epochs

    def current(self) -> bool:
        """Whether no scale was updated since."""
        return all([epoch.scales is None for epoch in self.epochs])

    def same(self, other: Moment) -> bool:
        return self.bound.active is other.bound.active and self.epochs == other.epochs

    def quantizers(self, i: int) -> Quantizers:
        """The quantizers of op `i`, with the scales of this moment."""
        found, applied = self.bound.quantizers(i), self.bound.applied[i]
        if applied is None or applied.state is None or self.bound.calibrating:
            return found
        then = self.epochs[self.bound.delayed.index(applied)].scales
        if then is None:
            return found
        found = dict(found)
        for key, quantizer in found.items():
            if key[0] == "forward" and key not in self.bound.given[i]:
                found[key] = quantizer.copy()
                found[key].scale = then[key[1] : key[1] + 1]
                # This amax was counted by the update.
                found[key].amax = torch.zeros_like(quantizer.amax)
        return found


class Tracker:
    """Finds what a list of ops uses now, and what recomputations of their forward passes use."""

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self.ops = ops
        self._bounds: dict[Active | None, Bound] = {}
        self._seen = -1
        self._on = False  # whether a recipe was ever used
        self._last: Any = None  # weak reference to the last moment
        self._alive: list[Any] = []  # weak references to moments that graphs may hold
        # Moments of forward passes without gradients inside an autocast that was entered with
        # them: reentrant checkpoints recompute such passes, and no graph holds their moments.
        self._pending: deque[Moment] = deque()

    def bound(self, changes: int) -> Bound:
        """The quantizers of the ops in the current context. `changes`: counts settings of ops."""
        if changes != self._seen:
            self._bounds.clear()
            self._seen = changes
        found = self._bounds.get(local.active)
        if found is None:
            if len(self._bounds) >= _MOST:
                self._bounds.clear()
            found = self._bounds[local.active] = Bound(self.ops, local.active)
            self._on = self._on or found.on
        return found

    def now(self, changes: int, device: torch.device) -> Moment:
        """What a forward pass with an input on `device` uses."""
        bound = self.bound(changes)
        if not self._on:
            return bound.plain
        moment: Moment | None = None
        replay = local.replay
        if replay is not None and replay.again:
            moment = replay.next(self)
        elif in_backward() >= 0:
            moment = self._recomputed()
        if moment is not None:
            return moment
        if bound.delayed:
            bound.fit(device)
        moment = self._last and self._last()
        epochs = [state.epoch() for state in bound.states]
        if moment is None or moment.bound is not bound or moment.epochs != epochs:
            moment = Moment(bound, epochs)
            self._last = weakref.ref(moment)
            if len(self._alive) > _MOST:
                self._alive = [m for m in self._alive if m() is not None]
            self._alive.append(self._last)
        if replay is not None:
            replay.append(self, moment)
        elif may_be_recomputed():
            self._wait(moment)
        return moment

    def _wait(self, moment: Moment) -> None:
        pending = self._pending
        if len(pending) == _MOST:
            # The first and the last one tell whether all are the same.
            del pending[1]
        pending.append(moment)

    def _recomputed(self) -> Moment | None:
        """The moment of the forward pass that is recomputed in this backward pass."""
        found = [m for m in [r() for r in self._alive] if m is not None]
        if not found:
            return None
        if any(not m.same(found[0]) for m in found):
            name = " + ".join(type(op).__name__ for op in self.ops)
            raise RuntimeError(
                f"{name}: a forward pass is recomputed, but several are open, under other recipes "
                "or with scales from before and after an update, and it is not known which one it "
                "is; use tenon.torch.checkpoint, or update the scales only when no forward pass is "
                "open: autocast(update='manual') and update_scales()"
            )
        # Other checkpoints recompute under hooks for saved tensors.
        if self._pending and not _saved.hooked():
            self._pending.popleft()
        return found[0]
