"""The base class of modules whose calls torch.compile and other tracers see as operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _watch

__all__ = ["Traced", "call_traced"]


def _constant(method: Callable[..., Any]) -> Callable[..., Any]:
    """The result is a constant of a graph, and the method is not traced.

    The same as torch.compiler.assume_constant_result, which loads the compiler.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


class Traced:
    """What `_compiled` computes from the settings of a module.

    These are methods because then a graph serves any module with the same settings.
    """

    # Settings under which it is not compiled, and why.
    _uncompiled: tuple[Any, str] = (None, "")

    @_constant
    def _fit(self, settings: Any, *given: Any) -> None:
        from ._compiled import fit

        fit(self, *given)

    @_constant
    def _layout(self, settings: Any) -> Any:
        from ._compiled import layout

        return layout(self, settings)

    @_constant
    def _lower(self, settings: Any, *given: Any) -> Any:
        from ._compiled import lower

        return lower(self, settings, *given)

    @_constant
    def _transformed(self) -> bool:
        """Whether a transform of torch.func is active. Graphs guard that themselves."""
        return bool(_watch.transforming())

    @_constant
    def _not_compiled(self, settings: Any, why: str) -> str:
        from ._compiled import not_compiled

        return not_compiled(self, settings, why)


def call_traced(owner: Any, call: Any, x: Any, extra_inputs: Any, keywords: Any) -> Any:
    """A call of `owner` that torch traces. `call` is the plain one."""
    from ._compiled import traced

    return traced(owner, call, x, extra_inputs, keywords)
