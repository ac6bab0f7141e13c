"""Twenty openings of Python files, the kind of text the demo checkpoint was trained on."""

PROMPTS = (
    'def read_json(path):\n    with open(path, encoding="utf-8") as f:\n        return json.',
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "class Cache:\n    def __init__(self, size):\n        self.size = size\n",
    "def test_add():\n    assert add(1, 2) == 3\n\n\ndef test_",
    "from typing import Any\n\n\ndef flatten(items: list[Any]) -> list[Any]:\n    ",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n",
    "for i in range(10):\n    for j in range(i):\n        print(",
    "import numpy as np\n\n\ndef softmax(x, axis=-1):\n    ",
    "try:\n    import ujson as json\nexcept ImportError:\n    ",
    "logger = logging.getLogger(__name__)\n\n\ndef setup(",
    "async def fetch(session, url):\n    async with session.get(url) as response:\n",
    '"""Utilities for working with dates."""\n\nimport datetime\n\n',
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "with open(filename) as handle:\n    for line in handle:\n        line = line.",
    "parser.add_argument('--verbose', action='store_true', help='",
    "class MyError(Exception):\n    pass\n\n\nclass ",
    "@property\ndef name(self):\n    return self._name\n\n@name.setter\n",
    "x = [1, 2, 3]\ny = {k: v for k, v in zip(",
    "if __name__ == '__main__':\n    ",
    "def quicksort(arr):\n    if len(arr) <= 1:\n        return arr\n    pivot = ",
)
