"""One thing done to several objects: each is tried, and each failure is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import click

from agentenv.cli.meter import waiting
from agentenv.cli.telling import show_error
from agentenv.errors import AenvError

AT_ONCE = 8  # what is asked of a node side by side


def for_each(names: Sequence[str], do: Callable[[str], str], doing: str, *, at_once: int = AT_ONCE) -> None:
    """Do it to each, some at a time, and print what each gives, in their order.

    Args:
        names: what the command line names.
        do: takes a name; returns what is printed of it.
        doing: the word for it, such as pausing, for who waits.
        at_once: so many side by side; with 1 it is done in the caller's thread.

    Raises:
        AenvError: there is one, and it failed.
        click.exceptions.Exit: some of several failed, which stderr says; the code is the first one's.
    """
    if len(names) == 1:
        click.echo(_waited(names[0], partial(do, names[0]), doing))
        return
    failures: list[AenvError] = []
    with _trying(names, do, at_once) as tries:
        for name, each in zip(names, tries, strict=True):
            try:
                click.echo(_waited(name, each, doing))
            except AenvError as error:
                show_error(error)
                failures.append(error)
    if failures:
        click.echo(f"aenv: {len(failures)} of {len(names)} failed", err=True)
        raise click.exceptions.Exit(failures[0].exit_code)


def _waited(name: str, result: Callable[[], str], doing: str) -> str:
    with waiting(f"{doing} {name}"):
        return result()


@contextmanager
def _trying(
    names: Sequence[str], do: Callable[[str], str], at_once: int
) -> Iterator[list[Callable[[], str]]]:
    """For each name what gives its result; those that are done side by side have begun."""
    if at_once == 1:
        yield [partial(do, name) for name in names]
        return
    from concurrent.futures import ThreadPoolExecutor  # takes 10 ms, which --help has no use for

    with ThreadPoolExecutor(at_once) as pool:
        try:
            yield [pool.submit(do, name).result for name in names]
        except BaseException:  # interrupted, or nobody reads any more: what has not begun is not done
            pool.shutdown(wait=False, cancel_futures=True)
            raise
