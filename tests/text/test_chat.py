"""Chat templates: the dialect that published models expect, and a sandbox that ends."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import pytest

from paceline.errors import InvalidInput, PacelineError, UnsupportedOption
from paceline.text.chat import MAX_STEPS, MAX_TEXT, render

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
    with pytest.raises(UnsupportedOption, match=r"the model's chat template (is not safe|cannot be read)"):
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


GROW = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(80) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% set r = range(9999)|list %}{% for a in r recursive %}{{ '' if loop.depth0 else loop(r) }}{% endfor %}",
        "{{ range(2**70) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [[1] * 9999] * 9999 }}",
        "{{ 7 ** 99999999 }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ '%010000000000d' % 1 }}",
        "{{ '%010000000000d' | format(1) }}",
        "{{ '{:>10000000000}'.format('x') }}",
        "{{ 'x' | indent(10**9, true) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ strftime_now('%1000000000Y') }}",
        GROW.replace("STEP", "ns.s ~ ns.s"),
        GROW.replace("STEP", "ns.s + ns.s"),
        GROW.replace("STEP", "ns.s.replace('a', 'aa')"),
        GROW.replace("STEP", "ns.s | replace('a', 'aa')"),
        GROW.replace("STEP", "[ns.s, ns.s] | join(ns.s)"),
        GROW.replace("STEP", "ns.s.join([ns.s, ns.s])"),
        GROW.replace("STEP", "'{0}{0}'.format(ns.s)"),
        GROW.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
        GROW.replace("STEP", "'%s%s' | format(ns.s, ns.s)"),
        GROW.replace("STEP", "[ns.s, ns.s]"),
        GROW.replace("STEP", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ ns.s | tojson }}"),
        GROW.replace("STEP", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ ns.s | string | length }}"),
        "{% set n = namespace(s='a') %}{% for i in range(80) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_does_not_end_or_grows_without_end(template: str) -> None:
    start = time.perf_counter()
    with pytest.raises(UnsupportedOption, match=r"the model's chat template (is not safe to run|does not end)"):
        render(template, USER)
    assert time.perf_counter() - start < 20


def test_the_limits_leave_room_for_long_conversations() -> None:
    """A thousand turns of a thousand characters, with a template that builds its text piece by piece."""
    talk = [{"role": role, "content": "x" * 1000} for role in ("user", "assistant")] * 500
    piecewise = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = m.role ~ ': ' ~ m.content %}"
        "{{ ns.s | trim }}\n{% endfor %}"
    )
    assert render(piecewise, talk).count("\n") == 1000
    assert len(render(CHATML, talk)) > 1_000_000
    assert MAX_STEPS >= 100_000
    assert MAX_TEXT >= 2**26


def test_one_rendering_does_not_spend_the_next_ones_budget() -> None:
    for _ in range(5):
        assert len(render(f"{{% for i in range({MAX_STEPS // 3}) %}}x{{% endfor %}}", USER)) == MAX_STEPS // 3


@pytest.mark.parametrize(
    "template, where",
    [
        ("{% for %}", "at line 1"),
        ("a\n{{ 'x' | nosuch }}", "at line 2"),
        ("{{ x", "at line 1"),
        ("{{" + "(" * 9999, ""),
    ],
)
def test_a_template_that_cannot_be_read(template: str, where: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"the model's chat template cannot be read {where}".strip()):
        render(template, USER)


def test_a_template_of_absurd_size() -> None:
    with pytest.raises(UnsupportedOption, match="has 1048577 characters; at most 1048576"):
        render("x" * (2**20 + 1), USER)


@pytest.mark.parametrize("template", ["{{ x.y.z }}", "{{ 1 / 0 }}", "{{ messages[0].content.foo() }}", "{{ 1 + 'a' }}"])
def test_a_template_that_fails_on_these_messages(template: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape("the model's chat template fails on these messages: ")) as caught:
        render(template, USER)
    assert isinstance(caught.value, PacelineError)


def test_a_template_cannot_shadow_the_counters() -> None:
    template = "{% set counted = 1 %}{% set joined = 2 %}{% for i in [1, 2] %}{{ i ~ '.' }}{% endfor %}"
    assert render(template, USER) == "1.2."
