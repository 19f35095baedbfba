"""YAML plus dotted overrides into frozen dataclasses, with errors that name the key and the remedy.

Each module owns the dataclass it reads (`LossConfig` lives in loss.py); `assemble.Config` composes them. This file
knows none of them. A string literal under a field is its documentation; `--help` prints it.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hiexp.redact import install_hook, redact, redact_values

C = TypeVar("C")
V = TypeVar("V")


class ConfigError(Exception):
    """A mistake of the user's that is told in one line, before any expensive work."""


def load(schema: type[C], argv: Sequence[str]) -> C:
    """Read `["configs/x.yaml", "optim.lr=5e-7", ...]`: dataclass default < YAML < override.

    Raises ConfigError for an unreadable file, an unknown key (the nearest is suggested), a wrong type or value.
    """
    values: dict[str, Any] = {}
    overrides = [argument for argument in argv if _is_override(argument)]
    for path in argv:
        if path not in overrides:
            _merge(values, read_yaml(path))
    for argument in overrides:
        key, text = argument.split("=", 1)
        try:
            value = yaml.safe_load(text) if text else ""
        except yaml.YAMLError:
            value = text
        _assign(values, key.strip(), value)
    return typing.cast(C, _build(schema, values, ""))


def _is_override(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and all(part.isidentifier() for part in key.strip().split("."))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file (safe loader: no Python objects, no code)."""
    file = Path(path)
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], 1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else "; expected a .yaml file or key=value"
        raise ConfigError(f"no such config file: {path}{hint}")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not plain YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not {type(content).__name__}")
    return content


def dump(config: Any, path: str | Path) -> None:
    """Write the resolved configuration as YAML that `load` reads back to an equal object, secrets (redact.py) apart."""
    Path(path).write_text(yaml.safe_dump(redact_values(_plain(config)), sort_keys=False), encoding="utf-8")


def describe(schema: type) -> str:
    """One line per key: name, type, default, documentation. What `--help` prints."""
    lines = []
    for key, field, doc in _leaves(schema, ""):
        default = _default(field)
        shown = "required" if default is dataclasses.MISSING else repr(default)
        lines.append(f"  {key:<34} {_type_name(_hints(field.owner)[field.name]):<18} {shown:<22} {doc}")
    return "\n".join(lines)


def lookup(registry: Mapping[str, V], name: str, kind: str) -> V:
    """registry[name], or a ConfigError that lists the known names."""
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(str(name), list(registry), 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown {kind} {name!r}; {hint}known: {', '.join(sorted(registry))}")


@dataclasses.dataclass
class _Leaf:
    name: str
    owner: type
    default: Any
    default_factory: Any


def _leaves(schema: type, prefix: str):
    docs = _field_docs(schema)
    for field in dataclasses.fields(schema):
        annotation = _hints(schema)[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from _leaves(typing.cast(type, annotation), f"{prefix}{field.name}.")
        else:
            leaf = _Leaf(field.name, schema, field.default, field.default_factory)
            yield f"{prefix}{field.name}", leaf, docs.get(field.name, "")


def _default(leaf: _Leaf) -> Any:
    if leaf.default_factory is not dataclasses.MISSING:
        return leaf.default_factory()
    return leaf.default


def _field_docs(schema: type) -> dict[str, str]:
    """String literals that follow a field in the class body."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(schema)) or "pass").body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, after in itertools.pairwise(body):
        is_doc = isinstance(after, ast.Expr) and isinstance(getattr(after, "value", None), ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_doc:
            docs[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return docs


def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        child = values.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {dotted!r}: {parent!r} is a value, not a section")
        values = child
    values[last] = value


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _build(schema: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints, arguments = _hints(schema), {}
    names = [field.name for field in dataclasses.fields(schema)]
    for key in values:
        if key not in names:
            raise ConfigError(_unknown(schema, prefix, str(key), names))
    for field in dataclasses.fields(schema):
        annotation, key = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(annotation):
            section = values.get(field.name, {})
            section = {} if section is None else section
            if not isinstance(section, dict):
                raise ConfigError(f"{key} is a section (keys: {', '.join(_hints(annotation))}), got {section!r}")  # type: ignore[arg-type]
            arguments[field.name] = _build(typing.cast(type, annotation), section, f"{key}.")
        elif field.name in values:
            arguments[field.name] = _coerce(annotation, values[field.name], key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key} is required; set it in the YAML file or as {key}=... on the command line")
    try:
        return schema(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{prefix.rstrip('.')}: {error}" if prefix else str(error)) from error


def _unknown(schema: type, prefix: str, key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, 1, cutoff=0.6)
    if near:
        return f"unknown key {prefix}{key}; did you mean {prefix}{near[0]}?"
    everywhere = [full for full, _, _ in _leaves(schema, prefix)]
    tails = {full.rsplit(".", 1)[-1]: full for full in everywhere}
    far = difflib.get_close_matches(key, list(tails), 1, cutoff=0.8)
    if far:
        return f"unknown key {prefix}{key}; did you mean {tails[far[0]]}?"
    return f"unknown key {prefix}{key}; known here: {', '.join(names)}"


def _coerce(annotation: Any, value: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _coerce(next(a for a in arguments if a is not type(None)), value, key)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{key} must be one of {', '.join(map(str, arguments))}; got {value!r}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else None
        fixed = len(arguments) if arguments[-1] is not Ellipsis else None
        if items is None or (fixed is not None and len(items) != fixed):
            raise ConfigError(f"{key} must be a list of {fixed or 'any number of'} values; got {value!r}")
        return tuple(_coerce(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key} must be a mapping of names to values; got {value!r}")
        return {str(name): _coerce(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    return _scalar(annotation, value, key)


def _scalar(annotation: Any, value: Any, key: str) -> Any:
    wrong = ConfigError(f"{key} must be {_type_name(annotation)}; got {value!r}")
    if annotation is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if annotation is float:  # YAML 1.1 reads 1e-6 as a string
        try:
            return float(value) if not isinstance(value, bool) else _raise(wrong)
        except (TypeError, ValueError):
            raise wrong from None
    if annotation is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong
        return value
    if annotation is str:
        if isinstance(value, (dict, list)) or value is None:
            raise wrong
        return str(value)
    return value


def _raise(error: Exception) -> typing.NoReturn:
    raise error


def _type_name(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "")


def _plain(config: Any) -> Any:
    if dataclasses.is_dataclass(config):
        return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [_plain(item) for item in config]
    if isinstance(config, dict):
        return {name: _plain(item) for name, item in config.items()}
    return config


def run_script(main: Callable[[Any], int | None], schema: type, argv: Sequence[str], doc: str | None) -> int:
    """Command-line shell of the scripts: `--help`, one-line user errors (exit code 2), else what `main` returns."""
    if not argv or "-h" in argv or "--help" in argv:
        print(f"{doc or ''}\nKeys (YAML or key=value on the command line):\n{describe(schema)}")
        return 0
    install_hook()
    warnings.formatwarning = lambda message, *_, **__: redact(f"warning: {message}\n")
    try:
        return main(load(schema, argv)) or 0
    except ConfigError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
