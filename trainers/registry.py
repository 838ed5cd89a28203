"""A registry per seam: one file, one registration, one name in YAML."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from trainers.errors import UserError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to implementations of one seam. Modules of `package` register themselves when first looked up.

    Discovery imports every module of the package, so those must import heavy libraries inside functions.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self._package = kind, package
        self._members: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate an implementation: `@STRATEGIES.register("ddp")`."""

        def add(member: T) -> T:
            assert name not in self._members, f"{self.kind} {name!r} is registered twice"
            self._members[name] = member
            return member

        return add

    def __getitem__(self, name: str) -> T:
        members = self._discover()
        if name not in members:
            raise UserError(f"unknown {self.kind} {name!r}{did_you_mean(name, members)}; available: {', '.join(self)}")
        return members[name]

    def __contains__(self, name: object) -> bool:
        return name in self._discover()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._discover()))

    def __len__(self) -> int:
        return len(self._discover())

    def _discover(self) -> dict[str, T]:
        if not self._discovered:
            self._discovered = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
        return self._members
