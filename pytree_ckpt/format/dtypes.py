"""The dtypes that a checkpoint can hold, by name, and how Zarr stores each.

The names are numpy's and ml_dtypes'. A dtype that TensorStore has no type for, and one whose
elements are smaller than a byte, is stored as the bytes that it has in memory: one `uint8` for
each element. So what is hashed, what is stored and what is in memory are the same bytes.
"""

import ml_dtypes
import numpy as np

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_EXTENDED_STORED_AS_SUCH = (
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz"),
)
_STORED_AS_BYTES = (
    *("float8_e3m4", "float8_e4m3", "float8_e8m0fnu"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
)

_BY_NAME: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in _NATIVE},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in _EXTENDED_STORED_AS_SUCH + _STORED_AS_BYTES
        if hasattr(ml_dtypes, name)
    },
}
_NAME_OF: dict[np.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}


def names() -> tuple[str, ...]:
    """Every dtype name that can be stored with the ml_dtypes that is installed."""
    return tuple(_BY_NAME)


def is_known(name: str) -> bool:
    """Whether this release and the installed ml_dtypes have the dtype."""
    return name in _BY_NAME


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype (little-endian) with this name.

    Raises:
        KeyError: No such dtype, or the installed ml_dtypes is too old to have it.
    """
    return _BY_NAME[name]


def name_of(dtype: np.dtype) -> str | None:
    """The name of a numpy dtype of either byte order, or None if it cannot be stored."""
    return _NAME_OF.get(dtype.newbyteorder("=") if dtype.byteorder == ">" else dtype)


def zarr_dtype(name: str) -> str:
    """The Zarr `data_type` under which elements of this dtype are stored."""
    return "uint8" if name in _STORED_AS_BYTES else name


def storage_dtype(name: str) -> np.dtype:
    """The numpy dtype in which elements of this dtype are handed to and taken from TensorStore.

    TensorStore reads no bool that is neither 0 nor 1, and memory that nobody has written to may
    have one.
    """
    return _BY_NAME["uint8" if name == "bool" else zarr_dtype(name)]


def kind_of(name: str) -> str:
    """One of "bool", "int", "float", "complex"."""
    if name == "bool":
        return "bool"
    if name.startswith(("int", "uint")):
        return "int"
    return "complex" if name.startswith("complex") else "float"


def has_nan(name: str) -> bool:
    """Whether a NaN has a place in the dtype, be it of floats or of other numbers."""
    return name not in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")


def int_limits(name: str) -> tuple[int, int]:
    """Least and greatest value of an integer dtype.

    Example:
        >>> int_limits("int4"), int_limits("uint8")
        ((-8, 7), (0, 255))
    """
    bits = int("".join(c for c in name if c.isdigit()))
    if name.startswith("u"):
        return 0, (1 << bits) - 1
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
