"""Calls as data: what is asked, and how answers are read."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import e2b
import httpx
import pytest
from e2b import NotFoundException, SandboxException, SandboxNotFoundException
from e2b.exceptions import RateLimitException, ServiceBusyException

import agentenv
from agentenv.api.answers import operation
from agentenv.client import answers, calls, opening
from agentenv.client.answers import Operation, Phase, Refused
from agentenv.limits import DiskLimits, Limits, NetworkLimits
from agentenv.sandbox.phases import Phases


def test_children_have_the_same_or_each_its_own() -> None:
    assert calls.children(3, None, None) == {"count": 3}
    assert calls.children(None, None, None) == {"count": 1}
    each = calls.children(None, [{"N": "0"}, {"N": "1"}], {"job": "a"})
    assert each == {
        "count": 2,
        "children": [
            {"envVars": {"N": "0"}, "metadata": {"job": "a"}},
            {"envVars": {"N": "1"}, "metadata": {"job": "a"}},
        ],
    }
    with pytest.raises(ValueError, match="3 are wanted, and envs or metadata are for 2"):
        calls.children(3, [{}, {}], None)
    with pytest.raises(ValueError, match="2 are wanted, and envs or metadata are for 1"):
        calls.children(None, [{}], [{}, {}])


def test_a_fork_names_what_is_asked_alone() -> None:
    call = calls.fork("ione", 2, timeout_s=60)
    assert (call.method, call.path, call.body) == (
        "POST",
        "/sandboxes/ione/fork",
        {"count": 2, "timeout": 60},
    )


def test_names_of_snapshots_are_one_part_of_the_path() -> None:
    assert calls.lineage("team/mine:v1").path == "/snapshots/team%2Fmine%3Av1"


def test_each_of_many_is_a_sandbox_or_a_reason() -> None:
    one = {"sandboxID": "i1", "templateID": "t", "envdVersion": "0.6.13", "envdAccessToken": "secret"}
    found = answers.many([{"sandbox": one}, {"error": {"code": 503, "message": "full"}}])
    assert [type(each).__name__ for each in found] == ["Made", "Refused"]
    assert found[1] == Refused(503, "full")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (404, NotFoundException),
        (429, RateLimitException),
        (503, ServiceBusyException),
        (500, SandboxException),
    ],
)
def test_a_refusal_is_the_exception_of_its_status(code: int, kind: type[Exception]) -> None:
    error = opening.refusal(Refused(code, "because"))
    assert type(error) is kind
    assert "because" in str(error)


def test_an_answer_of_404_says_what_is_missing() -> None:
    gone = httpx.Response(404, json={"code": 404, "message": "it is gone"})
    with pytest.raises(SandboxNotFoundException, match="it is gone"):
        opening.answered(calls.tree("i1"), gone)
    with pytest.raises(NotFoundException, match="it is gone") as caught:
        opening.answered(calls.lineage("s1"), gone, "snapshot")
    assert type(caught.value) is NotFoundException
    with pytest.raises(SandboxNotFoundException, match="no route"):
        opening.answered(calls.tree("i1"), httpx.Response(404, text="no route"))


def test_other_errors_are_those_of_e2b() -> None:
    with pytest.raises(ServiceBusyException, match="no room"):
        opening.answered(calls.fork("i1"), httpx.Response(503, json={"code": 503, "message": "no room"}))


def test_limits_are_written_and_read() -> None:
    wanted = Limits(NetworkLimits(rx_bytes_per_second=1 << 20), DiskLimits(iops=100))
    body = calls.set_limits("i1", wanted).body
    assert body == {"network": {"rxBytesPerSecond": 1 << 20}, "disk": {"iops": 100}}
    assert answers.limits({"limits": body}) == wanted
    assert answers.limits({}) == Limits()


def test_operations_are_read_as_they_are_written() -> None:
    ticks = iter([0.0, 1.0, 3.0, 4.0])
    phases = Phases("create", "i1", counter=lambda: next(ticks))
    with phases("restore"):
        pass
    phases.finish()
    told = json.loads(json.dumps([operation(phases).model_dump(exclude_none=True)]))
    assert answers.operations(told) == [Operation("create", 4.0, (Phase("restore", 1.0, 2.0),))]


def test_a_create_takes_more_than_that_of_e2b() -> None:
    wishes: opening.Wishes = {
        "limits": Limits(disk=DiskLimits(iops=100)),
        "cpu_count": 2,
        "memory_mb": None,
        "drives": [{"id": "data", "image": "alpine:3.20"}],
        "paused_timeout": 0,
        "api_key": "k",
    }
    more, reached = opening.split(wishes)
    assert reached == {"api_key": "k"}
    body = opening.new_sandbox("base", more, timeout=60, network={"deny_out": ["0.0.0.0/0"]})
    assert body["templateID"] == "base"
    assert (body["timeout"], body["network"]["denyOut"]) == (60, ["0.0.0.0/0"])
    assert (body["cpuCount"], body["pausedTimeout"]) == (2, 0)
    assert body["limits"] == {"network": {}, "disk": {"iops": 100}}
    assert body["attachedDrives"] == [{"id": "data", "image": "alpine:3.20"}]
    assert "memoryMB" not in body


def _parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return {each.name: (each.kind, each.default) for each in found}


@pytest.mark.parametrize(
    "name", [n for n in vars(agentenv.Sandbox) if inspect.isroutine(getattr(agentenv.Sandbox, n))]
)
def test_both_classes_take_the_same(name: str) -> None:
    assert _parameters(getattr(agentenv.AsyncSandbox, name)) == _parameters(getattr(agentenv.Sandbox, name))


@pytest.mark.parametrize("name", ["create", "_create", "fork", "_cls_fork_sandbox"])
@pytest.mark.parametrize(
    ("theirs", "ours"), [(e2b.Sandbox, agentenv.Sandbox), (e2b.AsyncSandbox, agentenv.AsyncSandbox)]
)
def test_what_is_replaced_takes_all_that_is_replaced(theirs: type, ours: type, name: str) -> None:
    """Also what of E2B's is private: a new version that has it otherwise is noticed here."""
    replaced, own = _parameters(getattr(theirs, name)), _parameters(getattr(ours, name))
    variable = {each for each, (kind, _) in replaced.items() if kind is inspect.Parameter.VAR_KEYWORD}
    assert {each: replaced[each] for each in replaced if each not in variable} == {
        each: own[each] for each in replaced if each not in variable
    }


def test_nothing_of_it_is_loaded_before_it_is_used() -> None:
    program = (
        "import sys, agentenv\n"
        "assert agentenv.__version__ and 'Sandbox' in dir(agentenv)\n"
        "heavy = {'e2b', 'httpx', 'pydantic', 'click', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import agentenv.client.calls\n"  # which a command line has use for as well
        "assert agentenv.Limits and not {'e2b', 'httpx', 'pydantic'} & set(sys.modules)\n"
        "assert agentenv.Sandbox is agentenv.Sandbox and 'e2b' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        agentenv.Nothing  # noqa: B018
