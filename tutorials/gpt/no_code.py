"""Reading a checkpoint of `torch.distributed.checkpoint` without running code from it.

``.metadata`` is a pickle, and so is each value that is not a tensor. A pickle can call any function that it names. The
checksums of the manifest do not help: the author of a checkpoint also writes its checksums. So this reader loads only
the classes that ``torch.distributed.checkpoint`` itself writes into ``.metadata``, and torch's ``weights_only=True``
loads the other values. A pickle that names another class, such as ``os.system``, raises an error.

This removes the known way to run code. Resume only from checkpoints that you trust all the same: a checkpoint also
decides what the model computes, and how much memory it takes.

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

# All that `dcp.save` names in `.metadata`.
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
                f".metadata names {module}.{name}, which is no part of a checkpoint. Nothing was run. "
                "Do not use this checkpoint if you do not know where it comes from."
            )
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint from a folder, without code from its ``.metadata``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata.

        Raises:
            UnpicklingError: it names anything else than classes of a checkpoint.
        """
        with self.fs.create_stream(self.path / ".metadata", "rb") as file:  # type: ignore[operator]
            metadata: Metadata = _Unpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(dcp.DefaultLoadPlanner):
    """Puts the loaded values into the state, also those that are not tensors, without running code from them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a value that is not a tensor.

        Raises:
            UnpicklingError: its pickle names anything that ``weights_only=True`` refuses.
        """
        loaded = torch.load(value, weights_only=True)
        # The planner loads the value that the line above has accepted, not the bytes of the file.
        checked = io.BytesIO()
        torch.save(loaded, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
