"""The instruction of a published agent as text with fields: ours, or the original that a user gives in a file.

    {question}   required, in the user's message
    {strategy}   where the experience for the question goes: nothing, or a block that brings its own line breaks
    {date}       YYYY-MM-DD

Other braces are text, and `{{x}}` is the text `{x}`: a field that nobody knows is a mistake worth telling.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError

FIELDS = ("question", "strategy", "date")
_FIELD = re.compile(r"\{\{([^{}]*)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class PromptText:
    """An instruction: text with {question}, and perhaps {strategy} and {date}, where `{{x}}` stands for `{x}`."""

    user: str
    """the user's message, or all of the text where there are no messages"""
    system: str = ""
    """empty: no message of its own (a chat template may add one)"""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas that the chat template shows"""

    @property
    def fields(self) -> list[str]:
        return [found[2] for found in _FIELD.finditer(f"{self.system}\n{self.user}") if found[2]]


def today() -> str:
    """The date in UTC, YYYY-MM-DD."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def read_prompt(path: str, present: PromptText, is_raw: bool) -> PromptText:
    """The instruction in a UTF-8 text file, as the model is to see it.

    The line break at the end of the file does not count. A line `---` parts the system message from the user's; without
    one all is the user's message, or (for an agent that has no messages, `is_raw`) all of the text. A third part
    replaces the tools of the `present` instruction, if it has them. ConfigError names the file and what is wrong.
    """
    where = f"prompt file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}); name a text file") from error
    parts = re.split(r"^---[ \t]*(?:\n|\Z)", text.removesuffix("\n"), flags=re.MULTILINE)
    most = 1 if is_raw else 3 if present.tools else 2
    if len(parts) > most:
        what = {1: "is one text", 2: "has a system and a user message", 3: "has two messages and tools"}[most]
        raise ConfigError(f"{where} has {len(parts)} parts between lines ---, but this protocol's prompt {what}")
    parts = [part.removesuffix("\n") for part in parts[:-1]] + parts[-1:]
    tools = _tools_in(parts.pop(), where) if len(parts) == 3 else present.tools
    prompt = PromptText(parts[-1], parts[0] if len(parts) > 1 else "", tools)
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    for name in prompt.fields:
        if name not in FIELDS:
            raise ConfigError(
                f"{where}: unknown field {{{name}}}; known: {known}; where the braces are part of the text, write "
                f"{{{{{name}}}}}"
            )
    if "question" not in PromptText(prompt.user).fields:
        place = " in the part after ---, which is the user's message" if len(parts) > 1 else ""
        raise ConfigError(f"{where} lacks the required field {{question}}{place}; write it where the question stands")
    if prompt.fields.count("strategy") > 1:
        raise ConfigError(f"{where} has the field {{strategy}} twice; leave one")
    return prompt


def _tools_in(text: str, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: its third part is the tools, a JSON list, but: {error}") from error
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: its third part must be a JSON list of tool schemas")
    return tuple(tools)


def fill(text: str, values: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda found: values[found[2]] if found[2] else f"{{{found[1]}}}", text)
