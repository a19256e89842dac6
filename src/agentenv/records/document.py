"""Records as JSON documents, which is how the database keeps them."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from agentenv.errors import StoreCorrupt

T = TypeVar("T")


class Documents(Generic[T]):
    """The documents of one kind of record, a dataclass; `what` is its name in an error."""

    def __init__(self, kind: type[T], what: str) -> None:
        self._codec = TypeAdapter(kind)
        self._what = what

    def encode(self, record: T) -> str:
        """The record as a JSON document."""
        return self._codec.dump_json(record).decode()

    def decode(self, document: str) -> T:
        """The record of a JSON document.

        Raises:
            StoreCorrupt: it is not one.
        """
        try:
            return self._codec.validate_json(document)
        except ValidationError as error:
            raise StoreCorrupt(f"{self._what} cannot be read: {error}") from None
