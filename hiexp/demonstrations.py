"""Written examples of what a policy should say: JSON lines in three layouts -> token ids and a mask of what is learned.

    {"segments": [...], "reward": 1.0, ...}      a trajectory of our own: its ids as they were sampled, POLICY trained
    {"question": "...", "target": "..."}         a prompt and its answer: the answer and the end of the turn trained
    {"messages": [{"role", "content"}, ...]}     a conversation: every assistant turn and its end trained

Worked example of the last two, ChatML template (`^` trained): masks come from rendering the conversation up to a turn
and up to its end, never from a template's own marks, which most templates lack (huggingface/transformers#34172).

    <|im_start|>user\\nWho?<|im_end|>\\n<|im_start|>assistant\\nYou.<|im_end|>\\n
                                                            ^^^^^^^^^^^^^^
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hiexp.config import ConfigError
from hiexp.data import DataError, records
from hiexp.engine import decode, with_bos
from hiexp.protocols import AgentProtocol
from hiexp.trajectory import Source, Status, Trajectory

PROMPT_KEYS = ("prompt", "question", "instruction", "problem")
TARGET_KEYS = ("target", "response", "completion", "solution", "answer")
"""The first of each that a record has is used; the line printed at the start says which."""

Pieces = list[tuple[str, bool]]
"""Text, and whether it is learned."""


@dataclass(frozen=True)
class SFTConfig:
    train: str = ""
    """file of demonstrations, JSON lines: trajectories of a run, prompt/target pairs or chats; python -m hiexp.sft"""
    dev: str = ""
    """file of demonstrations whose loss is measured while training (sft.dev_every)"""
    dev_every: int = 0
    """measure the loss on sft.dev every so many steps and at the end; 0 = never"""
    epochs: int = 3
    """passes over the demonstrations, each in its own order"""
    rows_per_step: int = 64
    """demonstrations per optimiser step, over all processes; the last step of an epoch takes what is left"""
    max_tokens: int = 0
    """longest demonstration, prompt included; 0 = the model's window"""
    overlong: Literal["drop", "cut"] = "drop"
    """what happens to a longer one; cut loses its end, and with it how to stop"""
    prompt: Literal["chat", "protocol"] = "chat"
    """how a pair's prompt is shown: sft.system and the chat template, or as rollout.protocol opens a question"""
    system: str = ""
    """system prompt of pairs and chats that have none; "" = none"""
    min_reward: float | None = None
    """use only trajectories of at least this reward (rejection sampling); null = all"""
    per_question: int = 0
    """use at most so many different trajectories of a question, the first in the file; 0 = all"""

    def __post_init__(self) -> None:
        for name in ("epochs", "rows_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("dev_every", "max_tokens", "per_question"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or above")
        if self.dev_every and not self.dev:
            raise ConfigError(f"dev_every={self.dev_every} needs a file; set dev, or dev_every=0")
        if self.prompt == "protocol" and self.system:
            raise ConfigError("prompt=protocol brings its own instruction; set system= (empty), or prompt=chat")


@dataclass(frozen=True)
class Demonstration:
    """Token ids and, for each, whether it is learned; the last one always is, the first never."""

    where: str
    """file and line"""
    token_ids: array
    mask: bytes
    """one byte for each id; both compact, since a file may hold 10^8 tokens"""

    @property
    def trained(self) -> int:
        return sum(self.mask)

    def row(self) -> tuple[list[int], list[bool]]:
        return list(self.token_ids), [bool(one) for one in self.mask]


