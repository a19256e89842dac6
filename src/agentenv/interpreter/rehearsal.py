"""What a Python kernel does before it has a user, so that the first code waits for little. Runs there.

Libraries are loaded into what becomes the template's snapshot: importing pandas takes half a second on real
hardware and ten times that under software emulation. Nothing of it shows: no name, no figure, no number of
an execution.
"""

from __future__ import annotations

import contextlib
import random
import sys
from importlib import import_module
from typing import Any


def prepare() -> None:
    """Load the libraries whose results clients show, and show one each; what is not installed is left out."""
    with contextlib.suppress(ImportError):
        pandas = import_module("pandas")
        _show(pandas.DataFrame({"a": [1, 2]}))
    with contextlib.suppress(ImportError):
        plt = import_module("matplotlib.pyplot")
        figure, axes = plt.subplots()
        axes.plot([1, 2])
        _show(figure)
        plt.close(figure)
    rehearse()


def rehearse() -> None:
    """Show a number."""
    _show(1)


def inherit() -> None:
    """Seed the generators of random numbers: each sandbox of a snapshot would have the same ones."""
    random.seed()
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()


def _show(shown: Any) -> None:
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        shell.display_formatter.format(shown)
