"""A reflector and an abstractor that are functions of the prompt, and what they write."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hiexp.api_client import BudgetReached, Reply
from hiexp.encoder import Encoder, HashEncoder
from hiexp.hek_prompts import PROMPTS
from hiexp.reflector import Reflector
from hiexp.sampling import Sampling


class ScriptedWriter:
    """`reply(prompt)` answers each prompt, in the order given; `asked` keeps the prompts. Raises BudgetReached after
    `most` replies."""

    name, together, max_new_tokens = "scripted", False, 50

    def __init__(self, reply: Callable[[str], str], most: int | None = None) -> None:
        self.reply, self.most = reply, most
        self.asked: list[str] = []

    def fit(self, wordings: Sequence[str]) -> str:
        return wordings[0]

    def length(self, prompt: str) -> int:
        return len(prompt)

    def batches(self, prompts: Mapping[int, Any]) -> Iterator[list[int]]:
        yield list(prompts)

    def answer(self, prompts: Mapping[int, str], sampling: Mapping[int, Sampling]) -> Iterator[dict[int, Reply]]:
        for i, prompt in prompts.items():
            if self.most is not None and len(self.asked) >= self.most:
                raise BudgetReached("build.reflector.max_calls is reached")
            self.asked.append(prompt)
            yield {i: Reply(self.reply(prompt), 1, 1)}


def scripted_reflector(
    reply: Callable[[str], str], encoder: Encoder | None = None, most: int | None = None
) -> Reflector:
    """Asks once, in the compact form."""
    return Reflector(ScriptedWriter(reply, most), encoder or HashEncoder(), PROMPTS["compact"], Sampling(), 1)


def asked_of(reflector: Reflector) -> list[str]:
    """The prompts that a scripted reflector was given so far."""
    assert isinstance(reflector.writer, ScriptedWriter)
    return reflector.writer.asked


def lesson(title: str, description: str) -> str:
    return json.dumps({"title": title, "description": description})


def members_of(prompt: str) -> list[tuple[str, str]]:
    """(title, description) of the lines of a request for an abstraction."""
    lines = [line.removeprefix("- ") for line in prompt.splitlines() if line.startswith("- ")]
    return [tuple(line.split(" : ", 1)) for line in lines]  # type: ignore[misc]