@dataclass
class Demonstrations:
    """What a file gave, and what was left out or cut, for which reason."""

    path: str
    rows: list[Demonstration] = field(default_factory=list)
    layouts: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """reason -> how many rows, and where the first stands"""
    cut: dict[str, tuple[int, str]] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)
    """the ids that end the pairs and chats: a policy that learned them must be stopped at them"""

    def fingerprint(self) -> str:
        """Changes with any id, mask or the order of rows."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(hashlib.sha256(row.token_ids.tobytes() + row.mask).digest())
        return digest.hexdigest()[:16]

    def summary(self) -> str:
        """One line for the start of a run."""
        kinds = ", ".join(f"{count} {layout}" for layout, count in self.layouts.items())
        sizes = [len(row.token_ids) for row in self.rows]
        trained = sum(row.trained for row in self.rows)
        text = f"{self.path}: {kinds}; {sum(sizes)} tokens, {trained} learned, the longest row has {max(sizes)}"
        for word, reasons in (("left out", self.left_out), ("cut", self.cut)):
            text += f"; {word}: {_reasons(reasons)}" if reasons else ""
        return text


def read_demonstrations(
    path: str | Path, tokenizer: Any, cfg: SFTConfig, window: int, protocol: AgentProtocol | None = None
) -> Demonstrations:
    """The demonstrations of a file in file order, read line by line. `window`: longest sequence of the model.

    DataError naming file and line for a record of no known layout, a trajectory of another tokenizer, or a turn that
    the chat template does not render as it stands; ConfigError if nothing is left to train on.
    """
    limit = cfg.max_tokens or window
    found, reader, chosen = Demonstrations(str(path)), _Reader(tokenizer, cfg, protocol), _Selection(cfg)
    for where, record in records(path):
        if "segments" in record:
            trajectory = _trajectory(where, record)
            if reason := chosen.refuses(trajectory):
                _count(found.left_out, reason, where)
                continue
            layout, ids, mask = "trajectories", *reader.trajectory(where, trajectory)
        else:
            layout, pieces = reader.text(where, record)
            ids, mask = reader.encode(where, pieces)
            found.ends.add(ids[-1])
        end = max(at for at, on in enumerate(mask) if on) + 1  # what follows teaches nothing
        if end > limit:
            if cfg.overlong == "drop" or not any(mask[:limit]):
                _count(found.left_out, f"longer than {limit} tokens", where)
                continue
            _count(found.cut, f"longer than {limit} tokens", where)
            end = max(at for at, on in enumerate(mask[:limit]) if on) + 1
        found.rows.append(Demonstration(where, array("i", ids[:end]), bytes(mask[:end])))
        found.layouts[layout] = found.layouts.get(layout, 0) + 1
    if not found.rows:
        raise ConfigError(
            f"{path}: no row has anything to learn ({_reasons(found.left_out)}); lower sft.min_reward, raise "
            "sft.max_tokens, or name another file"
        )
    return found


class _Selection:
    """Which trajectories are used."""

    def __init__(self, cfg: SFTConfig) -> None:
        self.cfg = cfg
        self._taken: dict[str, set[int]] = {}

    def refuses(self, trajectory: Trajectory) -> str:
        """Why not, or ""."""
        least, most = self.cfg.min_reward, self.cfg.per_question
        if trajectory.status is Status.BROKEN:
            return "with an id that no token has"
        if least is not None and not trajectory.reward >= least:
            return f"of reward below {least:g}"
        if not any(trajectory.response_mask):
            return "without a token of the policy"
        if most:
            taken, this = self._taken.setdefault(trajectory.sample_id, set()), hash(tuple(trajectory.token_ids))
            if this in taken or len(taken) >= most:
                return f"repeated or beyond {most} of a question"
            taken.add(this)
        return ""


class _Reader:
    """Records to ids and masks, by one tokenizer."""

    def __init__(self, tokenizer: Any, cfg: SFTConfig, protocol: AgentProtocol | None) -> None:
        self.tokenizer, self.cfg, self.protocol = tokenizer, cfg, protocol
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.control = control_tokens(tokenizer)

    def trajectory(self, where: str, one: Trajectory) -> tuple[list[int], list[bool]]:
        """Its ids as they are; DataError if they are not of this tokenizer, by their range or by the text on record."""
        ids, size = one.token_ids, len(self.tokenizer)
        remedy = f"they were sampled with another tokenizer than that of model.path={self.tokenizer.name_or_path}"
        if min(ids) < 0 or max(ids) >= size:
            raise DataError(f"{where}: segments hold token id {max(ids)}, the tokenizer has {size}; {remedy}")
        said = [decode(self.tokenizer, s.token_ids) for s in one.segments if s.source is Source.POLICY]
        written = [turn.text for turn in one.turns if turn.text]
        if written and (said := [text for text in said if text]) != written:
            a, b = next(((a, b) for a, b in zip(said, written, strict=False) if a != b), (said, written))
            raise DataError(f"{where}: segments read {str(a)[:60]!r}, but turns hold {str(b)[:60]!r}; {remedy}")
        return ids, one.response_mask

    def text(self, where: str, record: dict[str, Any]) -> tuple[str, Pieces]:
        """(name of the layout, pieces) of a chat or a pair."""
        if "messages" in record:
            messages = self._messages(where, record, "messages", "assistant")
            if not any(one["role"] == "assistant" for one in messages):
                raise DataError(f"{where}: messages have no assistant turn, nothing to learn; drop the record")
            return "chats", self._chat(where, self._with_system(messages), 0)
        prompt_key = next((key for key in PROMPT_KEYS if key in record), "")
        target_key = next((key for key in TARGET_KEYS if key in record), "")
        if not prompt_key or not target_key:
            raise DataError(
                f"{where}: keys {', '.join(record)} are no known layout; needed: segments (a trajectory), messages (a "
                f"chat), or one of {', '.join(PROMPT_KEYS)} with one of {', '.join(TARGET_KEYS)}"
            )
        prompt = self._messages(where, record, prompt_key, "user")
        target = self._messages(where, record, target_key, "assistant")
        if [one["role"] for one in target] != ["assistant"]:
            raise DataError(f"{where}: {target_key} must be text or one assistant message; use messages for more")
        return f"pairs ({prompt_key} -> {target_key})", self._pair(where, prompt, target[0])

    def encode(self, where: str, pieces: Pieces) -> tuple[list[int], list[bool]]:
        """Each piece by itself, as a rollout does, so that no token lies across what is learned and what is not."""
        ids: list[int] = []
        mask: list[bool] = []
        for number, (text, learned) in enumerate(pieces):
            new = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            new = new if number else list(with_bos(self.tokenizer, new))
            ids += new
            mask += [learned] * len(new)
        if not any(mask) or mask[0]:
            raise DataError(f"{where}: the {'prompt' if any(mask) else 'target'} has no token; drop the record")
        return ids, mask

    def _pair(self, where: str, prompt: list[dict[str, Any]], target: dict[str, Any]) -> Pieces:
        is_text = len(prompt) == 1 and prompt[0]["role"] == "user"
        if self.cfg.prompt == "chat" and self.has_template:
            return self._chat(where, self._with_system([*prompt, target]), len(prompt))
        if not is_text:
            raise DataError(f"{where}: a prompt of several messages needs a chat template and sft.prompt=chat")
        text = prompt[0]["content"]
        if self.protocol is not None and self.cfg.prompt == "protocol":
            text = "".join(piece for _, piece in self.protocol.prompt(text, "", self.tokenizer))
        elif self.cfg.system:
            text = f"{self.cfg.system}\n\n{text}"
        return [(text, False), (target["content"] + self._end_of_turn(where, text), True)]

    def _end_of_turn(self, where: str, prompt: str) -> str:
        """What ends an answer: the template's mark if the prompt came through it, else the end of a text."""
        if any(mark in prompt for mark in self.control) and self.has_template:
            probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]
            return self._chat(where, probe, 1)[-1][0].partition("?")[2]
        if not self.tokenizer.eos_token:
            raise DataError(f"{where}: the tokenizer has no end token, so no answer would end; set its eos_token")
        return self.tokenizer.eos_token

    def _chat(self, where: str, messages: list[dict[str, Any]], first: int) -> Pieces:
        """The conversation with its assistant turns from number `first` on learned, each up to its end mark."""
        if not self.has_template:
            raise DataError(f"{where}: a chat needs a tokenizer with a chat template; use prompt and target instead")
        pieces, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            before, after = self._render(where, messages[:number], True), self._render(where, messages[: number + 1])
            if not before.startswith(done) or not after.startswith(before):
                raise DataError(
                    f"{where}: message {number}: the chat template renders the conversation up to here differently "
                    "once it goes on, so what a policy would see cannot be told; split the record at this turn, or set "
                    "another template"
                )
            reply = after[len(before) :]
            if message["content"].strip() not in reply:
                raise DataError(f"{where}: message {number}: the chat template changes its text; set another template")
            end = max((at + len(mark) for mark in self.control if (at := reply.rfind(mark)) >= 0), default=0)
            if not end:
                raise DataError(f"{where}: message {number}: the chat template ends a turn with no control token")
            pieces += [(before[len(done) :], False), (reply[:end], True)]
            done = before + reply[:end]
        return pieces

    def _render(self, where: str, messages: list[dict[str, Any]], is_open: bool = False) -> str:
        from jinja2 import TemplateError  # a dependency of chat templates alone

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open)
        except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            roles = ", ".join(str(one["role"]) for one in messages)
            raise DataError(f"{where}: the chat template does not take the roles {roles or 'none'}: {error}") from error

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.cfg.system or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.cfg.system}, *messages]

    def _messages(self, where: str, record: dict[str, Any], key: str, role: str) -> list[dict[str, Any]]:
        """record[key] as messages; a text is one of `role`."""
        value = record[key]
        if key == "instruction" and isinstance(value, str) and record.get("input"):
            value = f"{value}\n\n{record['input']}"  # Alpaca's layout
        messages = [{"role": role, "content": value}] if isinstance(value, str) else value
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}: {key} must be text or a list of messages, not {type(value).__name__}")
        for number, one in enumerate(messages):
            text = one.get("content") if isinstance(one, dict) and isinstance(one.get("role"), str) else None
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{where}: {key}[{number}] needs a role and a content, as texts that are not empty")
            if mark := next((mark for mark in self.control if mark in text), ""):
                raise DataError(f"{where}: {key}[{number}] holds the control token {mark}; take it out of the text")
        return messages


def control_tokens(tokenizer: Any) -> list[str]:
    """The texts that a tokenizer reads as marks of its own: begin and end of turns and texts, padding."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _trajectory(where: str, record: dict[str, Any]) -> Trajectory:
    try:
        one = Trajectory.from_json(record)
        if not all(isinstance(token, int) for token in one.token_ids):
            raise ValueError("token ids must be whole numbers")
        return one
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where}: not a trajectory that a run wrote ({reason}); write the file again") from error


def _count(reasons: dict[str, tuple[int, str]], reason: str, where: str) -> None:
    count, first = reasons.get(reason, (0, where))
    reasons[reason] = (count + 1, first)


def _reasons(reasons: dict[str, tuple[int, str]]) -> str:
    return ", ".join(f"{count} {reason} (first {first})" for reason, (count, first) in reasons.items())
