"""Arrays on the wire: ids that count upwards and columns of one value are most of all metadata, and need few bytes.

Sealing and opening a message costs time for every byte of it; 1024 rows of a grant are 36 kB plain and 150 bytes so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_PLAIN, _SAME, _RANGE = b"p", b"s", b"r"
SHORT = 4  # arrays up to this long are sent plain: looking at them costs more


def pack(array: npt.NDArray[Any]) -> bytes:
    """One letter, then all values, or the only one, or the first of a range."""
    if len(array) > SHORT:
        first = array[0]
        if array[-1] == first:
            if (array == first).all():
                return _SAME + array[:1].tobytes()
        elif array.dtype.kind == "i" and is_range(array):
            return _RANGE + array[:1].tobytes()
    return _PLAIN + array.tobytes()


def unpack(raw: bytes, dtype: Any, rows: int) -> npt.NDArray[Any]:
    kind, body = raw[:1], raw[1:]
    if kind == _PLAIN:
        array = np.frombuffer(body, dtype)
        if len(array) != rows:
            raise ValueError(f"{len(array)} values came for {rows} rows")
        return array
    value = np.frombuffer(body, dtype)
    if len(value) != 1 or kind not in (_SAME, _RANGE):
        raise ValueError("an array came in a form that is not known")
    if kind == _SAME:
        return np.full(rows, value[0])
    return np.arange(int(value[0]), int(value[0]) + rows, dtype=dtype)


def is_range(array: npt.NDArray[Any]) -> bool:
    """Whether whole numbers count upwards by one: n of them, ascending, from the first to the first plus n - 1."""
    n = len(array)
    return n > 0 and int(array[-1]) - int(array[0]) == n - 1 and (n < 3 or bool((array[1:] > array[:-1]).all()))


def span(index: npt.NDArray[Any]) -> slice | npt.NDArray[Any]:
    """The same index as a slice where it is a range: reading a table by it is then one straight copy."""
    return slice(int(index[0]), int(index[-1]) + 1) if is_range(index) else index


def distinct(array: npt.NDArray[Any]) -> list[int]:
    """The values that occur: mostly one, and then no list of all is made."""
    if len(array) and array[0] == array[-1] and (array == array[0]).all():
        return [int(array[0])]
    return list(set(array.tolist()))
