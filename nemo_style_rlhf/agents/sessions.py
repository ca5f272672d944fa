"""The tokens of one sample whose program talks to the policy through an API: a tree of calls, and the rows to train on.

A call brings a whole conversation. If it begins with a conversation that this session has answered, the tokens that the policy
read and sampled there stay as they are, and only the program's addition is tokenized (agents/tokens.py). Any other beginning,
such as a history that the program has edited, is rendered from scratch and begins a new branch of the tree.

Programs make concurrent calls, so nothing here may depend on the order in which calls arrive: the seed of a call is a function
of its content, and rows depend only on the tokens of all answers.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_style_rlhf.agents.environment import Action
from nemo_style_rlhf.agents.events import Called
from nemo_style_rlhf.agents.rows import Row, SampledSpan
from nemo_style_rlhf.agents.tokens import continuation
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Message, is_parts, plain_text


@dataclass(frozen=True, order=True)
class _Answer:
    """An answered call. The order compares only content."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish_reason: str
    call: int = field(compare=False)
    """Number of the call within the attempt."""
    text: str = field(compare=False)
    asked: str = field(compare=False)
    """The program's text before the answer; empty if it sent token ids."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.completion


@dataclass(frozen=True)
class _Node:
    """A conversation, or a text, that ends with an answer."""

    answer: _Answer
    messages: list[Message]
    """The conversation as the chat template reads it; for a text, only the answer."""


class Session:
    """The calls of one attempt at a sample."""

    def __init__(self, seed: int) -> None:
        """``seed`` is the sample's, the same in every attempt."""
        self._seed = seed
        self._asked: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._answers: list[_Answer] = []
        self._called: dict[int, Called] = {}
        self._conversations: dict[str, list[_Node]] = {}
        self._texts: dict[str, list[_Node]] = {}

    def prompt_for(self, call: Called, encoder: Encoder) -> list[int]:
        """Return the token ids that the policy reads for a call, without changing the session.

        Raises:
            UserError: the chat template cannot render the conversation, or it ends with the assistant's message.
        """
        if isinstance(call.prompt, str):
            return self._prompt_of_text(call.prompt, encoder)
        if isinstance(call.prompt[0], int):
            return [token for token in call.prompt if isinstance(token, int)]
        messages, tools = _messages(call), _tools(call)
        if messages[-1]["role"] == "assistant":
            raise UserError("the conversation ends with the assistant's message: add one that the policy answers")
        for length, key in reversed([*enumerate(_keys(call), start=1)]):
            if key in self._conversations:
                node = _first(self._conversations[key])
                new = [_readable(message) for message in messages[length:]]
                return _continued(encoder, node, new, tools)
        try:
            text = encoder.chat([_readable(each) for each in messages], add_generation_prompt=True, tools=tools)
        except Dropped as reason:
            raise UserError(f"the chat template cannot render the conversation: it is {reason}") from reason
        return encoder.rendered(text)

    def seed_for(self, call: Called, token_ids: Sequence[int]) -> int:
        """Return the seed for the answer to a call. To be called once for each call.

        Args:
            token_ids: what :meth:`prompt_for` returned.
        """
        request = _request(call)
        asked = self._asked[request, tuple(token_ids)]
        self._asked[request, tuple(token_ids)] += 1
        return request_seed(self._seed, token_ids, asked, request)

    def record(self, call: Called, token_ids: Sequence[int], action: Action, version: int) -> None:
        """Record the answer to a call, before the program reads it.

        Args:
            token_ids: what :meth:`prompt_for` returned.
            action: the answer, with at least one token.
            version: version of the weights that sampled it.

        Raises:
            ValueError: the answer has no tokens, or another number of log-probabilities.
        """
        if not action.token_ids or len(action.token_ids) != len(action.logprobs):
            raise ValueError(
                f"an answer of {len(action.token_ids)} tokens has {len(action.logprobs)} log-probabilities: expected as many, at "
                "least one"
            )
        finish_reason = "length" if action.truncated else "stop"
        asked = call.prompt if isinstance(call.prompt, str) else "\n".join(map(plain_text, _messages(call)))
        answer = _Answer(
            tuple(token_ids), action.token_ids, action.logprobs, version, finish_reason, call.call, action.text, asked
        )
        self._answers.append(answer)
        self._called[call.call] = call
        if isinstance(call.prompt, str):
            node = _Node(answer, [said("assistant", action.text)])
            self._texts.setdefault(call.prompt + action.text, []).append(node)
        elif not isinstance(call.prompt[0], int):
            messages = [*_messages(call), action.message]
            node = _Node(answer, [_readable(message) for message in messages])
            self._conversations.setdefault([*_chain(messages, call.tools)][-1], []).append(node)

    def rows(self, named: int | None = None) -> list[Row]:
        """The training rows so far: one for each answer that no later call continued, and one for the sample's answer. If that
        answer is known, its row is the last. Only the tokens decide the order of rows, and which row trains a shared token.

        Args:
            named: the call whose answer the program gave as the sample's.
        """
        answers, parents = self._tree()
        final = _final(answers, parents, named)
        others = sorted(_leaves(parents) - {final}, key=lambda leaf: (answers[leaf].tokens, leaf))
        learned: set[int] = set()
        rows = []
        for last in [*([] if final is None else [final]), *others]:
            path, number = [], last
            while number not in learned:
                path.append(number)
                learned.add(number)
                if (above := parents[number]) is None:
                    break
                number = above
            rows.append(_row(answers[last].tokens, [answers[number] for number in reversed(path)]))
        return rows if final is None else [*rows[1:], rows[0]]

    def has_answer(self, named: int | None = None) -> bool:
        """True if the sample's answer is known, or there are no answers. It is the answer that the program names; else the only
        one that no later call continued; else the one among these whose prompt holds all the others.

        Args:
            named: as for :meth:`rows`.
        """
        answers, parents = self._tree()
        return not answers or _final(answers, parents, named) is not None

    def first_call(self, named: int | None = None) -> Called | None:
        """The call that began the conversation of the sample's answer; None if the answer is not known.

        Args:
            named: as for :meth:`rows`.
        """
        answers, parents = self._tree()
        number = _final(answers, parents, named)
        if number is None:
            return None
        while (above := parents[number]) is not None:
            number = above
        return self._called[answers[number].call]

    def _tree(self) -> tuple[list[_Answer], list[int | None]]:
        """The answers in the order of their content, and for each the number of the answer that its prompt continues."""
        answers = sorted(self._answers)
        by_tokens: dict[tuple[int, ...], int] = {}
        for number, answer in enumerate(answers):
            by_tokens.setdefault(answer.tokens, number)
        lengths = sorted({len(tokens) for tokens in by_tokens}, reverse=True)

        def parent(answer: _Answer) -> int | None:
            before = (answer.prompt[:length] for length in lengths if length <= len(answer.prompt))
            return next((by_tokens[tokens] for tokens in before if tokens in by_tokens), None)

        return answers, [parent(answer) for answer in answers]

    def _prompt_of_text(self, text: str, encoder: Encoder) -> list[int]:
        known = [before for before in self._texts if text.startswith(before)]
        if not known:
            return encoder.prompt(text)
        longest = max(known, key=len)
        return _continued(encoder, _first(self._texts[longest]), text.removeprefix(longest), None)


