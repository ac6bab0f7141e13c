"""Many turns against one fresh prefill of all their text, token for token."""

from itertools import product
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest
from chat_artifact import FORGETFUL, TEMPLATE, TOKENIZER, VOCAB, write
from counting_artifact import Counting

import export
from artifacts import Target
from export.build import build
from export.options import BuildOptions
from export.sources import read_source
from runtime.chat_template import ChatTemplate
from runtime.committed import cache_rows, states_of
from runtime.conversation import Conversation, chat_prompt
from runtime.decode import Decoder
from runtime.errors import RequestError
from runtime.load import load
from runtime.state import Finish
from runtime.tokenizer import Tokenizer

CHECKPOINT = Path(export.__file__).parent / "demo" / "tiny-hybrid-mtp"
TURNS = ("def main(argv):\n", "and now \N{SNAKE}", "import os", "x", "class Cache:\n    def")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The demo checkpoint: real layers, real chat markers."""
    folder = tmp_path_factory.mktemp("trained") / "artifact"
    options = BuildOptions(k=3, capacity=768, prefill_rows=64, target=Target("cpu", "float32"))
    build(read_source(CHECKPOINT), folder, options, run_check=False)
    return folder


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return write(tmp_path_factory.mktemp("counting"))


def converse(folder, **settings):
    """A conversation and its decoder, which counts rows at the prefill slot."""
    loaded = load(folder)
    decoder = Decoder(loaded)
    slot, rows = loaded.slots["prefill"], []
    run = slot.run
    slot.run = lambda n=None: (rows.append(n), run(n))
    tokenizer = Tokenizer.of(folder, loaded.manifest)
    template = ChatTemplate.of(folder, loaded.manifest)
    return decoder, Conversation(decoder, tokenizer, template, **settings), rows


def fresh_answer(folder, conversation, messages, most, **choices):
    """The answer's tokens by a decoder that saw nothing before."""
    ids, _ = chat_prompt(
        conversation._template, conversation._tokenizer, messages, conversation._options
    )
    with Decoder.open(folder) as fresh:
        steps = fresh.generate(ids, most, **choices)
        return ids, [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("which", ["trained", "counting"])
@pytest.mark.parametrize("k", [0, 3])
def test_every_turn_equals_a_single_shot_and_prefills_only_what_is_new(which, k, request):
    folder = request.getfixturevalue(which)
    decoder, conversation, rows = converse(folder, system="Be brief.")
    with decoder:
        spent, last_ids, last_was_canonical = 0, [], False
        for number, turn in enumerate(TURNS):
            messages = [*conversation.messages, {"role": "user", "content": turn}]
            text = "".join(conversation.ask(turn, 24, k=k, stop_ids=()))
            ids, want = fresh_answer(folder, conversation, messages, 24, k=k, stop_ids=())
            assert conversation.answer.ids == want, number
            assert conversation.messages[-1] == {"role": "assistant", "content": text}
            fed = sum(rows)
            rows.clear()
            assert fed == len(ids) - decoder.stats.reused
            canonical = Tokenizer.of(folder, decoder.manifest).encode(text) == want
            spent += fed
            if last_was_canonical:
                # the newest token of the last answer, its closing marker, and the new turn
                assert decoder.stats.reused == len(last_ids) + 24 - 1
            last_ids, last_was_canonical = ids, canonical
        assert decoder.stats.reused > 0
        assert spent < len(ids) * 3


def test_an_end_of_turn_inside_a_block_is_prefilled_again_from_what_was_kept(tmp_path):
    """A perfect head: every block is accepted whole, so the caches run past the end."""
    folder = write(tmp_path, miss=0)
    decoder, conversation, rows = converse(folder)
    with decoder:
        ids, want = fresh_answer(folder, conversation, [{"role": "user", "content": "a"}], 9)
        rows.clear()
        stop = [want[2]]
        list(conversation.ask("a", 30, stop_ids=stop))
        assert conversation.answer.finish is Finish.STOP
        assert decoder.sequence.cut
        assert conversation.answer.ids == want[:3]
        rows.clear()
        messages = [*conversation.messages, {"role": "user", "content": "b"}]
        list(conversation.ask("b", 9))
        again, want = fresh_answer(folder, conversation, messages, 9)
        assert conversation.answer.ids == want
        # kept: where the assistant's turn was opened, one marker before the prompt's end
        assert decoder.stats.reused == len(ids) - 1
        assert sum(rows) == len(again) - len(ids) + 1


def test_the_true_end_of_a_turn_inside_a_block_is_not_gone_on_from(tmp_path):
    """The next prompt begins with all that was emitted, and still not with what was fed."""
    c = Counting(vocab=VOCAB, capacity=512, miss=0)
    turn, answer = next(
        (turn, answer)
        for turn in product(ascii_letters, repeat=2)
        for answer in [c.greedy(TOKENIZER.encode(f"<|u|>{''.join(turn)}<|end|>\n<|a|>"), 3)]
        if all(len(TOKENIZER.decode([token])) == 1 for token in answer)
        and TOKENIZER.decode(answer).isalnum()
        and TOKENIZER.decode(answer).isascii()
        and answer[2] not in answer[:2]
    )
    end = TOKENIZER.decode(answer[2:])  # what this model ends its turns with
    closed = TEMPLATE.replace(
        "<|end|>", f"{{{{ '{end}' if m.role == 'assistant' else '<|end|>' }}}}"
    )
    folder = write(tmp_path, miss=0, eos=(answer[2],), template=closed)
    decoder, conversation, _ = converse(folder)
    with decoder:
        list(conversation.ask("".join(turn), 30))
        assert conversation.answer.ids == answer
        emitted = [*decoder.sequence.prompt, *answer]
        messages = [*conversation.messages, {"role": "user", "content": "b"}]
        list(conversation.ask("b", 9))
        ids, want = fresh_answer(folder, conversation, messages, 9)
        assert ids[: len(emitted)] == emitted
        assert conversation.answer.ids == want
        assert decoder.stats.reused == len(emitted) - len(answer) - 1


def test_caches_and_states_are_those_of_a_fresh_prefill(trained):
    """Of target and head, after going on from the live state and from a kept one."""
    text = "def main(argv):\n    import os\n    return os.path.join(argv[0], "
    with Decoder.open(trained) as decoder, Decoder.open(trained) as fresh:
        ids = Tokenizer.of(trained, decoder.manifest).encode(text)
        kept = len(ids) - 4
        list(decoder.generate(ids, 14, keep_at=kept))
        live = decoder.sequence.fed
        for prompt, held in (((*live, 7, 8, 9), len(live)), ((*ids[:kept], 7, 8), kept)):
            decoder.prefill(prompt, reuse=True)
            assert decoder.stats.reused == held
            fresh.prefill(prompt)
            whole = all_of(fresh, len(prompt))
            for name, values in all_of(decoder, len(prompt)).items():
                assert np.allclose(values, whole[name], rtol=0, atol=2e-4), name


def all_of(decoder, length):
    """Rows of every cache and every state; the head's last row is open until a draft."""
    loaded = decoder.loaded
    found = states_of(loaded) | cache_rows(loaded, 0, length)
    for name in ("head.0.key", "head.0.value"):
        found[name] = loaded.buffers.read(name)[:, :, : length - 1]
    return found


def test_a_stop_string_inside_a_block_is_prefilled_again_from_what_was_kept(tmp_path):
    folder = write(tmp_path, miss=0)
    decoder, conversation, _ = converse(folder)
    with decoder:
        ids, want = fresh_answer(folder, conversation, [{"role": "user", "content": "d"}], 40)
        text = TOKENIZER.decode(want)
        letters = [TOKENIZER.decode([token]) for token in want]
        stop = next(
            c
            for i, c in enumerate(letters)
            if c.isalnum() and letters.index(c) == i > 4 and i % 4
        )
        shown = "".join(conversation.ask("d", 40, stop=[stop]))
        assert shown == text.split(stop)[0]
        messages = [*conversation.messages, {"role": "user", "content": "b"}]
        list(conversation.ask("b", 9))
        assert conversation.answer.ids == fresh_answer(folder, conversation, messages, 9)[1]
        assert decoder.stats.reused == len(ids) - 1


def test_a_template_that_opens_a_turn_otherwise_than_it_keeps_it_costs_the_answer(counting):
    decoder, conversation, rows = converse(counting, options={"think": True})
    with decoder:
        list(conversation.ask("a", 5, stop_ids=()))
        before, _ = fresh_answer(counting, conversation, conversation.messages[:1], 1)
        rows.clear()
        messages = [*conversation.messages, {"role": "user", "content": "b"}]
        list(conversation.ask("b", 5, stop_ids=()))
        ids, want = fresh_answer(counting, conversation, messages, 5, stop_ids=())
        assert conversation.answer.ids == want
        assert decoder.stats.reused == len(before) - len("<think>") - 1
        assert sum(rows) == len(ids) - decoder.stats.reused


def test_a_template_that_rewrites_history_is_followed_from_the_start(tmp_path):
    folder = write(tmp_path, template=FORGETFUL)
    decoder, conversation, rows = converse(folder)
    with decoder:
        for turn in ("a", "b", "c"):
            messages = [*conversation.messages, {"role": "user", "content": turn}]
            rows.clear()
            list(conversation.ask(turn, 5, stop_ids=()))
            ids, want = fresh_answer(folder, conversation, messages, 5, stop_ids=())
            assert conversation.answer.ids == want
        assert (decoder.stats.reused, sum(rows)) == (0, len(ids))


def test_an_interrupt_keeps_what_was_answered_and_the_next_turn_is_right(counting):
    decoder, conversation, _ = converse(counting)
    with decoder:
        pieces = conversation.ask("hello", 50, stop_ids=())
        for _ in range(4):
            next(pieces)
        pieces.close()
        assert conversation.messages[-1]["content"] == conversation.answer.text
        messages = [*conversation.messages, {"role": "user", "content": "b"}]
        list(conversation.ask("b", 9, stop_ids=()))
        _, want = fresh_answer(counting, conversation, messages, 9, stop_ids=())
        assert conversation.answer.ids == want


def test_an_interrupt_inside_a_graph_loses_the_state_and_nothing_else(counting, monkeypatch):
    decoder, conversation, _ = converse(counting)

    def interrupted(rows=None):
        raise KeyboardInterrupt

    with decoder:
        pieces = conversation.ask("hello", 50, stop_ids=())
        for _ in range(4):
            next(pieces)
        with monkeypatch.context() as patch:
            patch.setattr(decoder.loaded.slots["verify"], "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(pieces)
        messages = [*conversation.messages, {"role": "user", "content": "b"}]
        assert [m["role"] for m in messages] == ["user", "assistant", "user"]
        list(conversation.ask("b", 9, stop_ids=()))
        _, want = fresh_answer(counting, conversation, messages, 9, stop_ids=())
        assert conversation.answer.ids == want
        assert decoder.stats.reused > 0


def test_an_interrupt_before_the_first_token_takes_the_turn_back(counting, monkeypatch):
    decoder, conversation, _ = converse(counting)

    def interrupted(rows=None):
        raise KeyboardInterrupt

    with decoder, monkeypatch.context() as patch:
        patch.setattr(decoder.loaded.slots["prefill"], "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(conversation.ask("hello", 50))
        assert conversation.messages == []


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was(counting):
    decoder, conversation, _ = converse(counting, system="s")
    with decoder:
        list(conversation.ask("a", 5, stop_ids=()))
        before = list(conversation.messages)
        with pytest.raises(RequestError, match="takes at most 511"):
            list(conversation.ask("x" * 600, 5))
        assert conversation.messages == before
        list(conversation.ask("b", 5, stop_ids=()))
        conversation.reset()
        assert conversation.messages == [{"role": "system", "content": "s"}]


def test_two_conversations_may_take_turns_on_one_decoder(counting):
    decoder, one, _ = converse(counting)
    with decoder:
        two = Conversation(decoder, one._tokenizer, one._template, system="other")
        for conversation in (one, two, one, two, two, one):
            turn = str(len(conversation.messages))
            messages = [*conversation.messages, {"role": "user", "content": turn}]
            list(conversation.ask(turn, 7, stop_ids=()))
            _, want = fresh_answer(counting, conversation, messages, 7, stop_ids=())
            assert conversation.answer.ids == want
