"""One thing done to several objects: each is tried, and each failure is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from agentenv.cli.telling import show_error
from agentenv.errors import AenvError

AT_ONCE = 8  # what is asked of a node side by side


def for_each(names: Sequence[str], do: Callable[[str], str], *, at_once: int = AT_ONCE) -> None:
    """Do it to each, some at a time, and print what each gives, in their order.

    Args:
        names: what the command line names.
        do: takes a name; returns what is printed of it.
        at_once: so many side by side.

    Raises:
        AenvError: there is one, and it failed.
        click.exceptions.Exit: some of several failed, which stderr says; the code is the first one's.
    """
    if len(names) == 1:
        click.echo(do(names[0]))
        return
    failures: list[AenvError] = []
    with ThreadPoolExecutor(at_once) as pool:
        doing = [pool.submit(do, name) for name in names]
        try:
            for each in doing:
                try:
                    click.echo(each.result())
                except AenvError as error:
                    show_error(error)
                    failures.append(error)
        except BaseException:  # interrupted, or nobody reads any more: what has not begun is not done
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        click.echo(f"aenv: {len(failures)} of {len(names)} failed", err=True)
        raise click.exceptions.Exit(failures[0].exit_code)
