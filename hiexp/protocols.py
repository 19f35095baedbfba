"""How an agent talks: the prompt, the stop strings, what a turn asks for, and how the environment replies.

Our own instructions, and the registry of every protocol. The parser reads the text of one policy turn and nothing else.
To add a protocol: an instance of `TagProtocol` (or any class with the members of AgentProtocol) in the dict below; its
instruction and its parser then sit in this one file.

Worked example (compact): the policy wrote `<search> capital of Norway </search>`, the environment replies

    NOTICE "\\n<information>\\n"   DOCUMENT "oslo is the capital of norway"   NOTICE "\\n</information>\\n"
"""

import json
from typing import Protocol

from hiexp.config import ConfigError, lookup
from hiexp.observations import neutralise
from hiexp.peer_form import PeerProtocol
from hiexp.peer_protocols import PEERS
from hiexp.prompt_files import read_prompt, today
from hiexp.tag_protocol import CHATML_REPLY, Action, AgentProtocol, Asked, Pieces, TagProtocol

__all__ = [
    "PROTOCOLS",
    "Action",
    "AgentProtocol",
    "Asked",
    "Pieces",
    "TagProtocol",
    "neutralise",
    "open_protocol",
]


def _tool_query(content: str) -> str:
    """`{"name": "search", "arguments": {"query": "..."}}` -> the query; anything else -> empty."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    arguments = call.get("arguments") if isinstance(call, dict) and call.get("name") == "search" else None
    query = arguments.get("query") if isinstance(arguments, dict) else None
    return query.strip() if isinstance(query, str) else ""


_ADVICE = (
    "A result may also hold an <experience></experience> block: advice from earlier, similar situations. Advice is not "
    "evidence: never quote it as a fact, and leave it aside when it does not fit. Stop searching as soon as the facts "
    "suffice."
)
_QWEN_TOOL = (
    "You answer questions by reasoning and, where facts are missing, by searching. Think inside <think></think> first. "
    "To search, write one <tool_call></tool_call> that holds a JSON object with `name` set to `search` and "
    "`arguments.query` set to a short query about one fact that can be understood on its own, for example\n"
    '<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>\n'
    f"The result comes back in <tool_response></tool_response>. {_ADVICE} Finish with the shortest complete answer in "
    "\\boxed{}."
)
_SEARCH_O1 = (
    "You answer questions by reasoning and, where facts are missing, by searching. To search, write a short query "
    "about one fact between <|begin_search_query|> and <|end_search_query|>. The result comes back between "
    f"<|begin_search_result|> and <|end_search_result|>. {_ADVICE} Finish with the shortest complete answer in "
    "\\boxed{}."
)
_SEARCH_R1 = (
    "You answer questions by reasoning and, where facts are missing, by searching. Think inside <think></think> first. "
    "To search, write a short query about one fact inside <search></search>. The result comes back in "
    f"<information></information>. {_ADVICE} Finish with the shortest complete answer inside <answer></answer>."
)
_FEW_SHOT = """\
Look facts up, one at a time: write <search> what to look up </search> and passages come back. Then write <answer> the \
shortest answer </answer>. Advice between <experience> and </experience> is no evidence.

Question: In which country was the author of Peer Gynt born?
<search> author of Peer Gynt </search>
<information>
Peer Gynt: Peer Gynt is a play by Henrik Ibsen.
</information>
<search> birthplace of Henrik Ibsen </search>
<information>
Henrik Ibsen: Ibsen was born in Skien, Norway.
</information>
<answer> Norway </answer>

Question: Who is older, the painter of Guernica or the composer of Bolero?
<search> painter of Guernica </search>
<information>
Guernica: a painting by Pablo Picasso, born 1881.
</information>
<search> composer of Bolero </search>
<information>
Bolero: an orchestral work by Maurice Ravel, born 1875.
</information>
<answer> Maurice Ravel </answer>"""
_FEW_SHOT_DIRECT = """\
Give the shortest answer to each question.

Question: In which country was the author of Peer Gynt born?
<answer> Norway </answer>

Question: Who is older, the painter of Guernica or the composer of Bolero?
<answer> Maurice Ravel </answer>"""
_DIRECT = "Answer the question. Think step by step, then give the shortest complete answer in \\boxed{}."

PROTOCOLS: dict[str, AgentProtocol] = {
    "qwen_tool": TagProtocol(
        name="qwen_tool",
        instruction=_QWEN_TOOL,
        query_tags=("<tool_call>", "</tool_call>"),
        read_query=_tool_query,
        before="<|im_end|>\n<|im_start|>user\n<tool_response>\n",
        after=f"</tool_response><|im_end|>\n{CHATML_REPLY}",
    ),
    "search_o1": TagProtocol(
        name="search_o1",
        instruction=_SEARCH_O1,
        query_tags=("<|begin_search_query|>", "<|end_search_query|>"),
        result_tags=("<|begin_search_result|>", "<|end_search_result|>"),
    ),
    "search_r1": TagProtocol(
        name="search_r1",
        instruction=_SEARCH_R1,
        query_tags=("<search>", "</search>"),
        result_tags=("<information>", "</information>"),
        answer_tags=("<answer>", "</answer>"),
    ),
    # for models too small to follow an instruction: worked examples as plain text, with search and without
    "few_shot": TagProtocol(
        name="few_shot",
        instruction=_FEW_SHOT,
        query_tags=("<search>", "</search>"),
        result_tags=("<information>", "</information>"),
        answer_tags=("<answer>", "</answer>"),
        use_chat=False,
    ),
    "few_shot_direct": TagProtocol(
        name="few_shot_direct",
        instruction=_FEW_SHOT_DIRECT,
        query_tags=None,
        answer_tags=("<answer>", "</answer>"),
        use_chat=False,
    ),
    # for tiny word-level models: no instruction, no titles, every token between spaces
    "compact": TagProtocol(
        name="compact",
        instruction="",
        query_tags=("<search>", "</search>"),
        result_tags=("<information>", "</information>"),
        answer_tags=("<answer>", "</answer>"),
        use_titles=False,
    ),
    "direct": TagProtocol(name="direct", instruction=_DIRECT, query_tags=None),
    **PEERS,
}


class PromptSettings(Protocol):
    """What of a RolloutConfig says how the agent is spoken to."""

    @property
    def protocol(self) -> str: ...
    @property
    def prompt_file(self) -> str: ...
    @property
    def prompt_date(self) -> str: ...


def open_protocol(cfg: PromptSettings) -> AgentProtocol:
    """The protocol with the instruction in `cfg.prompt_file`, if it names one, and a date that stays the same.

    Raises ConfigError for an unknown protocol, a file that is not there or does not fit, and a file for a protocol of
    our own, whose instructions belong to it.
    """
    protocol = lookup(PROTOCOLS, cfg.protocol, "rollout.protocol")
    if isinstance(protocol, PeerProtocol):
        text = protocol.prompt_text
        if cfg.prompt_file:
            text = read_prompt(cfg.prompt_file, text, protocol.form == "raw")
        return protocol.speaking(text, cfg.prompt_date or today(), bool(cfg.prompt_file))
    if cfg.prompt_file:
        raise ConfigError(
            f"rollout.prompt_file={cfg.prompt_file} is for the instruction of a published agent, but rollout.protocol="
            f"{cfg.protocol} is our own; leave it empty, or set one of {', '.join(sorted(PEERS))}"
        )
    return protocol
