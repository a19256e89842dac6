"""Routes of what can be seen of sandboxes: E2B's calls of metrics and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from agentenv.api import answers
from agentenv.api.models import Given, rfc3339
from agentenv.api.projects import Projects
from agentenv.errors import InvalidRequest
from agentenv.observe import logbook
from agentenv.observe.logbook import Entry
from agentenv.observe.metrics import CONTENT_TYPE
from agentenv.observe.observation import Observation
from agentenv.observe.samples import Sample
from agentenv.sandbox.service import Sandboxes

MANY_MOST = 100
LINES_MOST = 1000

Level = Literal["debug", "info", "warn", "error"]
Lines = Annotated[int, Query(ge=0, le=LINES_MOST)]
Moment = Annotated[int | None, Query(ge=0)]


class MetricAnswer(Given):
    """Figures of a sandbox at a moment; sizes in bytes, processor time in percent of all it has."""

    timestamp: str
    timestampUnix: int
    cpuCount: int
    cpuUsedPct: float
    memUsed: int
    memTotal: int
    memCache: int
    diskUsed: int
    diskTotal: int


class MetricsOfMany(Given):
    sandboxes: dict[str, MetricAnswer]


class LineAnswer(Given):
    """A line of a log, itself a JSON object."""

    timestamp: str
    line: str


class EntryAnswer(Given):
    """A line of a log."""

    timestamp: str
    level: Level
    message: str
    fields: dict[str, str]


class LogsAnswer(Given):
    logs: list[LineAnswer]
    logEntries: list[EntryAnswer]


class LogsAnswerV2(Given):
    logs: list[EntryAnswer]


def routes(service: Sandboxes, observation: Observation, projects: Projects) -> APIRouter:
    """All routes of what is seen."""
    router = APIRouter(tags=["observability"])
    _node(router, observation)
    _metrics(router, service, observation, projects)
    _logs(router, service, observation)
    return router


def _node(router: APIRouter, observation: Observation) -> None:
    metrics = observation.metrics

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def of_node() -> Response:
        """The node's metrics for Prometheus; needs no key."""
        return Response(await metrics.of_node(), media_type=CONTENT_TYPE)

    @router.get(
        "/metrics/sandboxes", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def of_sandboxes() -> Response:
        """What each sandbox that runs takes of its host, for Prometheus."""
        return Response(await metrics.of_sandboxes(), media_type=CONTENT_TYPE)


def _metrics(router: APIRouter, service: Sandboxes, observation: Observation, projects: Projects) -> None:
    histories = observation.histories

    @router.get("/sandboxes/metrics", response_model=MetricsOfMany)
    async def metrics_of_many(sandbox_ids: Annotated[list[str], Query()]) -> Response:
        """The newest figures of up to 100 sandboxes (ids separated by commas), of those that have any."""
        wanted = [name for each in sandbox_ids for name in each.split(",") if name]
        if len(wanted) > MANY_MOST:
            raise InvalidRequest(f"sandbox_ids: at most {MANY_MOST}, there are {len(wanted)}")
        mine = filter(projects.has_sandbox, wanted)
        found = {name: sample for name in mine if (sample := histories.last(name)) is not None}
        return answers.json(MetricsOfMany(sandboxes={name: _metric(each) for name, each in found.items()}))

    @router.get("/sandboxes/{sandbox_id}/metrics", response_model=list[MetricAnswer])
    async def metrics(sandbox_id: str, start: Moment = None, end: Moment = None) -> Response:
        """Figures of a sandbox of the last hour, oldest first; `start` and `end` are seconds since the epoch.
        Those of one that has ended are kept for a while."""
        if sandbox_id not in histories:
            service.get(sandbox_id)
        await observation.sampler.look_at(sandbox_id)
        return answers.json([_metric(each) for each in histories.of(sandbox_id, start, end)])


def _logs(router: APIRouter, service: Sandboxes, observation: Observation) -> None:
    def find(sandbox_id: str, query: logbook.Query) -> list[Entry]:
        if sandbox_id not in observation.logbook:
            service.get(sandbox_id)
        return observation.logbook.find(sandbox_id, query)

    @router.get("/sandboxes/{sandbox_id}/logs", response_model=LogsAnswer)
    async def logs(sandbox_id: str, start: Moment = None, limit: Lines = LINES_MOST) -> Response:
        """What a sandbox's log has from `start` on, in milliseconds since the epoch, oldest first."""
        found = find(sandbox_id, logbook.Query(start, limit))
        lines = [LineAnswer(timestamp=rfc3339(each.at), line=each.line()) for each in found]
        return answers.json(LogsAnswer(logs=lines, logEntries=[_entry(each) for each in found]))

    @router.get("/v2/sandboxes/{sandbox_id}/logs", response_model=LogsAnswerV2)
    async def logs_v2(
        sandbox_id: str,
        cursor: Moment = None,
        limit: Lines = LINES_MOST,
        direction: Literal["forward", "backward"] = "forward",
        level: Level = "debug",
        search: Annotated[str, Query(max_length=256)] = "",
    ) -> Response:
        """What a sandbox's log has from `cursor` (milliseconds since the epoch) on, or from there back, the
        newest first; of at least a level, with `search` in the message, in whatever case."""
        found = find(sandbox_id, logbook.Query(cursor, limit, direction, level, search))
        return answers.json(LogsAnswerV2(logs=[_entry(each) for each in found]))


def _metric(sample: Sample) -> MetricAnswer:
    return MetricAnswer(
        timestamp=rfc3339(sample.at),
        timestampUnix=int(sample.at),
        cpuCount=sample.cpus,
        cpuUsedPct=sample.cpu_pct,
        memUsed=sample.mem_used,
        memTotal=sample.mem_total,
        memCache=sample.mem_cache,
        diskUsed=sample.disk_used,
        diskTotal=sample.disk_total,
    )


def _entry(entry: Entry) -> EntryAnswer:
    return EntryAnswer(
        timestamp=rfc3339(entry.at),
        level=entry.level,
        message=entry.message,
        fields={"logger": entry.logger, **entry.fields},
    )
