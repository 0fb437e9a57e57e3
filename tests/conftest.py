"""Eight CPU devices, a deterministic Hypothesis, and the meshes that the tests share."""

import os

# JAX reads both of these once: before anything imports it. Of two equal flags the last one counts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".lstrip()
)

from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest

if TYPE_CHECKING:
    from jax.sharding import Mesh

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.load_profile("ci")


def make_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> "Mesh":
    """Return a mesh of the first devices, in their order, with Auto axes."""
    import jax
    from jax.sharding import AxisType, Mesh

    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, axis_names, axis_types=(AxisType.Auto,) * len(shape))


@pytest.fixture
def mesh_4x2() -> "Mesh":
    return make_mesh((4, 2), ("data", "model"))


@pytest.fixture
def mesh_2x4() -> "Mesh":
    return make_mesh((2, 4), ("data", "model"))


@pytest.fixture
def mesh_8() -> "Mesh":
    return make_mesh((8,), ("data",))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
