"""Conversations are rendered and read as by `apply_chat_template` of transformers."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
from chat_templates import CHATML, TEMPLATES
from tokenizer_folders import opened, write_folder
from transformers import AutoTokenizer

from mod_export.errors import UsageError
from mod_export.runtime import template_process
from mod_export.runtime.chat_template import ChatTemplate
from mod_export.runtime.template_process import TemplateNotRenderedError
from mod_export.runtime.texts import Bytes
from mod_export.runtime.tokenizer import TokenizersFile
from mod_export.serve.openai_formats import ChatRequest

SYSTEM = {"role": "system", "content": "Answer <briefly> & 'well'."}
USER = {"role": "user", "content": "  What is \u00fcber \U0001f600?\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOver, \u6771\u4eac "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None, "<\u00fc>"]}}}],
}
CONVERSATIONS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "And <|im_end|> or </s>?"}],
    "all": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "empty": [{"role": "user", "content": ""}],
    "odd": [USER, USER],
    "call": [USER, CALL, USER],
    "named": [{**USER, "name": "me", "nothing": None}],
}
REFUSED = {
    **{(family, "odd"): "alternate" for family in ("llama2", "mistral", "gemma")},
    **{("gemma", name): "System role not supported" for name in ("system", "all")},
}


def folder_of(root: Path, family: str, *, beside: bool = True) -> Path:
    """Writes a tokenizer folder, with the template in its own file or in tokenizer_config.json."""
    if not beside:
        return write_folder(root, family, chat_template=TEMPLATES[family])
    folder = write_folder(root, family)
    (folder / "chat_template.jinja").write_text(TEMPLATES[family])
    return folder


@pytest.mark.parametrize(("family", "beside"), [*((family, True) for family in TEMPLATES), ("qwen3", False)])
def test_conversations_are_those_of_transformers(tmp_path: Path, family: str, beside: bool) -> None:
    folder = folder_of(tmp_path, family, beside=beside)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    file, rendered = opened(folder), 0
    for name, messages in CONVERSATIONS.items():
        if (family, name) in REFUSED:
            message = f"^the model's chat template refuses this conversation: .*{REFUSED[family, name]}"
            with pytest.raises(UsageError, match=message):
                file.chat_template.render(messages)
            with pytest.raises(jinja2.TemplateError, match=REFUSED[family, name]):
                theirs.apply_chat_template(messages, add_generation_prompt=True)
            continue
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert file.chat_template.render(messages) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert file.ids(text, special=False) == ids
        rendered += 1
    assert rendered >= 4


@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma"])
def test_a_conversation_begins_once(tmp_path: Path, family: str) -> None:
    """The template writes the first token itself, which the tokenizer would add to plain text."""
    file = opened(folder_of(tmp_path, family))
    (begin,) = file.ids("")
    assert file.ids(file.chat_template.render([USER]), special=False).count(begin) == 1
    assert file.ids("a")[0] == begin


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]


def test_named_templates(tmp_path: Path) -> None:
    """The default template is for plain conversations, and chat_template.jinja comes before all others."""
    folder = write_folder(tmp_path, "smollm2", chat_template=NAMED)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert opened(folder).chat_template.render([USER]) == expected
    (folder / "chat_template.jinja").write_text("{{ messages[0]['role'] }}\n")
    assert opened(folder).chat_template.render([USER]) == "user"


@pytest.mark.parametrize(("template", "message"), [
    (None, r"^this model has no chat template \(chat_template\.jinja, or chat_template in tokenizer_config\.json\); "),
    (NAMED[:1], r"^the model has chat templates for tool_use, and none is the default; write the one to use to "),
    ([{"name": "default"}], r"^chat_template in .*: expected a text, or a list of \{name, template\}$"),
    (5, r"^chat_template in tokenizer_config\.json: expected a text, or a list of \{name, template\}$"),
    ("{% if %}", r"^the model's chat template cannot be read \("),
])  # fmt: skip
def test_templates_that_are_none(tmp_path: Path, template: Any, message: str) -> None:
    folder = write_folder(tmp_path, "smollm2", chat_template=template)
    with pytest.raises(UsageError, match=message) as caught:
        TokenizersFile(folder / "tokenizer.json").chat_template.render([USER])
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "smollm2")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template\.jinja: cannot be read \("):
        TokenizersFile(folder / "tokenizer.json").chat_template.render([USER])


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append({}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(_x=1) %}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ messages[7].content.upper() }}",
    "{% include 'x' %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
])  # fmt: skip
def test_templates_that_fail_or_reach_further_are_refused(source: str) -> None:
    with pytest.raises(UsageError, match=r"^the model's chat template refuses this conversation: ."):
        ChatTemplate(source, {}).render([USER])


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENDLESS, r"refuses this conversation: it took longer than 0\.5 s$"),
        (LARGE, "refuses this conversation: it took more than 512 MiB of memory$"),
        ("{% for i in range(30000) %}{{ 'a' * 1000 }}{% endfor %}", "it wrote more than 16,777,216 characters$"),
        ("{{ 'a' * 10 ** 10 }}", "refuses this conversation: it took more than 512 MiB of memory$"),
        # jinja2 computes constants when it reads a template.
        ("{{ 9 ** 99999999 }}", r"cannot be read \(it took longer than 0\.5 s\)$"),
    ],
)
def test_templates_have_limits(monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    monkeypatch.setattr(template_process, "RENDER_S", 60.0 if "longer" not in message else 0.5)
    with pytest.raises(UsageError, match=message):
        ChatTemplate(source, {}).render([USER])


def test_a_template_goes_on_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}done", {})
    monkeypatch.setattr(template_process, "RENDER_S", 0.5)
    with pytest.raises(UsageError, match="it took longer than"):
        template.render([{"role": "user", "content": "slow"}])
    monkeypatch.undo()
    assert template.render([USER]) == "done"
    # The system may have killed the process meanwhile.
    process = template._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert template.render([USER]) == "done"


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    texts = [str(number) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts))
    assert found == texts


def test_no_process_for_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TemplateNotRenderedError, match=r"process that would do it did not start \(exit status 1\)$"):
        ChatTemplate("", {})


def test_a_process_that_somebody_kills_while_it_renders() -> None:
    """What was asked fails for now; what the template is able to do is not decided by that."""
    template = ChatTemplate("{{ tools }}", {})
    process = template._process._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    threading.Thread(target=kill_when_asked, args=[process]).start()
    with pytest.raises(TemplateNotRenderedError, match=r"ended \(exit status -9\); try again$"):
        _ = template.reads_tools
    assert template.reads_tools
    template._process.close()
    with pytest.raises(TemplateNotRenderedError, match=r"the process that would do it is closed$"):
        template.render([USER])


def kill_when_asked(process: subprocess.Popen[str]) -> None:
    """Kills a process that is stopped, as soon as a question waits for it."""
    assert process.stdin is not None
    while not any(fcntl.ioctl(process.stdin.fileno(), termios.FIONREAD, bytes(4))):
        time.sleep(0.01)
    process.kill()


@pytest.mark.parametrize(("messages", "message"), [
    ([{"content": "x"}], "a message has a role, which is a text, got {'content': 'x'}"),
    ([{"role": 1, "content": ""}], "a message has a role, which is a text, got {'role': 1, 'content': ''}"),
    ([{**USER, "x": object()}], "a message holds more than plain data (Object of type object is not JSON serializable"),
])  # fmt: skip
def test_messages_that_are_none(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        ChatTemplate(CHATML, {}).render(messages)


CALLS = {
    "role": "assistant", "tool_calls": [{"id": "call_1", "type": "function",
                                         "function": {"name": "f", "arguments": '{"x": 1}'}}],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "7"}
THOUGHT = {"role": "assistant", "content": "Over.", "reasoning": "hm"}
EVERY_KEY = "{% for m in messages %}{% for k in m | sort %}{{ k }}={{ m[k] | tojson }};{% endfor %}\n{% endfor %}"
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}|"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [
    EVERY_KEY,
    PARTS,
    "{{ messages[1].content is defined }}{{ messages[-1].reasoning_content }}{{ messages[-1].thinking }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{{ dict(a=1, b=2) | tojson }}{{ dict.fromkeys(['a'], 1) }}{{ dict([('k', 'v')]).k }}",
    "{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ eos_token }}{{ nothing }}",
])  # fmt: skip
def test_what_a_template_can_see_is_what_transformers_shows_it(tmp_path: Path, source: str) -> None:
    folder = write_folder(tmp_path, "smollm2", chat_template=source)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    messages = [USER, CALLS, RESULT, {**USER, "name": "me", "nothing": None}, THOUGHT]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert opened(folder).chat_template.render(messages) == expected


SENT: list[dict[str, Any]] = [
    {"role": "user", "content": "a", "name": "me"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    CALLS,
    {**CALLS, "content": None},
    RESULT,
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]},
    THOUGHT,
    {"role": "assistant", "content": "x", "reasoning_content": "y"},
    {"role": "assistant", "content": "x", "refusal": None},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "system", "content": ""},
    {"role": "developer", "content": "b"},
]
"""Messages that OpenAI's types allow."""


