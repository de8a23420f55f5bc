"""The base classes of operations: context, basic ops (one step), fused ops (several steps)."""

from __future__ import annotations

import abc
import inspect
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from .. import _watch
from .._context import local, microbatch
from .._delayed import State, check_state, own_buffers
from ..recipe import Recipe
from . import _hooks, _kernels, _registry
from ._recipes import Applied, Quantizers
from ._routes import ANY
from ._traced import Traced, call_traced

if TYPE_CHECKING:
    from ..quantizer import Quantizer
    from ..recipe import QuantizerRole
    from .fuser import OperationFuser
    from .sequential import Sequential

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext"]

Gradient = torch.Tensor | None
ExtraOutputs = Sequence[Sequence[torch.Tensor | None]]
BackwardResult = tuple[Gradient, Sequence[Sequence[Gradient]], Sequence[Sequence[Gradient]]]


_NOT_COPIED = (
    *("_own_fuser", "_own_plan", "_parts", "_hooks", "_applied", "_state"),
    *("_uncompiled", "_fitted", "_gradient_amax"),
)
_RECIPES = 16  # that an op remembers

_changes = 0


def changes() -> int:
    """A counter that changes when a setting of an operation changes."""
    return _changes


def count_change() -> None:
    global _changes
    _changes += 1


class OperationContext:
    """The data that one basic op keeps from its forward to its backward pass.

    Any attribute may be set. `saved_tensors` is () until `save_for_backward` is called.
    `requires_grad` is whether this op will run backward. `input_requires_grad` is whether the
    gradient of its input is needed. `prev_op_grad_output_quantizer` is the quantizer of the op that
    will receive that gradient.
    """

    saved_tensors: tuple[Any, ...] = ()
    requires_grad: bool = True
    input_requires_grad: bool = True
    prev_op_grad_output_quantizer: Quantizer | None = None
    # Whether a tensor given to the call requires a gradient, also while none is recorded.
    _wanted: bool = True
    # Parameters computed by a parametrization or a hook: one tensor for the whole call.
    _computed: dict[str, torch.Tensor] | None = None
    # The parameters of the op as read by the call, in the order of `parameter_names`.
    _given: Sequence[Any] | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: Any) -> None:
        """Saves tensors, quantised tensors and None for the backward pass, in this order."""
        self.saved_tensors = tensors

    @property
    def to_save(self) -> tuple[Any, ...]:
        """The tensors given to `save_for_backward`. The name is Transformer Engine's."""
        return self.saved_tensors

    @to_save.setter
    def to_save(self, tensors: tuple[Any, ...] | None) -> None:
        self.saved_tensors = tuple(tensors or ())


