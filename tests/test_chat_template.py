"""Templates against hand-written text."""

import hashlib
import json
import time
from dataclasses import replace
from datetime import datetime

import pytest
from counting_artifact import Counting

from artifacts import Manifest
from runtime.chat_template import ChatTemplate
from runtime.errors import LoadError, RequestError

USER = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chatml_is_rendered_open_and_closed():
    template = ChatTemplate(CHATML)
    closed = "<|im_start|>user\nhi<|im_end|>\n"
    assert template.render(USER) == closed + "<|im_start|>assistant\n"
    assert template.render(USER, opened=False) == closed


def test_templates_get_what_transformers_gives_them():
    """What the templates of the family use: filters, tests, loop controls, namespaces."""
    source = """{%- set ns = namespace(last=0) %}
    {%- for m in messages[::-1] %}
        {%- if loop.index0 % 2 == 1 %}{% continue %}{% endif %}
        {%- set ns.last = ns.last + loop.length * 2 ** 3 %}
        {{- bos_token ~ m.content | trim ~ (m.x is defined) ~ loop.last }}
    {%- endfor %}
    {%- generation %}{{ ns.last }}{% endgeneration %}
    {{- messages | tojson }}
    {{-  "a-b".split("-")[-1].replace("b", "c") }}{{ [1, 2] | join("+") }}
    {%- if tools %}tools{% endif %}{% if thinking is false %}!{% endif %}"""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": " <é> "}]
    expected = '<s><é>FalseTrue8[{"role": "user", "content": " <é> "}]c1+2!'
    assert template.render(messages, options={"thinking": False}) == expected


def test_a_template_can_tell_the_date():
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert template.render(USER) == str(datetime.now().year)


def test_a_template_can_refuse_a_conversation():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses the conversation: roles must alternate"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}"
        "{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}"
        "{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}"
        "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}"
        "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}"
        "{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ [0] * 999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.missing.missing }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('x') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_what_would_use_the_machine_up_or_break_out_is_refused_in_time(source):
    begin = time.perf_counter()
    with pytest.raises(RequestError, match="the chat template refuses the conversation"):
        ChatTemplate(source).render(USER)
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "does not compile"),
        ("{{ 'x' | center(999999999) }}", "does not compile"),
        ("x" * (2**20 + 1), "has 1048577 bytes; none is over 1048576"),
    ],
)
def test_what_is_no_template_is_refused_when_it_is_loaded(source, message):
    with pytest.raises(LoadError, match=message):
        ChatTemplate(source)


def artifact(tmp_path, **files: str):
    folder = Counting().write(tmp_path)
    digests = {}
    for name, text in files.items():
        name = name.replace("__", ".")
        (folder / name).write_text(text)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    return folder, replace(Manifest.read(folder), files=digests)


def test_the_file_beats_the_config_and_the_config_gives_special_tokens(tmp_path):
    config = {
        "chat_template": "config {{ bos_token }}{{ eos_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "pad_token": None,
    }
    folder, manifest = artifact(tmp_path, tokenizer_config__json=json.dumps(config))
    template = ChatTemplate.of(folder, manifest)
    assert template is not None
    assert template.render(USER) == "config <s></s>"
    files = {"tokenizer_config__json": json.dumps(config), "chat_template__jinja": "file"}
    template = ChatTemplate.of(*artifact(tmp_path, **files))
    assert template is not None
    assert template.render(USER) == "file"


def test_a_list_of_templates_has_a_default(tmp_path):
    config = {"chat_template": [{"name": "rag"}, {"name": "default", "template": "yes"}, 3]}
    template = ChatTemplate.of(*artifact(tmp_path, tokenizer_config__json=json.dumps(config)))
    assert template is not None
    assert template.render(USER) == "yes"


@pytest.mark.parametrize("config", ["{}", '{"chat_template": 3}', '{"chat_template": []}'])
def test_an_artifact_may_have_no_template(tmp_path, config):
    assert ChatTemplate.of(*artifact(tmp_path, tokenizer_config__json=config)) is None
    assert ChatTemplate.of(*artifact(tmp_path)) is None


@pytest.mark.parametrize("config", ["[]", "not json", "[" * 100_000])
def test_a_config_that_is_none_is_refused(tmp_path, config):
    with pytest.raises(LoadError, match=r"tokenizer_config.json is no"):
        ChatTemplate.of(*artifact(tmp_path, tokenizer_config__json=config))
