"""The part of cloudpickle that Evenly uses; cloudpickle itself has no annotations."""

import pickle
from types import ModuleType
from typing import Any, BinaryIO

class Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, protocol: int | None = None) -> None: ...
    def reducer_override(self, obj: Any) -> Any: ...

def register_pickle_by_value(module: ModuleType) -> None: ...
