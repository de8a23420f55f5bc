"""Tests that a name keeps the definition that it had when an op was built or traced."""

import ctypes
import threading

import jax
import jax.numpy as jnp
import pytest
import tenon
import tenon.jax as tj
import tenon.torch.functional as F
import torch
from tenon._lib import text_of
from tenon.torch import ops

X = jnp.full((4, 1, 8), 3.0)


def test_jax_backward_is_that_of_its_forward():
    tenon.define("jax_twice", "2*x")
    y, pullback = jax.vjp(lambda x: tj.activation(x, ("jax_twice",)), X)
    tenon.define("jax_twice", "10*x")
    assert (y == 6).all()
    assert (pullback(jnp.ones_like(y))[0] == 2).all()


@pytest.mark.parametrize("key", [("jax_jitted",), "jax_jitted", ("jax_jitted(x) + 0*x",)])
def test_jitted_functions_keep_their_meaning(key):
    tenon.define("jax_jitted", "2*x")
    f = jax.jit(lambda x: tj.activation(x, key))
    g = jax.jit(jax.grad(lambda x: tj.activation(x, key).sum()))
    act = jax.jit(lambda x: tj.cpp_extensions.act_lu(x, key))
    assert (f(X) == 6).all() and (g(X) == 2).all() and (act(X) == 6).all()
    tenon.define("jax_jitted", "10*x")
    assert (f(X) == 6).all() and (g(X) == 2).all() and (act(X) == 6).all()
    fresh = jax.jit(lambda x: tj.activation(x, key))
    assert (fresh(X) == 30).all()


def test_jax_gated_keys():
    tenon.define("jax_gated", "2*x")
    x = jnp.concatenate([X, X], axis=1)
    y, pullback = jax.vjp(lambda x: tj.activation(x, ("jax_gated", "linear")), x)
    tenon.define("jax_gated", "x*x")
    assert (y == 18).all()
    assert (pullback(jnp.ones_like(y))[0] == 6).all()


def test_torch_threads_see_one_definition():
    """Values and gradients use the same definition, also if another thread redefines the name."""
    tenon.define("zz", "1*x")
    stop = threading.Event()

    def redefine():
        k = 0
        while not stop.is_set():
            k += 1
            tenon.define("zz", f"{1 + k % 50}*x")

    mixed = []

    def use():
        x = torch.full((4, 8), 1.0, requires_grad=True)
        for _ in range(150):
            op = ops.Activation("zz")
            for y in (op(x), F.activation("zz", x), ops.Sequential(ops.Bias(8), op)(x), F.zz(x)):
                (dx,) = torch.autograd.grad(y.sum(), x)
                if (dx != y.detach()).any():
                    mixed.append((y.flatten()[0].item(), dx.flatten()[0].item()))

    threads = [threading.Thread(target=use) for _ in range(3)]
    other = threading.Thread(target=redefine)
    other.start()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stop.set()
    other.join()
    assert not mixed


def test_equal_definitions_are_one():
    first = tenon.define("same_again", "x*2 + 1")
    tenon.define("same_again", "x*3")
    assert tenon.define("same_again", "x*2 + 1") == first


def test_a_definition_of_another_process_is_named():
    with pytest.raises(ValueError, match="elsewhere@1234abcd.*define it with the formula"):
        tenon.activation("elsewhere@1234abcd")


def test_texts_that_another_thread_makes_longer():
    texts = iter((b"x" * 2000, b"y" * 3000))
    last = b""

    def grows(buffer, capacity, size):
        nonlocal last
        last = next(texts, last)
        size._obj.value = len(last) + 1
        written = last[: capacity - 1] + b"\0"
        ctypes.memmove(buffer, written, len(written))
        return 0

    assert text_of(grows) == "y" * 3000
