"""Answers from blocks of tokens of one byte each, so it is known where each block ends."""

import pytest
from test_tokenizer import END, TOKENIZER

from runtime.answer import Answer
from runtime.state import Finish, Step


def steps_of(text: str | list[int], size: int, finish: Finish = Finish.LENGTH) -> list[Step]:
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    blocks = [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [
        Step(
            tokens=block,
            drafted=size - 1,
            accepted=len(block) - 1,
            finish=finish if i == len(blocks) - 1 else None,
        )
        for i, block in enumerate(blocks)
    ]


def pieces(answer: Answer, steps: list[Step]) -> list[str]:
    shown = []
    for step in steps:
        shown.append(answer.add(step))
        if answer.finish is not None:
            break
    assert "".join(shown) == answer.text
    return shown


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_stop_string_ends_the_answer_wherever_blocks_end(size):
    answer = Answer(TOKENIZER, ["STOP"])
    pieces(answer, steps_of("abcde STOP more", size))
    assert (answer.text, answer.finish) == ("abcde ", Finish.STOP)
    assert TOKENIZER.decode(answer.ids) == "abcde STOP"  # the token that completed it is last


def test_a_stop_string_across_the_edge_of_a_block_is_held_back_and_never_shown():
    answer = Answer(TOKENIZER, ["STOP"])
    assert pieces(answer, steps_of("abST" + "OPxy", 4)) == ["ab", ""]


def test_what_looked_like_a_stop_string_comes_out_once_it_is_none():
    answer = Answer(TOKENIZER, ["STOP"])
    assert pieces(answer, steps_of("abST" + "ATUS", 4)) == ["ab", "STATUS"]


def test_the_end_lets_out_what_was_held_back():
    answer = Answer(TOKENIZER, ["STOP"])
    assert pieces(answer, steps_of("abcST", 4)) == ["abc", "ST"]


def test_an_emoji_of_four_tokens_appears_whole():
    answer = Answer(TOKENIZER)
    assert pieces(answer, steps_of("x\N{SNAKE}y", 3)) == ["x", "\N{SNAKE}y"]
    answer = Answer(TOKENIZER, ["\N{SNAKE}"])
    pieces(answer, steps_of("x\N{SNAKE}y", 3))
    assert (answer.text, answer.finish) == ("x", Finish.STOP)


def test_the_token_that_stops_is_no_text_even_where_it_is_not_special():
    ids = [*TOKENIZER.encode("ab"), *TOKENIZER.encode("!")]
    answer = Answer(TOKENIZER)
    pieces(answer, steps_of(ids, 3, Finish.STOP))
    assert (answer.text, answer.ids) == ("ab", ids)
    answer = Answer(TOKENIZER)
    pieces(answer, steps_of([*TOKENIZER.encode("ab"), END], 3, Finish.STOP))
    assert answer.text == "ab"


def test_a_stop_string_before_a_stop_token_in_the_same_block_wins():
    ids = [*TOKENIZER.encode("ab#c"), END]
    answer = Answer(TOKENIZER, ["#"])
    pieces(answer, steps_of(ids, 5, Finish.STOP))
    assert (answer.text, answer.ids) == ("ab", ids[:3])
