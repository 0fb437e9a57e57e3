"""`diff` says all that differs between two checkpoints, and reads no more than it must."""

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pytree_ckpt as pc
from pytree_ckpt.format import dtypes
from pytree_ckpt.plan.diffing import compare_elements, join
from pytree_ckpt.verbs import checkpoint as checkpoint_verb
from tests.conftest import make_mesh


def differences(
    tmp_path: Path, a: Any, b: Any, *, metadata: tuple[Any, Any] = (None, None)
) -> list[tuple[str, str]]:
    for name, tree, own in (("a", a, metadata[0]), ("b", b, metadata[1])):
        pc.save(tmp_path / name, tree, overwrite=True, metadata=own)
    return [(d.path, d.kind) for d in pc.diff(tmp_path / "a", tmp_path / "b").differences]


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "large": rng.standard_normal((1 << 10, 1 << 10)),
        "small": {f"w{n}": rng.integers(0, 99, 7) for n in range(5)},
        "key": jax.random.key(3),
        "none": None,
        "empty": [],
        "step": 7,
        "nan": math.nan,
        "iterator": pc.PerProcess({"position": 12}),
    }


def test_equal_states_are_the_same_whenever_they_were_saved(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", state())
    pc.save(tmp_path / "b", state(), options=pc.SaveOptions(compress="zstd"))
    report = pc.diff(tmp_path / "a", tmp_path / "b")
    assert report.same
    assert report.nbytes_read == 0
    assert report.equal_chunks == pc.read_manifest(tmp_path / "a").num_chunks
    assert "the same" in str(report)


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({"w": 1}, {"w": 1, "b": 2}, [("b", "added")]),
        ({"w": 1, "b": 2}, {"w": 1}, [("b", "removed")]),
        ({"w": [1, 2]}, {"w": (1, 2)}, [("w", "structure")]),
        ({"w": {}}, {"w": []}, [("w", "structure")]),
        ({"w": 1, "n": None}, {"w": 1}, [("n", "structure")]),
        ({"w": np.zeros(3)}, {"w": np.zeros(4)}, [("w", "shape")]),
        ({"w": np.zeros(3)}, {"w": np.zeros(3, np.float32)}, [("w", "dtype")]),
        ({"w": np.zeros(3)}, {"w": 0.0}, [("w", "kind")]),
        ({"w": np.zeros(3)}, {"w": np.ones(3)}, [("w", "values")]),
        ({"w": np.zeros(3)}, {"w": -np.zeros(3)}, [("w", "values")]),
        ({"w": 1}, {"w": True}, [("w", "values")]),
        ({"w": 1}, {"w": 1.0}, [("w", "values")]),
        ({"w": 10**5000}, {"w": 10**5000 + 1}, [("w", "values")]),
        ({"w": np.float64(0)}, {"w": np.zeros(())}, [("w", "kind")]),
        ({"k": jax.random.key(0)}, {"k": jax.random.key(1)}, [("k", "values")]),
        ({"p": pc.PerProcess(1)}, {"p": pc.PerProcess(2)}, [("p", "values")]),
        ({"p": pc.PerProcess(1)}, {"p": 1}, [("p", "kind")]),
    ],
)
def test_a_difference_is_named(
    tmp_path: Path, a: Any, b: Any, found: list[tuple[str, str]]
) -> None:
    assert differences(tmp_path, a, b) == found
    assert differences(tmp_path, a, a) == []


def test_another_implementation_of_keys_is_another_dtype(tmp_path: Path) -> None:
    a, b = ({"k": jax.random.key(0, impl=impl)} for impl in ("rbg", "unsafe_rbg"))
    assert differences(tmp_path, a, b) == [("k", "dtype")]


def test_metadata_is_compared_entry_by_entry(tmp_path: Path) -> None:
    a, b = {"run": 1, "lr": 0.1, "old": None}, {"run": 1, "lr": 0.2, "new": 3}
    assert differences(tmp_path, {"w": 1}, {"w": 1}, metadata=(a, b)) == [
        ("metadata['lr']", "metadata"),
        ("metadata['old']", "metadata"),
        ("metadata['new']", "metadata"),
    ]


