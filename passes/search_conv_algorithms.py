"""search-conv-algorithms: let cuDNN time its convolution algorithms once and keep the fastest."""

from __future__ import annotations

import dataclasses

from ampopt.ir.graph import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, calls
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result

SECONDS_A_CONVOLUTION = 0.1
"""In a new process, see `SearchConvAlgorithms`."""


@dataclasses.dataclass(frozen=True)
class SearchConvAlgorithms(Pass):
    """Let cuDNN choose each convolution's algorithm by timing it instead of by its heuristic.

    Rewrites: the program's settings. The search runs when the program is captured, once for each
    convolution's shape, inside the program's own scope and in a thread that does nothing else: PyTorch caches
    plans by thread, and one that was chosen without a search stays. The captured CUDA graph keeps the outcome
    for good; without a graph, the setting only affects convolutions that the calling thread has not run
    before. Outside of the program's calls, `torch.backends.cudnn.benchmark` keeps the user's value.
    Requires: CUDA and at least one convolution. Declines: everything else.
    Correct because: every algorithm computes the same convolution; only the order of the sums, or the
    transform that they are computed in (Winograd, FFT), differs, and the verification covers that.
    Cost: in a new process about a tenth of a second for each convolution, for which cuDNN also compiles
    candidates (H100, EfficientNet-B0 in FP16: 9 s); later some milliseconds.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.PLACEMENT
    portable = False

    def why_not(self, program: Program) -> str | None:
        """Declines programs for which cuDNN does not search."""
        return None if program.device.type == "cuda" else "only cuDNN's convolutions can be searched"

    def expected_seconds(self, program: Program) -> float:
        """See the cost of the class: it is spent where the program is captured."""
        return SECONDS_A_CONVOLUTION * _count(program)

    def apply(self, program: Program) -> Result:
        """Set the switch in the program's settings; counts the convolutions that it affects."""
        found = _count(program)
        if not found or program.settings.search_algorithms:
            return Result(program, 0)
        settings = dataclasses.replace(program.settings, search_algorithms=True)
        return Result(program.replace(settings=settings), found)


def _count(program: Program) -> int:
    return sum(1 for _ in calls(program.graph, CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS))
