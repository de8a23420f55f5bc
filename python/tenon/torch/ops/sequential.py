"""A list of operations and other modules, run one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import torch

from .fuser import OperationFuser
from .op import BasicOperation, FusibleOperation

__all__ = ["Sequential"]


class Sequential(torch.nn.Module):
    """y = opₙ(… op₂(op₁(x))): neighbouring operations are fused, other modules run in between.

    It is made of modules, of an iterable of them, or of a dict with names, and it is a list:
    append, extend, insert, pop, slices, +, +=. Extra inputs go to the ops that take some, from
    left to right; the result is y, or (y, *extra outputs). `op_kwargs` maps a basic op, or its
    index, to keywords of its forward.
    """

    _modules: dict[str, torch.nn.Module]  # type: ignore[assignment]

    def __init__(self, *args: torch.nn.Module | Iterable[Any] | Mapping[str, Any]) -> None:
        super().__init__()
        self._groups: list[tuple[Any, list[int]]] | None = None
        self._grouped: list[torch.nn.Module] = []
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
        """Puts a module before the one at `index`."""
        self._check(module)
        modules = list(self)
        modules.insert(index, module)
        self._renumber(modules)
        return self

    def pop(self, index: int = -1) -> torch.nn.Module:
        """Takes the module at `index` out, and gives it."""
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

    def groups(self) -> list[tuple[Any, list[int]]]:
        """Fusers of neighbouring operations, and other modules, with the indices they cover."""
        modules = list(self._modules.values())
        if self._groups is None or modules != self._grouped:
            groups: list[tuple[Any, list[int]]] = []
            run: list[int] = []
            for i, module in enumerate([*modules, None]):
                if isinstance(module, FusibleOperation):
                    run.append(i)
                    continue
                if run:
                    ops = [modules[j] for j in run]
                    groups.append((OperationFuser(ops), run))  # type: ignore[arg-type]
                    run = []
                if module is not None:
                    groups.append((module, [i]))
            self._groups, self._grouped = groups, modules
            fusers = [part for part, _ in groups if isinstance(part, OperationFuser)]
            self._num_extra_inputs = sum(fuser.num_extra_inputs for fuser in fusers)
        return self._groups

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
    ) -> Any:
        """The output, or (output, *extra outputs)."""
        groups = self.groups()
        if len(extra_inputs) != self._num_extra_inputs:
            raise ValueError(
                f"Sequential: {len(extra_inputs)} extra inputs were given; its ops take "
                f"{self._num_extra_inputs}"
            )
        if len(groups) == 1 and not op_kwargs:
            return groups[0][0](input, *extra_inputs)
        by_op = self._kwargs(op_kwargs) if op_kwargs else None
        x: Any = input
        taken = 0
        extra_outputs: list[torch.Tensor] = []
        for part, _ in groups:
            if not isinstance(part, OperationFuser):
                x = part(x)
                continue
            kwargs = None if by_op is None else [by_op.get(op, {}) for op in part._basic_ops]
            given = extra_inputs[taken : taken + part.num_extra_inputs]
            taken += part.num_extra_inputs
            x = part(x, *given, basic_op_kwargs=kwargs)
            if part.num_extra_outputs:
                extra_outputs.extend(x[1:])
                x = x[0]
        return (x, *extra_outputs) if extra_outputs else x

    def _kwargs(self, op_kwargs: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        by_op: dict[Any, dict[str, Any]] = {}
        fusers = [part for part, _ in self.groups() if isinstance(part, OperationFuser)]
        inside = {id(op) for fuser in fusers for op in fuser._basic_ops}
        for key, kwargs in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            if not isinstance(op, BasicOperation) or id(op) not in inside:
                raise ValueError(
                    f"Sequential: op_kwargs has {key!r}; it must be a basic operation of this "
                    "Sequential, or its index"
                )
            by_op[op] = kwargs
        return by_op

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles build their own fusers.
        return {**self.__dict__, "_groups": None, "_grouped": []}

    def _repr_html_(self) -> str:
        from ._explain import page

        return page(self)

    def extra_repr(self) -> str:
        """What was fused in the last forward, if there was one."""
        if self._groups is None or list(self) != self._grouped:
            return ""
        lines = []
        for part, _ in self._groups:
            if isinstance(part, OperationFuser):
                lines += [f"plan: {name}" for name in part.describe_plans()]
                forward, backward = part.describe()
                lines.append("forward: " + ", ".join(forward))
                lines.append("backward: " + ", ".join(backward))
        return "\n".join(lines)
