"""`AsyncSandbox`: E2B's, and what that lacks; the same as `sync`, awaited."""

from __future__ import annotations

import logging
from typing import Any, Self, TypeVar, Unpack, cast, overload

import e2b
from e2b.api.client_async import get_api_client
from e2b.connection_config import ApiParams
from e2b.retry import resolve_idempotency_key
from e2b.sandbox.sandbox_api import McpServer, SandboxIamOpts, SandboxLifecycle, SandboxNetworkOpts
from e2b.sandbox.utils import class_method_variant
from e2b.sandbox_async.main import SandboxAsyncVolumeMount

from agentenv.client import calls, opening
from agentenv.client.answers import Made, Operation, Refused, Snapshot, Tree
from agentenv.client.calls import Call, EachOrAll
from agentenv.client.opening import Wishes
from agentenv.limits import Limits

T = TypeVar("T")


class AsyncSandbox(e2b.AsyncSandbox):
    """A sandbox. All that E2B's class does, it does as well, and raises the same exceptions."""

    @classmethod
    async def create(
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
        volume_mounts: SandboxAsyncVolumeMount | None = None,
        logger: logging.Logger | None = None,
        idempotency_key: str | None = None,
        **wishes: Unpack[Wishes],
    ) -> Self:
        """See Sandbox.create."""
        # E2B's hands what it does not know to _create.
        return await super().create(
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
    async def _create(
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
        return cls._opened(await cls._ask(call, params, logger), params, logger)

    @classmethod
    async def start_many(
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
        """See Sandbox.start_many."""
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
        found = await cls._ask(calls.batch(wanted, count, envs, metadata), params, logger)
        return cls._each_opened(found, params, logger)

    @overload  # type: ignore[misc]  # as E2B's: of an instance, or of an id on the class
    async def fork(
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
    async def fork(
        sandbox_id: str,
        timeout: int | None = None,
        count: int | None = None,
        logger: logging.Logger | None = None,
        *,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        **opts: Unpack[ApiParams],
    ) -> list[AsyncSandbox | Exception]: ...
    @class_method_variant("_cls_fork_sandbox")  # type: ignore[no-untyped-call,misc,arg-type]
    async def fork(
        self,
        timeout: int | None = None,
        count: int | None = None,
        *,
        envs: EachOrAll = None,
        metadata: EachOrAll = None,
        **opts: Unpack[ApiParams],
    ) -> list[Self | Exception]:
        """See Sandbox.fork."""
        return await type(self)._cls_fork_sandbox(
            self.sandbox_id,
            timeout,
            count,
            envs=envs,
            metadata=metadata,
            **self.connection_config.get_api_params(**opts),
        )

    @classmethod
    async def _cls_fork_sandbox(
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
        return cls._each_opened(await cls._ask(call, params, logger), params, logger)

    async def rollback(self, snapshot_id: str | None = None, **opts: Unpack[ApiParams]) -> Self:
        """See Sandbox.rollback."""
        await self._ask(calls.rollback(self.sandbox_id, snapshot_id), self._reached(opts), missing="snapshot")
        return self

    async def tree(self, **opts: Unpack[ApiParams]) -> Tree:
        """See Sandbox.tree."""
        return await self._ask(calls.tree(self.sandbox_id), self._reached(opts))

    @classmethod
    async def lineage(cls, snapshot_id: str, **opts: Unpack[ApiParams]) -> Snapshot:
        """See Sandbox.lineage."""
        return await cls._ask(calls.lineage(snapshot_id), cls._resolve_api_params(**opts), missing="snapshot")

    async def operations(self, **opts: Unpack[ApiParams]) -> list[Operation]:
        """See Sandbox.operations."""
        return await self._ask(calls.operations(self.sandbox_id), self._reached(opts))

    async def get_limits(self, **opts: Unpack[ApiParams]) -> Limits:
        """See Sandbox.get_limits."""
        return await self._ask(calls.limits(self.sandbox_id), self._reached(opts))

    async def set_limits(self, limits: Limits, **opts: Unpack[ApiParams]) -> None:
        """See Sandbox.set_limits."""
        await self._ask(calls.set_limits(self.sandbox_id, limits), self._reached(opts))

    async def give_back_memory(self, **opts: Unpack[ApiParams]) -> None:
        """See Sandbox.give_back_memory."""
        await self._ask(calls.give_back_memory(self.sandbox_id), self._reached(opts))

    def _reached(self, opts: ApiParams) -> ApiParams:
        return cast(ApiParams, self.connection_config.get_api_params(**opts))

    @classmethod
    async def _ask(
        cls,
        call: Call[T],
        params: ApiParams,
        logger: logging.Logger | None = None,
        *,
        missing: opening.Missing = "sandbox",
    ) -> T:
        client = get_api_client(opening.config_of(params, logger)).get_async_httpx_client()
        return opening.answered(call, await client.request(**opening.arguments(call)), missing)

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
