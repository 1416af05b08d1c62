"""One record of a chat data set to messages, whatever its layout.

| layout | keys |
|---|---|
| messages | `messages`: role and content, also `reasoning_content` and `tool_calls` of an assistant |
| conversations | ShareGPT: `conversations` with from and value; `system` beside it |
| prompt/response | `prompt` and `response` (or `completion`), texts or lists of messages; `system` beside them |

What comes out has one form: roles system, user, assistant and tool, content as text, no keys that are null, arguments of
tool calls as objects (some write them as JSON text). `tools`, schemas of functions, may stand beside any layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
KEYS = ("messages", "conversations", "prompt", "response", "completion", "system", "tools", "id")


class SampleError(ValueError):
    """A sample that cannot be trained on: `kind` is one of a few words to count by, `detail` says what is wrong here."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Conversation:
    """Messages in the one form, schemas of tools, the record's id (None when it has none) and its layout."""

    messages: list[Message]
    tools: list[Any] | None
    id: str | None
    layout: str


def conversation(record: Any) -> Conversation:
    """The conversation in `record`, a parsed JSON value or a row of a table.

    Raises:
        SampleError: no known layout, an unknown role, empty or non-text content, no assistant turn.
    """
    if not isinstance(record, dict):
        raise SampleError("not a record", f"a JSON object is needed, this is {type(record).__name__}")
    record = {key: value for key, value in record.items() if value is not None}
    if "messages" in record:
        layout, raw = "messages", _turns(record["messages"], "messages")
    elif "conversations" in record:
        layout, raw = "conversations", [_sharegpt(t) for t in _turns(record["conversations"], "conversations")]
    elif "prompt" in record and ("response" in record or "completion" in record):
        answer = "response" if "response" in record else "completion"
        layout = f"prompt/{answer}"
        raw = _side(record["prompt"], "user", "prompt") + _side(record[answer], "assistant", answer)
    else:
        found = ", ".join(map(str, record)) or "nothing"
        raise SampleError("no messages", f"needs messages, conversations or prompt and response; it has {found}")
    if layout != "messages" and isinstance(record.get("system"), str) and record["system"]:
        raw = [{"role": "system", "content": record["system"]}, *raw]
    messages = one_form(raw)
    if not any(message["role"] == "assistant" for message in messages):
        raise SampleError("no assistant turn", f"{len(messages)} messages, none by the assistant")
    identity = record.get("id")
    return Conversation(messages, schemas(record.get("tools")), None if identity is None else str(identity), layout)


def one_form(turns: Sequence[Any]) -> list[Message]:
    """Messages of a role and content each, in the form that templates are given.

    Raises:
        SampleError: an unknown role, empty or non-text content, a broken tool call.
    """
    return [_message(n, turn) for n, turn in enumerate(turns, 1)]


def _turns(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SampleError("no messages", f"'{key}' is not a list with messages")
    return value


def _side(value: Any, role: str, key: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _turns(value, key)


def _sharegpt(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # role and content under the name of the other layout: _message looks at them
    speaker, value = turn["from"], turn.get("value")
    role = SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if speaker != "function_call":
        return {"role": role, "content": value}
    call = _parsed(value, "broken tool call")
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(c, dict) and "name" in c for c in calls):
        raise SampleError("broken tool call", "a function_call is not JSON with a name and arguments")
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def _message(number: int, turn: Any) -> Message:
    where = f"message {number}"
    if not isinstance(turn, dict):
        raise SampleError("no messages", f"{where} is not an object with role and content")
    message: Message = {key: value for key, value in turn.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise SampleError("unknown role", f"{where} has the role {role!r}; known: {', '.join(ROLES)}")
    message["content"] = _text(message.get("content", ""), where)
    if "reasoning_content" in message:
        message["reasoning_content"] = _text(message["reasoning_content"], where)
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(c, where) for c in _turns(message["tool_calls"], "tool_calls")]
    else:
        message.pop("tool_calls", None)
    says_nothing = not message["content"].strip() and "tool_calls" not in message
    # A system prompt may be empty on purpose (no default one), and so may what a tool returned.
    if says_nothing and role in ("user", "assistant"):
        raise SampleError("empty content", f"{where} ({role}) says nothing")
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)  # OpenAI's content parts
    if not isinstance(content, str):
        raise SampleError("content is not text", f"{where} holds {type(content).__name__}")
    if not is_text(content):
        raise SampleError("content is not text", f"{where} holds half a surrogate pair")
    return content


def is_text(text: str) -> bool:
    """Whether a tokenizer takes it: JSON can name halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _call(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object, which templates expect."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise SampleError("broken tool call", f"{where} calls a tool without a name")
    inner = inner | ({"arguments": _parsed(inner["arguments"], "broken tool call")} if "arguments" in inner else {})
    return call | {"function": inner} if "function" in call else inner


def schemas(value: Any) -> list[Any] | None:
    """Schemas of tools, written as a list or as its JSON text; None without any.

    Raises:
        SampleError: it is something else.
    """
    value = _parsed(value, "broken tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise SampleError("broken tools", "'tools' is not a list of schemas")
    return value


def _parsed(value: Any, kind: str) -> Any:
    """`value`, or what it says when it is JSON text; text that nests too deep is bad, as what `kind` calls it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
    except RecursionError:
        raise SampleError(kind, "its JSON text nests too deep") from None
