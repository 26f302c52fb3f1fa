"""Examines one model: what is measured first, then every finding, within a time budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampopt.diagnosis.case import Case, eager_call, trained_as
from ampopt.diagnosis.finding import Finding, milliseconds, ranked
from ampopt.diagnosis.findings import in_order
from ampopt.diagnosis.layers import layers_of, without_tensor_cores
from ampopt.diagnosis.operators import Spent, profiled
from ampopt.diagnosis.work import works
from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.errors import AmpoptError, CaptureError, InputError, LackError, first_line
from ampopt.ir.capture import capture
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.narrow_convs import why_it_may_crash
from ampopt.measure.clocks import device_time, seconds_once_loaded, settled_latency
from ampopt.measure.sampling import Sampler, interleave
from ampopt.search.trials import Progress
from ampopt.system.budget import Budget
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument

EAGER_S = 3.0
"""Seconds for the samples of eager in all lanes."""

RUNS, MOST_RUNS, QUICKLY_S, PROFILED_S = 5, 25, 0.25, 3.0
"""Profiled runs of a graph; of a quick one as many as fit into 0.25 s; of one of which five take 3 s, one."""

TRIES, OWN_COST_S = 3, 1e-3
"""How often a graph is profiled on a CPU whose operators take longer together than three calls and 1 ms."""

TOGETHER = 1.3
"""From so many times a call's time on, that its operators take longer together is noted."""

SLOW_CALL_S, LOADING_S = 0.05, 10.0
"""A shorter call needs no further look, and first calls may load libraries for this long, in seconds."""

SLOWEST, SAMPLED_S = 20.0, 0.5
"""A lane is not sampled if its call takes over `SLOWEST` times FP32's, and over `SAMPLED_S` seconds."""


def measure(case: Case, lanes: tuple[Lane, ...], tell: Progress) -> None:
    """Fill a case: the graph, latencies and device times by lane, and the layer table."""
    tell("all", "capture")
    try:
        captured = capture(case.original, case.args, case.kwargs, case.device)
        case.program = captured.program
        case.notes += [captured.told] if captured.told is not None else []
    except LackError as error:
        case.notes.append(str(error))
    except CaptureError as error:
        case.not_a_graph = str(error)
    trained_as(case.original, case.model)  # not before: a graph's weights need no gradients
    tell("all", "eager")
    _time_eager(case, lanes)
    _time_device(case)
    _read_usage(case)
    try:
        _time_operators(case, tell)
    except Exception as error:
        check_interrupted(error)
        case.notes.append(f"its operators could not be timed: {first_line(error)}")


def find_all(case: Case, tell: Progress) -> tuple[Finding, ...]:
    """Every finding, ranked; what fails while it looks is a note."""
    found: list[Finding] = []
    for find in in_order(is_busy=case.is_busy):
        name = find.__module__.rpartition(".")[2].replace("_", "-")
        tell("all", name)
        try:
            found += find(case)
        except Exception as error:
            check_interrupted(error)
            case.notes.append(f"{name} could not be examined: {first_line(error)}")
    return ranked(found)


def untried_note(untried: Sequence[str], budget: Budget) -> tuple[str, ...]:
    """What there was no time for, and the budget that may do; empty if there was time for all."""
    if not untried:
        return ()
    seconds = 2 * math.ceil(budget.seconds)
    return (f"not tried for want of time, {argument('budget_s', seconds)} may do: {'; '.join(untried)}",)


