"""What this sandbox is and who may speak to it: environment, token, default user and directory.

`POST /init` fills it; every other call reads it.
"""

from __future__ import annotations

from binascii import a2b_base64

from agentenv.guest import users
from agentenv.guest.connect import ConnectError
from agentenv.guest.lean import compare_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agentenv.guest.http import Request
    from agentenv.guest.users import User

GATEWAY = "169.254.0.22"
VERSION = "0.6.13"  # of E2B's envd, whose behaviour clients switch on by it
UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"


class Context:
    """The agent's state that outlives a request.

    Attributes:
        env: variables of every process that is started.
        token: what `X-Access-Token` has to be; None lets everyone in.
        default_user: the account of requests that name none.
        default_workdir: where their processes start; None for the account's home.
        gateway: the only address from which `/init` is accepted.
        catch_ups: called before a request is handled, by those who have to know by then what
            happened before it.
    """

    def __init__(self, gateway: str = GATEWAY, default_user: str = "root") -> None:
        self.env: dict[str, str] = {}
        self.token: str | None = None
        self.default_user = default_user
        self.default_workdir: str | None = None
        self.gateway = gateway
        self.lifecycle: str | None = None
        self.catch_ups: list[Callable[[], None]] = []

    def token_ok(self, request: Request) -> bool:
        """Whether the request carries the access token (or none is needed)."""
        if self.token is None:
            return True
        given = request.headers.get("x-access-token", "")
        return compare_digest(given.encode("latin-1", "replace"), self.token.encode())

    def user_of(self, request: Request, name: str | None = None) -> User:
        """The account that a request acts as: `name`, else Basic auth's user, else the default.

        Raises:
            ConnectError: unauthenticated, when there is no such account.
        """
        name = name or _basic_user(request) or self.default_user
        try:
            return users.find(name)
        except KeyError:
            raise ConnectError("unauthenticated", f"invalid username: '{name}'") from None


def _basic_user(request: Request) -> str | None:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return a2b_base64(credentials.strip()).decode().partition(":")[0]
    except ValueError:  # both a broken base64 and broken UTF-8
        raise ConnectError("unauthenticated", "malformed Authorization header") from None