def sharded(array: np.ndarray, shape: tuple[int, ...], *spec: str | None) -> jax.Array:
    mesh = make_mesh(shape, ("x", "y")[: len(shape)])
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def test_another_layout_is_a_sharding_and_the_values_are_compared_all_the_same(
    tmp_path: Path,
) -> None:
    rows = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    changed = rows.copy()
    changed[700, 3] -= 8
    pc.save(tmp_path / "a", {"w": sharded(rows, (8,), "x")})
    pc.save(tmp_path / "b", {"w": sharded(rows, (2, 4), None, "y")})
    pc.save(tmp_path / "c", {"w": sharded(changed, (2, 4), None, "y")})
    same = pc.diff(tmp_path / "a", tmp_path / "b").differences
    assert [(d.path, d.kind) for d in same] == [("w", "sharding")]
    _, values = pc.diff(tmp_path / "a", tmp_path / "c").differences
    assert values.values is not None
    assert (values.values.count, values.values.max_abs, values.values.at) == (1, 8.0, (700, 3))


def test_only_chunks_whose_digests_differ_are_read(tmp_path: Path) -> None:
    rows = np.zeros((8, 1 << 18), np.float32)
    changed = rows.copy()
    changed[6, 5] = 2.5
    pc.save(tmp_path / "a", {"w": sharded(rows, (8,), "x"), "small": np.arange(9)})
    pc.save(tmp_path / "b", {"w": sharded(changed, (8,), "x"), "small": np.arange(9)})
    report = pc.diff(tmp_path / "a", tmp_path / "b")
    (found,) = report.differences
    assert str(found) == "w  values: 1 element differs, by at most 2.5 at [6, 5]"
    assert report.nbytes_read == 2 * rows.nbytes // 8
    assert report.equal_chunks == 8


