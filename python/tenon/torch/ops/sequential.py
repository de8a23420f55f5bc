"""A list of operations and other modules that run one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import torch

from .. import _watch
from .._context import microbatch
from .._delayed import check_state
from . import _hooks
from ._routes import ANY, Routes
from ._traced import Traced, call_traced
from .fuser import OperationFuser, runs_itself
from .op import BasicOperation, FusedOperation, FusibleOperation, PartOperation, basic_ops

__all__ = ["Sequential"]


class Sequential(torch.nn.Module, Traced):
    """y = opₙ(… op₂(op₁(x))). Adjacent operations are fused, other modules run between them.

    It is created from modules, an iterable of modules, or a dict with names. It supports the list
    operations append, extend, insert, pop, slices, +, +=. Extra inputs go to the ops that take
    them, from left to right. The result is y, or (y, *extra outputs). `op_kwargs` maps a basic op,
    or its index, to keywords of its forward.
    """

    _modules: dict[str, torch.nn.Module]  # type: ignore[assignment]

    def __init__(self, *args: torch.nn.Module | Iterable[Any] | Mapping[str, Any]) -> None:
        super().__init__()
        self._groups: list[tuple[Any, list[int]]] | None = None
        self._grouped: list[torch.nn.Module] = []
        self._called: list[FusibleOperation] = []
        self._hooks = -1
        self._routes: list[Routes] = []  # one per group
        self._num_extra_inputs = 0
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        elif (
            len(args) == 1
            and isinstance(args[0], Iterable)
            and not isinstance(args[0], torch.nn.Module)
        ):
            self.extend(args[0])  # type: ignore[arg-type]
        else:
            self.extend(args)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())

    @overload
    def __getitem__(self, index: int) -> torch.nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        if isinstance(index, slice):
            return type(self)(list(self)[index])
        return self._modules[self._key(index)]

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        key = self._key(index)
        self._check(module)
        self._modules[key] = module

    def __delitem__(self, index: int | slice) -> None:
        kept = list(self)
        del kept[index]
        self._renumber(kept)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        made = type(self)(list(self))
        return made.extend(modules)

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(modules)

    def append(self, module: torch.nn.Module) -> Sequential:
        """Adds a module at the end."""
        self._check(module)
        name = len(self)
        while str(name) in self._modules:
            name += 1
        self.add_module(str(name), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Adds modules at the end."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: torch.nn.Module) -> Sequential:
        """Inserts a module before the one at `index`."""
        self._check(module)
        modules = list(self)
        modules.insert(index, module)
        self._renumber(modules)
        return self

    def pop(self, index: int = -1) -> torch.nn.Module:
        """Removes the module at `index` and returns it."""
        module = self[index]
        del self[index]
        return module

    def _key(self, index: int) -> str:
        keys = list(self._modules)
        try:
            return keys[index]
        except IndexError:
            raise IndexError(f"Sequential: index {index}; it has {len(keys)} modules") from None

    def _renumber(self, modules: list[torch.nn.Module]) -> None:
        self._modules.clear()
        for i, module in enumerate(modules):
            self._modules[str(i)] = module

    @staticmethod
    def _check(module: object) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"Sequential: {module!r} is not a torch.nn.Module; wrap it in an operation or a "
                "module"
            )
        if isinstance(module, PartOperation) and module.parameter_holder() is not module:
            raise ValueError(
                f"Sequential: this {type(module).__name__} is part of a "
                f"{type(module.parameter_holder()).__name__}, which has its parameters; add that "
                f"one, or make a {type(module).__name__} of its own"
            )

    @classmethod
    def of_parts(cls, ops: Iterable[torch.nn.Module]) -> Sequential:
        """A Sequential of the parts of one operation, which owns their parameters."""
        made = cls()
        for i, op in enumerate(ops):
            made.add_module(str(i), op)
        return made

    def groups(self) -> list[tuple[Any, list[int]]]:
        """The groups of modules, with the indices that they cover.

        A group is a fuser of adjacent operations, an operation with hooks that is called as a
        module, or another module.
        """
        modules = list(self._modules.values())
        same = self._groups is not None and modules == self._grouped
        if same and self._hooks == _hooks.given() and not self._called:
            assert self._groups is not None
            return self._groups
        # The counter does not change when a hook is removed.
        self._hooks = _hooks.given()
        called = [op for op in _basic_or_called(modules) if _hooks.why_called(op)]
        if not same or called != self._called:
            groups = _grouped(modules)
            self._routes = [_routes(part) for part, _ in groups]
            self._num_extra_inputs = sum(routes.fed.count(None) for routes in self._routes)
            # Assigned last, because other threads check these to know whether the rest is valid.
            self._called, self._grouped, self._groups = called, modules, groups
        assert self._groups is not None
        return self._groups

    @property
    def _module_groups(self) -> list[Any]:
        """The fusers and the other modules that a call runs. The name is Transformer Engine's."""
        return [part for part, _ in self.groups()]

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """The output, or (output, *extra outputs).

        With is_first_microbatch=True the codes of quantised weights are kept. With False they are
        used: the weights are the same as in that call. None: weights are quantised in every call.
        """
        if is_first_microbatch is not None:
            with microbatch(is_first_microbatch):
                return self.forward(input, *extra_inputs, op_kwargs=op_kwargs)
        if _watch.traced(input):
            kwargs = {"op_kwargs": op_kwargs} if op_kwargs else {}
            return call_traced(self, self._call, input, extra_inputs, kwargs)
        return self._call(input, *extra_inputs, op_kwargs=op_kwargs)

    def _call(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
    ) -> Any:
        groups = self.groups()
        if len(extra_inputs) != self._num_extra_inputs:
            _watch.check("Sequential", input)  # tracers add their own arguments
            raise ValueError(
                f"Sequential: {len(extra_inputs)} extra inputs were given; its ops take "
                f"{self._num_extra_inputs}"
            )
        if len(groups) == 1 and not op_kwargs and not self._called:
            return groups[0][0](input, *extra_inputs)
        by_op = self._kwargs(op_kwargs) if op_kwargs else {}
        x: Any = input
        callers = iter(extra_inputs)
        channels: dict[str, torch.Tensor] = {}
        extra_outputs: list[torch.Tensor] = []
        for (part, _), routes in zip(groups, self._routes, strict=True):
            given = [next(callers) if name is None else channels[name] for name in routes.fed]
            x = part(x, *given, **_keywords(part, by_op))
            if routes.given:
                x, *made = x
                for (name, shown), tensor in zip(routes.given, made, strict=True):
                    if name is not None:
                        channels[name] = tensor
                    if shown:
                        extra_outputs.append(tensor)
        return (x, *extra_outputs) if extra_outputs else x

    def _kwargs(self, op_kwargs: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        by_op: dict[Any, dict[str, Any]] = {}
        inside = {id(op) for part, _ in self.groups() for op in _basic_ops(part)}
        for key, kwargs in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            if not isinstance(op, BasicOperation) or id(op) not in inside:
                raise ValueError(
                    f"Sequential: op_kwargs has {key!r}; it must be a basic operation of this "
                    "Sequential, or its index"
                )
            by_op[op] = kwargs
        return by_op

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        check_state(self, state_dict, prefix)  # of all parts, before anything is copied
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles create their own fusers.
        made = {**self.__dict__, "_groups": None, "_grouped": [], "_called": [], "_routes": []}
        made.pop("_uncompiled", None)
        return made

    __prepare_scriptable__ = _watch.not_scriptable

    def _repr_html_(self) -> str:
        from ._explain import page

        return page(self)

    def extra_repr(self) -> str:
        """The fused ops of the last forward pass, if there was one."""
        if self._groups is None or list(self) != self._grouped:
            return ""
        lines = []
        for part, _ in self._groups:
            if isinstance(part, OperationFuser):
                forward, backward = part.describe()
                lines.append("forward: " + ", ".join(forward))
                lines.append("backward: " + ", ".join(backward))
        return "\n".join(lines)


def _basic_or_called(modules: Iterable[torch.nn.Module]) -> Iterator[FusibleOperation]:
    """The operations that may have hooks."""
    for module in modules:
        if isinstance(module, FusibleOperation):
            yield module
            if isinstance(module, FusedOperation):
                yield from basic_ops(module)


def pieces(op: FusibleOperation) -> list[FusibleOperation]:
    """`op`, or its basic ops if some of them are called as modules."""
    for basic in basic_ops(op) if isinstance(op, FusedOperation) else ():
        why = _hooks.why_called(basic)
        if why and runs_itself(op):
            raise RuntimeError(
                f"{type(op).__name__}: {why.replace('it', type(basic).__name__, 1)}, which is not "
                f"called inside it; give the hook to {type(op).__name__} itself"
            )
        if why:
            return list(basic_ops(op))
    return [op]


def _grouped(modules: list[torch.nn.Module]) -> list[tuple[Any, list[int]]]:
    groups: list[tuple[Any, list[int]]] = []
    run: list[tuple[int, FusibleOperation]] = []
    for i, module in enumerate([*modules, None]):
        if isinstance(module, FusibleOperation):
            called = _hooks.why_called(module)
            run += [(i, op) for op in ([module] if called else pieces(module))]
            continue
        groups += _cut(run)
        run = []
        if module is not None:
            groups.append((module, [i]))
    return groups


def _cut(run: list[tuple[int, FusibleOperation]]) -> list[tuple[Any, list[int]]]:
    """Adjacent operations as one fuser, or as several if some ops are called as modules."""
    parts: list[list[tuple[int, FusibleOperation]]] = [[]]
    for entry in run:
        if _hooks.why_called(entry[1]):
            parts += [[entry], []]
        else:
            parts[-1].append(entry)
    parts = [part for part in parts if part]
    in_parts = [[b for _, op in part for b in basic_ops(op)] for part in parts]
    if len(parts) > 1:
        Routes([op for part in in_parts for op in part])  # raises an error if channels do not match
    groups: list[tuple[Any, list[int]]] = []
    for at, part in enumerate(parts):
        ops, indices = [op for _, op in part], sorted({i for i, _ in part})
        if _hooks.why_called(ops[0]):
            groups.append((ops[0], indices))
            continue
        before = {n for one in in_parts[:at] for op in one for n, _ in op._output_channels.values()}
        after = {n for one in in_parts[at + 1 :] for op in one for n in op._input_channels.values()}
        groups.append((OperationFuser(ops, before, after), indices))
    return groups


def _basic_ops(part: Any) -> list[BasicOperation]:
    if isinstance(part, OperationFuser):
        return part._basic_ops
    return basic_ops(part) if isinstance(part, FusibleOperation) else []


def _routes(part: Any) -> Routes:
    """The extra tensors that `part` takes and returns."""
    if isinstance(part, OperationFuser):
        return part._routes
    return Routes(_basic_ops(part), ANY, ANY)


def _keywords(part: Any, by_op: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """The keywords for a call of `part`."""
    ops = _basic_ops(part)
    if not by_op or not ops:
        return {}
    if isinstance(part, BasicOperation):
        return by_op.get(part, {})
    return {"basic_op_kwargs": [by_op.get(op, {}) for op in ops]}