def _time_eager(case: Case, lanes: tuple[Lane, ...]) -> None:
    samplers: dict[str, Sampler] = {}
    fp32_s = 0.0
    for lane in lanes:
        if lane.is_mixed and case.program is not None and (crash := why_it_may_crash(case.program)):
            case.notes.append(f"the {lane.name} lane was not tried: {crash}")
            continue
        call = eager_call(case.original, case.args, case.kwargs, case.device, lane)
        most_s = math.inf if not samplers else max(SLOWEST * fp32_s, SAMPLED_S)
        try:
            seconds = seconds_once_loaded(
                call, case.device, long_s=SLOW_CALL_S, most_s=most_s, loading_s=LOADING_S
            )
            if seconds <= most_s:
                call()  # plainly: PyTorch has faster ways, which may fail, for calls that nothing watches
        except Exception as error:
            check_interrupted(error)
            if not lane.is_mixed:
                raise _fails_again(case, error) from error
            case.notes.append(
                f"the {lane.name} lane was not tried: the model fails in it ({first_line(error)})"
            )
            continue
        case.lanes[lane.name] = lane
        if seconds > most_s:
            case.too_slow[lane.name] = most_s
            continue
        if not samplers:
            fp32_s = seconds
        samplers[lane.name] = settled_latency(call, case.device, last_s=seconds)
    try:
        case.latency = interleave(samplers, seconds=EAGER_S, least=6, most=200)
    except Exception as error:
        check_interrupted(error)
        raise _fails_again(case, error) from error


def _fails_again(case: Case, error: Exception) -> InputError:
    name = type(case.model).__name__
    return InputError(f"{name} fails when it is called again with the same inputs: {first_line(error)}")


def _time_device(case: Case) -> None:
    if case.device.type != "cuda" or case.program is None:
        return
    samplers = {}
    for name in case.latency:
        program = case.start(case.lanes[name])
        assert program is not None
        try:
            samplers[name] = device_time(ReplayedProgram(program).replay, case.device)
        except AmpoptError as error:
            case.notes.append(f"no device time in the {name} lane: {first_line(error)}")
    case.device_time = interleave(samplers, seconds=1.0) if samplers else {}


def _read_usage(case: Case) -> None:
    """Clocks, power and energy of each lane, where the device tells them."""
    for name, measured in case.latency.items():
        case.read_usage(name, case.eager(case.lanes[name]), measured.median)


def _runs(call_s: float) -> int:
    """How many runs of a graph are profiled, whose call takes so many seconds."""
    return 1 if RUNS * call_s >= PROFILED_S else max(RUNS, min(MOST_RUNS, int(QUICKLY_S / call_s)))


def _longer_note(case: Case, lane: str, together: float) -> list[str]:
    """A note that a graph's operators took longer together, in seconds, than a call of it, if they did."""
    call_s = case.latency[lane].median
    if case.device.type != "cpu" or together <= TOGETHER * call_s:
        return []
    return [
        f"the operators in the {lane} lane took {milliseconds(together)} ms together under the profiler, and "
        f"a call {milliseconds(call_s)}: their times, rates and shares of ceilings are those of slower calls"
    ]


def _time_operators(case: Case, tell: Progress) -> None:
    if case.program is None:
        return
    weights = case.original.named_parameters(remove_duplicate=False)
    trained = {name for name, weight in weights if weight.requires_grad}
    spent: dict[str, dict[str, Spent]] = {}
    for name, measured in case.latency.items():
        tell(name, "operators")
        program = case.start(case.lanes[name])
        assert program is not None
        for _ in range(TRIES if measured.median < SLOW_CALL_S else 1):
            found = profiled(program, _runs(measured.median), trained)
            together = sum(each.seconds for each in found.values())
            if case.device.type != "cpu" or together <= 3 * measured.median + OWN_COST_S:
                spent[name] = found
                case.notes += _longer_note(case, name, together)
                break
        else:
            case.notes.append(
                f"the times of operators in the {name} lane are left out: together they took "
                f"{1e3 * together:.3g} ms, and a call {1e3 * measured.median:.3g}; other work on this "
                "machine disturbed them"
            )
    dtypes = {name: case.lanes[name].dtype for name in spent}
    lanes = {FP32.name: FP32, **{name: case.lanes[name] for name in spent}}
    done = {name: works(lane.start(case.program)) for name, lane in lanes.items()}
    case.layers = layers_of(done, spent, dtypes, case.ceilings)
    mixed = [name for name in spent if case.lanes[name].is_mixed]
    case.notes += [note for name in mixed if (note := without_tensor_cores(case.layers, name))]
