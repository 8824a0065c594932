"""Schemas: the dataclasses that type the configuration, found beside what they configure and applied to plain
values.

Nothing here imports torch. Whatever YAML names by `_target_` is either a dataclass itself (an env family, a
network, a logger) or has one called `<Name>Config` beside it (an algorithm), whose fields are exactly the
YAML's keys.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, IntegerNode, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from rl.errors import ConfigError


def bounded(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field whose value comes from YAML and must lie in the bounds given (None passes where the
    type allows it)."""
    limits = {"at least": ge, "above": gt, "at most": le, "below": lt}
    return field(default=MISSING, metadata={"limits": limits, "choices": choices})


def accept_whole_floats() -> None:
    """Let whole floats such as 1e6 stand for integers, in YAML as on the command line; OmegaConf refuses
    them."""
    IntegerNode._validate_and_convert_impl = _whole_number  # type: ignore[method-assign]


def _whole_number(self: IntegerNode, value: Any) -> int:
    """Integers accept `1e6`, in YAML as on the command line; OmegaConf alone refuses every float."""
    try:
        number = float(value) if isinstance(value, str) and not value.lstrip("+-").isdigit() else value
        if isinstance(number, bool) or (isinstance(number, float) and not number.is_integer()):
            raise ValueError(value)
        return int(number)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValidationError("'$VALUE' is not an integer") from error


# --- schemas --------------------------------------------------------------------------------------

_LIGHT = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "math",
    "typing",
    "rl.checks",
    "rl.errors",
    "rl.schemas",
}


def schema_of(target: str) -> type:
    """The dataclass that types the keys beside `_target_: target`, read from the source without importing the
    module.

    An algorithm's module imports torch, which takes seconds; its config dataclass needs only the standard
    library, so only that class is executed. Where the source does not allow this the module is imported after
    all.

    Raises:
        ConfigError: there is no such module, or it holds neither a dataclass of that name nor `<Name>Config`.
    """
    module_name, _, name = target.rpartition(".")
    try:
        spec = importlib.util.find_spec(module_name) if module_name else None
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ConfigError(
            f"_target_: {target}: no module {module_name or target!r} can be imported; write "
            f"package.module.Name"
        )
    alias = f"{module_name}:schema"
    if alias not in sys.modules:
        sys.modules[alias] = _light_module(alias, Path(spec.origin))
    for source in (sys.modules[alias], None):
        module = source or importlib.import_module(module_name)
        for candidate in (name, f"{name}Config"):
            found = getattr(module, candidate, None)
            if isinstance(found, type) and hasattr(found, "__dataclass_fields__"):
                return found
            if isinstance(found, str):  # imported from a module that is not light
                return schema_of(found)
        if source is not None and not _defines(Path(spec.origin), name):
            break
    raise ConfigError(
        f"_target_: {target}: {module_name} defines neither a dataclass {name} nor a dataclass {name}Config"
    )


def _defines(path: Path, name: str) -> bool:
    return any(
        isinstance(node, ast.ClassDef) and node.name == name for node in ast.parse(path.read_text()).body
    )


def _light_module(alias: str, path: Path) -> types.ModuleType:
    """A module holding only the dataclasses of the source file at `path`, and where other names were imported
    from."""
    module = types.ModuleType(alias)
    sys.modules[alias] = module  # dataclasses look their annotations up here
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module not in _LIGHT:
            for name in node.names:
                setattr(module, name.asname or name.name, f"{node.module}.{name.name}")
            continue
        light_import = isinstance(node, ast.ImportFrom) or (
            isinstance(node, ast.Import) and all(name.name in _LIGHT for name in node.names)
        )
        is_dataclass = isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(d) for d in node.decorator_list
        )
        if light_import or is_dataclass:
            if isinstance(node, ast.ClassDef):
                _take_bases(module, node)
            code = compile(
                ast.Module([node], type_ignores=[]),
                str(path),
                "exec",
                flags=annotations_flag(),
                dont_inherit=True,
            )
            try:
                exec(code, module.__dict__)
            except NameError:
                continue  # needs more of its module: schema_of imports it
    return module


def _take_bases(module: types.ModuleType, node: ast.ClassDef) -> None:
    """Give `module` the dataclasses of modules that are not light which class `node` inherits from."""
    for base in node.bases:
        found = getattr(module, base.id, None) if isinstance(base, ast.Name) else None
        if isinstance(found, str):
            assert isinstance(base, ast.Name)
            setattr(module, base.id, schema_of(found))


