"""Python values live in the manifest and come back exact in type and in every bit."""

import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytree_ckpt as pc
from pytree_ckpt.format import values, wire
from tests.bitwise import assert_same, bits_of


def float_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


VALUES: dict[str, Any] = {
    "true": True,
    "false": False,
    "zero": 0,
    "minus one": -1,
    "step": 700_000 * 3072,
    "beyond int32": 2**31,
    "beyond a double": 2**53 + 1,
    "least int64": -(2**63),
    "greatest int64": 2**63 - 1,
    "beyond int64": 2**63,
    "beyond uint64": 2**64,
    "below int64": -(2**63) - 1,
    "two hundred bits": 2**200,
    "minus two hundred bits": -(2**200),
    "beyond the digits that Python prints": -(7**20_000),
    "learning rate": 1e-8,
    "tenth": 0.1,
    "integral": 3.0,
    "minus zero": -0.0,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "least subnormal": 5e-324,
    "quiet NaN with a payload": float_of(0x7FF8_0000_DEAD_BEEF),
    "signalling NaN": float_of(0x7FF0_0000_0000_0001),
    "negative NaN": float_of(0xFFF8_0000_0000_0000),
    "complex": complex(-0.0, 2.5),
    "complex zero of signs": complex(-0.0, -0.0),
    "complex zero of a sign": complex(0.0, -0.0),
    "complex NaN": complex(float_of(0x7FF8_0000_0000_0007), -math.inf),
    "text": "name",
    "unicode": "é 空 🦆 \u202e \x00 \n ' \" \\",
    "no text": "",
    "longest text": "é" * (1 << 18),
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "text as bytes": b"name",
    "longest bytes": b"\xff" * (1 << 20),
    "none": None,
}


def test_every_kind_of_value_comes_back_exactly(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", VALUES)
    assert_same(pc.load(tmp_path / "ckpt"), VALUES)
    assert_same(pc.load(tmp_path / "ckpt", VALUES), VALUES)
    other = {k: None if v is None else type(v)() for k, v in VALUES.items()}
    assert_same(pc.load(tmp_path / "ckpt", other), VALUES)
    with pc.open(tmp_path / "ckpt") as ckpt:
        assert_same(ckpt.to_numpy(), VALUES)
        for name, value in VALUES.items():
            assert value is None or bits_of(ckpt[name]) == bits_of(value)


@pytest.mark.parametrize("name", ["step", "minus zero", "signalling NaN", "no text", "no bytes"])
def test_a_value_can_be_the_whole_tree(tmp_path: Path, name: str) -> None:
    value = VALUES[name]
    pc.save(tmp_path / "ckpt", value)
    assert bits_of(pc.load(tmp_path / "ckpt")) == bits_of(value)
    assert bits_of(pc.load(tmp_path / "ckpt", type(value)())) == bits_of(value)


bit_patterns = st.integers(0, 2**64 - 1).map(float_of)
any_value = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-(2**2000), 2**2000),
    bit_patterns,
    st.floats(),
    st.builds(complex, bit_patterns, bit_patterns),
    st.text(),
    st.binary(),
)


@given(any_value)
def test_the_wire_form_of_a_value_is_exact_and_deterministic(value: Any) -> None:
    data = wire.encode(values.to_wire(value))
    assert bits_of(values.from_wire(wire.decode(data, what="test"))) == bits_of(value)
    assert wire.encode(values.to_wire(value)) == data


