"""The Python client: E2B's, and what that lacks.

`Sandbox` and `AsyncSandbox` are E2B's classes with forks that differ, rollback, lineage, limits and
starting many. What is asked and how an answer is read is plain data (`calls`, standard library only);
`sync` and `asynchronous` send it over E2B's own connections.
"""

from __future__ import annotations
