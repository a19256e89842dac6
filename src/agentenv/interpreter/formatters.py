"""An IPython extension: results in the forms that E2B's clients have beside Jupyter's own.

Runs in a Python kernel. Data frames are shown as columns (`e2b/data`), matplotlib's figures as descriptions
of their charts (`e2b/chart`, by the `e2b_charts` package), lists and mappings as JSON, images that are opened
or saved as pictures. A library is looked at only when the code has imported it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.display import display
from traitlets import ObjectName, Unicode


class DataFormatter(BaseFormatter):
    """A pandas DataFrame as lists by column."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict

    def __call__(self, shown: Any) -> Any:
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(shown, pandas.DataFrame):
            return super().__call__(shown)
        columns = enumerate(map(str, shown.columns))  # by place: a name may stand twice
        return {name: [_plain(value) for value in shown.iloc[:, place].tolist()] for place, name in columns}


class ChartFormatter(BaseFormatter):
    """A matplotlib Figure as what it shows."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, shown: Any) -> Any:
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(shown, figure.Figure):
            return super().__call__(shown)
        try:
            from e2b_charts import chart_figure_to_dict

            return chart_figure_to_dict(shown)
        except Exception:  # whatever it does not know, the picture is still there
            return None


class JsonFormatter(JSONFormatter):
    """Lists and mappings as JSON, where they are that."""

    def __call__(self, shown: Any) -> Any:
        if type(shown) in (list, dict):
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                return json.loads(json.dumps(shown, default=_number, allow_nan=False))
        return super().__call__(shown)


def _plain(value: Any) -> Any:
    """A cell as JSON has it: times as text, what is no finite number as null."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _number(value: Any) -> Any:
    """numpy's numbers and arrays, which JSON does not know."""
    if type(value).__module__.partition(".")[0] == "numpy":
        return value.tolist()
    raise TypeError(type(value).__name__)


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython."""
    shell.colors = "nocolor"
    formatter = shell.display_formatter
    formatter.formatters["text/plain"].max_seq_length = 0  # a long list is shown whole
    for kind in (DataFormatter, ChartFormatter, JsonFormatter):
        made = kind(parent=formatter)
        formatter.formatters[made.format_type] = made
    sys.meta_path.insert(0, _Pictures())


class _Pictures(MetaPathFinder):
    """Adapts Pillow when it is imported: without a screen, an image that is shown or saved is displayed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "PIL.Image":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Adapting(spec.loader)
        return spec


class _Adapting(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _adapt(module)


def _adapt(pillow: Any) -> None:
    save: Callable[..., None] = pillow.Image.save

    def show(image: Any, title: str | None = None) -> None:
        display(image)

    def saved(image: Any, fp: Any, format: str | None = None, **options: Any) -> None:
        if isinstance(fp, str):
            display(image)
        save(image, fp, format, **options)

    pillow.Image.show, pillow.Image.save = show, saved
