"""A name server with records of its own, for tests of what is done with answers."""

from __future__ import annotations

from pathlib import Path

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdatatype
import dns.rrset

from support.dns import Upstream


def records(text: str) -> list[dns.rrset.RRset]:
    """Records, one a line: `NAME TTL TYPE DATA`."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, ttl, rdtype, data = line.split(None, 3)
        record = dns.rdata.from_text("IN", rdtype, data, origin=dns.name.root, relativize=False)
        found.append(dns.rrset.from_rdata(f"{name}.", int(ttl), record))
    return found


class Zone(Upstream):
    """Gives, for a name, all the records that were put there under it, in that order, as a whole.

    What belongs in an answer is the test's to say: aliases are not followed, and nothing is checked.
    `asked` has name, type and the number of options of each question.
    """

    def __init__(self, place: Path | None = None, address: str = "127.0.0.1", port: int = 53) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.given: dict[str, list[dns.rrset.RRset]] = {}
        self.codes: dict[str, int] = {}
        super().__init__(place, address, port)

    def put(self, name: str, text: str = "", *, code: int = 0) -> None:
        """Answer questions for a name so from now on."""
        self.given[name] = records(text)
        self.codes[name] = code

    def answer(self, asked: bytes, transport: str) -> bytes:
        question = dns.message.from_wire(asked)
        name, rdtype = question.question[0].name.to_text(omit_final_dot=True), question.question[0].rdtype
        self.asked.append((name, dns.rdatatype.to_text(rdtype), len(question.options)))
        made = dns.message.make_response(question, recursion_available=True)
        made.set_rcode(dns.rcode.Rcode(self.codes.get(name, dns.rcode.NXDOMAIN)))
        made.answer.extend(self.given.get(name, []))
        try:
            limit = 65535 if transport == "tcp" else max(512, question.payload)
            return made.to_wire(max_size=limit)
        except dns.exception.TooBig:
            made.answer.clear()
            made.flags |= dns.flags.TC
            return made.to_wire()
