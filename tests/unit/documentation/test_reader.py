"""Reading the documentation's blocks, and typing them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import Block, Reader, blocks

PAGE = """
# A page

```sh
one
```

<!-- not run: it takes a host -->

```python
two

```

- item
  ```console
  $ three
  ```

<!-- not run: lost -->
words
```text
four
```
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    directory = tmp_path / "reader"
    directory.mkdir()
    reader = Reader(directory, os.environ)
    yield reader
    reader.close()


def block(language: str, text: str) -> Block:
    return Block(Path(__file__), 1, language, text)


def test_blocks_are_found_with_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = [(each.line, each.language, each.text, each.not_run) for each in blocks(page)]
    assert found == [
        (4, "sh", "one\n", None),
        (10, "python", "two\n\n", "it takes a host"),
        (16, "console", "$ three\n", None),
        (22, "text", "four\n", None),
    ]


def test_a_shell_keeps_variables_and_directory_and_hands_them_to_python(reader: Reader) -> None:
    reader.type(block("sh", "mkdir below\ncd below\nexport SAID='a word'\n"))
    reader.type(block("sh", 'test "$(basename "$PWD")" = below\n'))
    reader.type(block("python", "import os\nsaid = os.environ['SAID']\n"))
    reader.type(block("python", "assert said == 'a word'\n"))


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("sh", "echo begun\nfalse\necho not reached\n", "ended with status 1:\nbegun\n"),
        ("python", "print('begun')\n1 / 0\n", "ZeroDivisionError"),
        ("console", "$ echo one; exit 3\n", "ended with status 3"),
        ("console", "$ echo one\ntwo\n", "wrote\none\n"),
    ],
)
def test_what_fails_is_told_with_its_place(reader: Reader, language: str, text: str, words: str) -> None:
    with pytest.raises(AssertionError, match=r"test_reader\.py:1: ") as raised:
        reader.type(block(language, text))
    assert words in str(raised.value)
    assert "not reached" not in str(raised.value)


def test_what_a_command_writes_may_differ_where_the_page_says_so(reader: Reader) -> None:
    reader.type(block("console", "$ echo one $RANDOM\none …\n$ printf 'a\\nb\\nc\\n' \\\n  | cat\na\n…\nc\n"))
