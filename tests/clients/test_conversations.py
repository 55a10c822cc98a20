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
