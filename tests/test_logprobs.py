import math

import numpy as np
import pytest

from runtime.errors import RequestError
from runtime.logprobs import check_logprobs, token_logprob


def test_probabilities_are_those_of_the_softmax():
    found = token_logprob(np.log(np.float32([0.1, 0.6, 0.3])), 2, 2)
    assert found.token == 2
    assert found.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2]
    assert found.top[0][1] == pytest.approx(math.log(0.6), abs=1e-6)
    assert found.to_json()["top"][1] == {"token": 2, "logprob": found.logprob}


def test_large_logits_do_not_overflow():
    found = token_logprob(np.float32([1e30, 0, -1e30]), 0, 3)
    assert found.logprob == 0
    assert [token for token, _ in found.top] == [0, 1, 2]


def test_of_equals_the_lower_id_comes_first_and_no_more_are_given():
    found = token_logprob(np.zeros(9, np.float32), 8, 4)
    assert [token for token, _ in found.top] == [0, 1, 2, 3]
    assert token_logprob(np.zeros(9, np.float16), 8, 0).top == ()


@pytest.mark.parametrize("top", [-1, 10])
def test_more_than_the_vocabulary_is_refused(top):
    check_logprobs(None, 9)
    check_logprobs(9, 9)
    with pytest.raises(RequestError, match=f"logprobs is {top}; an artifact gives 0 to 9"):
        check_logprobs(top, 9)
