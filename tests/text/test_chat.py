"""Chat templates: the dialect that published models expect, and what the sandbox keeps from them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from paceline.errors import InvalidInput, PacelineError, UnsupportedOption
from paceline.text.chat import render

USER = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_chatml() -> None:
    assert render(CHATML, USER) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, TALK[:3], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )


def test_an_instruct_template_with_its_own_checks() -> None:
    template = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 1) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""
    assert render(template, TALK, bos="<s>", eos="</s>") == "<s>[INST] Hi [/INST] Hello.</s>[INST] Bye [/INST]"
    with pytest.raises(InvalidInput, match="refuses the conversation: roles must alternate"):
        render(template, TALK[1:], bos="<s>", eos="</s>")


LLAMA_3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none and tools is defined %}
    {{- 'Environment: ipython\n' }}
{%- endif %}
{{- 'Today: ' + (date_string if date_string is defined else strftime_now('%d %b %Y')) + '\n\n' }}
{{- system_message }}{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
            {{- {'name': call.name, 'parameters': call.arguments} | tojson }}{{- '<|eot_id|>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


def test_the_shape_of_llama_3() -> None:
    def turn(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    opened = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    extra = {"date_string": "1 Jan 2026", "tools": None}
    assert render(LLAMA_3, TALK[:2], bos="<b>", extra=extra) == (
        "<b>" + turn("system", "Today: 1 Jan 2026\n\nBe brief.") + turn("user", "Hi") + opened
    )
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": "\u00e9<"}}]}
    text = render(LLAMA_3, [*USER, called], extra={"tools": []})
    assert "Environment: ipython\nToday: " in text
    assert turn("assistant", '{"name": "f", "parameters": {"x": "\u00e9<"}}') in text


GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def test_the_shape_of_gemma() -> None:
    assert render(GEMMA, TALK[1:], bos="<bos>") == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(InvalidInput, match="refuses the conversation: System role not supported"):
        render(GEMMA, TALK)
    with pytest.raises(InvalidInput, match="refuses the conversation: Conversation roles must alternate"):
        render(GEMMA, USER * 2)


MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in turns if m.role in ('user', 'assistant') %}
    {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' ~ (system ~ '\n\n' if loop.last and system is defined else '') ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' ~ m.content | trim ~ eos_token }}
    {%- else %}
        {{- raise_exception('no role ' ~ m.role) }}
    {%- endif %}
{%- endfor %}"""


def test_the_shape_of_mistral() -> None:
    assert render(MISTRAL, TALK, bos="<s>", eos="</s>") == (
        "<s>[INST] Hi[/INST] Hello.</s>[INST] Be brief.\n\nBye[/INST]"
    )
    with pytest.raises(InvalidInput, match="refuses the conversation: roles must alternate"):
        render(MISTRAL, USER * 2)
    with pytest.raises(InvalidInput, match="refuses the conversation: no role tool"):
        render(MISTRAL, [*USER, {"role": "tool", "content": "7"}])


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{% if true %}\n  {% if true %}\na\n  {% endif %}\n{% endif %}", "a\n"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ {'b': '<\u00e9>', 'a': [1, none]} | tojson }}", '{"b": "<\u00e9>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=Hi;"),
        ("{% for k, v in messages[0] | dictsort %}{{ k }};{% endfor %}", "content;role;"),
        ("{% set ns = namespace(n=0) %}{% for m in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say('a') ~ say(1) }}", "<a><1>"),
        ("{{ 'a b'.split()[1].upper() + 'x'.replace('x', 'yy') }}", "Byy"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{}{:>3}'.format('b', 'c') }}{{ '%d' | format(4) }}", "a-007b  c4"),
        ("{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ [0] * 2 }}", "abab12323[0, 0]"),
        ("{{ messages[-1]['content'] if messages else 'none' }}{{ missing }}", "Hi"),
        ("{{ missing is defined }}{{ strftime_now is defined }}{{ tools is none }}", "FalseTrueFalse"),
        ("{% for x in messages %}{{ loop.length }}{{ loop.last }}{% endfor %}", "1True"),
        (
            "{% for x in [[1, [2]]] recursive %}{{ '(' ~ loop(x) ~ ')' if x is iterable else x }}{% endfor %}",
            "(1(2))",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}", "a1"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
    ],
)  # fmt: skip
def test_the_dialect(template: str, expected: str) -> None:
    assert render(template, USER) == expected


