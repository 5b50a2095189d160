"""A wrapper that doesn't show in names: ``weight``, not ``module.weight``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    _IncompatibleKeys,  # pyright: ignore[reportPrivateUsage] - hooks are promised exactly this type
)

from evenly.checkpoint import clean_keys, key_cleaner

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping


class CleanNames(nn.Module):
    """For a wrapper whose one child is ``self.module``: all names are those that the child has for them.

    Mix it in before the wrapper's own base: ``class DataParallel(CleanNames, torch.nn.DataParallel)``. This
    holds wherever the wrapper is, in a larger model too, whose ``state_dict()`` has ``0.weight`` for it.

    What the wrapper lacks is looked up in the module. What torch registers (submodules, parameters,
    buffers) is set in the module: ``model.fc = nn.Linear(8, 2)`` replaces the layer that runs. Other
    attributes stay on the wrapper, as in ``torch.nn.DataParallel``. A subclass that keeps a module for
    itself writes it to ``self.__dict__``.

    ``children()`` is ``[module]`` and ``modules()`` has the wrapper first, since code that walks through
    models relies on both. ``parameters(recurse=False)`` is what the wrapper itself holds: nothing.
    """

    module: nn.Module

    # What torch calls by name is overridden under the same names, with its own loose types.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the module, under the module's own names.

        Args:
            *args: As for ``torch.nn.Module.state_dict``.
            **kwargs: As for ``torch.nn.Module.state_dict``.

        Returns:
            What ``self.module.state_dict`` returns. Hooks of the wrapper run around it.
        """
        named = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        prefix = named.get("prefix", "")
        hooks = cast("Any", self)
        for hook in hooks._state_dict_pre_hooks.values():
            hook(self, prefix, named.get("keep_vars", False))
        state = cast("Any", self.module).state_dict(*args, **kwargs)
        local_metadata = getattr(state, "_metadata", {}).get(prefix[:-1], {})
        for hook in hooks._state_dict_hooks.values():
            # Only hooks from before torch's public ones may give another dict.
            replaced = hook(self, state, prefix, local_metadata)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Loads a state dict of the bare module, or one with wrappers' prefixes in any nesting.

        Args:
            state_dict: Names to tensors.
            strict: Whether missing and unexpected keys are an error.
            assign: Whether tensors are taken as they are instead of copied, as in ``torch.nn.Module``.

        Returns:
            ``missing_keys``, by the names in the module, and ``unexpected_keys``, by the names in
            ``state_dict``.

        Raises:
            RuntimeError: If keys are missing or unexpected and ``strict``, or if shapes differ.
            TypeError: If ``state_dict`` isn't a mapping with strings as keys.
            ValueError: If two keys name the same value.
        """
        expected = self.module.state_dict().keys()
        if type(self.module).load_state_dict is nn.Module.load_state_dict:
            # Keys are cleaned on the way, where their old names are still known. Versions have to be clean
            # now.
            versions = getattr(clean_keys(state_dict, expected=expected), "_metadata", None)
            state = dict(state_dict) if versions is None else _with_versions(state_dict, versions)
            return super().load_state_dict(state, strict=strict, assign=assign)
        # The module has its own way to load, which torch would not call for a child.
        options = {name: True for name, value in (("assign", assign),) if value}
        cleaned = clean_keys(state_dict, expected=expected)
        return self.module.load_state_dict(cleaned, strict=strict, **options)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = (strict, missing_keys, unexpected_keys, error_msgs)
        for hook in cast("Any", self)._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, *rest)
        given = _clean_in_place(state_dict, prefix, self.module)
        cast("Any", self.module)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        # torch's loader goes on with "_modules" now, and would add "module." to all names.
        incompatible = _IncompatibleKeys(missing_keys, unexpected_keys)
        self.__dict__["_modules"] = _LoadingModules(self, incompatible, given)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the module's parameters by the names that they have there.

        Args:
            prefix: Put in front of every name.
            recurse: If not, nothing: the wrapper itself has no parameters.
            remove_duplicate: Whether a parameter with several names comes once.

        Yields:
            Names and parameters.
        """
        if recurse:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the module's buffers by the names that they have there.

        Args:
            prefix: Put in front of every name.
            recurse: If not, nothing: the wrapper itself has no buffers.
            remove_duplicate: Whether a buffer with several names comes once.

        Yields:
            Names and buffers.
        """
        if recurse:
            yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yields the wrapper, then the module under the same name, then what is in it by the names there.

        Args:
            memo: Modules that have been yielded.
            prefix: The wrapper's own name.
            remove_duplicate: Whether a module with several names comes once.

        Yields:
            Names and modules.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Finds a submodule by its name in the module, or by that name behind ``module.``.

        Args:
            target: The name; "" is the wrapper.

        Returns:
            The submodule.

        Raises:
            AttributeError: If there is none.
        """
        if not target:
            return self
        try:
            return self.module.get_submodule(target)
        except AttributeError:
            first, _, rest = target.partition(".")
            if first != "module":
                raise
            return self.module.get_submodule(rest)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Finds a parameter by its name in the module, or by that name behind ``module.``.

        Args:
            target: The name.

        Returns:
            The parameter.

        Raises:
            AttributeError: If there is none.
        """
        holder, name = self._holder(target)
        return holder.get_parameter(name)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Finds a buffer by its name in the module, or by that name behind ``module.``.

        Args:
            target: The name.

        Returns:
            The buffer.

        Raises:
            AttributeError: If there is none.
        """
        holder, name = self._holder(target)
        return holder.get_buffer(name)

    def _holder(self, target: str) -> tuple[nn.Module, str]:
        path, _, name = target.rpartition(".")
        return (self.get_submodule(path) if path else self.module), name

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter in the module.

        Args:
            name: Its name there.
            param: The parameter.
        """
        self.module.register_parameter(name, param)

    def register_buffer(
        self,
        name: str,
        tensor: torch.Tensor | None,
        persistent: bool = True,
    ) -> None:
        """Registers a buffer in the module.

        Args:
            name: Its name there.
            tensor: The buffer.
            persistent: Whether it is part of state dicts.
        """
        self.module.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a submodule to the module, or, as "module", replaces the module itself.

        Args:
            name: Its name there.
            module: The submodule.
        """
        if name == "module":
            super().add_module(name, module)
        else:
            self.module.add_module(name, module)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        """Does the same as `add_module`.

        Args:
            name: Its name there.
            module: The submodule.
        """
        self.add_module(name, module)

    def __getattr__(self, name: str) -> Any:
        """Looks up in the module what the wrapper lacks."""
        # Without "__dict__" being filled, as in unpickling, there is no module to ask. Special methods are
        # not the module's to answer: `copy` would take its `__deepcopy__` for the wrapper's.
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name == "module" or (name.startswith("__") and name.endswith("__")):
            return super().__getattr__(name)
        try:
            return getattr(module, name)
        except AttributeError as error:
            message = (
                f"'{type(self).__name__}' object has no attribute '{name}', nor has the "
                f"'{type(module).__name__}' object that it wraps"
            )
            raise AttributeError(message, name=name, obj=self) from error

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets in the module what torch registers, and what the module has already; the rest on the wrapper."""
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name == "module":
            super().__setattr__(name, value)
        # A layer that was set on the wrapper would not run, and one that it hides in the module would.
        elif _is_registered(value):
            self.__dict__.pop(name, None)
            setattr(module, name, value)
        # So would an option that is read from the module, and only seems to have been set.
        elif name in self.__dict__ or hasattr(type(self), name) or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __dir__(self) -> list[str]:
        """Lists the attributes of the wrapper and of the module."""
        module = self.__dict__.get("_modules", {}).get("module")
        return sorted({*super().__dir__(), *(() if module is None else dir(module))})


class _LoadingModules(dict[str, "nn.Module | None"]):
    """What a wrapper has as ``_modules`` after ``_load_from_state_dict``, for one step of torch's loader.

    That step asks for ``_modules.items()``, to load each child with its name added to the prefix. It gets
    what is *in* the module, so that names, versions and errors come out as they would without the wrapper.
    The one call ends it.
    """

    def __init__(self, wrapper: CleanNames, incompatible: _IncompatibleKeys, given: dict[str, str]) -> None:
        self._real = vars(wrapper)["_modules"]
        super().__init__(self._real)
        self._wrapper = wrapper
        self._incompatible = incompatible
        self._given = given

    def items(self) -> Any:
        self._wrapper.__dict__["_modules"] = self._real
        return self._children()

    def _children(self) -> Iterator[tuple[str, nn.Module | None]]:
        module = cast("Any", self._wrapper.module)
        yield from module._modules.items()
        # The loader is through with the children, and goes on with the wrapper's hooks. The module's come
        # first.
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, self._incompatible)
        unexpected = cast("list[str]", cast("Any", self._incompatible).unexpected_keys)
        unexpected[:] = [self._given.get(key, key) for key in unexpected]


def _clean_in_place(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> dict[str, str]:
    """Cleans the keys behind ``prefix``, and returns the given name of each that changed."""
    given = [key for key in state_dict if key.startswith(prefix)]
    inner = {key[len(prefix) :]: state_dict[key] for key in given}
    rename = key_cleaner(inner, expected=module.state_dict().keys())
    names = {prefix + rename(key): prefix + key for key in inner}
    # All out, then all in: one key's new name may be another one's old name.
    for key in given:
        del state_dict[key]
    state_dict.update(zip(names, inner.values(), strict=True))
    return {clean: key for clean, key in names.items() if clean != key}


def _with_versions(state_dict: Mapping[str, Any], versions: object) -> dict[str, Any]:
    class _Versioned(dict[str, Any]):
        _metadata = versions

    return _Versioned(state_dict)


def _is_registered(value: object) -> bool:
    return isinstance(value, nn.Module | nn.Parameter)
