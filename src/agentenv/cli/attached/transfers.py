"""Files from here to a sandbox, from there to here, and from one sandbox to another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from agentenv.cli.attached.couriers import Courier
from agentenv.cli.attached.parcel import Packer, Refused, Unpacker
from agentenv.cli.attached.ways import Way
from agentenv.cli.attached.wire import Agent
from agentenv.errors import AenvError, GuestFault, HostFault, InvalidRequest, NotFound
from agentenv.guestimage.mounted import INTERPRETER

STREAM = "-"  # standard input or output in the place of a file


class Meter(Protocol):
    """Shows how far a transfer is."""

    def total(self, files: int, size: int) -> None:
        """So many files and bytes are to come; -1: nobody knows."""

    def add(self, size: int) -> None:
        """So many more bytes are done."""


@dataclass(frozen=True)
class End:
    """A sandbox that files are copied from or to: its agent, as the user whose they are, and its ports."""

    agent: Agent
    way: Way | None = None


@dataclass(frozen=True)
class Transfer:
    """One transfer, which can be begun again: what is complete of large files is not sent twice.

    Args:
        tag: the same for the same transfer.
        meter: is told of its progress.
        say: takes a message about something that was left out.
        interpreter: the words before the program's text in a sandbox.
    """

    tag: str
    meter: Meter
    say: Callable[[str], None]
    interpreter: Sequence[str] = INTERPRETER

    def upload(self, end: End, sources: Sequence[str], destination: str) -> None:
        """Copy files, or standard input (`-`), into a sandbox.

        Raises:
            NotFound: a source is not there. InvalidRequest: sources that cannot go together.
            GuestFault: it cannot be written there. LineBroken: the connection broke.
        """
        for source in sources:
            if source != STREAM and not os.path.exists(source):  # noqa: PTH110
                raise NotFound(f"{source}: no such file or directory")
        if STREAM in sources and len(sources) > 1:
            raise InvalidRequest("standard input goes alone")
        with self._courier(end, "unpack", destination, *_into(sources)) as courier:
            packer = Packer(courier.write, courier.answer, self.say, self.meter.add, self.meter.total)
            try:
                if sources[0] == STREAM:
                    packer.pack_stream(lambda size: os.read(0, size), "stdin")
                else:
                    packer.pack(list(sources))
            except Refused as error:
                raise InvalidRequest(str(error)) from None
            _expect_success(courier)

    def download(self, end: End, sources: Sequence[str], destination: str) -> None:
        """Copy files out of a sandbox, to standard output if the destination is `-`.

        Raises:
            GuestFault: a source is not there, or cannot be read. HostFault: it cannot be written here.
            LineBroken: the connection broke.
        """
        with self._courier(end, "pack", *sources) as courier:
            unpacker = Unpacker(
                courier.read, lambda number: courier.send(b"%d\n" % number), self.meter.add, self.meter.total
            )
            try:
                if destination == STREAM:
                    unpacker.unpack_stream(_write_out)
                else:
                    unpacker.unpack(destination, into=len(sources) > 1)
            except Refused as error:
                raise GuestFault(f"what comes from the sandbox is refused: {error}") from None
            except BrokenPipeError:
                raise
            except OSError as error:
                name = os.fsdecode(error.filename or destination)
                raise HostFault(f"{name}: {error.strerror}") from error
            for line in courier.finish():
                self.say(line)

    def between(self, one: End, sources: Sequence[str], other: End, destination: str) -> None:
        """Copy files from one sandbox to another, or to another place in the same one.

        Raises:
            GuestFault: something cannot be read or written. LineBroken: a connection broke.
        """
        with (
            self._courier(one, "pack", *sources) as source,
            self._courier(other, "unpack", destination, *_into(sources)) as target,
        ):
            answers = threading.Thread(target=_pass_on, args=(target, source), name="answers", daemon=True)
            answers.start()
            while data := source.receive():
                target.send(data)
                self.meter.add(len(data))
            lines = source.finish()
            target.end_input()  # or it would wait for what a source that failed will never send
            answers.join()
            _expect_success(target, before=lines)
        for line in lines:
            self.say(line)

    def _courier(self, end: End, *arguments: str) -> Courier:
        tag = f"{self.tag}-{arguments[0]}"
        return Courier(end.agent, arguments, tag, way=end.way, interpreter=self.interpreter)


def _into(sources: Sequence[str]) -> list[str]:
    return ["into"] if len(sources) > 1 else []


def _pass_on(one: Courier, other: Courier) -> None:
    """What one program writes is the other's input, until either has ended."""
    with suppress(AenvError):
        while data := one.receive():
            other.send(data)


def _expect_success(courier: Courier, *, before: Sequence[str] = ()) -> None:
    """Wait until it has unpacked all. `before` are reasons why not all came to it."""
    lines = courier.finish()
    if courier.failed:
        raise GuestFault("; ".join(before or lines) or "the program in the sandbox failed without a word")


def _write_out(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