def test_strftime_now_and_further_variables() -> None:
    assert render("{{ strftime_now('%Y') }}", USER) == str(datetime.now().year)
    template = "{{ tools[0].name }}{% if not enable_thinking %}<think></think>{% endif %}"
    assert render(template, USER, extra={"tools": [{"name": "f"}], "enable_thinking": False}) == "f<think></think>"
    assert render("{{ messages[0].content }}", USER, extra={"messages": "mine"}) == "Hi"


def test_messages_keep_their_other_keys_and_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, *USER]
    assert render("{{ messages[0].tool_calls[0].name }}{{ messages[0].content is none }}", messages) == "fTrue"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "ab"
    assert parts[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "messages, error, message",
    [
        ([], InvalidInput, r"messages = \[\]; allowed: a non-empty list of role and content"),
        ("hello", InvalidInput, "messages = 'hello'"),
        ({"role": "user", "content": "x"}, InvalidInput, "messages = {'role': 'user'"),
        (None, InvalidInput, "messages = None"),
        (["hello"], InvalidInput, r"messages\[0\] = 'hello'; allowed: a mapping"),
        ([{"content": "x"}], InvalidInput, r"messages\[0\]\['role'\] = None; allowed: a non-empty string"),
        ([{"role": "", "content": "x"}], InvalidInput, r"messages\[0\]\['role'\] = ''"),
        ([{"role": 7, "content": "x"}], InvalidInput, r"messages\[0\]\['role'\] = 7"),
        ([*USER, {"role": "user"}], InvalidInput, r"messages\[1\]\['content'\] = None; allowed: a string"),
        ([{"role": "user", "content": 7}], InvalidInput, r"messages\[0\]\['content'\] = 7"),
        ([{"role": "user", "content": b"x"}], InvalidInput, r"messages\[0\]\['content'\] = b'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidInput, r"messages\[0\]: a text part without text"),
        ([{"role": "user", "content": ["x"]}], UnsupportedOption, r"messages\[0\]: content of type None"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}],
            UnsupportedOption,
            r"messages\[0\]: content of type 'image_url' is not supported, only text",
        ),
    ],
)
def test_malformed_messages(messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        render(CHATML, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ (messages | map('attr', '__class__') | list)[0].__mro__ }}",
        "{{ '{0.__globals__[os]}'.format(raise_exception) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% from 'os' import system %}",
        "{% extends 'x' %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(UnsupportedOption, match="the model's chat template reaches outside its sandbox: "):
        render(template, USER)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "raise_exception.__globals__",
        "''|attr('__class__')",
        "namespace.__init__",
        "self._context",
    ],
)
def test_attributes_that_the_sandbox_hides_are_undefined(expression: str) -> None:
    assert render(f"{{{{ {expression} }}}}{{{{ ({expression}) is defined }}}}", USER) == "False"
    assert render("{{ '{0.__class__}'.format(1) }}", USER) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ range(2**70) }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ 'a' * 10**18 }}",
        "{{ 'a' * 10**30 }}",
        "{% set n = 10**18 %}{{ 'x'.center(n) }}",
    ],
)
def test_a_template_that_runs_out_of_range_stack_or_memory(template: str) -> None:
    with pytest.raises(UnsupportedOption, match="the model's chat template runs away: "):
        render(template, USER)


def test_a_long_conversation() -> None:
    """A thousand turns of a thousand characters."""
    talk = [{"role": role, "content": "x" * 1000} for role in ("user", "assistant")] * 500
    text = render(CHATML, talk)
    assert text.count("<|im_end|>") == 1001
    assert len(text) > 1_000_000


@pytest.mark.parametrize(
    "template, where",
    [
        ("{% for %}", "at line 1"),
        ("a\n{{ 'x' | nosuch }}", "at line 2"),
        ("{{ x", "at line 1"),
        ("{{" + "(" * 9999, ""),
        ("{{ 10**9999 }}", ""),  # folded while it is compiled, and too long to print
    ],
)
def test_a_template_that_cannot_be_read(template: str, where: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"the model's chat template cannot be read {where}".strip()):
        render(template, USER)


def test_a_template_of_absurd_size() -> None:
    with pytest.raises(UnsupportedOption, match="has 262145 characters; at most 262144"):
        render("x" * (2**18 + 1), USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ x.y.z }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.foo() }}",
        "{{ 1 + 'a' }}",
        "{{ missing | tojson }}",
        "{{ 1 | tojson(cls=namespace) }}",
    ],
)
def test_a_template_that_fails_on_these_messages(template: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape("the model's chat template fails on these messages: ")) as caught:
        render(template, USER)
    assert isinstance(caught.value, PacelineError)
