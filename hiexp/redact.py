"""Keep secrets out of everything that a run writes or prints: `redact` a text, `redact_values` nested settings.

A secret is known by its name (api_key, token, password, ...), by its place (the user part of a URL, a bearer header),
by its shape (sk-..., hf_..., ghp_...), or because an environment variable named *_KEY, *_TOKEN, *_SECRET or *_PASSWORD
holds it. `max_new_tokens`, `case_key` and `eos_token` are none.
"""

import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

HIDDEN = "<redacted>"
SHORTEST = 8
"""A shorter value of an environment variable, or of a name that ends in "token", may be an ordinary word or number."""


def redact(text: str) -> str:
    """`text` with HIDDEN in place of every secret in it; twice is the same as once."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, HIDDEN)
    text = _USER_OF_URL.sub(HIDDEN, text)
    for pattern in (_ASSIGNED, _FLAG):
        text = pattern.sub(_hide_value, text)
    return _SHAPES.sub(HIDDEN, text)


def redact_values(value: Any, name: str = "") -> Any:
    """Nested settings with every secret in their texts replaced; numbers, booleans and None stay."""
    if isinstance(value, Mapping):
        return {key: redact_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if _is_secret(name, value) else redact(value)


def install_hook() -> None:
    """From here on, the traceback of an exception that ends the process is redacted."""

    def print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = print_redacted


def _secrets_of_environment() -> list[str]:
    """Longest first, so that none is cut by another that it contains."""
    values = {value for name, value in os.environ.items() if name.upper().endswith(_ENVIRONMENT)}
    return sorted((value for value in values if len(value) >= SHORTEST and value != HIDDEN), key=len, reverse=True)


def _is_secret(name: str, value: str) -> bool:
    found = _NAME.fullmatch(name)
    if not found or _PLAIN_TOKEN.search(name):
        return False
    return not name.lower().endswith("token") or len(value) >= SHORTEST


def _hide_value(found: re.Match[str]) -> str:
    inside = found["value"].strip("\\\"'")
    if not inside or not _is_secret(found["name"].lstrip("-"), inside):
        return found[0]
    before, _, behind = found["value"].partition(inside)
    return found["name"] + found["between"] + before + HIDDEN + behind


_ENVIRONMENT = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_NAMES = (
    r"[\w.-]{0,60}?(?:(?:api|access|secret|private)[_-]?key|secret|password|passwd|passphrase|credentials?"
    r"|authorization|token)"
)
_VALUE = r"""(?:(?:bearer|basic|token)\s+)?(?:\\"[^"]*\\"|"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',;&)}\]]+)"""
_NAME = re.compile(_NAMES, re.IGNORECASE)
_PLAIN_TOKEN = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask|stop|image|next)[_-]?token$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""(?<![\w.-])(?P<name>{_NAMES})(?P<between>\\?["']?\s*[=:]\s*)(?P<value>{_VALUE})""", re.IGNORECASE
)
_FLAG = re.compile(rf"(?<![\w.-])(?P<name>--{_NAMES})(?P<between>\s+)(?P<value>(?!-){_VALUE})", re.IGNORECASE)
_USER_OF_URL = re.compile(r"""(?<=://)[^\s/?#"'<>@]{1,500}(?:@[^\s/?#"'<>@]{1,500})*(?=@)""")
_SHAPES = re.compile(
    r"(?<!\w)(?:sk-[\w-]{16,}|hf_\w{20,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16})"
    r"|(?<=bearer )[\w.~+/=-]{16,}",
    re.IGNORECASE,
)
