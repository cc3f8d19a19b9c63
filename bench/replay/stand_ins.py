"""Import parts of a big package without its dependencies: the rest of it is stood in for.

`stand_in_for` lets the import system find an empty module for all that is at or below a name. An
attribute of such a module is a class that accepts whatever is done to it at import time: it can be
a base class, a decorator, an annotation, an enum member. The measured code calls none of them:
`open_` gives it the real packages, without running their ``__init__``, `fill` the few helpers.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path


class _Anything(type):
    """Class of the classes that stand in; those that derive from one are ordinary again."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(cls, *arguments, **options):
        if "_stands_in" not in vars(cls):
            return super().__call__(*arguments, **options)
        is_decorator = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if is_decorator else cls

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


def _stand_in(name):
    return _Anything(name, (), {"_stands_in": True})


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _stand_in(name))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == other or name.startswith(other + ".") for other in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for(*names):
    """Let every module at or below these dotted names be empty."""
    sys.meta_path.insert(0, _Finder(names))


def folder_of(package):
    """Where an installed package lies; nothing of it is run."""
    if package in sys.modules:
        return Path(sys.modules[package].__path__[0])
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: make bench-peers", name=package)
    return Path(next(iter(spec.submodule_search_locations)))


def open_(name, folder):
    """Make a package importable whose own ``__init__`` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    return _enter(name, module)


def fill(name, **attributes):
    """An empty module but for these attributes."""
    module = _EmptyModule(name)
    module.__path__ = []
    vars(module).update(attributes)
    return _enter(name, module)


def definitions(path, *names, **given):
    """Top-level classes and functions of a file, by name, without running the rest of it."""
    wanted = [
        node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in names
    ]
    space = dict(given)
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    return {name: space[name] for name in names}


def _enter(name, module):
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)
    return module
