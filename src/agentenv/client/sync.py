"""`Sandbox`: E2B's, and what that lacks."""

from __future__ import annotations

import logging
from typing import Any, Self, TypeVar, Unpack, cast, overload

import e2b
from e2b.api.client_sync import get_api_client
from e2b.connection_config import ApiParams
from e2b.retry import resolve_idempotency_key
from e2b.sandbox.sandbox_api import McpServer, SandboxIamOpts, SandboxLifecycle, SandboxNetworkOpts
from e2b.sandbox.utils import class_method_variant
from e2b.sandbox_sync.main import SandboxVolumeMount

from agentenv.client import calls, opening
from agentenv.client.answers import Made, Operation, Refused, Snapshot, Tree
from agentenv.client.calls import Call, EachOrAll
from agentenv.client.opening import Wishes
from agentenv.limits import Limits

T = TypeVar("T")


class Sandbox(e2b.Sandbox):
    """A sandbox. All that E2B's class does, it does as well, and raises the same exceptions."""

    @classmethod
    def create(
        cls,
        template: str | None = None,
        timeout: int | None = None,
        metadata: dict[str, str] | None = None,
        envs: dict[str, str] | None = None,
        secure: bool | None = None,
        allow_internet_access: bool | None = None,
        mcp: McpServer | None = None,
        network: SandboxNetworkOpts | None = None,
        iam: SandboxIamOpts | None = None,
        lifecycle: SandboxLifecycle | None = None,
        volume_mounts: SandboxVolumeMount | None = None,
        logger: logging.Logger | None = None,
        idempotency_key: str | None = None,
        **wishes: Unpack[Wishes],
    ) -> Self:
        """Start a sandbox: as E2B's, with `limits`, `cpu_count`, `memory_mb`, `disk_size_mb`, `drives` and
        `paused_timeout` besides (see `Wishes`)."""
        # E2B's hands what it does not know to _create.
        return super().create(
            template,
            timeout,
            metadata,
            envs,
            secure,
            allow_internet_access,
            mcp,
            network,
            iam,
            lifecycle,
            volume_mounts,
            logger,
            idempotency_key,
            **cast(ApiParams, wishes),
        )

    @classmethod
    def _create(
        cls,
        template: str | None,
        timeout: int | None,
        metadata: dict[str, str] | None,
        envs: dict[str, str] | None,
        allow_internet_access: bool | None,
        mcp: McpServer | None = None,
        network: SandboxNetworkOpts | None = None,
        iam: SandboxIamOpts | None = None,
        lifecycle: SandboxLifecycle | None = None,
        volume_mounts: list[Any] | None = None,
        logger: logging.Logger | None = None,
        idempotency_key: str | None = None,
        **opts: Unpack[Wishes],
    ) -> Self:
        more, reached = opening.split(opts)
        wanted = opening.new_sandbox(
            template or cls.default_template,
            more,
            timeout=timeout,
            metadata=metadata,
            envs=envs,
            allow_internet_access=allow_internet_access,
            mcp=mcp,
            network=network,
            iam=iam,
            lifecycle=lifecycle,
            volume_mounts=volume_mounts,
        )
        params = cls._resolve_api_params(**reached)
        call = calls.create(wanted, resolve_idempotency_key(idempotency_key))
        return cls._opened(cls._ask(call, params, logger), params, logger)

    @classmethod
    def start_many(
        cls,
        template: str | None = None,
        count: int | None = None,
        *,
        timeout: int | None = None,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        allow_internet_access: bool | None = None,
        network: SandboxNetworkOpts | None = None,
        lifecycle: SandboxLifecycle | None = None,
        logger: logging.Logger | None = None,
        **wishes: Unpack[Wishes],
    ) -> list[Self | Exception]:
        """Start many of one template or snapshot, side by side.

        Each succeeds or fails for itself: there is one entry for each, a sandbox or why there is none.

        `template` is its name or id, or a snapshot's; `count` 1 to 100 (missing, as many as `envs` or
        `metadata` are for); `timeout` in seconds; `envs` and `metadata` are the same for all, or one for
        each. The rest is as in `create`.

        Raises:
            ValueError: `envs` or `metadata` are for another number of them.
        """
        more, reached = opening.split(wishes)
        wanted = opening.new_sandbox(
            template or cls.default_template,
            more,
            timeout=timeout,
            allow_internet_access=allow_internet_access,
            network=network,
            lifecycle=lifecycle,
        )
        params = cls._resolve_api_params(**reached)
        found = cls._ask(calls.batch(wanted, count, envs, metadata), params, logger)
        return cls._each_opened(found, params, logger)

    @overload  # type: ignore[misc]  # as E2B's: of an instance, or of an id on the class
    def fork(
        self,
        timeout: int | None = None,
        count: int | None = None,
        *,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        **opts: Unpack[ApiParams],
    ) -> list[Self | Exception]: ...
    @overload
    @staticmethod
    def fork(
        sandbox_id: str,
        timeout: int | None = None,
        count: int | None = None,
        logger: logging.Logger | None = None,
        *,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        **opts: Unpack[ApiParams],
    ) -> list[Sandbox | Exception]: ...
    @class_method_variant("_cls_fork_sandbox")  # type: ignore[no-untyped-call,misc,arg-type]
    def fork(
        self,
        timeout: int | None = None,
        count: int | None = None,
        *,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        **opts: Unpack[ApiParams],
    ) -> list[Self | Exception]:
        """Start children that go on from where this sandbox is, with its memory, processes and disk.

        It goes on as well. Each succeeds or fails for itself, as with `start_many`.

        `timeout` is how many seconds each child lives (missing, the node's default); `count` 1 to 100
        (missing, as many as `envs` or `metadata` are for, or one). `envs` and `metadata` are the same for
        all children or one for each, added to what they inherit. Commands that are started later see the
        variables; what runs already does not.

        Raises:
            ValueError: `envs` or `metadata` are for another number of them.
        """
        return type(self)._cls_fork_sandbox(
            self.sandbox_id,
            timeout,
            count,
            envs=envs,
            metadata=metadata,
            **self.connection_config.get_api_params(**opts),
        )

    @classmethod
    def _cls_fork_sandbox(
        cls,
        sandbox_id: str,
        timeout: int | None = None,
        count: int | None = None,
        logger: logging.Logger | None = None,
        *,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        **opts: Unpack[ApiParams],
    ) -> list[Self | Exception]:
        params = cls._resolve_api_params(**opts)
        call = calls.fork(sandbox_id, count, envs=envs, metadata=metadata, timeout_s=timeout)
        return cls._each_opened(cls._ask(call, params, logger), params, logger)

    def rollback(self, snapshot_id: str | None = None, **opts: Unpack[ApiParams]) -> Self:
        """Put this sandbox back to one of its own snapshots, or to its start; it goes on from there.

        Its id, address and tokens stay; what ran since is gone.

        Raises:
            NotFoundException: there is no such snapshot of it.
        """
        self._ask(calls.rollback(self.sandbox_id, snapshot_id), self._reached(opts), missing="snapshot")
        return self

    def tree(self, **opts: Unpack[ApiParams]) -> Tree:
        """The snapshots taken of this sandbox, each below the one it grew from."""
        return self._ask(calls.tree(self.sandbox_id), self._reached(opts))

    @classmethod
    def lineage(cls, snapshot_id: str, **opts: Unpack[ApiParams]) -> Snapshot:
        """A snapshot, by id or name, with its parent and children.

        Raises:
            NotFoundException: there is none.
        """
        return cls._ask(calls.lineage(snapshot_id), cls._resolve_api_params(**opts), missing="snapshot")

    def operations(self, **opts: Unpack[ApiParams]) -> list[Operation]:
        """What was done with this sandbox, by whomever, and what the node spent its time on; oldest first.

        Of its create, resumes, pauses, snapshots, forks and so on; the node remembers the last thousand of
        all its sandboxes, since it was started.
        """
        return self._ask(calls.operations(self.sandbox_id), self._reached(opts))

    def get_limits(self, **opts: Unpack[ApiParams]) -> Limits:
        """How fast its network and disk may be."""
        return self._ask(calls.limits(self.sandbox_id), self._reached(opts))

    def set_limits(self, limits: Limits, **opts: Unpack[ApiParams]) -> None:
        """Have these limits in the place of all of before: None is the node's default, 0 no limit."""
        self._ask(calls.set_limits(self.sandbox_id, limits), self._reached(opts))

    def give_back_memory(self, **opts: Unpack[ApiParams]) -> None:
        """Have it start anew in place, without the memory that it changed, as a node short of memory does;
        processes and connections go on."""
        self._ask(calls.give_back_memory(self.sandbox_id), self._reached(opts))

    def _reached(self, opts: ApiParams) -> ApiParams:
        return cast(ApiParams, self.connection_config.get_api_params(**opts))

    @classmethod
    def _ask(
        cls,
        call: Call[T],
        params: ApiParams,
        logger: logging.Logger | None = None,
        *,
        missing: opening.Missing = "sandbox",
    ) -> T:
        client = get_api_client(opening.config_of(params, logger)).get_httpx_client()
        return opening.answered(call, client.request(**opening.arguments(call)), missing)

    @classmethod
    def _opened(cls, made: Made, params: ApiParams, logger: logging.Logger | None) -> Self:
        return cls(**opening.options(made, params, logger))

    @classmethod
    def _each_opened(
        cls, found: list[Made | Refused], params: ApiParams, logger: logging.Logger | None
    ) -> list[Self | Exception]:
        return [
            opening.refusal(each) if isinstance(each, Refused) else cls._opened(each, params, logger)
            for each in found
        ]