@settings(max_examples=25)
@given(st.lists(any_value, max_size=8))
def test_any_values_survive_a_save_and_a_load(saved: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pc.save(folder, saved)
        assert_same(pc.load(folder), saved)
        assert_same(pc.load(folder, saved), saved)


def test_numpy_scalars_are_not_python_numbers(tmp_path: Path) -> None:
    tree = {
        "python": [True, 1, 1.0, 1 + 0j],
        "numpy": [np.bool_(True), np.int64(1), np.float64(1), np.complex128(1)],
        "0-d": [np.array(True), np.array(1), np.array(1.0), np.array(1 + 0j)],
    }
    pc.save(tmp_path / "ckpt", tree)
    assert_same(pc.load(tmp_path / "ckpt"), tree)
    # A target says which of them is wanted; the number is the same.
    rotated = {"python": tree["numpy"], "numpy": tree["0-d"], "0-d": tree["python"]}
    assert_same(pc.load(tmp_path / "ckpt", rotated), rotated)


# --- a value where the target has another kind ------------------------------------------------

SAVED = {"flag": True, "step": 7, "rate": 0.5, "phase": 1j, "name": "x", "raw": b"x"}
ZERO = {"flag": False, "step": 0, "rate": 0.0, "phase": 0j, "name": "", "raw": b""}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("wanted", ZERO)
def test_a_value_is_not_taken_for_one_of_another_type(
    tmp_path: Path, name: str, wanted: str
) -> None:
    pc.save(tmp_path / "ckpt", {"x": SAVED[name]})
    if name == wanted:
        assert bits_of(pc.load(tmp_path / "ckpt", {"x": ZERO[wanted]})["x"]) == bits_of(SAVED[name])
        return
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", {"x": ZERO[wanted]})
    (mismatch,) = error.value.mismatches
    assert mismatch.path == "x"
    assert mismatch.kind in ("dtype", "kind")
    assert type(SAVED[name]).__name__ in mismatch.text
    assert type(ZERO[wanted]).__name__ in mismatch.text


def test_numbers_are_cast_only_when_that_is_asked_for(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", SAVED | {"big": 2**24 + 1})
    numbers = {"flag": 0, "step": 0.0, "rate": 0j, "big": np.float32(0)}
    with pytest.raises(pc.MismatchError, match="cast=True"):
        pc.load(tmp_path / "ckpt", numbers, partial=True)
    loaded = pc.load(tmp_path / "ckpt", numbers, partial=True, cast=True)
    assert_same(loaded, {"flag": 1, "step": 7.0, "rate": 0.5 + 0j, "big": np.float32(2**24)})
    for wanted in (0.0, np.float32(0), jnp.float32(0)):
        with pytest.raises(pc.MismatchError):
            pc.load(tmp_path / "ckpt", {"phase": wanted}, partial=True, cast=True)
    for wanted in ("", b"", jax.random.key(0)):
        with pytest.raises(pc.MismatchError):
            pc.load(tmp_path / "ckpt", {"step": wanted}, partial=True, cast=True)


IMPOSSIBLE_CASTS: dict[str, tuple[Any, Any]] = {
    "beyond every float": (2**2000, 0.0),
    "beyond every numpy float": (2**2000, np.float64(0)),
    "beyond every device float": (2**2000, jnp.bfloat16(0)),
    "beyond int64": (2**200, np.int64(0)),
    "beyond int32 on a device": (2**200, jnp.int32(0)),
    "NaN is no int": (math.nan, 0),
    "infinity is no int": (math.inf, 0),
    "NaN is no numpy int": (math.nan, np.int32(0)),
    "a numpy NaN is no int": (np.float64(math.nan), 0),
    "an infinite array is no int": (jnp.float32(math.inf), 0),
    "a short NaN is no int": (jnp.bfloat16(math.nan), 0),
    "a short infinity is no int": (np.asarray(math.inf).astype(jnp.bfloat16), 0),
    "four bits have no NaN": (np.float32(math.nan), np.zeros((), jnp.float4_e2m1fn)),
    "four bits have no NaN of Python": (math.nan, np.zeros((), jnp.float4_e2m1fn)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE_CASTS)
def test_a_cast_that_no_number_comes_of_is_refused_by_name(tmp_path: Path, name: str) -> None:
    value, target = IMPOSSIBLE_CASTS[name]
    pc.save(tmp_path / "ckpt", {"n": {"x": value}})
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", {"n": {"x": target}}, cast=True)
    assert [(m.path, m.kind) for m in error.value.mismatches] == [("n/x", "dtype")]


def test_a_cast_that_fails_on_what_was_read_does_not_say_that_the_rest_fits(tmp_path: Path) -> None:
    pc.save(tmp_path, {name: np.float32([math.nan]) for name in "abc"})
    with pytest.raises(pc.MismatchError, match=r"others .* may not have been read") as error:
        pc.load(tmp_path, {name: np.zeros(1, np.int8) for name in "abc"}, cast=True)
    assert "1 of 1" not in str(error.value)


def test_a_short_float_beyond_64_bits_is_cast_to_the_int_that_it_is(tmp_path: Path) -> None:
    pc.save(tmp_path, {"x": jnp.bfloat16(2.0**100)})
    assert_same(pc.load(tmp_path, {"x": 0}, cast=True), {"x": 2**100})


def test_infinity_stands_for_a_float_that_does_not_fit_a_narrower_one(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"a": 1e300, "b": np.float64(-1e300), "c": 1e300, "d": 2**200})
    target = {"a": np.float32(0), "b": jnp.float32(0), "c": jnp.bfloat16(0), "d": np.float16(0)}
    expected = {
        "a": np.float32(np.inf),
        "b": jnp.float32(-np.inf),
        "c": jnp.bfloat16(np.inf),
        "d": np.float16(np.inf),
    }
    assert_same(pc.load(tmp_path / "ckpt", target, cast=True), expected)


def test_a_python_number_loads_into_an_array_that_holds_it_exactly(tmp_path: Path) -> None:
    saved = {"step": 7, "big": 2**31 - 1, "flag": True, "rate": 0.1, "byte": -128}
    pc.save(tmp_path / "ckpt", saved)
    target = {
        "step": jnp.uint8(0),
        "big": np.int32(0),
        "flag": jnp.bool_(False),
        "rate": np.array(0.0),
        "byte": jax.ShapeDtypeStruct((), np.int8),
    }
    expected = {
        "step": jnp.uint8(7),
        "big": np.int32(2**31 - 1),
        "flag": jnp.bool_(True),
        "rate": np.array(0.1),
        "byte": jnp.int8(-128),
    }
    assert_same(pc.load(tmp_path / "ckpt", target), expected)


MISFITS: dict[str, tuple[Any, Any]] = {
    "int32 is too narrow": (2**31, np.int32(0)),
    "int32 on a device is too narrow": (2**31, jnp.int32(0)),
    "uint64 has no sign": (-1, np.uint64(0)),
    "uint64 is too narrow": (2**64, np.uint64(0)),
    "int64 is too narrow": (7**20_000, np.int64(0)),
    "float64 is no int": (2**53 + 1, np.float64(0)),
    "bool is no int": (1, np.bool_(False)),
    "int is no bool": (True, np.int8(0)),
    "float32 has fewer digits": (0.1, np.float32(0)),
    "float32 on a device has fewer digits": (0.1, jnp.float32(0)),
    "int is no float": (0.5, np.int64(0)),
    "complex64 has fewer digits": (1j, np.complex64(0)),
    "a vector of one": (1, np.zeros(1, np.int64)),
    "a matrix of one": (1, np.zeros((1, 1), np.int64)),
    "text is no number": ("1", np.int64(0)),
    "bytes are no array": (b"1", np.zeros(1, np.uint8)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_python_value_is_refused_where_an_array_cannot_be_it(tmp_path: Path, name: str) -> None:
    value, target = MISFITS[name]
    pc.save(tmp_path / "ckpt", {"n": {"x": value}})
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", {"n": {"x": target}})
    assert [m.path for m in error.value.mismatches] == ["n/x"]


def test_an_array_of_one_number_loads_into_a_python_number_of_its_kind(tmp_path: Path) -> None:
    tree = {"i": jnp.int32(-7), "u": np.uint64(2**64 - 1), "f": np.array(0.1), "b": jnp.bool_(True)}
    pc.save(tmp_path / "ckpt", tree)
    loaded = pc.load(tmp_path / "ckpt", {"i": 0, "u": 0, "f": 0.0, "b": False})
    assert_same(loaded, {"i": -7, "u": 2**64 - 1, "f": 0.1, "b": True})
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", {"i": 0.0, "u": False, "f": 0, "b": 0})
    assert [(m.path, m.kind) for m in error.value.mismatches] == [
        ("b", "dtype"),
        ("f", "dtype"),
        ("i", "dtype"),
        ("u", "dtype"),
    ]


def test_an_array_of_one_element_is_not_a_number(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"x": jnp.ones((1,))})
    with pytest.raises(pc.MismatchError, match=r"shape: saved \(1,\), wanted \(\)"):
        pc.load(tmp_path / "ckpt", {"x": 0.0})


# --- values of one process ------------------------------------------------------------------

STATE = {"epoch": 3, "seen": [1, 2, {"a": None, "b": b"\0"}], "rate": 0.1, "on": True, "n": "é"}


def test_the_value_of_a_process_comes_back(tmp_path: Path) -> None:
    tree = {"loader": pc.PerProcess(STATE), "w": np.ones(2), "none": pc.PerProcess(None)}
    pc.save(tmp_path / "ckpt", tree)
    for target in (None, {**tree, "loader": pc.PerProcess(None)}):
        loaded = pc.load(tmp_path / "ckpt", target)
        assert isinstance(loaded["loader"], pc.PerProcess)
        assert loaded["loader"].value == STATE
        assert loaded["none"].value is None
    with pc.open(tmp_path / "ckpt") as ckpt:
        assert ckpt["loader"] == [STATE]


def test_the_value_of_a_process_is_no_other_leaf(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"a": pc.PerProcess(1), "b": 1, "c": jnp.ones(())})
    target = {"a": 1, "b": pc.PerProcess(1), "c": pc.PerProcess(1)}
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", target)
    assert [(m.path, m.kind) for m in error.value.mismatches] == [
        ("a", "kind"),
        ("b", "kind"),
        ("c", "kind"),
    ]


@pytest.mark.parametrize(
    "value",
    [np.ones(2), {1: 2}, {1, 2}, object(), 2**64, [[object()]]],
    ids=["array", "int key", "set", "object", "large int", "object within"],
)
def test_the_value_of_a_process_must_be_plain_data(tmp_path: Path, value: Any) -> None:
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", {"loader": [pc.PerProcess(value)], "w": 1})
    assert [path for path, _ in error.value.leaves] == ["loader/0"]
    assert not (tmp_path / "ckpt").exists()


# --- metadata -------------------------------------------------------------------------------


def test_metadata_comes_back_with_the_manifest(tmp_path: Path) -> None:
    metadata = {"run": "a/b", "config": {"layers": [1, 2], "rate": 1e-4, "": None}, "raw": b"\0"}
    manifest = pc.save(tmp_path / "ckpt", {"w": 1}, metadata=metadata)
    assert manifest.metadata == metadata
    assert pc.read_manifest(tmp_path / "ckpt").metadata == metadata
    with pc.open(tmp_path / "ckpt") as ckpt:
        assert ckpt.manifest.metadata == metadata
    pc.save(tmp_path / "none", {"w": 1})
    assert pc.read_manifest(tmp_path / "none").metadata is None


@pytest.mark.parametrize(
    ("metadata", "where"),
    [
        ({"a": [1, np.ones(2)]}, r"metadata\['a'\]\[1\]"),
        ({"a": {1: 2}}, r"metadata\['a'\]"),
        ({"a": 2**64}, r"metadata\['a'\]"),
        (object(), "metadata"),
    ],
    ids=["array", "int key", "big int", "object"],
)
def test_metadata_that_is_not_plain_data_is_refused_by_place(
    tmp_path: Path, metadata: Any, where: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=where):
        pc.save(tmp_path / "ckpt", {"w": 1}, metadata=metadata)
    assert not (tmp_path / "ckpt").exists()


def test_metadata_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    """What is committed must be readable: nesting, text without a UTF-8 form, reference loops."""
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for metadata in (deep, loop, {"a": "\ud800"}, {"\ud800": 1}):
        with pytest.raises((TypeError, ValueError)):
            pc.save(tmp_path / "ckpt", {"w": 1}, metadata=metadata)
        assert not (tmp_path / "ckpt").exists()
