"""Other clients of OpenAI's API hold a conversation with this server, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_programs import Run
from serving import Server

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning")]
LITELLM = """
import json, sys
import litellm
url = sys.argv[1]
messages = [{"role": "user", "content": "Hello there"}]
kept = []
for turn in range(3):
    options = {"model": "openai/llama", "api_base": url + "/v1", "messages": messages}
    options |= {"temperature": 0, "max_tokens": 12}
    whole = litellm.completion(**options)
    parts = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].message.content
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    kept.append([text, streamed, whole.choices[0].finish_reason, whole.usage.total_tokens])
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]
print(json.dumps(kept))
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what the weather is in a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
"""A tool whose every call is short, so that a random model ends it."""
LITELLM_TOOLS = f"""
import json, sys
import litellm
url, tool = sys.argv[1], json.loads({json.dumps(json.dumps(TOOL))})
options = {{"model": "openai/llama", "api_base": url + "/v1", "temperature": 0, "max_tokens": 80, "tools": [tool],
            "tool_choice": {{"type": "function", "function": {{"name": "weather"}}}}}}
messages = [{{"role": "user", "content": "Oslo?"}}]
whole = litellm.completion(messages=messages, **options)
parts = list(litellm.completion(messages=messages, stream=True, **options))
built = litellm.stream_chunk_builder(parts, messages=messages)
calls = [answer.choices[0].message.tool_calls[0] for answer in (whole, built)]
messages += [whole.choices[0].message.model_dump(exclude_none=True),
             {{"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}}]
after = litellm.completion(messages=messages, model="openai/llama", api_base=url + "/v1", max_tokens=8, temperature=0)
print(json.dumps([[[call.function.name, call.function.arguments] for call in calls], after.usage.completion_tokens]))
"""
LANGCHAIN_TOOLS = f"""
import json, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
url, tool = sys.argv[1], json.loads({json.dumps(json.dumps(TOOL))})
chat = ChatOpenAI(model="llama", base_url=url + "/v1", temperature=0, max_tokens=80)
forced = chat.bind_tools([tool], tool_choice="weather")
asked = [HumanMessage("Oslo?")]
whole = forced.invoke(asked)
built = None
for part in forced.stream(asked):
    built = part if built is None else built + part
calls = [answer.tool_calls[0] for answer in (whole, built)]
after = chat.bind(max_tokens=8).invoke([*asked, whole, ToolMessage("rain", tool_call_id=calls[0]["id"])])
kept = [[call["name"], json.dumps(call["args"])] for call in calls]
print(json.dumps([kept, after.usage_metadata["output_tokens"]]))
"""
LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
url = sys.argv[1]
chat = ChatOpenAI(model="llama", base_url=url + "/v1", temperature=0, max_tokens=12, stream_usage=True)
messages, kept = [("system", "Be brief."), ("human", "Hello there")], []
for turn in range(3):
    whole = chat.invoke(messages)
    streamed = "".join(part.content for part in chat.stream(messages))
    finish = whole.response_metadata["finish_reason"]
    kept.append([whole.content, streamed, finish, whole.usage_metadata["total_tokens"]])
    messages += [("ai", whole.content), ("human", f"And {turn}?")]
print(json.dumps(kept))
"""


@pytest.mark.parametrize("program", [LITELLM, LANGCHAIN], ids=["litellm", "langchain"])
def test_three_turns(run: Run, server: Server, tmp_path: Path, program: str) -> None:
    (tmp_path / "talk.py").write_text(program)
    kept = json.loads(run("python", tmp_path / "talk.py", server.url).splitlines()[-1])
    assert len(kept) == 3
    for text, streamed, finish, tokens in kept:
        assert text == streamed
        assert finish in ("stop", "length")
        assert tokens > 12
    assert any(text for text, *_ in kept)


@pytest.mark.parametrize("program", [LITELLM_TOOLS, LANGCHAIN_TOOLS], ids=["litellm", "langchain"])
def test_a_tool_is_called_and_answered(run: Run, calling_server: Server, tmp_path: Path, program: str) -> None:
    """Whole and streamed, the call is the same and fits the tool's schema; the conversation goes on with its result."""
    (tmp_path / "call.py").write_text(program)
    calls, tokens = json.loads(run("python", tmp_path / "call.py", calling_server.url).splitlines()[-1])
    assert [name for name, _ in calls] == ["weather", "weather"]
    whole, streamed = (json.loads(arguments) for _, arguments in calls)
    assert whole == streamed
    assert whole["place"] in ("Oslo", "Rome")
    assert 1 <= whole["days"] <= 9
    assert tokens >= 1
