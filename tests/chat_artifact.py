"""The counting artifact with a tokenizer of one token a byte, chat markers and a template."""

import hashlib
import json
from pathlib import Path

from counting_artifact import Counting
from test_tokenizer import bytes_tokenizer

from runtime.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<|{{ m.role[0] }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% if think %}<think>{% endif %}{% endif %}"
)
"""Turns such as ``<|u|>hello<|end|>``; with `think` it opens what later turns do not have."""
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")
"""Rewrites: only the last message has its text."""

INNER = bytes_tokenizer()
INNER.add_special_tokens(["<|s|>", "<|u|>", "<|a|>"])
TOKENIZER = Tokenizer(INNER)
VOCAB = INNER.get_vocab_size()
END = INNER.token_to_id("<|end|>")


def write(folder: Path, *, template: str | None = TEMPLATE, **counting: object) -> Path:
    """Write it into `folder`; its vocabulary is the tokenizer's, every token has text."""
    settings = {"vocab": VOCAB, "capacity": 512, "eos": (END,), **counting}
    path = Counting(**settings).write(folder)
    files = {"tokenizer.json": INNER.to_str()}
    if template is not None:
        files["tokenizer_config.json"] = json.dumps({"chat_template": template})
    manifest = json.loads((path / "manifest.json").read_text())
    for name, text in files.items():
        (path / name).write_text(text)
        manifest["files"][name] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path