@pytest.mark.parametrize("source", [EVERY_KEY, PARTS, "{{ messages[0].role }} developer", CHATML])
def test_messages_of_openai_reach_the_template(tmp_path: Path, source: str) -> None:
    """The prompt is that of `apply_chat_template`, but for parts, the role developer and arguments that are a text,
    where the template does not know them.
    """
    folder = write_folder(tmp_path, "smollm2", chat_template=source)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    template = opened(folder).chat_template
    for message in SENT:
        (parsed,) = ChatRequest.model_validate_json(json.dumps({"messages": [message]})).messages
        known = known_to_transformers(message, source)
        if "tool_calls" in known:
            assert not template.reads_argument_texts
        try:
            expected = theirs.apply_chat_template([known], add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            with pytest.raises(UsageError, match=f"refuses this conversation: {re.escape(str(error))}"):
                template.render([parsed.for_template(template)])
            continue
        assert template.render([parsed.for_template(template)]) == expected, message


def known_to_transformers(message: dict[str, Any], source: str) -> dict[str, Any]:
    known = dict(message)
    if isinstance(message.get("content"), list):
        texts = [part.get("text", part.get("refusal")) for part in message["content"]]
        known["content"] = [{"type": "text", "text": text} for text in texts] if source == PARTS else "".join(texts)
    if message["role"] == "developer" and "developer" not in source:
        known["role"] = "system"
    if message.get("tool_calls"):
        known["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"x": 1}}} for call in message["tool_calls"]
        ]
    return known


@pytest.mark.parametrize(
    ("arguments", "expected"), [("{'x'}", '"'), ("[1]", '"'), ({"x": 1}, "{"), ('{"x": 1}', "{"), ("[" * 9999, '"')]
)
def test_only_the_text_of_an_object_becomes_one(arguments: Any, expected: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    request = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    (message,) = ChatRequest.model_validate(request).messages
    for source, first in (
        ("{{ messages[-1].tool_calls[0].function.arguments | tojson }}", expected),
        ("{{ messages[-1].tool_calls[0].function.arguments }}", str(arguments)[0]),
    ):
        template = ChatTemplate(source, {})
        assert template.render([message.for_template(template)])[0] == first


def test_whether_a_template_writes_tools() -> None:
    assert ChatTemplate("{{ tools | tojson }}", {}).reads_tools
    assert not ChatTemplate("{% if tools %}tools{% endif %}", {}).reads_tools
    assert not ChatTemplate("{{ raise_exception('no') }}", {}).reads_tools
    assert not ChatTemplate("{{ raise_exception('no') }}", {}).reads_argument_texts
    named = {"default": "", "tool_use": "{{ tools | tojson }}"}
    assert ChatTemplate(named, {}).reads_tools


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": [TOOL]}])
def test_variables_of_a_template_are_those_of_transformers(tmp_path: Path, variables: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, "qwen3")
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    rendered = opened(folder).chat_template.render([USER], variables)
    assert rendered == theirs.apply_chat_template([USER], add_generation_prompt=True, tokenize=False, **variables)
    assert ("<think>" in rendered) == (variables.get("enable_thinking") is False)
    assert ("# Tools" in rendered) == ("tools" in variables)


def test_a_variable_that_is_no_data_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^a variable of the template holds more than plain data \(Object of type "):
        ChatTemplate(CHATML, {}).render([USER], {"x": object()})


def test_bytes_have_no_template() -> None:
    with pytest.raises(UsageError, match=r"^this model's tokens are bytes, for which there is no chat template; give "):
        _ = Bytes().chat_template


def test_json_in_templates_is_that_of_transformers(tmp_path: Path) -> None:
    source = "{{ messages | tojson(indent=1, sort_keys=true) }}{{ messages | tojson(ensure_ascii=true) }}"
    folder = write_folder(tmp_path, "smollm2", chat_template=source)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template([SYSTEM, USER], add_generation_prompt=True, tokenize=False)
    assert opened(folder).chat_template.render([SYSTEM, USER]) == expected
    assert json.dumps(SYSTEM["content"])[1:-1] in expected
