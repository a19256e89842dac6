"""What the reference takes from the code: all of it, spelled so that Markdown leaves it alone."""

from __future__ import annotations

import re

import click
import pytest

import from_code
from agentenv import errors as tree
from agentenv.config import Settings
from from_code import commands, endpoints, errors, markdown, python_api, settings, sources


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ `(.*)`$", text, re.MULTILINE)


def test_settings_are_told_with_variable_value_and_default() -> None:
    text = settings.text()
    assert headings(text) == list(Settings.model_fields)
    assert "| `AENV_PORT` | integer, at least 0, at most 65535 | `8000` |" in text
    assert "| `AENV_PRESSURE` | `off`, `page_out`, `refresh`, `pause` | `refresh` |" in text
    assert "| `AENV_RESUME_TIMEOUT_S` | number, above 0 | `30` |" in text
    assert "| `AENV_REGISTRY_MIRRORS` | table (text = list (text)) | empty |" in text
    assert "| `AENV_API_KEY` | text | none |" in text


def test_every_command_is_told_with_its_options() -> None:
    text = commands.text()
    told = headings(text)
    assert {"aenv", "aenv node", "aenv node start", "aenv template create"} <= set(told)
    assert len(told) == len(set(told))
    assert "| `--from SOURCE` |" in text
    assert "JSON: list of [ListedSandbox](#body-listedsandbox)." in text
    assert "JSON: [EntryAnswer](#body-entryanswer), one on each line." in text
    assert "JSON: object with `able`, `capabilities`." in text
    assert "--help" not in re.findall(r"^\| `(.*)` \|", text, re.MULTILINE)


def test_a_command_that_is_hidden_is_not_told() -> None:
    @click.group()
    def root() -> None: ...

    @root.command(hidden=True)
    def secret() -> None: ...

    @root.command()
    def open() -> None: ...

    every = commands.every(click.Context(root, info_name="root"))
    assert [each.command_path for each in every] == ["root", "root open"]


def test_every_endpoint_and_body_is_told() -> None:
    text, document = endpoints.text(), endpoints.document()
    calls = {f"{method.upper()} {path}" for path, each in document["paths"].items() for method in each}
    assert calls == set(headings(text))
    assert "POST /sandboxes/{sandbox_id}/fork" in calls
    for target in re.findall(r"\]\(#(body-[^)]*)\)", text):
        assert f"({target})=" in text


def test_every_error_is_told_with_the_remedies_that_the_code_offers() -> None:
    text = errors.text()
    own = {each.__name__ for each in vars(tree).values() if isinstance(each, type)} - {"AenvError"}
    assert own <= set(headings(text))
    assert len(headings(text)) == len(sources.errors()) - 1
    assert "| 507 | [`StoreFull`](#error-errors-storefull) | `store_full` | 1 | yes |" in text
    said = errors.raised()
    assert len(said) > 200
    offered = {each.remedy for each in said if each.kind is tree.InvalidRequest}
    assert "check AENV_* variables and aenv.toml in the data directory" in offered


def test_the_client_is_told_without_what_it_inherits() -> None:
    text = python_api.text()
    assert {"agentenv.Sandbox", "agentenv.AsyncSandbox", "Tree"} <= set(headings(text))
    assert "### `sandbox.rollback`" in text
    assert "### `Sandbox.start_many`" in text
    assert "`await fork`" in text
    assert "run_code" not in text
    assert "'str" not in text


def test_a_page_gets_the_parts_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(from_code.PARTS, "settings", lambda: "all of \\1 them")
    page = "# A\n\n<!-- the site has here: settings -->\n\n`<!-- the site has here: settings -->`\n"
    assert from_code.filled(page) == "# A\n\nall of \\1 them\n\n`<!-- the site has here: settings -->`\n"
    with pytest.raises(KeyError):
        from_code.filled("<!-- the site has here: nothing -->")


def test_signs_of_markdown_mean_themselves_in_prose_and_not_in_code() -> None:
    assert markdown.prose("a *b* <c> `*d*` [e]") == r"a \*b\* \<c\> `*d*` \[e\]"
    assert markdown.prose("``a`*`` *") == r"``a`*`` \*"
    assert markdown.prose("an odd ` sign *") == r"an odd ` sign \*"


def test_code_may_hold_backticks_and_lines() -> None:
    assert markdown.code("a\nb") == "`a b`"
    assert markdown.code("a`b") == "`` a`b ``"


def test_cells_hold_bars_and_lines() -> None:
    assert markdown.table(("a",), [("b|c\nd",)]) == "| a |\n| --- |\n| b\\|c d |\n\n"
    assert markdown.table(("a",), []) == ""