def request_seed(sample_seed: int, token_ids: Sequence[int], asked: int, request: str = "") -> int:
    """A 31-bit seed, a pure function of the sample's seed and the call.

    Args:
        token_ids: the prompt's token ids.
        asked: number of earlier equal calls in the session. Among equal concurrent calls any may be the first: nothing
            distinguishes them.
        request: everything else that distinguishes two calls, such as the limit on the answer's length.
    """
    key = json.dumps([sample_seed, [*token_ids], asked, request]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1


def _leaves(parents: Sequence[int | None]) -> set[int]:
    """The answers that no call continued."""
    return set(range(len(parents))) - {number for number in parents if number is not None}


def _final(answers: Sequence[_Answer], parents: Sequence[int | None], named: int | None) -> int | None:
    """The number of the sample's answer; None if it is not known. The time of calls plays no role."""
    if named is not None:
        return next(number for number, answer in enumerate(answers) if answer.call == named)
    leaves = _leaves(parents)
    whole = [
        leaf
        for leaf in leaves
        if all(other == leaf or answers[other].text.strip() in answers[leaf].asked for other in leaves)
    ]
    return whole[0] if len(whole) == 1 else None


def _continued(
    encoder: Encoder, node: _Node, new: list[Message] | str, tools: list[dict[str, Any]] | None
) -> list[int]:
    tokens = node.answer.tokens
    return [*tokens, *continuation(encoder, node.messages, node.answer.completion, new, tools=tools)]


def _row(tokens: tuple[int, ...], learned: list[_Answer]) -> Row:
    """Build the row that trains the answers ``learned`` within ``tokens``, in order."""
    length = len(tokens)
    mask, logprobs, versions = [False] * length, [0.0] * length, [-1] * length
    turns = []
    for answer in learned:
        start, end = len(answer.prompt), len(answer.tokens)
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = answer.logprobs
        versions[start:end] = [answer.version] * (end - start)
        turns.append(SampledSpan(start, end, answer.finish_reason))
    return Row(tokens, tuple(mask), tuple(logprobs), tuple(versions), tuple(turns))


def _first(nodes: list[_Node]) -> _Node:
    """The node that a call continues if several have the same text but different tokens, chosen by content."""
    return min(nodes, key=lambda node: node.answer)


def _messages(call: Called) -> list[Message]:
    return [message for message in call.prompt if isinstance(message, dict)]


def _tools(call: Called) -> list[dict[str, Any]] | None:
    return [*call.tools] if call.tools else None


def _request(call: Called) -> str:
    """Everything about a call that the policy's answer may depend on, in canonical form."""
    sampling = dict(call.sampling or {})
    if isinstance(call.prompt, str) or isinstance(call.prompt[0], int):
        return _json([call.prompt, sampling])
    return _json([[*_keys(call)][-1], sampling])


def _keys(call: Called) -> Iterator[str]:
    return _chain(_messages(call), call.tools)


def _chain(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    """Yield for each message a digest of the canonical conversation up to it, with the tools that its beginning describes."""
    key = _json([*tools] if tools else None)
    for message in messages:
        key = hashlib.sha256(_json([key, _canonical(message)]).encode()).hexdigest()
        yield key


def _canonical(message: Message) -> Message:
    """The canonical form of a message, equal for all messages that mean the same.

    Client libraries send an answer back without fields that they do not know, with null for an empty content, and with parsed
    arguments of tool calls. In an answer, the text and the calls count, but not the ids of the calls.
    """
    content = message.get("content")
    content = plain_text(message) if content is None or is_parts(content) else content
    if message["role"] != "assistant":
        return {**{name: value for name, value in message.items() if value is not None}, "content": content}
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        calls.append([function.get("name"), _parsed(function.get("arguments"))])
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _readable(message: Message) -> Message:
    """The form in which chat templates expect a message: no nulls, and arguments of tool calls as an object."""
    known = {name: value for name, value in message.items() if value is not None}
    known.setdefault("content", "")
    if "tool_calls" in known:
        known["tool_calls"] = [_with_parsed_arguments(call) for call in known["tool_calls"]]
    return known


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_parsed_arguments(call["function"])}
    return {**call, "arguments": _parsed(call.get("arguments"))}


def _parsed(arguments: Any) -> Any:
    """The object that a call's arguments hold, parsed if they are JSON text. Anything else stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
