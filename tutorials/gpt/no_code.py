"""Reading a checkpoint of `torch.distributed.checkpoint` without running code from it.

``.metadata`` is a pickle file, and each value that is not a tensor is a pickle too. A pickle can call any function that
it names. The checksums of the manifest do not prevent this, because the author of a checkpoint also writes its
checksums. So this reader allows only the classes that ``torch.distributed.checkpoint`` itself writes to ``.metadata``,
and loads the other values with torch's ``weights_only=True``. If a pickle names anything else, such as ``os.system``,
the reader raises an error.

This prevents the known way to run code. Still, resume only from checkpoints that you trust. A checkpoint also
determines what the model computes and how much memory it needs.

*In torch:* ``FileSystemReader`` and ``DefaultLoadPlanner`` load both with the unrestricted ``pickle``.

Spec: SAVE-04.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["Planner", "Reader"]

# All classes that `dcp.save` writes to `.metadata`.
_CLASSES = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(
                f".metadata names {module}.{name}, which is not allowed in a checkpoint. No code was run.  "
                "Do not use this checkpoint unless you trust its source."
            )
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint from a folder, without code from its ``.metadata``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata.

        Raises:
            UnpicklingError: it names a class that is not allowed.
        """
        with self.fs.create_stream(self.path / ".metadata", "rb") as file:  # type: ignore[operator]
            metadata: Metadata = _Unpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(dcp.DefaultLoadPlanner):
    """Copies the loaded values into the state, including values that are not tensors, without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a value that is not a tensor.

        Raises:
            UnpicklingError: its pickle names anything that ``weights_only=True`` refuses.
        """
        loaded = torch.load(value, weights_only=True)
        # Pass the accepted value to the planner, and not the bytes of the file.
        checked = io.BytesIO()
        torch.save(loaded, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
