"""Typed PRNG keys: their data, and the name of what they are keys of."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is one of typed keys."""
    # A question to numpy first, because it is asked for each leaf, and JAX takes longer.
    return not isinstance(dtype, np.dtype) and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def impl_of_array(keys: jax.Array) -> str:
    """Name of the implementation; `rbg` and `unsafe_rbg` differ in nothing else."""
    return str(jax.random.key_impl(keys))


def impl_of_dtype(dtype: Any) -> str:
    """Name of the implementation of a `key<...>` dtype, as `impl_of_array` gives it."""
    # No public function tells the name of an implementation without a key of it.
    return str(getattr(getattr(dtype, "_impl", None), "name", dtype))


def is_known_impl(keys: jax.Array) -> bool:
    """Whether JAX finds the implementation of these keys by its name."""
    impl = impl_of_array(keys)
    return has_impl(impl) and bool(_dtype_of_impl(impl) == keys.dtype)


def has_impl(impl: str) -> bool:
    """Whether JAX has an implementation of this name."""
    try:
        _dtype_of_impl(impl)
    except ValueError:
        return False
    return True


@functools.cache
def _dtype_of_impl(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@functools.cache
def data_shape(impl: str) -> tuple[int, ...]:
    """The dimensions of the data of one key of an implementation that JAX has."""
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return tuple(data.shape)


def data_of(keys: jax.Array) -> jax.Array:
    """The key data: `uint32`, with the dimensions of one key at the end."""
    with jax.ensure_compile_time_eval():  # Inside of jit it would be a tracer.
        data: jax.Array = jax.random.key_data(keys)
    return data


def wrap(data: jax.Array, impl: str) -> jax.Array:
    """Keys from their data."""
    keys: jax.Array = jax.random.wrap_key_data(data, impl=impl)
    return keys