def test_without_a_common_digest_all_is_read(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", state())
    pc.save(tmp_path / "b", state(), options=pc.SaveOptions(digest="xxh3_128"))
    report = pc.diff(tmp_path / "a", tmp_path / "b")
    assert report.same
    assert report.equal_chunks == 0
    assert report.nbytes_read == 2 * pc.read_manifest(tmp_path / "a").nbytes


def test_a_rounded_copy_differs_in_dtype_and_by_how_much(tmp_path: Path) -> None:
    exact = np.linspace(0, 1, 10_000, dtype=np.float32)
    rounded = exact.astype(ml_dtypes.bfloat16)
    pc.save(tmp_path / "a", {"w": exact})
    pc.save(tmp_path / "b", {"w": rounded})
    dtype, values = pc.diff(tmp_path / "a", tmp_path / "b").differences
    assert (dtype.kind, dtype.a, dtype.b) == ("dtype", "float32", "bfloat16")
    gaps = np.abs(exact.astype(np.float64) - rounded.astype(np.float64))
    assert values.values is not None
    assert values.values.max_abs == gaps.max()
    assert values.values.count == (gaps > 0).sum()


def test_a_damaged_chunk_that_must_be_read_is_damage(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", {"w": np.zeros((512, 1024))})
    pc.save(tmp_path / "b", {"w": np.ones((512, 1024))})
    (file,) = (tmp_path / "b").glob("data-*/arrays/w/c.*")
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(pc.IntegrityError) as caught:
        pc.diff(tmp_path / "a", tmp_path / "b")
    assert caught.value.damage[0].path == "w"


def test_small_arrays_are_read_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("a", 0), ("b", 1)):
        pc.save(tmp_path / name, {f"w{n}": np.full(5, value) for n in range(200)})
    calls = []
    read = checkpoint_verb.Checkpoint.read_boxes

    def counting(self: Any, wanted: Any) -> Any:
        calls.append(len(wanted))
        return read(self, wanted)

    monkeypatch.setattr(checkpoint_verb.Checkpoint, "read_boxes", counting)
    assert len(pc.diff(tmp_path / "a", tmp_path / "b").differences) == 200
    assert calls == [200, 200]


def test_diff_imports_no_jax(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", {"w": np.zeros(5)})
    pc.save(tmp_path / "b", {"w": np.ones(5)})
    code = (
        "import sys, pytree_ckpt as pc\n"
        f"report = pc.diff({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r})\n"
        "print(report.same, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """In a process of its own: 128 MiB differ in each element, with a bound of 16 MiB."""
    for name, value in (("a", 0), ("b", 1)):
        pc.save(tmp_path / name, {"w": np.full((32, 1 << 20), value, np.float32)})
    code = (
        "import resource, pytree_ckpt as pc\n"
        "import pytree_ckpt.store.reading\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"pc.diff({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r},\n"
        "        options=pc.LoadOptions(max_inflight_bytes=16 << 20))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    scale = 1 if sys.platform == "darwin" else 1 << 10
    assert int(done.stdout) * scale < 128 << 20


# --- elements -------------------------------------------------------------------------------------

NUMBERS = ("bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "complex64")


@given(st.sampled_from(NUMBERS), st.data())
def test_elements_differ_as_numpy_says(name: str, data: st.DataObject) -> None:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)
    shape = data.draw(shapes)
    a, b = (data.draw(hnp.arrays(name, shape)) for _ in range(2))
    found = compare_elements(a, b, start=(0,) * a.ndim, are_numbers=True)
    unlike = [at for at in np.ndindex(shape) if a[at].tobytes() != b[at].tobytes()]
    assert (0 if found is None else found.count) == len(unlike)
    if found is None:
        return
    assert found.at in unlike
    gaps = {at: gap(a[at].item(), b[at].item()) for at in unlike}
    # A NaN is worse than an infinity.
    worst = max(gaps.values(), key=lambda g: (math.isnan(g), 0.0 if math.isnan(g) else g))
    assert found.max_abs is not None
    np.testing.assert_allclose(found.max_abs, worst, rtol=1e-12)
    np.testing.assert_allclose(gaps[found.at], worst, rtol=1e-12)


def gap(a: complex, b: complex) -> float:
    """The difference of two Python numbers, exact for ints."""
    if a == b or (a != a and b != b):
        return 0.0
    return float(abs(a - b))


NEAR = [s * (1 << bits) + by for s in (1, -1) for bits in (0, 11, 53, 63) for by in (-1, 0, 1)]


def elements(name: str) -> list[Any]:
    """Numbers of a dtype that are equal to those of another, or almost."""
    low, high = dtypes.int_limits(name) if "int" in name else (-math.inf, math.inf)
    beside = [math.nan, math.inf, 0.1] if dtypes.kind_of(name) in ("float", "complex") else []
    with np.errstate(over="ignore"):
        return np.array([n for n in NEAR if low <= n <= high] + beside, name).tolist()


@pytest.mark.parametrize(("name", "other"), list(itertools.permutations(NUMBERS, 2)))
def test_numbers_of_two_dtypes_differ_as_python_says(name: str, other: str) -> None:
    pairs = list(itertools.product(elements(name), elements(other)))
    a, b = zip(*pairs, strict=True)
    found = compare_elements(np.array(a, name), np.array(b, other), start=(0,), are_numbers=True)
    unlike = [x != y and not (x != x and y != y) for x, y in pairs]
    assert found is not None
    assert found.count == sum(unlike)
    assert unlike[found.at[0]]


@pytest.mark.parametrize("name", [n for n in dtypes.names() if n not in ("bool", "uint1")])
def test_every_dtype_is_compared(name: str) -> None:
    a = np.zeros(4, dtypes.dtype_of(name))
    b = a.copy()
    b[2] = 1 if name not in ("int1", "int2", "int4") else -1
    gap = abs(complex(b[2]) - complex(a[2]))
    found = compare_elements(a, b, start=(0,), are_numbers=True)
    assert found is not None
    assert (found.count, found.max_abs, found.at) == (1, gap, (2,))


def test_a_nan_that_meets_a_number_is_the_worst_difference() -> None:
    a, b = np.array([0.0, np.nan, 1.0]), np.array([np.inf, 5.0, 1.0])
    found = compare_elements(a, b, start=(10,), are_numbers=True)
    assert found is not None
    assert math.isnan(found.max_abs or 0)
    assert (found.count, found.at) == (2, (11,))
    part = compare_elements(a[:1], b[:1], start=(0,), are_numbers=True)
    for both in (join(part, found), join(found, part)):
        assert both is not None
        assert (both.count, both.at) == (3, (11,))
