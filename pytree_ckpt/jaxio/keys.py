"""Typed random keys: their data, and the name of what they are keys of."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

_KNOWN_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is one of typed keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def impl_of_array(keys: jax.Array) -> str:
    """Name of the implementation; `rbg` and `unsafe_rbg` differ in nothing else."""
    return str(jax.random.key_impl(keys))


def impl_of_dtype(dtype: Any) -> str:
    """Name of the implementation of a `key<...>` dtype, as `impl_of_array` gives it."""
    return _names().get(dtype) or str(dtype)


@functools.cache
def _names() -> dict[Any, str]:
    return {
        jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype: impl
        for impl in _KNOWN_IMPLS
    }


def data_of(keys: jax.Array) -> jax.Array:
    """The key data: `uint32`, with the dimensions of one key at the end."""
    data: jax.Array = jax.random.key_data(keys)
    return data


def wrap(data: jax.Array, impl: str) -> jax.Array:
    """Keys from their data."""
    keys: jax.Array = jax.random.wrap_key_data(data, impl=impl)
    return keys