def annotations_flag() -> int:
    """The compiler flag of `from __future__ import annotations`, so that annotations are not evaluated."""
    import __future__

    return __future__.annotations.compiler_flag


def typed(schema: type, values: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The fields of the dataclass `schema` from plain `values`, types converted and bounds checked.

    Args:
        at: the dotted key at which the values stand, for messages; "" for the root.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a value out of bounds.
    """
    keys = _keys(schema)
    known = {join(at, f.name): None for f in fields(keys)}
    for key in values:
        if join(at, str(key)) not in known:
            raise ConfigError(unknown_key(join(at, str(key)), known))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(keys), dict(values))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(
                f"{join(at, missing[0])} has no value; give it one, e.g. in the YAML that sets "
                f"{at or 'the run'}"
            )
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(plain(error, at)) from error
    check_bounds(result, at)
    return dict(vars(result))


def _keys(schema: type) -> type:
    """A plain dataclass of the fields that come from YAML: those in `__init__`, whatever else the class
    keeps."""
    names = vars(sys.modules[schema.__module__])
    kept = [f for f in fields(schema) if f.init]
    types_of = {f.name: eval(f.type, dict(names)) if isinstance(f.type, str) else f.type for f in kept}
    defaults = {}
    for f in kept:
        value = (
            {"default": f.default}
            if f.default_factory is dataclasses.MISSING
            else {"default_factory": f.default_factory}
        )
        defaults[f.name] = field(**value, metadata=f.metadata)
    return make_dataclass(schema.__name__, [(name, types_of[name], defaults[name]) for name in types_of])


def check_bounds(instance: Any, at: str) -> None:
    """Raise ConfigError for the first field of the dataclass outside the bounds given by `bounded`."""
    for f in fields(instance):
        value, key = getattr(instance, f.name), join(at, f.name)
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            check_bounds(value, key)
        choices = f.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise ConfigError(
                f"{key}={value}: choose one of {', '.join(choices)}{nearest(str(value), choices)}"
            )
        limits = {word: limit for word, limit in f.metadata.get("limits", {}).items() if limit is not None}
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
        ok = {"at least": float.__ge__, "above": float.__gt__, "at most": float.__le__, "below": float.__lt__}
        if value is not None and not all(
            ok[word](float(value), float(limit)) for word, limit in limits.items()
        ):
            allowed = " and ".join(f"{word} {limit:g}" for word, limit in limits.items())
            raise ConfigError(f"{key}={value}: must be {allowed}")


# --- messages -------------------------------------------------------------------------------------


def join(at: str, key: str) -> str:
    """`a.b` from `a` and `b`; `b` where there is no prefix."""
    return f"{at}.{key}" if at else key


def nearest(word: str, known: Any) -> str:
    """`; did you mean X?` for the closest of the known words, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_key(key: str, known: Mapping[str, Any]) -> str:
    """One line for a key that does not exist, with the nearest of the dotted keys that do."""
    tail = key.rpartition(".")[2]
    by_tail = {k.rpartition(".")[2]: k for k in reversed(list(known))}
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
    if not close:
        close = [by_tail[word] for word in difflib.get_close_matches(tail, list(by_tail), n=1, cutoff=0.7)]
    value = known.get(close[0]) if close else None
    example = f" (e.g. {close[0]}={value})" if value is not None else ""
    return f"unknown key {key}" + (
        f"; did you mean {close[0]}{example}?" if close else "; --help lists the keys"
    )


_MEANINGS = {
    r"^Value '(.*)' of type '.*' could not be converted to Float": r"'\1' is not a number",
    r"^Value '(.*)' is not a valid bool.*": r"'\1' is neither true nor false",
    r"^Incompatible value 'None' for field of type '(.*)'": r"may not be null, it is of type \1",
}


def plain(error: OmegaConfBaseException, at: str = "", known: Mapping[str, Any] | None = None) -> str:
    """One line for an OmegaConf error: key, value, and what is allowed."""
    key = join(at, error.full_key or "")
    text = str(error.msg or error).strip().splitlines()[0]
    for pattern, meaning in _MEANINGS.items():
        text = re.sub(pattern, meaning, text)
    if "is not in struct" in text or "not in '" in text:
        return unknown_key(key, known or {})
    value = (known or {}).get(key)
    return f"{key}: {text}" + (f"; a value that works: {key}={value}" if value is not None else "")


def flatten(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a nested mapping with its value, containers included, in order."""
    for key, value in node.items():
        yield join(at, str(key)), value
        if isinstance(value, Mapping):
            yield from flatten(value, join(at, str(key)))