class FusibleOperation(torch.nn.Module, Traced, abc.ABC):
    """A module that a `Sequential` may fuse with its neighbours."""

    # All settings as a text, which graphs of torch.compile guard, and the recipe that its state of
    # delayed scaling fits.
    _settings = ""
    _fitted = ""

    def note_settings(self) -> None:
        """Called after a setting has changed."""
        try:
            self.__dict__["_settings"] = self.settings()
        except AttributeError:  # it is being made
            self.__dict__["_settings"] = ""

    def settings(self) -> str:
        """All settings that a call depends on, as a text."""
        return ""

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool:
        """Whether this op consists of several basic ops."""

    def pre_first_fuser_forward(self) -> None:
        """Called once, before the first forward pass."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward pass. `requires_grad`: whether a backward pass follows."""

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer for the input of this op. None: the input is plain."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer for the gradient of the output of this op. None: it is plain."""
        return None

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, ExtraOutputs]:
        """Runs all basic ops forward. Returns (output, the extra outputs of each basic op)."""
        raise NotImplementedError(
            f"{type(self).__name__}: fuser_forward is not defined; define it, or let the op be "
            "used for the backward pass only"
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        """Runs all basic ops backward.

        Returns (input gradient, parameter gradients of each basic op, extra-input gradients of
        each).
        """
        raise NotImplementedError(
            f"{type(self).__name__}: fuser_backward is not defined; define it, or let the op be "
            "used for the forward pass only"
        )

    register_forward_pre_hook = _hooks.counted("register_forward_pre_hook")
    register_forward_hook = _hooks.counted("register_forward_hook")
    register_full_backward_pre_hook = _hooks.counted("register_full_backward_pre_hook")
    register_full_backward_hook = _hooks.counted("register_full_backward_hook")
    register_backward_hook = _hooks.counted("register_backward_hook")

    # A fuser of only this op, for calls outside of a Sequential.
    _own_fuser: OperationFuser | None = None

    def _alone(self) -> OperationFuser:
        fuser = self._own_fuser
        if fuser is None:
            from .fuser import OperationFuser

            fuser = OperationFuser([self], ANY, ANY)
            self.__dict__["_own_fuser"] = fuser
        return fuser

    __prepare_scriptable__ = _watch.not_scriptable

    def _repr_html_(self) -> str:
        from ._explain import page

        return page(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not isinstance(value, torch.nn.Parameter):
            count_change()
            self.note_settings()
            _hooks.count_attribute(name)
            if name in _OWN:
                _registry.count_change()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles create their own fuser.
        return {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        check_state(self, state_dict, prefix)  # of all parts, before anything is copied
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _op_forward(self: Any, ctx: OperationContext, input_: torch.Tensor, **kwargs: Any) -> Any:
    """The output y of the op. Tensors for the backward pass are given to `ctx.save_for_backward`.

    Keywords are prev_op_grad_output_quantizer, next_op_input_quantizer and those of the caller. An
    op without **kwargs gets only the keywords in its signature.
    """
    raise NotImplementedError(f"{type(self).__name__}: define op_forward(ctx, input, **kwargs)")


def _op_backward(self: Any, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
    """dx, or (dx, one gradient or None for each parameter)."""
    raise NotImplementedError(f"{type(self).__name__}: define op_backward(ctx, grad_output)")


class BasicOperation(FusibleOperation, abc.ABC):
    """One step with its parameters: y = op_forward(x), dx = op_backward(dy).

    An op may have `num_extra_inputs` and `num_extra_outputs` tensors in addition to the main one.
    Such an op defines `fuser_forward` and `fuser_backward` instead.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    # The tensors that `op_backward` returns gradients of. These may be parametrized or pruned, and
    # are read with `parameter`. None: the registered parameters, which may be neither.
    parameter_names: tuple[str, ...] | None = None
    # The name of this op in the registry and in chains.
    op_name: str | None = None
    # Whether the plan must know the mode: training or evaluation.
    has_modes = False
    # Whether extra inputs have the shape of the input, so that they may come from the same plan.
    channels_inside = True
    # The recipe of this op. It wins over that of `autocast`.
    recipe: Recipe | None = None
    # The op under each recipe, and its state of delayed scaling.
    _applied: dict[Recipe, Applied] | None = None
    _state: State | None = None

    def __init__(self) -> None:
        super().__init__()
        self._quantizers: dict[str, dict[int, Quantizer | None]] = {
            "forward": {},
            "backward": {},
        }
        # Slot -> channel name. For an output, also whether the caller gets it.
        self._input_channels: dict[int, str] = {}
        self._output_channels: dict[int, tuple[str, bool]] = {}
        self._channels_locked = False

    @property
    def is_fused_op(self) -> bool:
        return False

    def settings(self) -> str:
        own = [name for name in _OWN if name in self.__dict__]
        recipe = self.own_recipe()
        return " ".join(
            [
                f"{type(self).__qualname__} {self.plan_text()}",
                *([f"training={self.training}"] if self.has_modes else []),
                *[f"own {name} {id(self.__dict__[name])}" for name in own],
                *[f"{i}<{name}" for i, name in self._input_channels.items()],
                *[f"{i}>{to}" for i, to in self._output_channels.items()],
                *[f"{key} {type(q).__qualname__}" for key, q in self.given_quantizers().items()],
                *([] if recipe is None else [f"recipe {recipe.text()}"]),
                *(["called"] if _hooks.why_called(self) else []),
                *(["main_grad"] if getattr(self, "accumulate_into_main_grad", False) else []),
            ]
        )

    def num_quantizers(self, mode: str) -> int:
        """The number of quantizers of the op for mode "forward" or "backward"."""
        return 0

    def get_quantizer_roles(self, mode: str) -> Sequence[QuantizerRole] | None:
        """What the quantizers of `mode` are for, as a `CustomRecipe` is told. None: by position."""
        return None

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """Quantizer `index` of "forward" or "backward". None: not quantised."""
        quantizers = self._quantizers.get(mode)
        if quantizers is None or not 0 <= index < self.num_quantizers(mode):
            self._check_quantizer(mode, index)
            return None
        found = quantizers.get(index)
        return self._recipe_quantizer(mode, index) if found is None else found

    def _recipe_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """That of the call that runs, else of the recipe that holds now."""
        call = local.call
        at = None if call is None else call.fuser.places.get(self)
        if call is not None and at is not None:
            made: Quantizer | None = call.moment.quantizers(at).get((mode, index))
            return made
        applied, calibrating = self.applied_now()
        if applied is None or calibrating:
            return None
        applied.fit(self.home())
        return applied.quantizers.get((mode, index))

    def applied_now(self) -> tuple[Applied | None, bool]:
        """The recipe of the call that runs, else the one that holds now; whether it calibrates."""
        call = local.call
        at = None if call is None else call.fuser.places.get(self)
        if call is not None and at is not None:
            bound = call.moment.bound
            return bound.applied[at], bound.calibrating
        active, recipe = local.active, self.own_recipe()
        if recipe is None and active is not None:
            recipe = active.recipe
        applied = None if recipe is None else self.under(recipe)
        return applied, active is not None and active.calibrating

    def calibrate(self, mode: str, index: int, t: Any) -> None:
        """Collects the amax of a tensor that a recipe would quantise, while it calibrates."""
        applied, calibrating = self.applied_now()
        if calibrating and applied is not None and applied.state is not None:
            applied.quantizers[mode, index].calibrate(_kernels.plain(t))

    def given_quantizers(self) -> Quantizers:
        """The quantizers that were set."""
        return {
            (mode, i): q
            for mode, each in self._quantizers.items()
            for i, q in each.items()
            if q is not None
        }

    def own_recipe(self) -> Recipe | None:
        return self.recipe if isinstance(self.recipe, Recipe) else None

    def under(self, recipe: Recipe) -> Applied:
        """The op with the quantizers of a recipe."""
        known = self._applied
        if known is None:
            known = self.__dict__["_applied"] = {}
        if recipe not in known:
            if len(known) >= _RECIPES:
                known.clear()
            known[recipe] = Applied(self, recipe)
        return known[recipe]

    def delayed_state(self) -> State:
        """Its state of delayed scaling. The buffers are made by the first forward pass."""
        found = self._state
        if found is None:
            counts = {mode: self.num_quantizers(mode) for mode in self._quantizers}
            found = self.__dict__["_state"] = State(self, counts)
        return found

    def home(self) -> torch.device:
        """The device of its parameters, else of its buffers, else the default device."""
        for t in (*self.parameter_holder().parameters(), *self.buffers()):
            return t.device
        return torch.empty(0).device

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        state = own_buffers(self)
        for name in state:
            del self._buffers[name]
        result = super()._apply(fn, recurse)
        for name, t in state.items():
            # As integers, so that another dtype of the module does not change it.
            made = fn(t.view(torch.int32))
            moved = made.view(torch.float32) if made.dtype == torch.int32 else t.to(made.device)
            if t.is_meta and not moved.is_meta:
                moved.fill_(0.0 if name.endswith("history") else 1.0)
            self._buffers[name] = moved
        self._renewed_state()
        return result

    def _renewed_state(self) -> None:
        """Called after buffers of its state were replaced."""
        if self._state is not None:
            self._state.recipe, self._state.loaded = None, True
        self.__dict__["_fitted"] = ""
        count_change()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        check_state(self, state_dict, prefix)
        known = own_buffers(self)
        # A state that is not in the checkpoint stays as it is. One in the checkpoint is loaded into
        # buffers of its shape.
        for name in known:
            del self._buffers[name]
        for name, shape in self.delayed_state().shapes(state_dict, prefix).items():
            old = known.pop(name, None)
            same = old is not None and old.shape == shape
            self._buffers[name] = old if same else torch.empty(shape, device=self.home())
        super()._load_from_state_dict(
            *(state_dict, prefix, local_metadata, strict),
            *(missing_keys, unexpected_keys, error_msgs),
        )
        self._buffers.update(known)
        self._renewed_state()

    def quantizer_of(self, mode: str, index: int) -> Quantizer | None:
        """The same. None if the op has fewer quantizers, e.g. because a subclass says so."""
        return self.get_quantizer(mode, index) if index < self.num_quantizers(mode) else None

    def set_quantizer(self, mode: str, index: int, quantizer: Quantizer | None) -> None:
        """Sets or, with None, removes a quantizer of the op. It wins over that of a recipe."""
        self._check_quantizer(mode, index)
        if quantizer is not None and not callable(quantizer):
            raise TypeError(
                f"{type(self).__name__}: the quantizer is a {type(quantizer).__name__}; it must be "
                "one of tenon.torch.quantizer, or None"
            )
        self._quantizers[mode][index] = quantizer
        count_change()
        self.note_settings()

    def _check_quantizer(self, mode: str, index: int) -> None:
        if mode not in self._quantizers:
            raise ValueError(
                f"{type(self).__name__}: quantizer mode {mode!r}; it must be 'forward' or "
                "'backward'"
            )
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise IndexError(
                f"{type(self).__name__}: {mode} quantizer {index}; it has {count}, counted from 0"
            )

    def get_input_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def parameter(self, ctx: OperationContext, name: str) -> torch.Tensor:
        """The parameter `name` in the call of `ctx`, for both passes."""
        if ctx._computed is not None:
            return ctx._computed[name]
        if ctx._given is not None:
            return ctx._given[(self.parameter_names or ()).index(name)]  # type: ignore[no-any-return]
        found: Any = self.parameter_holder()._parameters.get(self.parameter_key(name))
        return getattr(self, name) if found is None else found

    def parameter_holder(self) -> torch.nn.Module:
        """The module that owns the parameters: the op itself, or the module that it is part of."""
        return self

    def parameter_key(self, name: str) -> str:
        """The name of a parameter in its holder."""
        return name

    def plan_text(self) -> str | None:
        """The current text of the op in a chain. None if no plan can run it."""
        return None

    def plan_cols(self, cols: int) -> int:
        """The number of columns of its output in a plan."""
        return cols

    def plan_width(self) -> int | None:
        """The number of columns of its input, if the op defines it."""
        return None

    def plan_lead(self, lead: Sequence[int], cols: int) -> Sequence[int] | None:
        """The leading dimensions of its output in a plan, for an input of shape (*lead, cols).

        None if such an input is invalid.
        """
        return lead

    def extra_fits(self, slot: int, shape: Sequence[int], lead: Sequence[int], cols: int) -> bool:
        """Whether extra input `slot` may have `shape` for an input of shape (*lead, cols)."""
        return tuple(shape) == (*lead, cols)

    def refuse_extra(self, slot: int, shape: Sequence[int], input_shape: Sequence[int]) -> None:
        """Raises an error for an extra input of the wrong shape."""
        raise ValueError(
            f"{type(self).__name__}: the input is {tuple(input_shape)}, extra input {slot} is "
            f"{tuple(shape)}; they must have the same shape"
        )

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of the output for an input of `shape`. None if it is unknown."""
        if not len(shape) or not is_built_in(self):
            return None
        return *shape[:-1], self.plan_cols(shape[-1])

    def set_extra_input_channel(self, index: int, name: str) -> None:
        """Reads extra input `index` from the channel `name` instead of from the caller."""
        self._check_channel("input", index, self.num_extra_inputs, name)
        self._input_channels[index] = name
        self.note_settings()

    def set_extra_output_channel(
        self, index: int, name: str, output_to_caller: bool = True
    ) -> None:
        """Sends extra output `index` to the channel `name`, and optionally to the caller."""
        self._check_channel("output", index, self.num_extra_outputs, name)
        if not isinstance(output_to_caller, bool):
            raise TypeError(
                f"{type(self).__name__}: output_to_caller={output_to_caller!r}; it must be True or "
                "False"
            )
        self._output_channels[index] = (name, output_to_caller)
        self.note_settings()

    def _check_channel(self, kind: str, index: int, count: int, channel: Any) -> None:
        op = type(self).__name__
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{op}: extra {kind} {index!r}; its number is a whole number")
        if not 0 <= index < count:
            raise IndexError(f"{op}: extra {kind} {index}; it has {count}, counted from 0")
        if not isinstance(channel, str):
            raise TypeError(
                f"{op}: the channel of extra {kind} {index} is {channel!r}; its name must be a "
                'string, e.g. "residual"'
            )
        if not channel:
            raise ValueError(
                f"{op}: the channel of extra {kind} {index} has an empty name; give it one, e.g. "
                '"residual"'
            )
        if self._channels_locked:
            raise RuntimeError(
                f"{op}: the channel of extra {kind} {index} cannot change after a call; set "
                "channels before the op is first used"
            )

    # Declared like torch.nn.Module.forward: an op takes only the keywords that it needs.
    op_forward: Callable[..., Any] = _op_forward
    op_backward: Callable[..., Any] = _op_backward

    def call_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """`op_forward` with the keywords in its signature."""
        wanted = keywords(self.op_forward)
        if wanted is None:
            return self.op_forward(
                ctx,
                input_,
                prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
                next_op_input_quantizer=next_op_input_quantizer,
                **kwargs,
            )
        given: dict[str, Any] = {
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
        }
        given = {name: value for name, value in given.items() if name in wanted}
        self.check_kwargs(kwargs)
        return self.op_forward(ctx, input_, **{**given, **kwargs})

    def check_kwargs(self, kwargs: Iterable[str]) -> None:
        """Raises an error for keywords that `op_forward` does not take."""
        taken = keywords(self.op_forward)
        for name in kwargs:
            if taken is not None and name not in taken:
                raise TypeError(
                    f"{type(self).__name__}: op_forward takes no keyword {name!r}; it takes "
                    f"{', '.join(sorted(taken)) or 'none'}"
                )

    def call_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[Gradient, Sequence[Gradient]]:
        """`op_backward`, with its result always as (dx, parameter gradients)."""
        result = self.op_backward(ctx, grad_output)
        if not isinstance(result, (tuple, list)):
            check_result(self, "op_backward", result)
            if any(p.requires_grad for p in self.parameters()):
                raise RuntimeError(
                    f"{type(self).__name__}: op_backward gave a tensor alone, but the op has "
                    "parameters that require gradients; return (grad_input, (a gradient or None "
                    "for each parameter,))"
                )
            return result, ()
        if len(result) != 2:
            raise RuntimeError(
                f"{type(self).__name__}: op_backward gave {len(result)} values; return a tensor, "
                "or (grad_input, parameter gradients)"
            )
        grad_input, grads = result
        if grad_input is not None or ctx.input_requires_grad:
            check_result(self, "op_backward", grad_input)
        return grad_input, tuple(grads)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, ExtraOutputs]:
        self._refuse_extra_tensors("fuser_forward")
        output = self.call_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer,
            next_op_input_quantizer,
            basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> BackwardResult:
        self._refuse_extra_tensors("fuser_backward")
        grad_input, grads = self.call_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grads], [()]

    def _refuse_extra_tensors(self, name: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{type(self).__name__}: it has {self.num_extra_inputs} extra inputs and "
                f"{self.num_extra_outputs} extra outputs, which op_forward and op_backward do not "
                f"see; define {name}"
            )

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Runs only this op. Returns its output, or (output, *extra outputs)."""
        if _watch.traced(input):
            return call_traced(self, self._call, input, extra_inputs, kwargs)
        return self._call(input, *extra_inputs, **kwargs)

    def _call(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        return self._alone()(input, *extra_inputs, basic_op_kwargs=[kwargs])


class PartOperation(BasicOperation):
    """A basic op whose parameters may belong to the module that contains it."""

    _whole: torch.nn.Module | None = None
    _keys: dict[str, str] = {}  # noqa: RUF012

    def move_parameters(self, whole: torch.nn.Module, names: dict[str, str] | None = None) -> None:
        """Moves the parameters of the op to `whole`. `names` are their names there, if others."""
        # Not a submodule: the op is a submodule of it.
        self.__dict__.update(_whole=whole, _keys=names or {})
        for name in self.parameter_names or ():
            whole.register_parameter(self.parameter_key(name), self._parameters.pop(name))

    def parameter_key(self, name: str) -> str:
        return self._keys.get(name, name)

    def parameter_holder(self) -> torch.nn.Module:
        return self if self._whole is None else self._whole

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Its own parameters, or those of its owner. Parents count them only there."""
        if self._whole is None:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        for name in self.parameter_names or ():
            found = self._whole._parameters.get(self.parameter_key(name))
            if found is not None:
                yield f"{prefix}.{name}" if prefix else name, found

    def __getattr__(self, name: str) -> Any:
        whole = self.__dict__.get("_whole")
        if whole is not None and name in (self.parameter_names or ()):
            return getattr(whole, self.parameter_key(name))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._whole is not None and name in (self.parameter_names or ()):
            setattr(self._whole, self.parameter_key(name), value)
        else:
            super().__setattr__(name, value)


class FusedOperation(FusibleOperation):
    """Several basic ops that run as one.

    It has no state. If it defines only `fuser_forward` or only `fuser_backward`, it must return and
    save the same tensors as its basic ops. In the other direction the basic ops run one by one.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        ops = list(basic_ops)
        if not ops:
            raise ValueError(f"{type(self).__name__}: basic_ops is empty; give at least one op")
        self.basic_ops = torch.nn.ModuleList(ops)

    @property
    def is_fused_op(self) -> bool:
        return True

    def get_input_quantizer(self) -> Quantizer | None:
        first = self.basic_ops[0]
        assert isinstance(first, FusibleOperation)
        return first.get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        last = self.basic_ops[-1]
        assert isinstance(last, FusibleOperation)
        return last.get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_ops:
            op.pre_first_fuser_forward()  # type: ignore[operator]

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_ops:
            op.pre_fuser_forward(requires_grad=requires_grad)  # type: ignore[operator]

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Runs the ops. Returns the output, or (output, *extra outputs).

        With is_first_microbatch=True the codes of quantised weights are kept. With False they are
        used: the weights are the same as in that call. None: weights are quantised in every call.
        """
        if is_first_microbatch is not None:
            with microbatch(is_first_microbatch):
                return self.forward(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        if _watch.traced(input):
            kwargs = {} if basic_op_kwargs is None else {"basic_op_kwargs": basic_op_kwargs}
            return call_traced(self, self._call, input, extra_inputs, kwargs)
        return self._call(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)

    def _call(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        if self._hooks != _hooks.given() or self._parts is not None:
            self._find_hooks()
        if self._parts is None:
            return self._alone()(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        by_op = dict(zip(basic_ops(self), basic_op_kwargs or (), strict=False))
        return self._parts(input, *extra_inputs, op_kwargs=by_op)

    # The basic ops as a Sequential, if some of them have hooks.
    _parts: Sequential | None = None
    _hooks = -1

    def _find_hooks(self) -> None:
        from .sequential import Sequential, pieces

        self.__dict__["_hooks"] = _hooks.given()
        ops = pieces(self)
        if ops == [self]:
            self.__dict__["_parts"] = None
        elif self._parts is None:
            self.__dict__["_parts"] = Sequential.of_parts(ops)


def basic_ops(op: FusibleOperation) -> list[BasicOperation]:
    """The basic ops of `op`, or itself if it is one."""
    if isinstance(op, FusedOperation):
        return [b for part in op.basic_ops for b in basic_ops(part)]  # type: ignore[arg-type]
    if not isinstance(op, BasicOperation):
        raise TypeError(
            f"{type(op).__name__} is neither a BasicOperation nor a FusedOperation; derive it from "
            "one of them"
        )
    return [op]


def with_numbers(op: str, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the parameter. Raises an error if it is on the meta device."""
    if parameter.is_meta:
        raise RuntimeError(
            f"{op}: {name} is on the meta device, where it has no numbers; give it memory with "
            "to_empty(device=...) and then values with reset_parameters() or load_state_dict()"
        )
    return parameter


def check_number(op: str, name: str, value: Any) -> None:
    """Raises an error if the argument is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: {name}={value!r}; it must be a number")


def check_size(op: str, name: str, value: Any) -> None:
    """Raises an error if the width is not an integer greater than 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{op}: {name}={value!r}; it must be a whole number")
    if value < 1:
        raise ValueError(f"{op}: {name}={value}; it must be at least 1")


def check_result(op: FusibleOperation, method: str, result: Any) -> None:
    """Raises an error if the result is not a tensor, plain or encoded."""
    if not isinstance(result, torch.Tensor) and not hasattr(result, "dequantize"):
        raise TypeError(
            f"{type(op).__name__}: {method} gave a {type(result).__name__}; it must return a "
            "torch.Tensor"
        )


def keywords(method: Any) -> frozenset[str] | None:
    """The keywords of an op_forward after ctx and input. None if it takes any."""
    return _keywords(getattr(method, "__func__", method), hasattr(method, "__self__"))


@lru_cache(maxsize=1024)
def _keywords(function: FunctionType, bound: bool) -> frozenset[str] | None:
    parameters = list(inspect.signature(function).parameters.values())[3 if bound else 2 :]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


# Methods that an op may override. Such an op is opaque.
_OWN = (
    "op_forward",
    "op_backward",
    "fuser_forward",
    "fuser_backward",
    "get_quantizer",
    "get_input_quantizer",
    "get_grad_output_quantizer",
    "num_quantizers",
    "parameter",
    "_activation_forward_impl",
    "_activation_backward_impl",
)
_HERE = __name__.rpartition(".")[0] + "."


@lru_cache(maxsize=1024)
def _built_in(cls: type) -> bool:
    return all(getattr(cls, name, _built_in).__module__.startswith(_HERE) for name in _OWN)


def is_built_in(op: FusibleOperation) -> bool:
    """Whether `op` runs only code of this package, so that it may join a segment."""
    return _built_in(type(op)) and not any(name in op.__dict__ for name in _OWN)
